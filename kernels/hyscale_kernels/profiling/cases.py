"""Inputs of a race: a shape, a dtype, windows and a regime of scores, drawn from a seed on the device.

Shape letters: T queries, S keys, H heads, D head size.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from . import captured

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

REGIMES = {
    "random": "normal queries and keys, signed normal weights: an untrained indexer",
    "trained": "keys near 256 centres, drifting along the sequence, a tenth of them three times as long; "
    "queries near a centre: peaked scores with locality",
    "documents": "16 topics, each 8,192 adjacent keys of one (cosine 0.95 with its direction); 64 adjacent "
    "queries ask about one topic (cosine 0.7), all heads alike: keys coherent enough to be pruned",
    "plateau": "non-negative queries, 60 % of keys non-positive, negative weights: the best scores are all 0",
    "constant": "one key, repeated",
    "sorted": "scores that rise with the key index",
    "periodic": "every 32nd key scores twice as high: the stride at which HyTopK samples 65,536 keys",
    "spike": "one key far above all others",
}
CAPTURED = "captured"  # not drawn: a small trained indexer's own, see ``captured_case``
WINDOWS = {
    "full": "every query sees every key",
    "causal": "query t sees keys 0 .. S-T+t: the last T positions of a sequence of S",
}


@dataclass(frozen=True)
class Case:
    """Checked inputs of one race: q [T, H, D], k [S, D], w [T, H], windows [T], k_scale [S] for fp8."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    top_k: int
    start: torch.Tensor
    end: torch.Tensor
    k_scale: torch.Tensor | None
    dtype: str
    windows: str
    regime: str

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def keys(self) -> int:
        return self.k.shape[0]

    def pairs(self) -> int:
        """Query-key pairs that must be scored."""
        return int((self.end.long() - self.start.long()).sum())

    def flops(self) -> float:
        """Tensor-core FLOPs of scoring every pair once: 2 H D a pair."""
        return 2.0 * self.pairs() * self.q.shape[1] * self.q.shape[2]


def draw(
    T: int,
    S: int,
    dtype: str,
    *,
    regime: str = "random",
    windows: str = "full",
    H: int = 32,
    D: int = 128,
    top_k: int = 2048,
    seed: int = 0,
    device: str = "cuda",
) -> Case:
    """Draw a case; fp8 keys carry one scale each. ValueError names an unknown regime, window or dtype."""
    for name, value, known in (
        ("regime", regime, REGIMES),
        ("windows", windows, WINDOWS),
        ("dtype", dtype, DTYPES),
    ):
        if value not in known:
            raise ValueError(f"no {name} {value!r}; there are: {', '.join(known)}")
    if windows == "causal" and T > S:
        raise ValueError(f"causal windows need no more queries than keys, got {T} queries and {S} keys")
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    q, k, w = normal(T, H, D), normal(S, D), normal(T, H)
    if regime == "trained":
        centres = normal(256, D)
        place = torch.arange(S, device=device) * 256 // S
        k = 0.35 * k + centres[(place + (uniform(S) < 0.3) * (uniform(S) * 256).long()) % 256]
        k *= torch.where(uniform(S, 1) < 0.1, 3.0, 1.0)
        q = 0.5 * q + centres[(uniform(T) * 256).long()][:, None, :]
        w = w.abs()
    elif regime == "documents":
        topics, cosine = normal(16, D), 0.95
        k = cosine * topics[torch.arange(S, device=device) // 8192 % 16] + math.sqrt(1 - cosine**2) * k
        q = 0.7 * topics[torch.arange(T, device=device) // 64 % 16][:, None, :] + 0.7 * q
        w = w.abs()
    elif regime == "plateau":
        q, w = q.abs(), -w.abs()
        k = k.abs() * torch.where(uniform(S, 1) < 0.6, -1.0, 1.0)
    elif regime == "constant":
        k = k[:1].expand(S, D).contiguous()
    elif regime == "sorted":
        q, w = q.abs(), w.abs()
        k = k[:1].abs() * torch.linspace(0.1, 1.0, S, device=device)[:, None]
    elif regime == "periodic":
        q, w = q.abs(), w.abs()
        level = torch.where(torch.arange(S, device=device) % 32 == 0, 1.0, 0.5)
        k = k[:1].abs() * (level * (1.0 + 0.1 * uniform(S)))[:, None]
    elif regime == "spike":
        k[S // 3] *= 50.0
    k_scale = None
    if dtype == "fp8":
        k_scale = (k.abs().amax(dim=1) / 448.0).clamp(min=1e-6)
        k = k / k_scale[:, None]
        q_scale = q.abs().amax(dim=2) / 448.0
        q = q / q_scale[:, :, None]
        w = w * q_scale
    start = torch.zeros(T, dtype=torch.int32, device=device)
    end = torch.full((T,), S, dtype=torch.int32, device=device)
    if windows == "causal":
        end = torch.arange(S - T + 1, S + 1, dtype=torch.int32, device=device)
    low = DTYPES[dtype]
    return Case(q.to(low), k.to(low), w, top_k, start, end, k_scale, dtype, windows, regime)


def captured_case(
    T: int,
    S: int,
    dtype: str,
    *,
    layer: int = 0,
    top_k: int = 2048,
    path: Path = captured.REPOSITORY_FILE,
    device: str = "cuda",
) -> Case:
    """Rows and keys of a trained indexer's ``layer``-th captured layer, repeated to T rows and S keys.

    Rows see the keys up to their own position. The case's regime says what was repeated. ValueError where T
    and S are not multiples of what was captured, or the layer or dtype is not there; FileNotFoundError where
    there is no capture.
    """
    layers = captured.read(path).layers
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer: {layer}; allowed: 0 to {len(layers) - 1}")
    of = layers[layer]
    rows, keys = len(of.positions), len(of.k.values)
    if T < 1 or S < 1 or T % rows or S % keys:
        raise ValueError(
            f"shape: {T} rows, {S} keys; captured: {rows} rows, {keys} keys, and multiples of these"
        )
    if dtype not in ("bf16", "fp8"):
        raise ValueError(f"dtype: {dtype!r}; captured: bf16, fp8")
    o = of.operands(dtype, device=device, tiles=S // keys, row_tiles=T // rows)  # type: ignore[arg-type]
    return Case(o.q, o.k, o.w, top_k, o.start, o.end, o.k_scale, dtype, "causal", o.label)
