"""Internal sizes, buffers and memory: forced overflow and underflow, workspace, addresses.

The forced properties report how many rows, by the kernel's own statistics, took the path that they force.
"""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_verify.cases import DTYPES, Case, InternalSizes
from hyscale_verify.memory import spread_rows, watched_allocations
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import expected, members, own_memory, same_bits, same_sets
from hyscale_verify.strategies import cases
from hyscale_verify.targets import Result, result_of

ANY = (
    "tie_rich",
    "random_normal",
    "duplicated_keys",
    "relu_plateau",
    "ulp_neighbours",
    "nan",
    "packed_windows",
    "documents",
)
MIB = 2**20


@promise("deterministic", (*ANY, "periodic", "infinities"), needs=["hytopk"])
def internal_sizes(trial: Trial) -> None:
    """Tiles, chunks, segments, samples and buffers of any size give the same bits."""
    first = trial.select(trial.case.with_(sizes=None))
    for label in ("sizes", "other sizes"):
        drawn = trial.draw(trial.space.internal_sizes(trial.case.num_keys), label)
        same_bits(trial.select(trial.case.with_(sizes=drawn)), first, f"with {label}")


def _tight(trial: Trial) -> InternalSizes:
    """The smallest candidate buffer and a sample small enough to be wrong."""
    cuda = trial.device == "cuda"
    return InternalSizes(
        tile_rows=64 if cuda else 4,
        tile_keys=128 if cuda else 32,
        gather=128 if cuda else 16,
        slack=1,
        row_group=1 if cuda else 4,
        samples=256 if cuda else 64,
        segment_tiles=0,
        row_tiles=4,
        key_tiles=64 if cuda else 8,
        repair_splits=64 if cuda else 2,
        consumers=3 if cuda else 0,
    )


def _larger(
    trial: Trial, on_cpu: tuple[int, ...], on_cuda: int, rows: int = 2, windows: tuple[str, ...] = ("full",)
) -> Case:
    """The trial's regime drawn again: rows that see far more keys than a tight buffer holds.

    K is one of ``on_cpu``, or ``on_cuda``.
    """
    keys, options = (6000, (on_cuda,)) if trial.device == "cuda" else (250, on_cpu)
    top_k = trial.draw(st.sampled_from(options), "K")
    drawn = cases(trial.case.regime, trial.space.exactly(rows, keys, top_k), windows)
    trial.case = trial.data.draw(drawn, label="case").with_(sizes=_tight(trial))
    return trial.case


def _exact(trial: Trial, result: Result) -> None:
    scores = trial.dense()
    same_sets(result, expected(trial.case, scores).indices, scores, "the target's own scores")


def _rescored(result: Result) -> NDArray[np.integer]:
    return np.asarray(result.stats.rescored.cpu().numpy())


@promise("exact", ("random_normal", "exact_integers", "reversed", "nan"), needs=["hytopk"])
def forced_overflow_of_candidates(trial: Trial) -> None:
    """More candidates than the buffer holds: the row is marked as rescored and exact, never truncated."""
    case = _larger(trial, (1, 3, 8), 200)
    with own_memory("an overflow"):
        result = trial.select()
    candidates = result.stats.candidates.cpu().numpy()
    room = _tight(trial).capacity(case.top_k)
    trial.numbers["rows forced"] = float((candidates > room).sum())
    for t in np.flatnonzero((candidates > room) & (_rescored(result) != 1)).tolist():
        raise FalsifiedError(
            f"row {t} had {candidates[t]} candidates for a buffer of {room} and is not marked as rescored",
            (t,),
        )
    _exact(trial, result)


@promise("exact", ("sorted", "ulp_neighbours", "random_normal"), needs=["hytopk"])
def forced_refill_of_the_repair_buffer(trial: Trial) -> None:
    """Repair fills its buffer again and again (scores that rise with the key) and stays exact."""
    _larger(trial, (1, 2, 5), 64)
    with own_memory("repair"):
        result = trial.select(return_scores=True)
    trial.numbers["rows forced"] = float((_rescored(result) == 1).sum())
    _exact(trial, result)


@promise("exact", ("relu_plateau", "constant", "spike", "tie_rich", "periodic"), needs=["hytopk"])
def forced_flood_by_a_plateau(trial: Trial) -> None:
    """Equal scores that no threshold can thin out are filled in: exact, smaller keys first.

    The windows leave out some keys at either end, which are as good as those inside. A few keys are raised
    above their equals where a walk in steps begins and ends: at the window's edges, at whole steps from it.
    """
    case = _larger(trial, (1, 3, 8), 64)
    low, behind = trial.draw(
        st.tuples(st.integers(0, 8), st.integers(0, 8)), "keys left out before and behind"
    )
    high, step = case.num_keys - behind, _tight(trial).gather
    edges = [low, low + step - 1, low + step, low + step + 1, low + 2 * step, high - 1]
    raised = trial.draw(st.lists(st.sampled_from(edges), max_size=4, unique=True), "keys raised")
    k = case.k.copy()
    k[raised, 0] += 1
    trial.case = case.with_(k=k, start=case.start + np.int32(low), end=case.end - np.int32(behind))
    with own_memory("filling from a plateau"):
        result = trial.select(return_scores=True)
    trial.numbers["rows forced"] = float((_rescored(result) == 2).sum())
    _exact(trial, result)


