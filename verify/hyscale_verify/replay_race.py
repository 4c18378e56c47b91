"""The race of selection replay on a GPU: a correctness gate, then times beside their floors.

``hyscale profile race --op replay`` runs it; so does benchmarks/replay.py, which trains a model besides.
Shape: GLM-5.1's indexer (H = 32, D = 128, K = 2048), T = 8,192 rows over S = 1,048,576 keys, selected by
HyTopK from random inputs.

Floors: bytes that must move through device memory at the measured copy rate; bytes gathered through the
second-level cache; FLOPs of the products at the measured GEMM rate; for dk, the T K D atomic additions by
themselves, at the same addresses in the same order, timed in the same race. A time is listed with each of
them, not with their sum, because they overlap.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hyscale_kernels.hytopk import hytopk
from hyscale_kernels.indexer import IndexerPlan, backward_workspace_bytes, indexer_loss, selected_scores
from hyscale_kernels.indexer.api import _backward
from hyscale_kernels.profiling.additions import add_ones
from hyscale_kernels.profiling.cases import DTYPES
from hyscale_kernels.profiling.ceilings import CACHE_BYTES_PER_S, COPY_BYTES_PER_S, GEMM_FLOPS
from hyscale_kernels.profiling.timing import interleaved, peak_extra_bytes
from hyscale_kernels.provenance import environment
from hyscale_kernels.replay import CorruptRecordError, decode_record, import_selection
from hyscale_kernels.replay.decode import launch_decode
from hyscale_kernels.replay.encode import launch_encode
from hyscale_kernels.replay.tiling import Tiling
from hyscale_ref import codec, loss

TARGETS_MS = {
    "encode": 0.3,
    "decode": 0.3,
    "selected scores": 2.0,
    "backward, atomic dk": 6.0,
    "backward, fixed-point dk": 12.0,
}
# Most that the allocator's rounding adds to the bytes that a backward pass states.
ROUNDING_BYTES = 8 * 2**20

Record = dict[str, Any]
Array = Any


class Case:
    """Random inputs on the GPU, every key visible, and HyTopK's selection of them."""

    def __init__(self, dtype: str, T: int, S: int, H: int, D: int, K: int, seed: int = 0) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        self.dtype, self.T, self.S, self.H, self.D, self.K = dtype, T, S, H, D, K
        self.q = normal(T, H, D).to(DTYPES[dtype])
        self.k = normal(S, D).to(DTYPES[dtype])
        self.w = normal(T, H)
        self.k_scale = torch.rand(S, device="cuda", generator=generator) + 0.5 if dtype == "fp8" else None
        self.start = torch.zeros(T, dtype=torch.int32, device="cuda")
        self.end = torch.full((T,), S, dtype=torch.int32, device="cuda")
        self.selection = hytopk(
            self.q,
            self.k,
            self.w,
            K,
            start=self.start,
            end=self.end,
            k_scale=self.k_scale,
            return_scores=True,
        )
        self.indices, self.count = self.selection.indices, self.selection.count
        self.grad = normal(T, K).masked_fill_(self.indices < 0, 0)

    def backward(self, fixed: bool, plan: IndexerPlan | None = None) -> tuple[torch.Tensor, ...]:
        sizes = (plan or IndexerPlan.default(self.S, self.H, self.D, "cuda")).as_ints()
        return _backward(self.grad, self.q, self.k, self.w, self.indices, self.k_scale, True, fixed, sizes)  # type: ignore[no-any-return]

    def arrays(self) -> tuple[Array, Array, Array, Array | None]:
        """q, k, w and k_scale in float64."""
        q, k, w = (each.double().cpu().numpy() for each in (self.q, self.k, self.w))
        return q, k, w, None if self.k_scale is None else self.k_scale.double().cpu().numpy()


# Gate


