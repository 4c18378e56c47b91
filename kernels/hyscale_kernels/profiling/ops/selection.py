"""Selection: HyTopK as a whole, scores that are written out, and top-k over them.

Shapes: ``rows`` queries, ``keys`` that every one of them sees (under causal windows: sees on average),
``heads`` and ``dim`` of the indexer, ``top_k``. Regimes: "untrained" scores are normal, "trained" ones peaked
with locality (cases.py).
"""

from typing import Any

import torch

from ...baselines import materialised_topk
from ...baselines.rivals import flashinfer_top_k
from ...hytopk import dense_scores, hytopk
from ..cases import Case, draw
from ..op import BYTES, Cost, Draw, Op, Shape, Work, chained, grid

FAMILY = "selection"
REGIMES = {"untrained": "random", "trained": "trained"}
GLM = {"heads": 32, "dim": 128, "top_k": 2048}
SCORED = {"heads": 32, "dim": 128}

ROWS = (4096, 16384, 2048, 8192, 1024, 512)
KEYS = (524288, 65536, 262144, 1048576, 32768, 131072, 16384, 8192, 4096)

COMPILE_S = 6.0  # of HyTopK's kernels

# Relu at half rate and a fused multiply-add, for each head of a pair.
LANE_OPS_PER_HEAD = 3.0


def scoring(shape: Shape, dtype: str, written: float = 0.0) -> Cost:
    """Every pair scored once, ``written`` bytes of each kept."""
    pairs = float(shape["rows"]) * shape["keys"]
    heads, dim = shape["heads"], shape["dim"]
    operands = BYTES[dtype] * dim * (shape["rows"] * heads + shape["keys"])
    return Cost(2.0 * heads * dim * pairs, LANE_OPS_PER_HEAD * heads * pairs, operands + written * pairs)


def selecting(shape: Shape, dtype: str) -> Cost:
    """Scoring, and indices written."""
    cost = scoring(shape, dtype)
    return Cost(cost.tensor_flops, cost.lane_ops, cost.bytes + 4.0 * shape["rows"] * shape["top_k"])


def case(inputs: Draw, shape: Shape, dtype: str, regime: str, windows: str = "full") -> Case:
    """A race's case; under causal windows the sequence is as long as the rows."""
    keys = shape["rows"] if windows == "causal" else shape["keys"]
    return draw(
        shape["rows"], keys, dtype, regime=REGIMES[regime], windows=windows, H=shape["heads"],
        D=shape["dim"], top_k=shape.get("top_k", 1), seed=inputs.seed, device=str(inputs.device),
    )  # fmt: skip


def keywords(drawn: Case) -> dict[str, Any]:
    return {"start": drawn.start, "end": drawn.end, "k_scale": drawn.k_scale}


