"""Every promise of replay and of the indexer's gradients, as a property of the suite.

They run on the cases that HyTopK is judged on: a record of HyTopK's own selection, gradients at its selected
keys.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from hyscale_ref import codec
from hyscale_ref.loss import indexer_loss, selected_score_gradients, selected_scores
from hyscale_verify.cases import Case, Tensors
from hyscale_verify.lifecycles.bounds import SPLIT_PRODUCT, gradient_bounds
from hyscale_verify.lifecycles.machine import run_machine
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import own_memory

CODED = ("tie_rich", "random_normal", "row_lengths", "packed_windows", "odd_sizes")
FINITE = ("exact_integers", "relu_plateau", "random_normal", "row_lengths", "rank_splits", "odd_sizes")
FEW = 0.4
SLEEP_CYCLES = 20_000_000  # some 10 ms of a GPU
WHY_FEW = "each example runs several interpreted kernels, forward and backward"


@dataclass(frozen=True)
class Selected:
    """A case's tensors and HyTopK's selection of them."""

    tensors: Tensors
    selection: Any

    @property
    def indices(self) -> torch.Tensor:
        indices: torch.Tensor = self.selection.indices
        return indices


def _selected(trial: Trial, case: Case | None = None) -> Selected:
    case = trial.case if case is None else case
    tensors = case.tensors(trial.device)
    selection = trial.hytopk.api.hytopk(
        tensors.q, tensors.k, tensors.w, tensors.top_k, **tensors.keywords, return_scores=True
    )
    return Selected(tensors, selection)


def _recorded(trial: Trial, tensors: Tensors) -> Any:
    return trial.hytopk.module("replay").record_selection(
        tensors.q, tensors.k, tensors.w, tensors.top_k, **tensors.keywords
    )


def _rows_differ(what: str, one: torch.Tensor, two: torch.Tensor) -> None:
    """FalsifiedError at the first row in which two tensors of equal shape differ in a bit."""
    a, b = (np.ascontiguousarray(each.detach().cpu().numpy()) for each in (one, two))
    if a.shape != b.shape:
        raise FalsifiedError(f"{what}: shape {a.shape}, not {b.shape}")
    if a.tobytes() != b.tobytes():
        width = a.view(np.uint8).reshape(len(a), -1)
        row = int((width != b.view(np.uint8).reshape(len(b), -1)).any(axis=1).argmax())
        raise FalsifiedError(f"{what}: row {row} is {a[row].tolist()}, not {b[row].tolist()}", (row,))


@promise("replay: codec", CODED, needs=["hytopk"])
def packed_words_follow_the_format(trial: Trial) -> None:
    """A record holds exactly the words that the reference packs, and decodes to the selection."""
    chosen = _selected(trial)
    record = _recorded(trial, chosen.tensors)
    start = trial.case.start
    wanted = codec.encode(
        chosen.indices.cpu().numpy(), chosen.selection.count.cpu().numpy(), start, trial.case.num_keys
    )
    words = record.words.cpu().numpy().view(np.uint32)
    if words.shape != wanted.shape or (words != wanted).any():
        row = int((words != wanted).any(axis=1).argmax()) if words.shape == wanted.shape else 0
        raise FalsifiedError(
            f"row {row} packs to {[hex(each) for each in words[row]]}, "
            f"the reference to {[hex(each) for each in wanted[row]]}", (row,)
        )  # fmt: skip
    decoded = trial.hytopk.module("replay").decode_record(record, **chosen.tensors.windows, validate=True)
    _rows_differ("decoded indices", decoded.indices, chosen.indices)
    _rows_differ("decoded count", decoded.count[:, None], chosen.selection.count[:, None])


@dataclass(frozen=True)
class Rows:
    """Drawn rows of a selection: what a codec has to carry, of any size."""

    indices: NDArray[np.int32]
    count: NDArray[np.int32]
    start: NDArray[np.int32]
    num_keys: int

    @classmethod
    def draw(cls, trial: Trial) -> "Rows":
        """Some rows over up to 2**31 - 1 keys, spread out, in one run, at either end of their window."""
        N = trial.draw(st.sampled_from((1, 2, 31, 700, 5000, 2**20 - 3, 2**20, 2**31 - 1)), "num_keys")
        K = trial.draw(st.sampled_from((1, 2, 7, 33, 64, 200)), "top_k")
        generator = np.random.default_rng(trial.draw(st.integers(0, 2**32 - 1), "seed of the rows"))
        T = 4
        start = generator.integers(0, N, T).astype(np.int32) * generator.integers(0, 2, T, dtype=np.int32)
        indices, count = np.full((T, K), -1, np.int32), np.zeros(T, np.int32)
        for t in range(T):
            length = N - int(start[t])
            span = min(length, K * int(generator.choice((1, 3, 2**30))))
            drawn = np.unique(generator.integers(0, span, int(generator.integers(0, 2 * K + 1))))
            values = np.sort(generator.permutation(drawn)[:K]) + (length - span) * int(
                generator.integers(0, 2)
            )
            count[t] = len(values)
            indices[t, : len(values)] = values + start[t]
        return cls(indices, count, start, N)

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        indices, count, start = (
            torch.from_numpy(each).to(device) for each in (self.indices, self.count, self.start)
        )
        return indices, count, start


@promise("replay: codec", ("tie_rich",), needs=["hytopk"])
def rows_of_any_size_follow_the_format(trial: Trial) -> None:
    """Drawn rows over up to 2**31 - 1 keys pack to the reference's words, and decode again."""
    replay = trial.hytopk.module("replay")
    rows = Rows.draw(trial)
    indices, count, start = rows.tensors(trial.device)
    tiling = replay.tiling.Tiling.default(indices.device)
    words = replay.encode.launch_encode(indices, count, start, rows.num_keys, tiling)
    wanted = codec.encode(rows.indices, rows.count, rows.start, rows.num_keys)
    _rows_differ("packed words", words, torch.from_numpy(wanted.view(np.int32)))
    K = indices.shape[1]
    again, counted, status = replay.decode.launch_decode(words, start, None, None, rows.num_keys, K, tiling)
    _rows_differ("decoded indices", again, indices)
    _rows_differ("decoded counts", counted[:, None], count[:, None])
    _rows_differ("status", status[:, None], torch.zeros_like(status)[:, None])