def codec_gate() -> Record:
    """Words equal the reference's, and decode to the rows they came from; single flipped bits are refused."""
    generator = np.random.default_rng(0)
    tiling = Tiling.default(torch.device("cuda"))
    wrong = missed = flips = 0
    million, shapes = 2**20, ((8192, 256), (100, 7), (64, 64), (2**31 - 1, 5), (50, 80), (700, 128))
    for N, K in ((million, 2048), (million, 300), *shapes):
        T = 37
        start = generator.integers(0, N // 2, T).astype(np.int32)
        indices, count = np.full((T, K), -1, np.int32), np.zeros(T, np.int32)
        for t in range(T):
            length = N - int(start[t])
            wanted = min(K, length) if t % 3 else int(generator.integers(0, min(K, length) + 1))
            span = min(length, 4 * K) if t % 2 else length  # every other row is clustered
            drawn = np.unique(generator.integers(0, span, 4 * wanted))
            values = np.sort(generator.permutation(drawn)[:wanted])
            count[t] = len(values)
            indices[t, : len(values)] = values + start[t]
        reference = codec.encode(indices, count, start, N)
        rows, counts, starts = (torch.from_numpy(each).cuda() for each in (indices, count, start))
        words = launch_encode(rows, counts, starts, N, tiling)
        wrong += not np.array_equal(words.cpu().numpy().view(np.uint32), reference)
        again, counted, status = launch_decode(words, starts, None, None, N, K, tiling)
        wrong += not (torch.equal(again, rows) and torch.equal(counted, counts) and not status.any().item())
        for _ in range(20):
            row, column = int(generator.integers(T)), int(generator.integers(words.shape[1]))
            changed = words.clone()
            changed[row, column] ^= 1 << int(generator.integers(31))
            try:
                codec.decode(changed.cpu().numpy(), start, N, K)
                refused = False
            except CorruptRecordError:
                refused = True
            _, _, status = launch_decode(changed, starts, None, None, N, K, tiling)
            flips += 1
            missed += bool(status[row].item()) != refused
    return {
        "claim": "packed words equal the reference, round trip, and refuse what it refuses",
        "shapes_wrong": wrong,
        "flipped_bits": flips,
        "disagreements": missed,
        "holds": wrong == 0 and missed == 0,
    }


def scores_gate(dtype: str) -> Record:
    """Selected scores equal HyTopK's bit for bit, at the full width and at odd sizes."""
    different = 0
    for case in (Case(dtype, 64, 65536, 32, 128, 2048), Case(dtype, 33, 3001, 5, 40, 77, seed=1)):
        scores = selected_scores(case.q, case.k, case.w, case.indices, k_scale=case.k_scale)
        assert case.selection.scores is not None
        different += int((scores.view(torch.int32) != case.selection.scores.view(torch.int32)).sum())
    return {
        "claim": "selected scores equal HyTopK's, bit for bit",
        "dtype": dtype,
        "different": different,
        "holds": different == 0,
    }


def near_zero(
    q: Array, k: Array, w: Array, indices: Array, grad: Array, scale: Array | None, share: float
) -> loss.ScoreGradients:
    """How far gradients may move because products within ``share`` of sum |q| |k| have either sign."""
    dq, dk, dw = np.zeros_like(q), np.zeros_like(k), np.zeros_like(w)
    for t, row in enumerate(indices):
        keys = row[row >= 0]
        c = np.abs(grad[t, row >= 0] * (1.0 if scale is None else scale[keys]))
        room = share * (np.abs(q[t]) @ np.abs(k[keys]).T)  # [H, J]
        terms = np.where(np.abs(q[t] @ k[keys].T) <= room, np.abs(w[t])[:, None] * c, 0.0)
        dq[t] = terms @ np.abs(k[keys])
        np.add.at(dk, keys, terms.T @ np.abs(q[t]))
        dw[t] = room @ c
    return loss.ScoreGradients(dq, dk, dw)


def gradients_gate(dtype: str) -> Record:
    """Gradients and loss against float64; fixed point bit-equal over repeats and tile sizes."""
    case = Case(dtype, 48, 5000, 32, 128, 300, seed=2)
    q, k, w, scale = case.arrays()
    indices, grad = case.indices.cpu().numpy(), case.grad.cpu().numpy()
    wanted = loss.selected_score_gradients(q, k, w, indices, grad, scale)
    size = loss.selected_score_gradients(np.abs(q), np.abs(k), np.abs(w), indices, np.abs(grad), scale)
    # One product q . k: fp8 tensor cores keep some 14 bits, 16-bit ones nearly float32.
    share = 2.0**-11.5 if dtype == "fp8" else 2.0**-21
    moved = near_zero(q, k, w, indices, grad, scale, share)
    rounded = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 0.0}[dtype]
    worst: dict[str, float] = {}
    for name, fixed in (("atomic", False), ("fixed_point", True)):
        for part, got in zip(("q", "k", "w"), case.backward(fixed), strict=True):
            reference = getattr(wanted, part)
            allowed = 2.0**-15 * getattr(size, part) + getattr(moved, part) + 1e-30
            allowed += 0.0 if part == "w" else rounded * np.abs(reference)
            error = np.abs(got.float().cpu().numpy() - reference)
            worst[f"d{part}_{name}_error_over_bound"] = float((error / allowed).max())
    first = case.backward(True)[1]
    base = IndexerPlan.default(case.S, case.H, case.D, case.q.device)
    others = [*[base] * 20, replace(base, scatter_keys=32), replace(base, chunk_keys=1024)]
    unequal = sum(not torch.equal(case.backward(True, plan)[1], first) for plan in others)

    target = torch.rand(case.T, case.K, device=case.q.device) * (case.indices >= 0)
    target /= target.sum(dim=1, keepdim=True)
    rows = indexer_loss(case.q, case.k, case.w, case.indices, target, k_scale=case.k_scale, temperature=1.5)
    scores = loss.selected_scores(q, k, w, indices, scale)
    largest = loss.selected_scores(np.abs(q), np.abs(k), np.abs(w), indices, scale).max(axis=1)
    reference_rows = loss.indexer_loss(target.double().cpu().numpy(), scores, indices, temperature=1.5).rows
    # A row's loss moves by at most twice its worst score error, over the temperature.
    allowed = 2.0 / 1.5 * (share + 2.0**-19) * largest + 1e-5
    worst["loss_error_over_bound"] = float((np.abs(rows.cpu().numpy() - reference_rows) / allowed).max())
    return {
        "claim": "gradients and loss within their bounds of float64; fixed-point dk repeats bit for bit",
        "dtype": dtype,
        **worst,
        "fixed_point_runs_unequal": unequal,
        "holds": max(worst.values()) <= 1.0 and unequal == 0,
    }


