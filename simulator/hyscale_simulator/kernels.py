"""What each kernel does: floating-point operations, CUDA-core instructions and bytes, from its shape.

One entry an op.  The same counts price a kernel on a GPU, normalise a measured table before interpolation,
and carry a measurement from one GPU to another, so a profile point and a simulated call never disagree on
what was computed.

Shapes are named integers: ``rows`` (queries or tokens), ``keys`` (mean keys a row sees, so a causal call has
about half its width), ``heads``, ``dim``, ``top_k``, ``width``, ``m``, ``n``, ``k``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from hyscale_ref.profile import Shape, as_shape

__all__ = ["OPS", "Cost", "Kernel", "Op", "kernel"]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

GEMM_TILE = 128
"""Rows to which each group of a grouped product is padded."""


SAMPLED = 8192
"""Keys that HyTopK samples for a row's threshold, in sequences of a million tokens."""

CANDIDATES = 2.07
"""Keys that HyTopK rescores for each that it selects: 4,240 for 2,048 (benchmarks/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Least work of one call.

    tensor_flops: on tensor cores (multiply and add are two).
    vector_slots: instructions on CUDA cores, in units of one fused multiply-add of one lane; an instruction
    that issues at half rate (max, compare) is two, one on the special-function unit (exp) eight.
    bytes: read and written in HBM, each operand once.
    """

    tensor_flops: float = 0.0
    vector_slots: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Kernel:
    """One call: an op of :data:`OPS`, its operand dtype and shape, who implements it, and in what regime.

    ``implementation`` and ``regime`` may be "" for any.
    """

    op: str
    dtype: str
    shape: Shape
    implementation: str = ""
    regime: str = ""

    @cached_property
    def cost(self) -> Cost:
        """Least work of this call."""
        return OPS[self.op].cost(dict(self.shape), self.dtype)

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.dtype, self.shape, self.implementation, self.regime))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Op:
    """How one kind of kernel is counted and interpolated.

    axes: the dimensions its utilisation depends on, coarsest first; measured points are interpolated along
    the last first.  Other dimensions enter through the cost alone.
    sequence_axes: those along which interpolation is linear in the square root (else in the logarithm).
    parts: the kernels it consists of, when nobody measured the whole.
    proxy: one measured kernel that does the same arithmetic, when nobody measured this one.
    memory: a streaming kernel: what it needs is bytes, and the measured copy rate prices it.  Its floor holds
    at any size (a launch, then bytes), so a size below the measured ones is no extrapolation either.
    usual: sizes that a call or a measured point without them means.
    jagged: libraries choose another kernel from one shape to the next, so that neighbours scatter: the median
    of those nearest along each axis predicts better than a line between two.
    additive: axes along which more is more of the same blocks, so that holding utilisation above the largest
    measured size is no extrapolation once the GPU is full.
    """

    cost: Callable[[dict[str, int], str], Cost]
    axes: tuple[str, ...]
    sequence_axes: tuple[str, ...] = ("rows", "keys", "queries")
    parts: Callable[["Kernel"], tuple["Kernel", ...]] | None = None
    proxy: Callable[["Kernel"], "Kernel"] | None = None
    memory: bool = False
    usual: Mapping[str, int] = field(default_factory=dict)
    jagged: bool = False
    additive: tuple[str, ...] = ("m", "rows", "batch", "groups", "queries")


@cache
def _known(op: str) -> Op:
    if op not in OPS:
        raise ValueError(f"op = {op!r}; known: {', '.join(sorted(OPS))}")
    return OPS[op]


def kernel(op: str, dtype: str, implementation: str = "", regime: str = "", /, **shape: int) -> Kernel:
    """A :class:`Kernel`; ValueError for an op, dtype or dimension that does not exist."""
    _known(op)
    if dtype not in BYTES:
        raise ValueError(f"{op}: dtype = {dtype!r}; allowed: {', '.join(BYTES)}")
    for name, size in shape.items():
        if size < 0:
            raise ValueError(f"{op}: shape.{name} = {size}; 0 or more is needed")
    return Kernel(op, dtype, as_shape(shape), implementation, regime)