@promise("replay: codec", ("tie_rich",), needs=["hytopk"])
def corrupt_words_are_refused(trial: Trial) -> None:
    """One flipped bit of a record is refused wherever the reference refuses it, and the row then is empty."""
    replay = trial.hytopk.module("replay")
    rows = Rows.draw(trial)
    words = codec.encode(rows.indices, rows.count, rows.start, rows.num_keys).view(np.int32)
    row = trial.draw(st.integers(0, len(words) - 1), "row")
    column = trial.draw(st.integers(0, words.shape[1] - 1), "word")
    bit = trial.draw(st.integers(0, 31), "bit")
    words.view(np.uint32)[row, column] ^= np.uint32(1 << bit)
    K = rows.indices.shape[1]
    try:
        codec.decode(words, rows.start, rows.num_keys, K)
        sound = True
    except codec.CorruptRecordError:
        sound = False
    changed, start = (torch.from_numpy(each).to(trial.device) for each in (words, rows.start))
    indices, count, status = replay.decode.launch_decode(
        changed, start, None, None, rows.num_keys, K, replay.tiling.Tiling.default(changed.device)
    )
    if bool(status[row].item()) == sound:
        raise FalsifiedError(
            f"the reference {'accepts' if sound else 'refuses'} row {row}, the kernel does not"
        )
    if not sound and (int(count[row]) != 0 or (indices[row] != -1).any()):
        raise FalsifiedError(f"a refused row still holds {indices[row].tolist()}, count {int(count[row])}")


@promise("replay: codec", ("tie_rich", "packed_windows", "row_lengths"), needs=["hytopk"])
def changed_windows_are_refused(trial: Trial) -> None:
    """A record decodes under the windows it was made with and under no others."""
    replay = trial.hytopk.module("replay")
    tensors = trial.case.tensors(trial.device)
    record = _recorded(trial, tensors)
    trial.assume(trial.case.num_queries > 0)
    row = trial.draw(st.integers(0, trial.case.num_queries - 1), "row")
    which = trial.draw(st.sampled_from(("start", "end")), "bound")
    step = trial.draw(st.sampled_from((-1, 1, 7)), "step")
    other = {name: value.clone() for name, value in tensors.windows.items()}
    other[which][row] += step
    try:
        replay.decode_record(record, **other, validate=True)
    except replay.ReplayError:
        return
    raise FalsifiedError(f"{which}[{row}] changed by {step}, and the record decoded", (row,))