@promise(
    "exact",
    ("tie_rich", "relu_plateau", "nan", "random_normal", "infinities", "ulp_neighbours", "constant"),
    needs=["hytopk"],
)
def table_and_scan_agree(trial: Trial) -> None:
    """A filtered table of scores gives a scan's answer, bit for bit, NaN counted alike, and the right one.

    The buffer is tight, the rows lie in two passes, and their windows begin and end anywhere.
    """
    tile = _tight(trial).tile_rows
    case = _larger(trial, (1, 3, 8), 64, tile + 1, ("full", "late", "ragged"))
    tight = replace(_tight(trial), row_tiles=1)
    scanned = trial.select(case.with_(sizes=tight), return_scores=True)
    trial.case = case.with_(sizes=replace(tight, table_keys=case.num_keys))
    with own_memory("a table of scores"):
        result = trial.select(return_scores=True)
    held = result.stats.candidates.cpu().numpy()
    trial.numbers["rows filtered"] = float((held < case.lengths).sum())
    same_bits(result, scanned, "a table against a scan")
    nans, others = (each.stats.nan_scores.cpu().numpy() for each in (result, scanned))
    for t in np.flatnonzero(nans != others).tolist():
        raise FalsifiedError(f"row {t} counts {nans[t]} NaN in a table and {others[t]} in a scan", (t,))
    _exact(trial, result)


@promise(
    "exact",
    ("documents", "spoiled_documents"),
    needs=["hytopk"],
    share=0.7,
    why_few="each example is two calls of hundreds of keys",
)
def pruning_changes_nothing(trial: Trial) -> None:
    """Key tiles left out of the scan were not needed: candidates, NaN and all bits are those of a full scan.

    The buffer is tight, and one row more than a tile holds lies in one pass or two.
    """
    sizes = replace(_tight(trial), slack=2)
    if trial.device == "cpu":
        sizes = replace(
            sizes,
            tile_rows=trial.draw(st.sampled_from((4, 2, 1)), "rows of a tile"),
            key_tiles=trial.draw(st.sampled_from((8, 2)), "key tiles of a chunk"),
            segment_tiles=trial.draw(st.sampled_from((3, 0)), "key tiles of a segment"),
            row_group=16,
        )
    case = _larger(trial, (1, 3, 8), 64, sizes.tile_rows + 1, ("full", "late", "ragged"))
    sizes = replace(sizes, row_tiles=trial.draw(st.sampled_from((2, 1)), "row tiles of a pass"))
    whole = trial.select(case.with_(sizes=sizes), return_scores=True)
    trial.case = case.with_(sizes=replace(sizes, prune_keys=1))
    with own_memory("pruning"), watched_allocations(0xFF):
        result = trial.select(return_scores=True)
    same_bits(result, whole, "with tiles left out against without")
    for name in ("nan_scores", "candidates", "rescored"):
        found, right = (getattr(each.stats, name).cpu().numpy() for each in (result, whole))
        for t in np.flatnonzero(found != right).tolist():
            raise FalsifiedError(
                f"row {t} has {name} = {found[t]} with tiles left out and {right[t]} without", (t,)
            )
    _exact(trial, result)


