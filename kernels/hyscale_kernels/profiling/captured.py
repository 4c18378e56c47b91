"""What a trained indexer scores: queries, keys and weights of some rows, captured from a small trained model.

``benchmarks/trained_indexer.py`` writes the file, ``benchmarks/data/trained_indexer.npz`` in the repository;
it is not part of an installed package. Values are fp8 e4m3 with power-of-two scales, so that the bf16 form of
a case is the very same numbers, and scores of both dtypes differ by rounding of sums alone.

The model is small and saw minutes of training: a regime between random and production weights, no more.

Shape letters: T rows, S keys, H heads, D head size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..quantize import Quantized, quantize

SCHEMA = 1
LIMIT_BYTES = 12_000_000
REPOSITORY_FILE = Path(__file__).parents[3] / "benchmarks" / "data" / "trained_indexer.npz"


class Operands(NamedTuple):
    """Arguments of ``hytopk``: q [T, H, D], k [S, D], w [T, H], start and end [T], k_scale [S] for fp8."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    k_scale: torch.Tensor | None
    label: str


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """One layer: quantised q [T, H, D] and k [S, D]; w float32 [T, H]; positions int32 [T] of the rows.

    Row t sees the keys up to its own position. ``number`` is the layer's place in the model.
    """

    number: int
    q: Quantized
    k: Quantized
    w: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(
        cls, number: int, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, positions: torch.Tensor
    ) -> "CapturedLayer":
        """From what a layer projected (before any fp8 rounding)."""
        return cls(
            number, quantize(q, power_of_two=True), quantize(k, power_of_two=True), w.detach().float(),
            positions.to(torch.int32),
        )  # fmt: skip

    def operands(
        self,
        dtype: Literal["bf16", "fp8"],
        *,
        device: torch.device | str = "cpu",
        tiles: int = 1,
        row_tiles: int = 1,
    ) -> Operands:
        """The layer as arguments of ``hytopk``, with what it is in words.

        ``tiles`` > 1 repeats the keys, and each row sees all earlier copies and its own part of the last: a
        longer context that nobody trained, in which every score is tied with its copies. ``row_tiles``
        repeats the rows. Both are named in the label. ValueError for counts below 1 or another dtype.
        """
        for name, count in (("tiles", tiles), ("row_tiles", row_tiles)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: {count!r}; allowed: an integer, 1 or more")
        if dtype not in ("bf16", "fp8"):
            raise ValueError(f"dtype: {dtype!r}; allowed: 'bf16', 'fp8'")
        keys = self.k.values.shape[0]
        end = (self.positions + 1 + (tiles - 1) * keys).repeat(row_tiles).to(device)
        label = f"trained, layer {self.number} of a small model"
        if tiles > 1:
            label += f", {keys} keys repeated {tiles} times"
        if row_tiles > 1:
            label += f", rows repeated {row_tiles} times"
        start, w = torch.zeros_like(end), self.w.to(device)
        if dtype == "bf16":
            q, k = (each.dequantize().to(torch.bfloat16).to(device) for each in (self.q, self.k))
            return Operands(
                q.repeat(row_tiles, 1, 1), k.repeat(tiles, 1), w.repeat(row_tiles, 1), start, end, None, label
            )
        q, k = (_repeated(each.values.to(device), n) for each, n in ((self.q, row_tiles), (self.k, tiles)))
        weights = (w * self.q.scale.to(device)).repeat(row_tiles, 1)
        return Operands(q, k, weights, start, end, self.k.scale.to(device).repeat(tiles), label)


@dataclass(frozen=True, eq=False)
class Captured:
    """Layers, and where they come from: commit, configuration, hash of the text, steps, losses."""

    layers: tuple[CapturedLayer, ...]
    provenance: Mapping[str, Any]


def write(path: Path, layers: Sequence[CapturedLayer], provenance: Mapping[str, Any]) -> int:
    """Write the file, by way of a temporary one; gives its bytes. ValueError if it is above LIMIT_BYTES."""
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "provenance": np.array(json.dumps({"schema": SCHEMA, **provenance})),
        "layers": np.array([layer.number for layer in layers], dtype=np.int32),
    }
    for layer in layers:
        named = {
            "q": layer.q.values.view(torch.uint8), "q_scale": layer.q.scale,
            "k": layer.k.values.view(torch.uint8), "k_scale": layer.k.scale,
            "w": layer.w, "positions": layer.positions,
        }  # fmt: skip
        arrays |= {f"{layer.number}.{name}": value.cpu().numpy() for name, value in named.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        size = temporary.stat().st_size
        if size > LIMIT_BYTES:
            raise ValueError(f"{path}: {size} bytes; allowed: at most {LIMIT_BYTES}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def read(path: Path = REPOSITORY_FILE) -> Captured:
    """The layers of a file.

    FileNotFoundError saying how the file is made; ValueError for a file of something else.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no captured indexer; benchmarks/trained_indexer.py trains one on a GPU"
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            provenance = json.loads(str(arrays["provenance"]))
            found = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "provenance"}
        if provenance.pop("schema") != SCHEMA:
            raise ValueError("schema")
        layers = tuple(_layer(number, found) for number in found["layers"].tolist())
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a captured indexer of schema {SCHEMA}: {error}") from error
    return Captured(layers, provenance)


def _layer(number: int, found: Mapping[str, torch.Tensor]) -> CapturedLayer:
    def get(name: str) -> torch.Tensor:
        return found[f"{number}.{name}"]

    q, k = (Quantized(get(name).view(torch.float8_e4m3fn), get(f"{name}_scale")) for name in ("q", "k"))
    return CapturedLayer(number, q, k, get("w"), get("positions"))


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    """fp8 rows repeated: by their bytes, because not every device copies fp8."""
    sizes = (times, *(1 for _ in values.shape[1:]))
    return values.view(torch.uint8).repeat(*sizes).view(values.dtype)
