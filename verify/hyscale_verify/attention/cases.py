"""Inputs that sparse latent attention is judged on, drawn from a seed.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyscale_verify.cases import DTYPES

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

KINDS = ("normal", "peaked", "deep", "exact", "single")


@dataclass(frozen=True)
class AttentionCase:
    """q [T, Hq, D], latent [S, D], indices [T, K], upstream gradient grad [T, Hq, Dv], sink [Hq] or None.

    Floats are float32 numbers that ``dtype`` holds exactly. ``exact`` marks inputs whose results are exact in
    every format: see ``draw_case``.
    """

    q: Float32
    latent: Float32
    indices: Int32
    grad: Float32
    sink: Float32 | None
    scale: float
    dtype: str
    exact: bool = False

    @property
    def value_dim(self) -> int:
        return int(self.grad.shape[2])

    def rows(self, rows: Any) -> "AttentionCase":
        """The case of some rows alone, in the order given."""
        return replace(self, q=self.q[rows], indices=self.indices[rows], grad=self.grad[rows])

    def tensors(self, device: str) -> dict[str, torch.Tensor | None]:
        """q, latent, indices, grad and sink on ``device``."""
        low = DTYPES[self.dtype]
        return {
            "q": torch.from_numpy(self.q.copy()).to(device, low),
            "latent": torch.from_numpy(self.latent.copy()).to(device, low),
            "indices": torch.from_numpy(self.indices.copy()).to(device),
            "grad": torch.from_numpy(self.grad.copy()).to(device, low),
            "sink": None if self.sink is None else torch.from_numpy(self.sink.copy()).to(device),
        }

    def float64(self) -> dict[str, Any]:
        """The arguments of ``hyscale_ref.attention.sparse_mla_gradients``."""
        sink = None if self.sink is None else self.sink.astype(np.float64)
        return {
            "q": self.q.astype(np.float64),
            "latent": self.latent.astype(np.float64),
            "indices": self.indices,
            "scale": self.scale,
            "value_dim": self.value_dim,
            "sink": sink,
        }

    def __repr__(self) -> str:
        T, Hq, D = self.q.shape
        return (
            f"AttentionCase({self.dtype}, T={T}, S={len(self.latent)}, Hq={Hq}, D={D}, Dv={self.value_dim}, "
            f"K={self.indices.shape[1]}, sink={self.sink is not None}, exact={self.exact})"
        )


def draw_case(seed: int, kind: str, dtype: str, large: tuple[int, int] | None = None) -> AttentionCase:
    """A case of ``kind``, one of KINDS; the same seed gives the same case.

    normal  normal numbers, any lengths, holes anywhere, empty rows
    peaked  logits spread over some 40: a few keys take all
    deep    logits near -300: exp of an unused place's 0 would overflow
    exact   logits and weights are powers of two and values small integers: out is exact in every format
    single  rows of one key or none: p is 1, and the keys' gradient is a sum of integers

    ``large``, heads and elements of a key beyond its 512 of value, draws sizes for a GPU.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r}; allowed: {', '.join(KINDS)}")
    generator = np.random.default_rng([seed, KINDS.index(kind)])

    def one_of(*values: int) -> int:
        return int(generator.choice(values))

    T, Hq = one_of(1, 2, 3, 5), one_of(1, 3, 16, 20)
    Dv, rest, S, K = one_of(2, 5, 8, 33), one_of(0, 1, 4), one_of(1, 9, 40, 40), one_of(1, 7, 20, 33)
    if large is not None:
        T, Dv, (Hq, rest) = one_of(1, 5, 40), 512, large
        S, K = one_of(70, 3000), one_of(1, 64, 200, 700)
    D = Dv + rest
    sink = 3 * generator.standard_normal(Hq).astype(np.float32) if generator.random() < 0.6 else None
    scale = float(np.float32(0.5 / np.sqrt(D)))
    if kind in ("exact", "single"):
        sink = None
        q, latent, indices = _exact(generator, T, Hq, Dv, D, K, S, single=kind == "single")
        grad = generator.integers(-4, 5, (T, Hq, Dv)).astype(np.float32)
        grad *= generator.integers(0, 2, Dv)  # a sum of 0 shows the smallest error beside it
        scale = float(np.log(2.0))
    else:
        q = _rounded(generator.standard_normal((T, Hq, D)), dtype)
        latent = _rounded(generator.standard_normal((S, D)), dtype)
        grad = _rounded(generator.standard_normal((T, Hq, Dv)), dtype)
        if kind == "peaked":
            scale *= 16
        elif kind == "deep":
            q[..., 0], latent[:, 0] = 16, np.float32(-24)
            scale = 0.75
        indices = generator.integers(0, S, (T, K)).astype(np.int32)
    holes = generator.random((T, K)) < generator.choice([0.0, 0.3, 0.9], (T, 1))
    holes |= np.arange(K) >= generator.integers(0, 4 * K + 1, (T, 1))  # a tail in one row of four
    if kind in ("exact", "single"):
        holes[:] = generator.random((T, 1)) < 0.2  # an empty row stays exact
    unused = holes | (indices < 0)
    indices = np.where(unused, -1 - generator.integers(0, 9, (T, K)), indices).astype(np.int32)
    return AttentionCase(q, latent, indices, grad, sink, scale, dtype, exact=kind in ("exact", "single"))


def _exact(
    generator: np.random.Generator, T: int, Hq: int, Dv: int, D: int, K: int, S: int, *, single: bool
) -> tuple[Float32, Float32, Int32]:
    """q, latent and indices with logits 0, 0, 1, 2, ... (in base 2) or all 0, by head.

    With 2**n keys in a row, the weights add up to a power of two either way. The logit is the key's last
    element, which q reads with a factor of 1 or 0. ``single`` rows have one key, whose logit is 0.
    """
    q = np.zeros((T, Hq, D), np.float32)
    q[..., -1] = generator.integers(0, 2, (T, Hq))
    indices = np.full((T, K), -1, np.int32)
    count = 1 if single or K < 4 else 4
    keys = max(S, count)
    latent = generator.integers(-8, 9, (keys, D)).astype(np.float32)
    ladder = np.array([0, 0, 1, 2]) if count == 4 else np.array([0])
    latent[:, -1] = np.resize(ladder, keys)
    for t in range(T):
        group = generator.integers(0, keys // count)
        places = generator.permutation(K)[:count]
        indices[t, places] = generator.permutation(count) + group * count
    return q, latent, indices


def _rounded(x: Float64, dtype: str) -> Float32:
    """x rounded to ``dtype``, as float32."""
    rounded: Float32 = torch.from_numpy(x).to(DTYPES[dtype]).float().numpy()
    return rounded