def _gemm(s: dict[str, int], dtype: str) -> Cost:
    m, n, k = s["m"], s["n"], s["k"]
    size = BYTES[dtype]
    return Cost(
        tensor_flops=2.0 * m * n * k,
        bytes=float(size * (m * k + k * n) + 2 * m * n),
    )


def _grouped_gemm(s: dict[str, int], dtype: str) -> Cost:
    """``groups`` products of [m, k] and [k, n]; rows are padded to the tile of each group."""
    groups, n, k = s["groups"], s["n"], s["k"]
    m = -(-s["m"] // GEMM_TILE) * GEMM_TILE
    size = BYTES[dtype]
    return Cost(
        tensor_flops=2.0 * groups * m * n * k,
        bytes=float(groups * (size * (m * k + k * n) + 2 * m * n)),
    )


def _grouped_proxy(call: Kernel) -> Kernel:
    s = dict(call.shape)
    m = -(-s["m"] // GEMM_TILE) * GEMM_TILE * s["groups"]
    return kernel("gemm", call.dtype, m=m, n=s["n"], k=s["k"])


def _batched_gemm(s: dict[str, int], dtype: str) -> Cost:
    b, m, n, k = s["batch"], s["m"], s["n"], s["k"]
    size = BYTES[dtype]
    return Cost(tensor_flops=2.0 * b * m * n * k, bytes=float(b * (size * (m * k + k * n) + 2 * m * n)))


def _batched_proxy(call: Kernel) -> Kernel:
    s = dict(call.shape)
    return kernel("gemm", call.dtype, m=s["batch"] * s["m"], n=s["n"], k=s["k"])


def _attention(s: dict[str, int], dtype: str, backward: bool = False) -> Cost:
    """Exact attention: QK^T and PV; backward repeats QK^T and adds dP, dV, dQ, dK (2.5 times).

    ``keys`` is the mean a query sees.  Per score: an exponential and about six more instructions.
    """
    pairs = float(s["batch"] * s["heads"] * s["queries"] * s["keys"])
    qk, v = s["qk_dim"], s["v_dim"]
    flops = 2.0 * (3 * qk + 2 * v) * pairs if backward else 2.0 * (qk + v) * pairs
    size = BYTES[dtype]
    q = s["batch"] * s["heads"] * s["queries"] * (qk + v)
    kv = s["batch"] * s["kv_heads"] * s["keys"] * (qk + v)
    return Cost(
        tensor_flops=flops, vector_slots=14.0 * pairs, bytes=float(size * (q + kv) * (3 if backward else 1))
    )


def _sparse_attention(s: dict[str, int], dtype: str, backward: bool = False) -> Cost:
    """Absorbed latent attention over ``top_k`` gathered keys a row (keys are shared by all heads)."""
    pairs = float(s["rows"] * s["heads"] * s["top_k"])
    qk, v = s["qk_dim"], s["v_dim"]
    flops = 2.0 * (3 * qk + 2 * v) * pairs if backward else 2.0 * (qk + v) * pairs
    gathered = s["rows"] * s["top_k"] * qk
    rows = s["rows"] * s["heads"] * (qk + v)
    traffic = BYTES[dtype] * (gathered + rows * (2 if backward else 1)) + (8 * gathered if backward else 0)
    return Cost(tensor_flops=flops, vector_slots=14.0 * pairs, bytes=float(traffic))


def _index_scores(s: dict[str, int], dtype: str, table_bytes: float = 4.0) -> Cost:
    """Scores of every (row, key) pair: a dot product, relu (half rate) and a multiply-add for each head."""
    pairs = float(s["rows"]) * s["keys"]
    heads, dim = s["heads"], s["dim"]
    operands = BYTES[dtype] * dim * (s["rows"] * heads + s["keys"])
    flops = 2.0 * heads * dim * pairs
    if dtype == "fp32":
        return Cost(vector_slots=flops / 2 + 3.0 * heads * pairs, bytes=operands + table_bytes * pairs)
    return Cost(tensor_flops=flops, vector_slots=3.0 * heads * pairs, bytes=operands + table_bytes * pairs)


def _index_scan(s: dict[str, int], dtype: str) -> Cost:
    """The same scores, but only one bit of each is written."""
    return _index_scores(s, dtype, table_bytes=1 / 8)


def _index_select(s: dict[str, int], dtype: str) -> Cost:
    """Top-k of a score table: read once, indices written."""
    del dtype
    pairs = float(s["rows"]) * s["keys"]
    return Cost(vector_slots=4.0 * pairs, bytes=4.0 * pairs + 4.0 * s["rows"] * s["top_k"])


def _gathered_scores(s: dict[str, int], dtype: str, backward: bool = False) -> Cost:
    """Scores of ``top_k`` chosen keys a row; backward gives dq, dk (scattered in fp32) and dw."""
    pairs = float(s["rows"]) * s["top_k"]
    heads, dim = s["heads"], s["dim"]
    flops = 2.0 * heads * dim * pairs * (3 if backward else 1)
    traffic = BYTES[dtype] * dim * (pairs + s["rows"] * heads) + 4.0 * pairs
    return Cost(
        tensor_flops=flops,
        vector_slots=3.0 * heads * pairs * (2 if backward else 1),
        bytes=traffic + (4.0 * dim * pairs * 2 if backward else 0),
    )


def _attention_mass(s: dict[str, int], dtype: str) -> Cost:
    """The indexer's teacher: attention probabilities summed over heads, at the selected keys."""
    pairs = float(s["rows"]) * s["top_k"]
    traffic = BYTES[dtype] * s["qk_dim"] * (pairs + s["rows"] * s["heads"]) + 8.0 * pairs
    return Cost(
        tensor_flops=2.0 * s["heads"] * s["qk_dim"] * pairs,
        vector_slots=10.0 * s["heads"] * pairs,
        bytes=traffic,
    )


def _indexer_loss(s: dict[str, int], dtype: str) -> Cost:
    """Scores at the selected keys, and their divergence from a target (read) with its gradient (written)."""
    scores = _gathered_scores(s, dtype)
    pairs = float(s["rows"]) * s["top_k"]
    return Cost(scores.tensor_flops, scores.vector_slots + 16.0 * pairs, scores.bytes + 8.0 * pairs)


def _threshold(s: dict[str, int], dtype: str) -> Cost:
    """HyTopK's estimate of each row's threshold: scores against a strided sample of keys.

    How many depends on the length and on the kernel's plan, which changes at times.  So that measurements
    stay comparable with calls, one number is counted, and the rest is utilisation.
    """
    return _index_scores({**s, "keys": min(s["keys"], SAMPLED)}, dtype)


def _finish(s: dict[str, int], dtype: str) -> Cost:
    """HyTopK's last stage: the top_k of the candidates, ties by index, sorted."""
    del dtype
    candidates = CANDIDATES * s["top_k"] * s["rows"]
    # 32 rounds of a bit-wise bisection in registers, then a prefix sum.
    return Cost(vector_slots=80.0 * candidates, bytes=8.0 * candidates + 4.0 * s["rows"] * s["top_k"])


def _compact(s: dict[str, int], dtype: str) -> Cost:
    """From the scan's bitmap to lists of candidates."""
    del dtype
    words = s["rows"] * s["keys"] / 32
    return Cost(vector_slots=8.0 * words, bytes=4.0 * words + 4.0 * CANDIDATES * s["top_k"] * s["rows"])


def _hytopk(s: dict[str, int], dtype: str) -> Cost:
    """All stages.  ``scanned``, where given: how many keys a bound on their score leaves to scan."""
    scan = _index_scan({**s, "keys": s.get("scanned", s["keys"])}, dtype)
    stages = (_threshold(s, dtype), scan, _compact(s, dtype), _finish(s, dtype))
    rescore = _gathered_scores({**s, "top_k": round(CANDIDATES * s["top_k"])}, dtype)
    whole = (*stages, rescore)
    return Cost(
        tensor_flops=sum(c.tensor_flops for c in whole),
        vector_slots=sum(c.vector_slots for c in whole),
        bytes=sum(c.bytes for c in whole),
    )


def _hytopk_parts(call: Kernel) -> tuple[Kernel, ...]:
    s = dict(call.shape)
    candidates = round(CANDIDATES * s["top_k"])
    scored = {name: s[name] for name in ("heads", "dim", "rows", "keys")}
    listed = {name: s[name] for name in ("top_k", "rows", "keys")}
    rescored = {"heads": s["heads"], "dim": s["dim"], "rows": s["rows"], "top_k": candidates}
    scanned = {**scored, "keys": s.get("scanned", s["keys"])}
    return (
        kernel("hytopk_threshold", call.dtype, **scored),
        kernel("hytopk_scan", call.dtype, **scanned),
        kernel("hytopk_compact", "fp32", **listed),
        kernel("selected_scores", call.dtype, **rescored),
        kernel("hytopk_finish", "fp32", **listed),
    )


def record_bits(top_k: int, keys: int) -> float:
    """Bits an index in a packed record (Elias-Fano): l + 1 + ceil(N / 2^l) / K, never above 32."""
    if top_k == 0:
        return 0.0
    low: int = max(math.floor(math.log2(keys / top_k)), 0) if keys > top_k else 0
    return float(min(low + 1 + math.ceil(keys / (1 << low)) / top_k, 32.0))


def _order(s: dict[str, int], dtype: str) -> Cost:
    """Rows of selected keys put in order: marked (8), sorted with their places (two passes of 12), marked."""
    del dtype
    indices = float(s["rows"]) * s["top_k"]
    return Cost(vector_slots=64.0 * indices, bytes=40.0 * indices)


def _codec(s: dict[str, int], dtype: str) -> Cost:
    """Packing or unpacking a selection record."""
    del dtype
    indices = float(s["rows"]) * s["top_k"]
    packed = record_bits(s["top_k"], s["keys"]) / 8
    return Cost(vector_slots=20.0 * indices, bytes=indices * (4 + packed))


def _stream(bytes_per_element: float, slots: float = 4.0) -> Op:
    """A streaming kernel over [rows, width] elements: bytes read and written for each."""

    def cost(s: dict[str, int], dtype: str) -> Cost:
        del dtype
        elements = float(s["rows"]) * s["width"]
        return Cost(vector_slots=slots * elements, bytes=bytes_per_element * elements)

    return Op(cost, axes=("width", "rows"), memory=True, additive=("rows", "width"))


_SCORED = ("heads", "dim", "rows", "keys")
_ATTENDED = ("heads", "qk_dim", "v_dim", "keys", "top_k", "rows")

SPREAD = {"keys": 65536}
"""Over how many keys a selection is spread, where a call or a measurement does not say."""

OPS: Mapping[str, Op] = {
    "gemm": Op(_gemm, axes=("m", "n", "k"), jagged=True),
    "grouped_gemm": Op(_grouped_gemm, axes=("groups", "m", "n", "k"), proxy=_grouped_proxy),
    "batched_gemm": Op(_batched_gemm, axes=("batch", "m", "n", "k"), proxy=_batched_proxy),
    "attention": Op(_attention, axes=("qk_dim", "v_dim", "queries", "keys")),
    "attention_bwd": Op(
        lambda s, d: _attention(s, d, backward=True), axes=("qk_dim", "v_dim", "queries", "keys")
    ),
    "sparse_attention": Op(_sparse_attention, axes=_ATTENDED, usual=SPREAD),
    "sparse_attention_bwd": Op(
        lambda s, d: _sparse_attention(s, d, backward=True), axes=_ATTENDED, usual=SPREAD
    ),
    "index_scores": Op(_index_scores, axes=_SCORED),
    "index_select": Op(_index_select, axes=("top_k", "rows", "keys")),
    "hytopk": Op(_hytopk, axes=("heads", "dim", "top_k", "keys", "rows"), parts=_hytopk_parts),
    "hytopk_threshold": Op(_threshold, axes=_SCORED),
    "hytopk_scan": Op(_index_scan, axes=_SCORED),
    "hytopk_compact": Op(_compact, axes=("top_k", "rows", "keys"), memory=True),
    "hytopk_finish": Op(_finish, axes=("top_k", "rows", "keys")),
    "selected_scores": Op(_gathered_scores, axes=("heads", "dim", "keys", "top_k", "rows"), usual=SPREAD),
    "selected_scores_bwd": Op(
        lambda s, d: _gathered_scores(s, d, backward=True),
        axes=("heads", "dim", "keys", "top_k", "rows"),
        usual=SPREAD,
    ),
    "attention_mass": Op(_attention_mass, axes=("heads", "qk_dim", "keys", "top_k", "rows"), usual=SPREAD),
    "indexer_loss": Op(_indexer_loss, axes=("heads", "dim", "keys", "top_k", "rows"), usual=SPREAD),
    # Rows of the teacher's mass are summed (4) and divided by their sums (8); the loss's kept gradient is
    # multiplied by the one that arrives (8); that of fp8 queries is divided by their scales and cast.
    "index_target": _stream(12.0),
    "index_loss_bwd": _stream(8.0),
    "index_unscale": _stream(14.0),
    "index_order": Op(_order, axes=("top_k", "rows"), memory=True),
    "record_encode": Op(_codec, axes=("top_k", "keys", "rows")),
    "record_decode": Op(_codec, axes=("top_k", "keys", "rows")),
    # Streaming kernels: bytes for each element of [rows, width].
    "fill": _stream(4.0, 1.0),
    # fp32 products of every head: relu (read, write), times the weight (read, write), sum over heads (read).
    "index_unfused": _stream(20.0, 4.0),
    "rmsnorm": _stream(4.0),
    "rmsnorm_bwd": _stream(6.0),
    "layernorm": _stream(4.0),
    "layernorm_bwd": _stream(6.0),
    "rope": _stream(4.0),
    "add": _stream(6.0),
    "dropout_add": _stream(7.0),
    "dropout_add_bwd": _stream(5.0),
    "swiglu": _stream(6.0, 12.0),
    "swiglu_bwd": _stream(10.0, 16.0),
    "gelu": _stream(4.0, 16.0),
    "gelu_bwd": _stream(6.0, 20.0),
    "softmax": _stream(4.0, 14.0),
    "softmax_bwd": _stream(6.0),
    "dropout": _stream(5.0),
    "dropout_bwd": _stream(5.0),
    # A training framework's fp8 cast: the largest magnitude is found (2), values are read again (2), written
    # along rows and columns (1 + 1).  "quantise" is the profiler's own kernel, which reads them once.
    "cast_transpose": _stream(6.0),
    "quantise": _stream(4.0),
    "permute": _stream(4.0),
    "embedding": _stream(4.0),
    "embedding_bwd": _stream(6.0),
    "cross_entropy": _stream(6.0, 14.0),
    "cross_entropy_unfused": _stream(24.0, 14.0),
    "adamw": _stream(30.0, 16.0),
    "grad_norm": _stream(4.0),
    # PyTorch's operators one at a time (work/eager.py): bytes over all of them.  Rotary positions count
    # rotated elements: to fp32 (6), four products (16), difference and sum (12), joined (8), to bf16 (6),
    # written into a wider row (6).  Quantisation of rows of 128: fp32 copy, finite?, magnitudes, scale,
    # quotient, mask, fp8.
    "cast": _stream(6.0, 1.0),
    "rope_eager": _stream(54.0),
    "rope_eager_bwd": _stream(80.0),
    "swiglu_eager": _stream(10.0, 12.0),
    "swiglu_eager_bwd": _stream(18.0, 16.0),
    "quantise_rows": _stream(94.0, 16.0),
    "embedding_eager": _stream(14.0),
    "embedding_eager_bwd": _stream(18.0),
    "join": _stream(4.0, 1.0),
    "scale": _stream(8.0, 1.0),
    "bucket": _stream(16.0, 1.0),
    # fp32 gradients are read and written (8) where a plain product writes bf16 (2).
    "accumulate": _stream(6.0, 1.0),
}
"""Every op by name."""
