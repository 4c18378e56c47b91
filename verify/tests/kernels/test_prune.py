"""Pruning: a key tile left out holds nothing that a row needs; alike keys are left out, others are not."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hyscale_kernels.hytopk import Plan
from hyscale_kernels.hytopk.problem import Problem
from hyscale_kernels.hytopk.prune import TileList, launch_prune
from hyscale_kernels.hytopk.scan import launch_scan
from hyscale_kernels.hytopk.score import launch_dense
from hyscale_verify.cases import DTYPES, rounded
from hyscale_verify.strategies.regimes import Sizes, Values, documents, random_normal, spoiled_documents
from hyscale_verify.strategies.source import SeededSource

INF, NAN = float("inf"), float("nan")
ROWS, KEYS = (64, 128) if torch.cuda.is_available() else (4, 32)  # of a tile
LOW = ("bf16", "fp16", "fp8") if torch.cuda.is_available() else ("fp32", "bf16", "fp16", "fp8")
WIDE = LOW[: LOW.index("bf16") + 1]  # those with the exponents of float32

Windows = tuple[list[int], list[int]]


@dataclass
class Pruned:
    """What one call leaves out, bool [row tiles, key blocks], of ``met`` that some window meets."""

    left_out: torch.Tensor
    met: int

    @property
    def share(self) -> float:
        return float(self.left_out.sum()) / self.met


def problem_of(values: Values, dtype: str, device: str, windows: Windows | None = None) -> Problem:
    low, high = windows or ([0] * len(values.q), [len(values.k)] * len(values.q))
    scale = np.ones(len(values.k)) if values.scale is None else values.scale
    with np.errstate(all="ignore"):
        q, k = (torch.from_numpy(rounded(each, dtype)).to(DTYPES[dtype]) for each in (values.q, values.k))
        w, scales = (torch.from_numpy(each.astype(np.float32)).to(device) for each in (values.w, scale))
    return Problem(
        q=q.to(device),
        k=k.to(device),
        w=w,
        k_scale=scales if dtype == "fp8" else None,
        lo=torch.tensor(low, dtype=torch.int32, device=device),
        hi=torch.tensor(high, dtype=torch.int32, device=device),
    )


def plan_of(problem: Problem) -> Plan:
    T, _, D = problem.q.shape
    plan = Plan.default(T, problem.num_keys, D, 1, problem.q.dtype, problem.device)
    return replace(plan, tile_rows=ROWS, tile_keys=KEYS, segment=0)


def inside(problem: Problem) -> torch.Tensor:
    key = torch.arange(problem.num_keys, device=problem.device)
    return (key >= problem.lo[:, None]) & (key < problem.hi[:, None])


def scores_of(problem: Problem) -> torch.Tensor:
    return launch_dense(problem, 0, problem.num_queries, plan_of(problem))


def best(scores: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank-th score of each row, NaN last."""
    return torch.where(scores.isnan(), -INF, scores).sort(descending=True).values[:, rank - 1].contiguous()


