"""Dense attention through PyTorch's scaled_dot_product_attention, forward and backward.

Shapes: ``batch``, ``heads``, ``kv_heads``, ``queries``, ``keys`` (that a query sees on average: half the
length when causal), ``qk_dim``, ``v_dim``. Implementations are PyTorch's backends; each is asked for alone,
so that none stands in for another.
"""

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..op import BYTES, Cost, Draw, Op, Shape, Work, backward

FAMILY = "dense_attention"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-attention-2": SDPBackend.FLASH_ATTENTION}


def cost(shape: Shape, back: bool) -> Cost:
    """QK and PV; backward repeats QK and adds dP, dV, dQ and dK."""
    batch, heads, queries, keys = (shape[name] for name in ("batch", "heads", "queries", "keys"))
    qk, v, size = shape["qk_dim"], shape["v_dim"], BYTES["bf16"]
    pairs = float(batch * heads * queries * keys)
    flops = 2.0 * (3 * qk + 2 * v) * pairs if back else 2.0 * (qk + v) * pairs
    held = batch * (heads * queries + shape["kv_heads"] * keys) * (qk + v)
    return Cost(flops, 14.0 * pairs, float(size * held * (3 if back else 1)))


def attention(who: str, regime: str, back: bool) -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        batch, heads, kv_heads = shape["batch"], shape["heads"], shape["kv_heads"]
        causal = regime == "causal"
        length = shape["queries"] if causal else shape["keys"]
        q = inputs.normal(batch, heads, shape["queries"], shape["qk_dim"])
        k = inputs.normal(batch, kv_heads, length, shape["qk_dim"])
        v = inputs.normal(batch, kv_heads, length, shape["v_dim"])
        # A CPU has neither backend: its own stands in, for the tests of this declaration.
        backend = BACKENDS[who] if inputs.device.type == "cuda" else SDPBackend.MATH

        def forward() -> torch.Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=kv_heads != heads
                )

        if not back:
            return Work(forward)
        for leaf in (q, k, v):
            leaf.requires_grad_()
        out = forward()
        return backward(out, (q, k, v), inputs.normal(*out.shape))

    def shapes(heads: int, kv_heads: int, dim: int, v_dim: int, tokens: int) -> list[Shape]:
        return [
            {
                "batch": max(tokens // length, 1), "heads": heads, "kv_heads": kv_heads, "queries": length,
                "keys": length // 2 if regime == "causal" else length, "qk_dim": dim, "v_dim": v_dim,
            }
            for length in (4096, 8192, 2048, 16384)
        ]  # fmt: skip

    usual = shapes(16, 16, 128, 128, 16384)
    grouped = shapes(32, 8, 128, 128, 8192)
    latent = shapes(16, 16, 192, 128, 16384)
    fitting = [*usual, *grouped[:2]]
    if who == "cudnn":  # FlashAttention-2 wants values as wide as the keys
        fitting += latent[:2]
    tokens = 8
    return Op(
        name="attention_bwd" if back else "attention",
        implementation=who,
        dtype="bf16",
        regime=regime,
        family=FAMILY,
        cost=lambda shape: cost(shape, back),
        build=build,
        shapes={
            "quick": usual[:1] if who == "cudnn" else [],
            "dense": fitting,
            "glm-5.1": latent[:2] if who == "cudnn" and regime == "causal" else [],
        },
        tiny={
            "batch": 1, "heads": 2, "kv_heads": 1, "queries": tokens,
            "keys": tokens // 2 if regime == "causal" else tokens, "qk_dim": 8, "v_dim": 8,
        },
        efficiency=0.7,
        compile_s=1.5,
        recompiles=("heads",),
    )  # fmt: skip


OPS = tuple(
    attention(who, regime, back)
    for who in BACKENDS
    for regime in ("causal", "full")
    for back in (False, True)
)