@promise("replay: codec", ("tie_rich", "odd_sizes"), needs=["hytopk"])
def changed_inputs_are_refused(trial: Trial) -> None:
    """Under a checkpoint policy a record serves no other dtype, heads, head size and top_k than its own."""
    replay = trial.hytopk.module("replay")
    case = trial.case
    trial.assume(case.num_queries > 0 and case.q.shape[2] > 1)
    t = case.tensors(trial.device)
    given = {"q": t.q, "k": t.k, "w": t.w, "top_k": t.top_k, **t.keywords}
    other = torch.bfloat16 if t.q.dtype == torch.float16 else torch.float16
    change = trial.draw(st.sampled_from(("nothing", "dtype", "heads", "head size", "top_k")), "change")
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "dtype": {"q": t.q.to(other), "k": t.k.to(other), "k_scale": None},
        "heads": {"q": t.q.repeat(1, 2, 1), "w": t.w.repeat(1, 2)},
        "head size": {"q": t.q[..., :-1], "k": t.k[:, :-1]},
        "top_k": {"top_k": t.top_k + 1},
    }
    runs = iter((given, given | changes[change]))

    def region(x: torch.Tensor) -> torch.Tensor:
        selection = replay.select(**next(runs), validate=True)
        product: torch.Tensor = x.sin() * selection.count.sum()
        return product

    x = torch.ones(1, device=trial.device, requires_grad=True)
    try:
        replay.checkpoint_with_replay(region, x).sum().backward()
    except (replay.ReplayError, ValueError) as error:
        if change == "nothing":
            raise FalsifiedError(f"a correct use was refused: {error}") from error
        return
    if change != "nothing":
        raise FalsifiedError(f"{change} changed, and the record served the recomputation")


@promise(
    "replay: scores", (*FINITE, "infinities", "strided_storage"), needs=["hytopk"], share=FEW, why_few=WHY_FEW
)
def selected_scores_are_the_selections(trial: Trial) -> None:
    """Scores at the selected keys equal those that HyTopK returned, bit for bit."""
    chosen = _selected(trial)
    t = chosen.tensors
    scores = trial.hytopk.module("indexer").selected_scores(t.q, t.k, t.w, chosen.indices, k_scale=t.k_scale)
    _rows_differ("selected scores", scores, chosen.selection.scores)


def _gradients(
    trial: Trial, chosen: Selected, grad: torch.Tensor, dk: str, plan: Any = None
) -> list[torch.Tensor]:
    """dq, dk, dw of the judged kernels, float32, in the arguments as given (fp8: times no scale)."""
    t = chosen.tensors
    indexer = trial.hytopk.module("indexer")
    w = t.w.detach().requires_grad_()
    if trial.case.dtype == "fp8":
        assert t.k_scale is not None
        ones = torch.ones_like(t.w)
        source_q, source_k = (
            torch.zeros(each.shape, device=w.device).requires_grad_() for each in (t.q, t.k)
        )
        scores = indexer.selected_scores(
            t.q, t.k, w, chosen.indices, k_scale=t.k_scale, q_source=source_q, k_source=source_k,
            q_scale=ones, dk=dk, plan=plan,
        )  # fmt: skip
        found = torch.autograd.grad(scores, (source_q, source_k, w), grad)
        return [found[0], found[1] * t.k_scale[:, None], found[2]]
    q, k = t.q.detach().requires_grad_(), t.k.detach().requires_grad_()
    scores = indexer.selected_scores(q, k, w, chosen.indices, dk=dk, plan=plan)
    return [each.float() for each in torch.autograd.grad(scores, (q, k, w), grad)]


def _upstream(trial: Trial, indices: torch.Tensor) -> torch.Tensor:
    """Gradients of the scores: small integers for exact inputs, normal otherwise; 0 at unused places."""
    generator = np.random.default_rng(trial.draw(st.integers(0, 2**32 - 1), "seed of the gradients"))
    if trial.case.exact:
        values = generator.integers(-3, 4, indices.shape).astype(np.float32)
    else:
        values = generator.standard_normal(indices.shape).astype(np.float32)
    return torch.from_numpy(values).to(indices.device).masked_fill(indices < 0, 0)


def _float64(case: Case) -> tuple[Any, Any, Any, Any]:
    """q, k, w and k_scale."""
    q, k, w = (each.astype(np.float64) for each in (case.q, case.k, case.w))
    return q, k, w, None if case.k_scale is None else case.k_scale.astype(np.float64)