def whole(dtype: str, regime: str, windows: str = "full") -> Op:
    """HyTopK, one call."""

    def build(inputs: Draw, shape: Shape) -> Work:
        drawn = case(inputs, shape, dtype, regime, windows)
        return Work(lambda: hytopk(drawn.q, drawn.k, drawn.w, drawn.top_k, **keywords(drawn)))

    if windows == "causal":
        lengths = (65536, 131072, 32768, 16384, 262144)
        shapes: dict[str, list[Shape]] = {
            "glm-5.1": [{"rows": rows, "keys": (rows + 1) // 2, **GLM} for rows in lengths]
        }
    elif regime == "trained":
        shapes = {
            "quick": grid(rows=4096, keys=(65536,), **GLM),
            "glm-5.1": chained(
                grid(rows=16384, keys=524288, **GLM), grid(rows=(4096, 1024), keys=KEYS[:6], **GLM)
            ),
        }
    else:
        shapes = {
            "quick": grid(rows=4096, keys=(65536, 262144, 16384), **GLM),
            "glm-5.1": chained(
                grid(rows=4096, keys=KEYS, **GLM),
                grid(rows=ROWS, keys=KEYS, **GLM),
                # Other selection sizes: the time turns at K = 2048, where the candidate buffer doubles.
                grid(rows=4096, keys=(65536, 524288), **SCORED, top_k=(256, 512, 1024, 1536, 4096, 8192)),
                # One tile, one wave or one key more than full.
                grid(rows=(4097, 4224, 8448, 4160), keys=65536, **GLM),
                grid(rows=4096, keys=(65537, 65664, 262145), **GLM),
            ),
        }
    return Op(
        name="hytopk",
        implementation="hytopk",
        dtype=dtype,
        regime=regime if windows == "full" else f"{regime}, {windows}",
        family=FAMILY,
        cost=lambda shape: selecting(shape, dtype),
        build=build,
        shapes=shapes,
        tiny={"rows": 20, "keys": 10 if windows == "causal" else 160, "heads": 2, "dim": 16, "top_k": 4},
        value=8.0 if regime == "untrained" and windows == "full" else 2.0,
        efficiency=0.6 if dtype == "bf16" else 0.5,
        compile_s=COMPILE_S,
        compiles=f"hytopk {dtype}",
        triton=True,
    )


def written_scores(implementation: str, dtype: str) -> Op:
    """The table of all scores in fp32: by HyTopK's dense pass ("triton"), or head by head in PyTorch.

    Whoever asks for fp8 scores without naming a scorer means the best there is, which is DeepGEMM's: our
    pass, written to verify, keeps a regime of its own.
    """

    def build(inputs: Draw, shape: Shape) -> Work:
        drawn = case(inputs, shape, dtype, "untrained")
        if implementation == "triton":
            return Work(lambda: dense_scores(drawn.q, drawn.k, drawn.w, **keywords(drawn)))
        q, keys = drawn.q.transpose(0, 1), drawn.k.T  # [H, T, D], [D, S]

        def einsum() -> torch.Tensor:
            scores = torch.zeros(shape["rows"], shape["keys"], device=inputs.device)
            for head in range(shape["heads"]):
                scores.addcmul_((q[head] @ keys).relu_(), drawn.w[:, head, None])
            return scores

        return Work(einsum)

    fused = implementation == "triton"
    rows: tuple[int, ...] = (1024,)
    if fused:
        rows = (4096, 1024, 256, 2048) if dtype == "bf16" else (4096, 1024)
    keys = (65536, 262144, 524288, 16384, 1048576, 131072) if fused else (65536, 262144)
    fitting = [shape for shape in grid(rows=rows, keys=keys, **SCORED) if shape["rows"] * shape["keys"] < 5e9]
    return Op(
        name="index_scores",
        implementation=implementation,
        dtype=dtype,
        regime="unfused" if not fused else "" if dtype == "bf16" else "dense pass",
        family=FAMILY,
        cost=lambda shape: scoring(shape, dtype, 4.0),
        build=build,
        shapes={"quick": grid(rows=4096, keys=65536, **SCORED) if fused else [], "glm-5.1": fitting},
        tiny={"rows": 20, "keys": 96, "heads": 2, "dim": 16},
        value=2.0 if fused else 0.5,
        efficiency=0.6 if fused else 0.1,
        compile_s=1.0,
        triton=fused,
    )


def top_k_of_table(regime: str) -> Op:
    """torch.topk over a table of scores; trained ones rise toward the last keys and repeat values."""

    def build(inputs: Draw, shape: Shape) -> Work:
        scores = inputs.normal(shape["rows"], shape["keys"], dtype="fp32")
        if regime == "trained":
            scores.add_(torch.linspace(0, 4, shape["keys"], device=inputs.device)).relu_()
        return Work(lambda: torch.topk(scores, shape["top_k"], dim=1, sorted=False))

    def cost(shape: Shape) -> Cost:
        pairs = float(shape["rows"]) * shape["keys"]
        return Cost(lane_ops=4.0 * pairs, bytes=4.0 * pairs + 12.0 * shape["rows"] * shape["top_k"])

    every = grid(rows=(4096, 1024, 256), keys=(65536, 524288, 262144, 16384, 1048576), top_k=2048)
    return Op(
        name="index_select",
        implementation="torch.topk",
        dtype="fp32",
        regime=regime,
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={
            "quick": grid(rows=4096, keys=65536, top_k=2048) if regime == "untrained" else [],
            "glm-5.1": [shape for shape in every if shape["rows"] * shape["keys"] < 2.2e9],
        },
        tiny={"rows": 8, "keys": 64, "top_k": 4},
        efficiency=0.06,
    )


def materialised(dtype: str) -> Op:
    """Scores and torch.topk as PyTorch runs them, a chunk of rows at a time: what HyTopK replaces."""

    def build(inputs: Draw, shape: Shape) -> Work:
        drawn = case(inputs, shape, dtype, "untrained")
        return Work(lambda: materialised_topk(drawn.q, drawn.k, drawn.w, drawn.top_k, **keywords(drawn)))

    return Op(
        name="materialised_topk",
        implementation="torch",
        dtype=dtype,
        regime="untrained",
        family=FAMILY,
        cost=lambda shape: selecting(shape, dtype),
        build=build,
        shapes={
            "quick": grid(rows=1024, keys=65536, **GLM) if dtype == "bf16" else [],
            "glm-5.1": grid(rows=1024, keys=(65536, 16384, 32768, 131072, 262144), **GLM),
        },
        tiny={"rows": 8, "keys": 64, "heads": 2, "dim": 16, "top_k": 4},
        efficiency=0.014 if dtype == "bf16" else 0.008,
    )


def deepgemm_scores() -> Op:
    """The table of fp8 scores by DeepGEMM, where it is installed."""

    def build(inputs: Draw, shape: Shape) -> Work:
        import deep_gemm  # type: ignore[import-not-found,unused-ignore]

        drawn = case(inputs, shape, "fp8", "untrained")
        keys = (drawn.k, drawn.k_scale)
        return Work(
            lambda: deep_gemm.fp8_mqa_logits(
                drawn.q, keys, drawn.w, drawn.start, drawn.end, clean_logits=False
            )
        )

    shapes = chained(
        grid(rows=4096, keys=(65536, 32768, 131072), **SCORED),
        grid(rows=16384, keys=32768, **SCORED),
        grid(rows=(4096, 1024, 256), keys=(65536, 262144, 524288, 16384), **SCORED),
    )
    return Op(
        name="index_scores",
        implementation="deepgemm",
        dtype="fp8",
        family=FAMILY,
        cost=lambda shape: scoring(shape, "fp8", 4.0),
        build=build,
        shapes={"glm-5.1": shapes, "quick": shapes[:1]},
        tiny={"rows": 20, "keys": 96, "heads": 2, "dim": 16},
        efficiency=0.67,
        compile_s=3.0,
        needs=("deep_gemm",),
    )


def flashinfer_select() -> Op:
    """FlashInfer's deterministic top-k of a table, where it is installed."""

    def build(inputs: Draw, shape: Shape) -> Work:
        rows, keys = shape["rows"], shape["keys"]
        scores = inputs.normal(rows, keys, dtype="fp32")
        first = torch.zeros(rows, dtype=torch.int32, device=inputs.device)
        length = torch.full_like(first, keys)
        return Work(lambda: flashinfer_top_k(scores, first, length, shape["top_k"], from_zero=True))

    torchs = top_k_of_table("untrained")
    # Blocks of a causal sequence of 64K and 256K tokens see half of its keys on average.
    halves = [
        *grid(rows=4096, keys=(65536, 32768, 131072), top_k=2048),
        *grid(rows=16384, keys=32768, top_k=2048),
    ]
    return Op(
        name="index_select",
        implementation="flashinfer",
        dtype="fp32",
        regime="untrained",
        family=FAMILY,
        cost=torchs.cost,
        build=build,
        shapes={"quick": torchs.shapes["quick"], "glm-5.1": chained(halves, torchs.shapes["glm-5.1"])},
        tiny=torchs.tiny,
        efficiency=0.14,
        compile_s=3.0,
        needs=("flashinfer",),
    )


OPS = (
    *(whole(dtype, regime) for dtype in ("bf16", "fp8") for regime in ("untrained", "trained")),
    whole("fp8", "untrained", "causal"),
    *(written_scores("triton", dtype) for dtype in ("bf16", "fp8")),
    written_scores("torch", "bf16"),
    *(top_k_of_table(regime) for regime in ("untrained", "trained")),
    *(materialised(dtype) for dtype in ("bf16", "fp8")),
    deepgemm_scores(),
    flashinfer_select(),
)  # fmt: skip