def import_gate() -> Record:
    """Imported indices, shuffled and in local coordinates, decode to the selection; a corrupt record
    raises."""
    case = Case("bf16", 64, 65536, 8, 64, 512, seed=3)
    start = torch.arange(64, dtype=torch.int32, device="cuda") * 7
    kept = torch.where(case.indices >= start[:, None], case.indices, -1)
    order = torch.rand(kept.shape, device="cuda").argsort(dim=1)
    shuffled = kept.gather(1, order).long()
    local = torch.where(shuffled >= 0, shuffled - start[:, None], -1)
    record = import_selection(local, case.S, start=start, end=case.end, local=True)
    decoded = decode_record(record, start=start, end=case.end, validate=True)
    wanted = kept.masked_fill(kept < 0, 2**31 - 1).sort(dim=1).values
    wanted = wanted.masked_fill(wanted == 2**31 - 1, -1)
    equal = torch.equal(decoded.indices, wanted)
    record.words[5, 4] ^= 1
    try:
        decode_record(record, start=start, end=case.end, validate=True)
        raised = False
    except CorruptRecordError:
        raised = True
    return {
        "claim": "imported records decode to the selection; a corrupt one raises",
        "equal": equal,
        "raised": raised,
        "holds": equal and raised,
    }


def gates() -> Iterator[Callable[[], Record]]:
    yield codec_gate
    yield import_gate
    for dtype in DTYPES:
        yield lambda dtype=dtype: scores_gate(dtype)  # type: ignore[misc]
        yield lambda dtype=dtype: gradients_gate(dtype)  # type: ignore[misc]


# Times


def floors(case: Case, words: int) -> dict[str, dict[str, float]]:
    """What each operation cannot do without: milliseconds by device memory, cache and products."""
    T, S, H, D, K = case.T, case.S, case.H, case.D, case.K
    width = case.q.element_size()
    rows = 4 * T * K
    gathered = T * K * D * width
    product = 2 * T * K * H * D / GEMM_FLOPS[case.dtype] * 1e3
    exact = 2 * T * K * H * D / GEMM_FLOPS["bf16"] * 1e3
    table = S * D * width

    def memory(count: float) -> float:
        return count / COPY_BYTES_PER_S * 1e3

    def cache(count: float) -> float:
        return count / CACHE_BYTES_PER_S * 1e3

    forward = {"memory": memory(2 * rows + table), "cache": cache(gathered), "products": product}
    backward = {
        "memory": memory(4 * rows + table + S * D * (4 + 4 + (4 if case.dtype == "fp8" else 2))),
        "cache_gathers": cache(gathered),
        "products": product + 4 * exact,
    }
    return {
        "encode": {"memory": memory(rows + 4 * T * words)},
        "decode": {"memory": memory(rows + 4 * T * words)},
        "selected scores": forward,
        "indexer loss": {**forward, "memory": memory(4 * rows + table)},
        "backward, atomic dk": backward,
        "backward, fixed-point dk": backward,
    }