@promise("replay: gradients", FINITE, needs=["hytopk"], share=FEW, why_few=WHY_FEW)
def selected_gradients_within_bounds(trial: Trial) -> None:
    """Gradients of q, k and w lie within rigorous bounds of float64, by both ways of adding dk up."""
    chosen = _selected(trial)
    grad = _upstream(trial, chosen.indices)
    way = trial.draw(st.sampled_from(("atomic", "fixed_point")), "dk")
    indices = chosen.indices.cpu().numpy()
    q, k, w, scale = _float64(trial.case)
    upstream = grad.double().cpu().numpy()
    fp8_cores = trial.case.dtype == "fp8" and trial.device == "cuda"
    wanted, bounds = gradient_bounds(
        q, k, w, indices, upstream, scale, trial.case.dtype, exact=trial.case.exact, fp8_cores=fp8_cores
    )
    extra = _fixed_point_error(trial.case, indices, upstream) if way == "fixed_point" else 0.0
    for part, got in zip(("q", "k", "w"), _gradients(trial, chosen, grad, way), strict=True):
        error = np.abs(got.double().cpu().numpy() - getattr(wanted, part))
        allowed = getattr(bounds, part) + (extra if part == "k" else 0.0)
        if not (error <= allowed).all():
            place = tuple(int(each) for each in np.argwhere(~(error <= allowed))[0])
            raise FalsifiedError(
                f"d{part}{list(place)} ({way}) is {float(got[place]):.9g}, in float64 "
                f"{getattr(wanted, part)[place]:.9g}: off by {error[place]:.3g}, allowed "
                f"{allowed[place]:.3g}",
                place[:1] if part != "k" else (),
                place[:1] if part == "k" else (),
            )