def bits_of(bitmap: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 32] as bool [R, N]: the first key of a word is its lowest bit."""
    places = torch.arange(32, dtype=torch.int32, device=bitmap.device)
    return (bitmap[..., None] >> places & 1).bool().flatten(1)


@np.errstate(all="ignore")
def prune(
    problem: Problem,
    threshold: torch.Tensor | int,
    row0: int = 0,
    keys: tuple[int, int] | None = None,
) -> Pruned:
    """``launch_prune`` of the rows from row0 on and a chunk of keys, into a bitmap of ones.

    ``threshold`` may be a rank among a row's own scores. Asserts what holds of every call: lists ascend,
    tiles left out hold no score, and no NaN, that a row of the tile needs, and the bitmap has what rows need.
    """
    plan, (key0, key1) = plan_of(problem), keys or (0, problem.num_keys)
    scores = scores_of(problem)
    if isinstance(threshold, int):
        threshold = best(scores, threshold)
    high, low = problem.hi[row0:].contiguous(), threshold[row0:].contiguous()
    R, words = len(low), -(-(key1 - key0) // 32)
    bitmap = torch.full((R, words), -1, dtype=torch.int32, device=problem.device)
    left = launch_prune(problem, high, low, bitmap, row0, key0, key1, plan)
    launch_scan(problem, high, low, bitmap, row0, key0, key1, plan, left)

    sees = inside(problem)[row0:, key0:key1]
    needs = sees & ~(scores[row0:, key0:key1] < low[:, None])
    shape = left.blocks.shape
    left_out, met = torch.zeros(shape, dtype=torch.bool), 0
    for tile in range(shape[0]):
        listed = left.blocks[tile, : int(left.length[tile])].tolist()
        assert listed == sorted({*listed} & {*range(shape[1])})
        rows = slice(tile * ROWS, (tile + 1) * ROWS)
        for block in range(shape[1]):
            columns = slice(block * KEYS, (block + 1) * KEYS)
            met += int(sees[rows, columns].any())
            left_out[tile, block] = block not in listed and bool(sees[rows, columns].any())
            assert block in listed or not needs[rows, columns].any(), (tile, block)
    found = bits_of(bitmap)[:, : key1 - key0]
    for t in range(R):
        first, last = (min(max(int(each[t]) - key0, 0), key1 - key0) for each in (problem.lo[row0:], high))
        read = slice(first // 32 * 32, -(-last // 32) * 32 if last > first else first // 32 * 32)
        assert found[t, read].tolist() == needs[t, read].tolist(), t
    return Pruned(left_out, met)


def coherent(
    T: int = ROWS, H: int = 2, D: int = 16, *, blocks: int = 8, noise: float = 0.01, wanted: int = 1
) -> Values:
    """Key tiles two by two alike; all rows want pair ``wanted``."""
    source = SeededSource(0)
    direction = np.linalg.qr(source.normal((D, D)))[0][: -(-blocks // 2)] * 4
    return Values(
        q=direction[wanted] + noise * source.normal((T, H, D)),
        k=direction[np.arange(blocks * KEYS) // (2 * KEYS)] + noise * source.normal((blocks * KEYS, D)),
        w=np.abs(source.normal((T, H))) + 0.5,
    )


def changed(values: Values, **factors: Any) -> Values:
    """The values with some arrays multiplied."""
    return replace(values, **{name: getattr(values, name) * factor for name, factor in factors.items()})


@pytest.mark.parametrize("dtype", LOW)
def test_tiles_of_alike_keys_are_left_out_where_no_row_wants_them(dtype: str, device: str) -> None:
    found = prune(problem_of(coherent(2 * ROWS), dtype, device), KEYS)
    assert found.left_out.tolist() == [[True, True, False, False, True, True, True, True]] * 2


@pytest.mark.parametrize("dtype", LOW)
def test_nothing_is_left_out_of_random_keys(dtype: str, device: str) -> None:
    n = Sizes(T=ROWS, S=8 * KEYS, H=4, D=32, K=1)
    assert prune(problem_of(random_normal(SeededSource(0), n, dtype), dtype, device), KEYS).share == 0


def drawn(maker: Any, seed: int, dtype: str, device: str) -> Pruned:
    """A drawn call with sizes that are no powers of two, rows and keys that fill no tile, any windows."""
    rng = np.random.default_rng(seed)
    n = Sizes(
        T=ROWS + int(rng.integers(1, ROWS)),
        S=int(rng.integers(4 * KEYS, 8 * KEYS)),
        H=int(rng.choice([1, 3, 5, 6])),
        D=int(rng.choice([16, 24, 33, 40])),
        K=1,
    )
    low, high = np.sort(rng.integers(0, n.S + 1, (2, n.T)), axis=0)
    if rng.random() < 0.5:
        low, high = low * 0, high * 0 + n.S
    problem = problem_of(maker(SeededSource(seed), n, dtype), dtype, device, (low.tolist(), high.tolist()))
    row0, key0 = int(rng.choice([0, 0, ROWS, 1])), int(rng.choice([0, 0, KEYS]))
    return prune(problem, int(rng.choice([1, 3, KEYS // 2])), row0, (key0, n.S))


@pytest.mark.parametrize("dtype", LOW)
def test_drawn_documents_lose_nothing_and_some_are_pruned(dtype: str, device: str) -> None:
    left_out = [drawn(documents, seed, dtype, device).left_out.any() for seed in range(6)]
    assert any(left_out)


@pytest.mark.parametrize("dtype", LOW)
def test_drawn_documents_with_odd_keys_weights_and_sizes_lose_nothing(dtype: str, device: str) -> None:
    for seed in range(100, 108):
        drawn(spoiled_documents, seed, dtype, device)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("value", "at"), [(NAN, 0), (INF, 1), (-INF, KEYS - 1), (1e30, 0), (-1e30, KEYS - 1)]
)
def test_the_block_of_a_key_that_is_no_number_or_huge_is_scanned_and_others_are_not(
    value: float, at: int, dtype: str, device: str
) -> None:
    values = coherent()
    values.k[5 * KEYS + at, 3] = value  # NaN in fp8, infinite in fp16
    found = prune(problem_of(values, dtype, device), KEYS)
    assert found.left_out.tolist() == [[True, True, False, False, True, False, True, True]]


@pytest.mark.parametrize("at", [0, 1, KEYS - 1])
@pytest.mark.parametrize("dtype", LOW)
def test_one_wanted_key_keeps_its_block(dtype: str, at: int, device: str) -> None:
    values = coherent()
    values.k[5 * KEYS + at] = values.k[2 * KEYS]
    assert prune(problem_of(values, dtype, device), KEYS).left_out.tolist()[0][5] is False


@pytest.mark.parametrize("weight", [NAN, INF, -INF, 1e30, -1e30, 1e16, -1e16])
def test_a_weight_that_may_overflow_keeps_every_block(weight: float, device: str) -> None:
    values = coherent(T=2 * ROWS)
    values.w[1, 1] = weight
    found = prune(problem_of(values, "bf16", device), KEYS)
    assert not found.left_out[0].any()
    assert found.left_out[1].any()  # the row tile beside it


@pytest.mark.parametrize(
    ("weight", "some"), [(0.0, True), (-0.0, True), (-1e-30, True), (-1.0, True), (-1e14, False)]
)
def test_a_weight_that_lowers_scores_lets_blocks_go(weight: float, some: bool, device: str) -> None:
    """But for one so large that what its head may round away hides all else."""
    values = coherent()
    values.q[:, 1] = -values.q[:, 1]  # so that the second head has nothing to lower where it matters
    values.w[:, 1] = weight
    assert (prune(problem_of(values, "bf16", device), KEYS).share > 0) == some


@pytest.mark.parametrize("row", [NAN, INF, -INF, 1e30])
def test_a_query_that_is_no_number_or_huge_keeps_every_block(row: float, device: str) -> None:
    for head, weight in ((0, 1.0), (1, -1.0)):
        values = coherent()
        values.q[1, head, 2] = row
        values.w[:, head] = weight
        assert prune(problem_of(values, "bf16", device), KEYS).share == 0


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-30, 1e-20, 1e-12, 1e12, 1e18, 1e30, 1e37])
def test_keys_queries_and_weights_of_any_size_lose_nothing(size: float, dtype: str, device: str) -> None:
    """Products overflow, or vanish, or neither where sizes meet their inverses."""
    other = min(1 / size, 1e37)
    for sizes in ({"k": size}, {"q": size}, {"w": size}, {"k": size, "w": other}, {"q": size, "k": other},
                  {"q": size, "k": size}, {"q": size, "k": size, "w": other}):  # fmt: skip
        prune(problem_of(changed(coherent(blocks=4), **sizes), dtype, device), KEYS)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-12, 1e12, 1e18, 1e30, 3e38])
def test_scales_of_any_size_lose_nothing(size: float, device: str) -> None:
    """The score is multiplied by its scale last, a key of a ball first."""
    values = coherent(blocks=6)
    document = np.arange(6 * KEYS) // KEYS
    for scale in (np.full(6 * KEYS, size), np.where(document == 5, size, 1.0), 1.0 + (document == 4)):
        for weight in dict.fromkeys((1.0, min(1 / size, 1e14), 1e-30, 1e14)):
            scaled = replace(changed(values, w=weight), scale=scale)
            prune(problem_of(scaled, "fp8", device), KEYS)


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF])
def test_a_scale_that_is_not_positive_and_finite_keeps_its_block(scale: float, device: str) -> None:
    scales = np.ones(8 * KEYS)
    scales[5 * KEYS + 1] = scale  # its score is NaN, which is counted
    found = prune(problem_of(replace(coherent(), scale=scales), "fp8", device), KEYS)
    assert found.left_out.tolist() == [[True, True, False, False, True, False, True, True]]


@pytest.mark.parametrize("dtype", LOW)
def test_equal_keys_are_kept_at_their_score_and_left_out_well_above_it(dtype: str, device: str) -> None:
    problem = problem_of(coherent(noise=0.0), dtype, device)
    height = best(scores_of(problem), 1)
    wanted = [[True, True, False, False, True, True, True, True]]
    assert prune(problem, height).left_out.tolist() == wanted
    above = torch.nextafter(height, torch.full_like(height, INF))
    assert prune(problem, above).left_out.tolist() in (wanted, [[True] * 8])
    assert prune(problem, height * 1.1).left_out.tolist() == [[True] * 8]
    assert prune(problem, torch.full_like(height, -INF)).share == 0
    assert prune(problem, torch.zeros_like(height)).share == 0


@pytest.mark.parametrize("D", [64, 128, 256])
def test_what_a_narrow_accumulator_cuts_off_is_covered(D: int, device: str) -> None:
    """One product of 2**16 and, beside it, negative ones just below its 2**-13th: Hopper's fp8 drops them."""
    large, small = 256.0, 2.75
    q, k = np.full((ROWS, 1, D), small), np.full((8 * KEYS, D), -small)
    q[..., 0] = k[:, 0] = large
    k[:KEYS] = 0
    problem = problem_of(Values(q, k, np.ones((ROWS, 1))), "fp8", device)
    assert prune(problem, 1).left_out.tolist() == [[True] + [False] * 7]


