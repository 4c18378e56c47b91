"""HyTopK stage by stage. Each runs alone, on what the stages before it left.

Shapes as in selection.py; an op names only those sizes that its time depends on.
"""

from dataclasses import dataclass

import torch

from ...hytopk import default_plan
from ...hytopk.compact import launch_compact
from ...hytopk.plan import Plan, ceil_div
from ...hytopk.plateau import launch_plateau
from ...hytopk.prepare import launch_prepare
from ...hytopk.problem import Problem, Results
from ...hytopk.repair import launch_repair
from ...hytopk.rescore import launch_rescore
from ...hytopk.scan import launch_scan
from ...hytopk.select import launch_select
from ...hytopk.threshold import launch_threshold
from ..cases import Case
from ..op import BYTES, DTYPES, Cost, Draw, Op, Shape, Work, chained, grid
from .selection import COMPILE_S, GLM, KEYS, LANE_OPS_PER_HEAD, SCORED, case, scoring

FAMILY = "stages"
CANDIDATES = 2.07  # keys that HyTopK rescores for each that it selects
STAGE_EFFICIENCY = {
    "hytopk_scan": 0.7, "hytopk_threshold": 0.25, "hytopk_rescore": 0.2, "hytopk_compact": 0.3,
    "hytopk_finish": 0.3,
}  # fmt: skip
LONG = tuple(keys for keys in KEYS if keys > 16384)  # fewer are not scanned, for GLM-5.1's top_k
TINY = {"heads": 2, "dim": 16, "top_k": 4}


@dataclass(frozen=True)
class Chunk:
    """What the stages of one pass over rows ``first`` .. ``first + R - 1`` hand to each other."""

    first: int
    filled: torch.Tensor
    counts: torch.Tensor
    scan_hi: torch.Tensor
    threshold: torch.Tensor
    plateau: torch.Tensor
    bitmaps: tuple[tuple[int, int, torch.Tensor], ...]
    candidates: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class Stages:
    """One call of HyTopK with everything between its stages kept, so that any of them can run again."""

    problem: Problem
    plan: Plan
    results: Results
    top_k: int
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, drawn: Case) -> "Stages":
        """Run every stage once. ValueError for contexts so short that HyTopK takes another way."""
        q, k, w, top_k = drawn.q, drawn.k, drawn.w, drawn.top_k
        T, S, device = q.shape[0], k.shape[0], q.device
        plan = default_plan(q, k, top_k)
        if plan.table_keys >= S:
            raise ValueError(f"keys = {S}: there are no such stages at {plan.table_keys} keys or fewer")
        indices = torch.empty((T, top_k), dtype=torch.int32, device=device)
        count, nans, pending, filled, invalid = (
            torch.empty(T, dtype=torch.int32, device=device) for _ in range(5)
        )
        lo, hi = launch_prepare(drawn.start, drawn.end, S, invalid)
        problem = Problem(q, k, w, drawn.k_scale, lo, hi)
        results = Results(indices, count, None, nans, pending, filled)
        chunks = []
        for first in range(0, T, plan.row_chunk):
            part = filled[first : first + plan.row_chunk]
            guesses = launch_threshold(problem, part, first, top_k, plan)
            rows, bitmaps = part.shape[0], []
            candidates = torch.empty((plan.buffers(rows), plan.capacity), dtype=torch.int32, device=device)
            for key0 in range(0, S, plan.key_chunk):
                key1 = min(key0 + plan.key_chunk, S)
                words = ceil_div(min(plan.key_chunk, S), 32)
                bitmap = torch.empty((rows, words), dtype=torch.int32, device=device)
                launch_scan(problem, guesses[0], guesses[1], bitmap, first, key0, key1, plan)
                launch_compact(problem, bitmap, guesses[0], part, candidates, first, key0, key1, plan)
                bitmaps.append((key0, key1, bitmap))
            keys = launch_rescore(problem, candidates, part, first, plan)
            chunks.append(
                Chunk(first, part, torch.empty_like(part), *guesses, tuple(bitmaps), candidates, keys)
            )
        return cls(problem, plan, results, top_k, tuple(chunks))

    def threshold(self) -> None:
        for part in self.chunks:  # it resets the counters it is given: not those of the candidates
            launch_threshold(self.problem, part.counts, part.first, self.top_k, self.plan)

    def scan(self) -> None:
        for part in self.chunks:
            for key0, key1, bitmap in part.bitmaps:
                launch_scan(
                    self.problem, part.scan_hi, part.threshold, bitmap, part.first, key0, key1, self.plan
                )

    def compact(self) -> None:
        for part in self.chunks:
            for key0, key1, bitmap in part.bitmaps:
                launch_compact(
                    self.problem, bitmap, part.scan_hi, part.filled, part.candidates, part.first, key0, key1,
                    self.plan,
                )  # fmt: skip

    def rescore(self) -> None:
        for part in self.chunks:
            launch_rescore(self.problem, part.candidates, part.filled, part.first, self.plan)

    def finish(self) -> None:
        """Selection, plateaus and repair."""
        for part in self.chunks:
            lists = (self.problem, part.candidates, part.keys)
            launch_select(
                *lists, part.filled, part.threshold, self.results, part.first, self.top_k, self.plan
            )
            launch_plateau(*lists, part.filled, part.plateau, self.results, part.first, self.top_k, self.plan)
            rows = part.filled.shape[0]
            launch_repair(*lists, self.results, part.first, rows, self.top_k, self.plan)

    def work(self, stage: str) -> Work:
        """One stage again, on what the stages before it left. Compaction appends, so it is reset."""
        call = {
            "hytopk_threshold": self.threshold,
            "hytopk_scan": self.scan,
            "hytopk_compact": self.compact,
            "hytopk_rescore": self.rescore,
            "hytopk_finish": self.finish,
        }[stage]
        return Work(call, self.results.filled.zero_ if stage == "hytopk_compact" else None)