def _fixed_point_error(
    case: Case, indices: NDArray[np.int32], grad: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The stated bound of the fixed-point dk, [S, 1]: hits**2 * peak * 2**-28 (indexer/README.md)."""
    scale = np.ones(case.num_keys) if case.k_scale is None else case.k_scale.astype(np.float64)
    largest = (
        (np.abs(case.q) * np.abs(case.w)[..., None]).sum(axis=1, dtype=np.float64).max(axis=1, initial=0.0)
    )
    hits, peak = np.zeros(case.num_keys), np.zeros(case.num_keys)
    for t, row in enumerate(indices):
        keys = row[row >= 0]
        hits[keys] += 1
        np.maximum.at(peak, keys, np.abs(grad[t, row >= 0]) * scale[keys] * largest[t])
    return (hits**2 * peak * 2.0**-28)[:, None]


@promise("replay: gradients", FINITE, needs=["hytopk"], share=FEW, why_few=WHY_FEW)
def fixed_point_does_not_depend_on_order(trial: Trial) -> None:
    """Fixed-point dk is the same in every bit for permuted rows and for other tile sizes."""
    trial.assume(trial.case.num_queries > 0)
    # Two numbers add up the same either way: it takes several rows that share their keys.
    case = trial.case.rows(list(range(trial.case.num_queries)) * (1 + 8 // trial.case.num_queries))
    chosen = _selected(trial, case)
    grad = _upstream(trial, chosen.indices)
    _, first, _ = _gradients(trial, chosen, grad, "fixed_point")
    order = np.random.default_rng(trial.draw(st.integers(0, 2**32 - 1), "seed of the order"))
    rows = order.permutation(case.num_queries)
    moved = _selected(trial, case.rows(rows))
    chunk = trial.draw(st.sampled_from((16, 64)), "chunk")
    plan = trial.hytopk.module("indexer").IndexerPlan(16, 16, 1, 1, 16, 1, chunk)
    upstream = grad[torch.from_numpy(rows).to(grad.device)].contiguous()
    _, second, _ = _gradients(trial, moved, upstream, "fixed_point", plan)
    _rows_differ("dk of permuted rows", second, first)


@promise(
    "replay: gradients",
    ("exact_integers", "random_normal", "rank_splits"),
    needs=["hytopk"],
    share=FEW,
    why_few=WHY_FEW,
)
def ranks_share_the_work(trial: Trial) -> None:
    """Rows of a rank have the records and the dq, dw that they have in the whole, bit for bit; dk adds up."""
    T = trial.case.num_queries
    trial.assume(T > 1)
    whole = _selected(trial)
    grad = _upstream(trial, whole.indices)
    record = _recorded(trial, whole.tensors)
    parts = _gradients(trial, whole, grad, "fixed_point")
    cut = trial.draw(st.integers(1, T - 1), "first rank's rows")
    total = torch.zeros_like(parts[1])
    for rows in (slice(0, cut), slice(cut, T)):
        rank = _selected(trial, trial.case.rows(rows))
        _rows_differ("a rank's record", _recorded(trial, rank.tensors).words, record.words[rows])
        dq, dk, dw = _gradients(trial, rank, grad[rows].contiguous(), "fixed_point")
        _rows_differ("a rank's dq", dq, parts[0][rows])
        _rows_differ("a rank's dw", dw, parts[2][rows])
        total += dk
    q, k, w, scale = _float64(trial.case)
    size = selected_score_gradients(
        np.abs(q),
        np.abs(k),
        np.abs(w),
        whole.indices.cpu().numpy(),
        np.abs(grad.double().cpu().numpy()),
        scale,
    )
    slack = (2.0**-6 if trial.case.dtype in ("bf16", "fp16") else 4 * SPLIT_PRODUCT) * size.k + 2.0**-20
    apart = (total - parts[1]).abs().double().cpu().numpy()
    if not (apart <= slack).all():
        key = int(np.argwhere(~(apart <= slack))[0][0])
        raise FalsifiedError(f"dk of the ranks adds up to something else at key {key}", (), (key,))


@promise("replay: loss", FINITE, needs=["hytopk"], share=FEW, why_few=WHY_FEW)
def indexer_loss_is_the_divergence(trial: Trial) -> None:
    """Loss and gradients of KL(target || softmax) agree with float64, rows without keys or target
    included."""
    chosen = _selected(trial)
    t, indices = chosen.tensors, chosen.indices
    generator = np.random.default_rng(trial.draw(st.integers(0, 2**32 - 1), "seed of the target"))
    weights = generator.random(indices.shape) * (indices.cpu().numpy() >= 0)
    weights *= generator.random((len(weights), 1)) < 0.8  # some rows have no target
    sums = weights.sum(axis=1, keepdims=True)
    target = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0).astype(np.float32)
    garbage = np.where(indices.cpu().numpy() >= 0, target, generator.standard_normal(indices.shape))
    coefficient = trial.draw(st.sampled_from((1.0, 0.25, -2.0)), "coefficient")
    temperature = trial.draw(st.sampled_from((1.0, 0.5, 8.0)), "temperature")
    w = t.w.detach().requires_grad_()
    rows = trial.hytopk.module("indexer").indexer_loss(
        t.q, t.k, w, indices, torch.from_numpy(garbage.astype(np.float32)).to(indices.device),
        coefficient=coefficient, temperature=temperature, k_scale=t.k_scale,
    )  # fmt: skip
    q, k, w64, scale = _float64(trial.case)
    keys = indices.cpu().numpy()
    scores = selected_scores(q, k, w64, keys, scale)
    wanted = indexer_loss(target, scores, keys, coefficient=coefficient, temperature=temperature)
    size = selected_scores(np.abs(q), np.abs(k), np.abs(w64), keys, scale).max(axis=1, initial=0.0)
    share = 2.0**-11 if trial.case.dtype == "fp8" and trial.device == "cuda" else 2.0**-19
    slack = abs(coefficient) * (4 * share * size / temperature + 2.0**-16)
    error = np.abs(rows.detach().double().cpu().numpy() - wanted.rows)
    if not (error <= slack).all():
        row = int(np.argwhere(~(error <= slack))[0][0])
        raise FalsifiedError(
            f"loss of row {row} is {float(rows[row]):.9g}, not {wanted.rows[row]:.9g}", (row,)
        )
    (dw,) = torch.autograd.grad(rows.sum(), w)
    reference = selected_score_gradients(q, k, w64, keys, wanted.grad_scores, scale).w
    reach = selected_score_gradients(np.abs(q), np.abs(k), np.abs(w64), keys, np.ones(keys.shape), scale).w
    allowed = (slack / temperature + 2.0**-20)[:, None] * reach + 2.0**-20
    apart = np.abs(dw.double().cpu().numpy() - reference)
    if not (apart <= allowed).all():
        row = int(np.argwhere(~(apart <= allowed))[0][0])
        raise FalsifiedError(
            f"the loss's dw of row {row} is {dw[row].tolist()}, not {reference[row]}", (row,)
        )


@promise(
    "replay: gradients",
    ("tie_rich", "random_normal", "packed_windows"),
    needs=["hytopk"],
    share=FEW,
    why_few=WHY_FEW,
)
def recomputation_changes_nothing(trial: Trial) -> None:
    """Gradients with a checkpointed selection, by policy or by tape, equal those without, bit for bit."""
    trial.assume(trial.case.dtype != "fp8")
    tensors = trial.case.tensors(trial.device)
    replay, indexer = trial.hytopk.module("replay"), trial.hytopk.module("indexer")
    tape = replay.SelectionTape(offload=trial.draw(st.booleans(), "offload"))
    frame = tape.frame(0)

    def region(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, select: Any) -> torch.Tensor:
        indices = select(q, k, w, tensors.top_k, **tensors.windows).indices
        scores = indexer.selected_scores(q, k, w, indices, dk="fixed_point")
        finite: torch.Tensor = torch.tanh(scores.masked_fill(indices < 0, 0) / 16)
        return finite

    def run(way: str) -> list[torch.Tensor]:
        q, k, w = (each.detach().clone().requires_grad_() for each in (tensors.q, tensors.k, tensors.w))
        if way == "kept":
            out = region(q, k, w, trial.hytopk.api.hytopk)
        elif way == "policy":
            out = replay.checkpoint_with_replay(region, q, k, w, replay.select)
        else:

            def taped(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                return region(q, k, w, lambda *a, **b: frame.select("layer", *a, **b))

            out = checkpoint(frame.region(taped), q, k, w, use_reentrant=way == "reentrant tape")
        torch.autograd.backward((out**2).sum())
        return [out.detach(), *(each.grad.float() for each in (q, k, w) if each.grad is not None)]

    way = trial.draw(st.sampled_from(("policy", "tape", "reentrant tape")), "checkpointed by")
    try:
        checkpointed = run(way)
    except replay.ReplayError as error:
        raise FalsifiedError(f"{way}: {error}") from error
    for name, one, two in zip(("result", "dq", "dk", "dw"), checkpointed, run("kept"), strict=True):
        _rows_differ(f"{name}, {way}", one.float(), two.float())
    tape.finish()
    if tape.held.total:
        raise FalsifiedError(f"{tape.held} held after the step")


@promise("replay: lifecycle", ("tie_rich", "row_lengths"), needs=["hytopk"], device="cuda")
def findings_are_waited_for(trial: Trial) -> None:
    """What a replay on a late stream found decides the step, not what its memory held before."""
    replay = trial.hytopk.module("replay")
    t = trial.case.tensors(trial.device)
    trial.assume(trial.case.num_queries > 0)
    corrupt = trial.draw(st.booleans(), "corrupt")
    tape = replay.SelectionTape()
    frame = tape.frame(0)

    def select() -> None:
        frame.select("layer", t.q, t.k, t.w, t.top_k, start=t.start, end=t.end, k_scale=t.k_scale)

    with frame.recording():
        select()
    if corrupt:
        frame.export("layer").fingerprint.add_(1)
    late = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    late.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(late), frame.replaying():
        left = [torch.full((1,), 0 if corrupt else -1, device=trial.device) for _ in range(256)]
        del left
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        select()
    try:
        tape.finish()
        refused = False
    except replay.ReplayError:
        refused = True
    if refused != corrupt:
        raise FalsifiedError(
            f"a {'corrupt' if corrupt else 'sound'} record was {'' if refused else 'not '}refused"
        )


@promise(
    "replay: lifecycle",
    ("tie_rich",),
    needs=["hytopk"],
    share=0.1,
    why_few="each example is a whole run of the stateful machine, with its own examples",
)
def records_live_as_they_should(trial: Trial) -> None:
    """Drawn schedules of records, replays, failures, misuse and offload agree with a dictionary model."""
    seed = trial.draw(st.integers(0, 2**32 - 1), "seed")
    with own_memory("a replay"):
        run_machine(trial.hytopk.package, trial.device, seed=seed)


PROPERTIES: tuple[Property, ...] = (
    packed_words_follow_the_format,
    rows_of_any_size_follow_the_format,
    corrupt_words_are_refused,
    changed_windows_are_refused,
    changed_inputs_are_refused,
    selected_scores_are_the_selections,
    selected_gradients_within_bounds,
    fixed_point_does_not_depend_on_order,
    ranks_share_the_work,
    indexer_loss_is_the_divergence,
    recomputation_changes_nothing,
    findings_are_waited_for,
    records_live_as_they_should,
)