def times(dtype: str) -> Iterator[Record]:
    T, S, H, D, K = 8192, 2**20, 32, 128, 2048
    case = Case(dtype, T, S, H, D, K)
    tiling = Tiling.default(torch.device("cuda"))
    words = launch_encode(case.indices, case.count, case.start, S, tiling)
    target = torch.rand(T, K, device="cuda")
    target /= target.sum(dim=1, keepdim=True)
    calls: dict[str, Callable[[], object]] = {
        "selected scores": lambda: selected_scores(
            case.q, case.k, case.w, case.indices, k_scale=case.k_scale
        ),
        "indexer loss": lambda: indexer_loss(
            case.q, case.k, case.w, case.indices, target, k_scale=case.k_scale
        ),
        "backward, atomic dk": lambda: case.backward(False),
        "backward, fixed-point dk": lambda: case.backward(True),
    }
    if dtype == "bf16":
        clustered = torch.arange(K, dtype=torch.int32, device="cuda").repeat(T, 1) + 5000
        packed = launch_encode(clustered, case.count, case.start, S, tiling)
        calls = {
            "encode": lambda: launch_encode(case.indices, case.count, case.start, S, tiling),
            "decode": lambda: launch_decode(words, case.start, case.end, None, S, K, tiling),
            "encode, one run of keys": lambda: launch_encode(clustered, case.count, case.start, S, tiling),
            "decode, one run of keys": lambda: launch_decode(
                packed, case.start, case.end, None, S, K, tiling
            ),
            **calls,
        }
    for kind in (torch.float32, torch.int32):
        calls[f"additions alone, {str(kind).removeprefix('torch.')}"] = add_ones(case.indices, S, D, kind)
    lowest = floors(case, words.shape[1])
    measured = interleaved(calls, rounds=9, budget_s=6.0)
    for way, alone in (("atomic", "float32"), ("fixed-point", "int32")):
        floor = lowest[f"backward, {way} dk"] = dict(lowest[f"backward, {way} dk"])
        floor["additions"] = measured[f"additions alone, {alone}"].median_ms
    for name, timing in measured.items():
        yield {
            "claim": "time",
            "call": name,
            "dtype": dtype,
            "shape": {"T": T, "S": S, "H": H, "D": D, "K": K},
            "median_ms": round(timing.median_ms, 4),
            "p20_ms": round(timing.p20_ms, 4),
            "p80_ms": round(timing.p80_ms, 4),
            "samples": timing.samples,
            "floor_ms": {key: round(value, 4) for key, value in lowest.get(name, {}).items()},
            "peak_extra_bytes": peak_extra_bytes(calls[name]),
            **_target(name, timing.median_ms),
        }
    for way in ("atomic", "fixed-point"):
        stated = backward_workspace_bytes(T, S, H, D, K, fixed_point=way == "fixed-point")
        extra = peak_extra_bytes(calls[f"backward, {way} dk"])
        yield {
            "claim": "a backward pass allocates at most what is stated, and the rounding of the allocator",
            "call": f"backward, {way} dk",
            "dtype": dtype,
            "peak_extra_bytes": extra,
            "stated_workspace_bytes": stated,
            "rounding_bytes": ROUNDING_BYTES,
            "holds": extra <= stated + ROUNDING_BYTES,
        }
    if dtype == "bf16":
        for rows, sets in (("selected by HyTopK from random inputs", words), ("one run of keys", packed)):
            bits = sets.nbytes * 8 / case.indices.numel()
            yield {
                "claim": "packed size at S = 1,048,576, K = 2048, counts included",
                "rows": rows,
                "bits_an_index": bits,
                "bytes_a_token_and_layer": sets.nbytes / T,
                "holds": bits <= 11.1,
            }


def _target(call: str, median_ms: float) -> Record:
    if call not in TARGETS_MS:
        return {}
    return {"target_ms": TARGETS_MS[call], "holds": median_ms <= TARGETS_MS[call]}


def race(dtypes: tuple[str, ...] = ("bf16", "fp8")) -> Iterator[Record]:
    """The gate's records, then, if all of them hold, the times of each dtype."""
    holds = True
    for gate in gates():
        record = gate()
        holds = holds and record["holds"]
        yield record
    if holds:
        for dtype in dtypes:
            yield from times(dtype)


def header() -> Record:
    """What every record carries besides: versions, GPU and the sources measured."""
    return {"schema": 1, "op": "replay", **environment("hytopk", "indexer", "replay")}