def candidates_of(shape: Shape) -> float:
    return CANDIDATES * shape["top_k"] * shape["rows"]


def sampling(shape: Shape, dtype: str) -> Cost:
    """Scores of as many keys a row as HyTopK's plan samples on a GPU, for GLM-5.1's top_k."""
    rows, keys, dim = (shape[name] for name in ("rows", "keys", "dim"))
    plan = Plan.default(rows, keys, dim, GLM["top_k"], DTYPES[dtype], "cuda")
    return scoring({**shape, "keys": min(plan.samples, keys)}, dtype, 4.0)


def compacting(shape: Shape) -> Cost:
    words = shape["rows"] * shape["keys"] / 32
    return Cost(lane_ops=8.0 * words, bytes=4.0 * words + 4.0 * candidates_of(shape))


def finishing(shape: Shape) -> Cost:
    """32 rounds of a bisection over the candidates, then a prefix sum."""
    listed = candidates_of(shape)
    return Cost(lane_ops=80.0 * listed, bytes=8.0 * listed + 4.0 * shape["rows"] * shape["top_k"])


def rescoring(shape: Shape, dtype: str) -> Cost:
    """The candidates' scores: each key is read at least once, however many rows want it."""
    listed, size = candidates_of(shape), BYTES[dtype] * shape["dim"]
    read = size * min(listed, float(shape["keys"])) + size * shape["heads"] * shape["rows"]
    flops = 2.0 * shape["heads"] * shape["dim"] * listed
    return Cost(flops, LANE_OPS_PER_HEAD * shape["heads"] * listed, read + 8.0 * listed)


def stage(name: str, dtype: str) -> Op:
    """One stage of HyTopK. Those that see no operands are recorded as fp32, once.

    The shapes name what the stage's time depends on; the others are GLM-5.1's.
    """
    axes = {
        "hytopk_threshold": SCORED, "hytopk_scan": SCORED, "hytopk_rescore": GLM,
        "hytopk_compact": {"top_k": 2048}, "hytopk_finish": {"top_k": 2048},
    }[name]  # fmt: skip
    operands = "fp8" if dtype == "fp32" else dtype

    def cost(shape: Shape) -> Cost:
        if name == "hytopk_threshold":
            return sampling(shape, dtype)
        if name == "hytopk_scan":
            return scoring(shape, dtype, 1 / 8)
        if name == "hytopk_rescore":
            return rescoring(shape, dtype)
        return compacting(shape) if name == "hytopk_compact" else finishing(shape)

    def build(inputs: Draw, shape: Shape) -> Work:
        given = {**(GLM if inputs.device.type == "cuda" else TINY), **shape}
        return Stages.of(case(inputs, given, operands, "untrained")).work(name)

    tiny = {axis: TINY[axis] for axis in axes}
    return Op(
        name=name,
        implementation="hytopk",
        dtype=dtype,
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={
            "quick": grid(rows=4096, keys=65536, **axes),
            "glm-5.1": chained(
                grid(rows=4096, keys=LONG, **axes), grid(rows=16384, keys=(524288, 65536), **axes)
            ),
        },
        tiny={"rows": 20, "keys": 256, **tiny},
        value=3.0,
        efficiency=STAGE_EFFICIENCY[name],
        compile_s=COMPILE_S,
        compiles=f"hytopk {operands}",
        triton=True,
    )


OPS = (
    *(
        stage(name, dtype)
        for name in ("hytopk_scan", "hytopk_threshold", "hytopk_rescore")
        for dtype in ("bf16", "fp8")
    ),
    *(stage(name, "fp32") for name in ("hytopk_compact", "hytopk_finish")),
)