def test_windows_decide_who_needs_a_block(device: str) -> None:
    """The rows that want a block must see it; a row that sees nothing needs nothing."""
    values = coherent(T=ROWS, blocks=8)
    low, high = [0] * ROWS, [8 * KEYS] * ROWS
    threshold = best(scores_of(problem_of(values, "bf16", device)), KEYS)
    low[0], high[0] = 0, 2 * KEYS + 1  # one wanted key
    for t in range(1, ROWS):
        low[t], high[t] = (4 * KEYS - 1, 8 * KEYS - 3) if t > 1 else (KEYS, KEYS)
    found = prune(problem_of(values, "bf16", device, (low, high)), threshold)
    assert found.left_out.tolist() == [[True, True, False, False, True, True, True, True]]
    low[0] = high[0] = 0
    found = prune(problem_of(values, "bf16", device, (low, high)), threshold)
    assert found.left_out.tolist()[0][3] is False
    nobody = prune(problem_of(values, "bf16", device, ([5] * ROWS, [5] * ROWS)), threshold)
    assert nobody.met == 0


def test_chunks_of_keys_and_rows_are_pruned_each_for_itself(device: str) -> None:
    problem = problem_of(coherent(T=3 * ROWS - 1, H=3, D=24), "bf16", device)
    for row0 in (0, ROWS, 1):
        for keys, wanted in (
            ((0, 4 * KEYS), [True, True, False, False]),
            ((4 * KEYS, 8 * KEYS), [True] * 4),
            ((2 * KEYS, 4 * KEYS - 5), [False, False]),
            ((7 * KEYS, 8 * KEYS), [True]),
        ):
            found = prune(problem, KEYS, row0, keys).left_out.tolist()
            assert found == [wanted] * -(-(3 * ROWS - 1 - row0) // ROWS), (row0, keys)


def test_the_last_block_of_as_many_keys_as_there_can_be_is_listed(device: str) -> None:
    S, D = 2**31 - 1, 16
    k = torch.ones((1, D), dtype=torch.bfloat16, device=device).expand(S, D)
    q, w = torch.ones((1, 1, D), dtype=torch.bfloat16, device=device), torch.ones((1, 1), device=device)
    lo, hi = (torch.tensor([each], dtype=torch.int32, device=device) for each in (S - 3 * KEYS, S))
    plan = replace(Plan.default(1, 8 * KEYS, D, 1, torch.bfloat16, device), tile_rows=ROWS, tile_keys=KEYS)
    for threshold, wanted in ((-INF, [4, 5, 6, 7]), (1.0, [4, 5, 6, 7])):
        bitmap = torch.full((1, 8 * KEYS // 32), -1, dtype=torch.int32, device=device)
        low = torch.tensor([threshold], device=device)
        left: TileList = launch_prune(
            Problem(q, k, w, None, lo, hi), hi, low, bitmap, 0, 2**31 - 8 * KEYS, S, plan
        )
        assert left.blocks[0, : int(left.length[0])].tolist() == wanted