@promise("window", ("tie_rich", "random_normal", "nan"), needs=["hytopk"])
def causal_passes(trial: Trial) -> None:
    """A causal call of several passes, each over the keys that its rows see, answers as one over all keys.

    Early passes take a table, later ones a scan, or all of them either.
    """
    size = 700 if trial.device == "cuda" else 50
    top_k = trial.draw(st.sampled_from((1, 5, 20)), "K")
    drawn = cases(trial.case.regime, trial.space.exactly(size, size, top_k), ("causal",))
    table_keys = trial.draw(st.sampled_from((size // 2, 0, size)), "keys of a table")
    sizes = replace(_tight(trial), row_tiles=1, table_keys=table_keys)
    trial.case = case = trial.data.draw(drawn, label="case").with_(sizes=sizes)
    given = case.tensors(trial.device)
    with own_memory("a causal call"):
        plan = trial.hytopk.plan(case)
        selection = trial.hytopk.api.hytopk(
            given.q, given.k, given.w, top_k, k_scale=given.k_scale, return_scores=True, plan=plan
        )
    result = result_of(selection)
    same_bits(result, trial.select(return_scores=True), "windows left out against windows given")
    _exact(trial, result)


def sampled_keys(low: int, high: int, samples: int) -> NDArray[np.int64]:
    """The keys that the threshold stage samples of [low, high): ``sample_keys`` of threshold.py."""
    i = np.arange(samples, dtype=np.int64)
    stride, rest = divmod(high - low, samples)
    jitter = ((i * 2654435769) % 2**32 * stride) >> 32
    return low + i * stride + i * rest // samples + jitter


@promise("exact", ("exact_integers", "random_normal"), needs=["hytopk"])
def forced_underflow(trial: Trial) -> None:
    """A threshold that fewer than K keys reach, because the sample saw the best keys only: still exact.

    The sampled keys are given distinct scores above all others.
    """
    case = _larger(trial, (33,), 200)
    q, k, w = np.zeros_like(case.q), np.zeros_like(case.k), np.zeros_like(case.w)
    q[:, 0, :3], w[:, 0] = (64, 8, 1), 1
    best = np.unique(sampled_keys(0, case.num_keys, _tight(trial).samples))
    level = np.random.default_rng(trial.draw(st.integers(0, 2**32 - 1), "seed")).permutation(len(best))
    for key, rank in zip(best, level, strict=True):
        k[key, :3] = (1 + rank // 64, rank // 8 % 8, rank % 8)
    trial.case = case.with_(q=q, k=k, w=w, k_scale=None if case.k_scale is None else case.k_scale * 0 + 1)
    result = trial.select()
    candidates = result.stats.candidates.cpu().numpy()
    trial.numbers["rows forced"] = float((candidates < case.top_k).sum())
    for t in np.flatnonzero((candidates < case.top_k) & (_rescored(result) == 0)).tolist():
        raise FalsifiedError(
            f"row {t} had {candidates[t]} candidates for K={case.top_k} and is not rescored", (t,)
        )
    _exact(trial, result)


@promise("memory", ("random_normal",), needs=["hytopk"])
def workspace_is_bounded(trial: Trial) -> None:
    """The stated workspace of any call is at most 16 T K bytes + 64 MiB: no score table, whatever S is."""
    T = trial.draw(st.integers(0, 2**20), "T")
    S = trial.draw(st.integers(0, 2**31 - 1), "S")
    H = trial.draw(st.integers(1, 128), "H")
    D = trial.draw(st.integers(16, 256), "D")
    K = trial.draw(st.integers(1, 4096), "K")
    dtype = trial.draw(st.sampled_from(trial.space.dtypes), "dtype")
    bound = 16 * T * K + 64 * MIB
    try:
        stated = trial.hytopk.api.workspace_bytes(T, S, H, D, K, DTYPES[dtype], trial.device)
    except AssertionError as error:
        raise FalsifiedError(
            f"workspace of T={T} S={S} H={H} D={D} K={K}: its own check fails: {error}"
        ) from error
    if not 0 <= stated <= bound:
        raise FalsifiedError(
            f"workspace of T={T} S={S} H={H} D={D} K={K}: {stated} bytes; {bound} are allowed"
        )


@promise("memory", ("random_normal", "relu_plateau", "packed_windows", "documents"), needs=["hytopk"])
def no_score_table(trial: Trial) -> None:
    """The memory really allocated beside the outputs is no more than stated."""
    case = trial.case
    T, _, D = case.q.shape
    inputs = case.tensors(trial.device)
    plan = trial.hytopk.plan(case)
    sizes = plan or trial.hytopk.api.Plan.default(
        T, case.num_keys, D, case.top_k, DTYPES[case.dtype], torch.device(trial.device)
    )
    stated = sizes.workspace_bytes(T, case.num_keys, D)
    if trial.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = trial.select(inputs=inputs, plan=plan)
        peak = torch.cuda.max_memory_allocated() - before
        slack = 16 * 512  # the caching allocator rounds every tensor up to 512 bytes
    else:
        with watched_allocations() as seen:
            result = trial.select(inputs=inputs, plan=plan)
        peak, slack = seen.peak, 0
    outputs = sum(each.nbytes for each in _outputs(result))
    if peak > outputs + stated + slack:
        raise FalsifiedError(
            f"{peak - outputs} bytes were allocated beside {outputs} of outputs; {stated} are stated"
        )


def _outputs(result: Result) -> list[torch.Tensor]:
    selection, stats = result.selection, result.stats
    return [
        selection.indices,
        selection.count,
        stats.nan_scores,
        stats.rescored,
        stats.candidates,
        stats.invalid,
    ]


EDGES = ("odd_sizes", "row_lengths", "strided_storage", "packed_windows", "tie_rich")


@promise("memory", EDGES, needs=["fused"], device="cpu")
def only_its_own_memory(trial: Trial) -> None:
    """Every load and store lies inside the memory of a tensor argument of its launch."""
    with own_memory("the call"):
        trial.select()


@promise("control", ("exact_integers", "random_normal"), needs=["fused"], device="cpu")
def offsets_beyond_int32(trial: Trial) -> None:
    """Rows of q, k or w that lie more than 2**31 elements apart give the same bits."""
    case = trial.case
    name = trial.draw(st.sampled_from(("k", "q", "w")), "far apart")
    inputs = case.tensors(trial.device)
    tensor = getattr(inputs, name)
    trial.assume(tensor.shape[0] >= 2)
    spread = spread_rows(tensor, 2**31)
    far = replace(inputs, **{name: spread})  # type: ignore[arg-type]
    what = f"{name} with rows {spread.stride(0)} elements apart"
    first = trial.select()
    with own_memory(what):
        second = trial.select(inputs=far)
    same_bits(second, first, what)


@promise(
    "control",
    ("random_normal",),
    needs=["hytopk"],
    device="cuda",
    share=0.02,
    why_few="each example fills gigabytes",
)
def large_tensors(trial: Trial) -> None:
    """Windows at the far end of q, k, indices beyond 2**31 elements answer as the far end alone does."""
    dtype = DTYPES[trial.case.dtype]
    rows, keys, K = 256, 4096, 2048
    T, S, H, D = 2**20 + rows, 2**24 + keys, 32, 128
    generator = torch.Generator(device="cuda").manual_seed(trial.draw(st.integers(0, 2**31 - 1), "seed"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q = torch.zeros((T, H, D), dtype=dtype, device="cuda")
    k = torch.zeros((S, D), dtype=dtype, device="cuda")
    w = torch.zeros((T, H), device="cuda")
    q[-rows:], k[-keys:], w[-rows:] = normal(rows, H, D).to(dtype), normal(keys, D).to(dtype), normal(rows, H)
    start = torch.full((T,), S, dtype=torch.int32, device="cuda")
    end = start.clone()
    start[-rows:] = S - keys + torch.arange(rows, device="cuda", dtype=torch.int32)
    scale = {} if dtype != torch.float8_e4m3fn else {"k_scale": torch.ones(S, device="cuda")}
    call = trial.hytopk.api.hytopk
    whole = call(q, k, w, K, start=start, end=end, **scale)
    scale = {name: each[-keys:].contiguous() for name, each in scale.items()}
    shift = S - keys
    alone = call(
        q[-rows:], k[-keys:], w[-rows:], K, start=start[-rows:] - shift, end=end[-rows:] - shift, **scale
    )
    moved = torch.where(alone.indices < 0, alone.indices, alone.indices + shift)
    same_bits(
        Result(whole.indices[-rows:].cpu().numpy(), whole.count[-rows:].cpu().numpy()),
        Result(moved.cpu().numpy(), alone.count.cpu().numpy()),
        "the far end of large tensors",
    )
    if bool((whole.count[:-rows] != 0).any()) or bool((whole.indices[:-rows] != -1).any()):
        raise FalsifiedError("a row with an empty window selected something")


@promise("result", (*ANY, "periodic", "infinities"), needs=["hytopk"])
def statistics_are_consistent(trial: Trial) -> None:
    """rescored is 0, 1 or 2, invalid is 0, and candidates are no fewer than selected keys unless rescored."""
    result = trial.select()
    stats = {
        name: getattr(result.stats, name).cpu().numpy() for name in ("rescored", "candidates", "invalid")
    }
    for t, row in enumerate(result.indices):
        if stats["rescored"][t] not in (0, 1, 2):
            raise FalsifiedError(f"row {t} has rescored = {stats['rescored'][t]}", (t,))
        if stats["invalid"][t] != 0:
            raise FalsifiedError(f"row {t} has a proper window and invalid = {stats['invalid'][t]}", (t,))
        if stats["rescored"][t] == 0 and stats["candidates"][t] < len(members(row)):
            raise FalsifiedError(
                f"row {t} selects {len(members(row))} keys of {stats['candidates'][t]} candidates", (t,)
            )


PROPERTIES: tuple[Property, ...] = (
    internal_sizes,
    forced_overflow_of_candidates,
    forced_refill_of_the_repair_buffer,
    forced_flood_by_a_plateau,
    forced_underflow,
    table_and_scan_agree,
    pruning_changes_nothing,
    causal_passes,
    workspace_is_bounded,
    no_score_table,
    only_its_own_memory,
    offsets_beyond_int32,
    large_tensors,
    statistics_are_consistent,
)
