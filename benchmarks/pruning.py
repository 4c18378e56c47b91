"""Which share of a scan a certified bound of the scores could skip, and what that is worth.

    python benchmarks/pruning.py [--keys 65536] [--tiles 4] [--out benchmarks/results/pruning.jsonl]

A scan's program scores a tile: 64 adjacent queries against 128 keys. It may skip the tile if no key of it can
reach the threshold of any of the 64 rows. For each regime of keys this counts the tiles for which

    ideal    that is so (no bound can do better: it would drop a selected key)
    ball     it follows from the block's centre c and radius r:   q.k <= q.c + |q| r
    box      it follows from the block's range in each dimension: q.k <= sum_d max(q_d low_d, q_d high_d)
    norm     it follows from the longest key of the block:        q.k <= |q| |k|

with score <= sum_h w+ relu(upper) + w- relu(lower). The gain at the same speed a tile is
1 / (1 - skipped + cost), where the bound of a block costs as much as scoring one key (ball, norm: 1/128 of
the scan; box: two products).

A scan may also score in fewer dimensions and bound the rest: q.k <= q1.k1 + |q2| |k2|, with q1, k1 in the 32
or 64 leading principal directions of the keys. ``pass`` is what such a filter lets through, as a multiple of
K: those keys are scored again, exactly, and more than about 16 K of them cost what was saved.

None of these counts depends on the GPU. Ties and rounding are left out of account: they could only make them
worse. Thresholds are the 1.3 K-th best score, about what the sample of HyTopK gives. The captured rows lie 64
positions apart; adjacent ones would agree on more tiles, on no more than ``of_one_row`` says. Their tiles see
different numbers of keys, of which the mean is recorded.

Shape letters: T queries of a tile, S keys, B blocks, H heads, D head size, K = top_k.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import normalize

from hyscale_kernels.profiling import captured as capture

T, BLOCK, H, D, K = 64, 128, 32, 128, 2048
SLACK = 1.3
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q [T, H, D], k [S, D], w [T, H]


class Draw:
    """Normal and uniform draws of one generator."""

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=self.device, generator=self.generator)

    def walk(self, steps: int, memory: float) -> torch.Tensor:
        """Stationary unit-variance vectors [steps, D] whose neighbours correlate by ``memory``."""
        noise, out = self.normal(steps, D) * math.sqrt(1 - memory**2), []
        last = self.normal(D)
        for each in noise:
            last = memory * last + each
            out.append(last)
        return torch.stack(out)


def random(draw: Draw, S: int) -> Inputs:
    return draw.normal(T, H, D), draw.normal(S, D), draw.normal(T, H)


def heavy_norm(draw: Draw, S: int) -> Inputs:
    length = torch.where(draw.uniform(S, 1) < 0.02, 10.0, 1.0)
    return draw.normal(T, H, D), draw.normal(S, D) * length, draw.normal(T, H).abs()


def clustered(draw: Draw, S: int) -> Inputs:
    """Keys near 256 centres in no order; queries near centres of their own."""
    centres = draw.normal(256, D)
    k = centres[(draw.uniform(S) * 256).long()] + 0.35 * draw.normal(S, D)
    q = centres[(draw.uniform(T) * 256).long()][:, None] + 0.5 * draw.normal(T, H, D)
    return q, k, draw.normal(T, H).abs()


def clustered_in_order(draw: Draw, S: int) -> Inputs:
    """The same centres, each in one stretch of the sequence."""
    centres = draw.normal(256, D)
    k = centres[torch.arange(S, device=draw.device) * 256 // S] + 0.35 * draw.normal(S, D)
    q = centres[(draw.uniform(T) * 256).long()][:, None] + 0.5 * draw.normal(T, H, D)
    return q, k, draw.normal(T, H).abs()


def local(draw: Draw, S: int) -> Inputs:
    """Keys drift slowly along the sequence; the tile's queries look for one topic, each head with its own
    noise."""
    k = draw.walk(S // 64, 0.95).repeat_interleave(64, dim=0)[:S] + 0.35 * draw.normal(S, D)
    topic = k[int(0.4 * S)]
    return topic + 0.5 * draw.normal(T, H, D), k, draw.normal(T, H).abs()


def topics(draw: Draw, S: int) -> Inputs:
    """As ``local``, but every row of the tile looks for a topic of its own."""
    k = draw.walk(S // 64, 0.95).repeat_interleave(64, dim=0)[:S] + 0.35 * draw.normal(S, D)
    own = k[(draw.uniform(T) * S).long()]
    return own[:, None] + 0.5 * draw.normal(T, H, D), k, draw.normal(T, H).abs()


def low_rank(draw: Draw, S: int) -> Inputs:
    """Nearly all of the keys and queries lies in few directions: standard deviations fall as exp(-i / 12)."""
    spectrum = torch.exp(-torch.arange(D, device=draw.device) / 12.0)
    turn = torch.linalg.qr(draw.normal(D, D)).Q
    return draw.normal(T, H, D) * spectrum @ turn, draw.normal(S, D) * spectrum @ turn, draw.normal(T, H)


def captured(place: int, draw: Draw, S: int) -> Inputs:
    """What a small trained model's indexer scores (trained_indexer.py): 64 rows, each 64 positions after the
    one before, over the keys that all of them see; S is not looked at."""
    q, k, w, _, end, _, _ = capture.read().layers[place].operands("bf16", device=draw.device)
    last = len(w) - T * draw.seed
    seen = int(end[last - T]) // BLOCK * BLOCK
    return q[last - T : last].float(), k[:seen].float(), w[last - T : last]


REGIMES: dict[str, Callable[[Draw, int], Inputs]] = {
    each.__name__: each
    for each in (random, heavy_norm, clustered, clustered_in_order, local, topics, low_rank)
}
CAPTURED: dict[str, Callable[[Draw, int], Inputs]] = {
    f"captured_{which}": partial(captured, place) for place, which in enumerate(("early", "late"))
}


def weighed(w: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The bound [T, B] of scores from bounds [T, H, B] of the products."""
    positive, negative = w.clamp(min=0)[..., None], w.clamp(max=0)[..., None]
    return (positive * upper.relu() + negative * lower.relu()).sum(dim=1)


def bounds(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Upper bounds [T, B] of the scores of each block of keys, by each method."""
    blocks = k.unflatten(0, (-1, BLOCK))
    centre = blocks.mean(dim=1)
    radius = (blocks - centre[:, None]).norm(dim=2).amax(dim=1)
    length = blocks.norm(dim=2).amax(dim=1)
    low, high = blocks.amin(dim=1), blocks.amax(dim=1)
    size = q.norm(dim=2)[..., None]
    middle = q @ centre.T
    up = q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T
    down = q.clamp(min=0) @ low.T + q.clamp(max=0) @ high.T
    return {
        "ball": weighed(w, middle + size * radius, middle - size * radius),
        "box": weighed(w, up, down),
        "norm": weighed(w, size * length, -size * length),
    }


def scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Scores [T, S], some keys at a time."""
    parts = [torch.einsum("ths,th->ts", (q @ part.T).relu(), w) for part in k.split(max(1, 2**26 // (T * H)))]
    return torch.cat(parts, dim=1)


def passing(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, threshold: torch.Tensor, kept: int) -> float:
    """Keys a row, as a multiple of K, whose bound from ``kept`` directions reaches the threshold."""
    directions = torch.linalg.eigh(k.T @ k).eigenvectors.flip(1)
    q, k = q @ directions, k @ directions
    rest_q, rest_k = q[..., kept:].norm(dim=2), k[:, kept:].norm(dim=1)
    sign = torch.where(w > 0, 1.0, -1.0)
    q = torch.cat([q[..., :kept], (sign * rest_q)[..., None]], dim=2)
    k = torch.cat([k[:, :kept], rest_k[:, None]], dim=1)
    upper = scores(q, k, w)
    return float((upper >= threshold).sum(dim=1).float().mean()) / K


FEWER = (32, 64)
COST = {"ideal": 0.0, "ball": 1 / BLOCK, "box": 2 / BLOCK, "norm": 1 / BLOCK}


def measure(regime: str, S: int, tiles: int, device: str) -> dict[str, object]:
    """Shares over ``tiles`` tiles of queries; ``of_one_row`` is for tiles of a single query."""
    skipped: dict[str, list[float]] = {name: [] for name in COST}
    of_one_row: dict[str, list[float]] = {name: [] for name in COST}
    passed: dict[int, list[float]] = {kept: [] for kept in FEWER}
    seen = 0.0
    for seed in range(tiles):
        q, k, w = (REGIMES | CAPTURED)[regime](Draw(seed, device), S)
        S = len(k)
        seen += S / tiles
        if regime in REGIMES:
            q = normalize(q, dim=2) * D**0.5
        s = scores(q, k, w)
        threshold = s.kthvalue(max(1, S - int(SLACK * K) + 1), dim=1).values[:, None]
        best = s.unflatten(1, (-1, BLOCK)).amax(dim=2)
        for name, upper in {"ideal": best, **bounds(q, k, w)}.items():
            if not bool((upper >= best - 1e-3 * best.abs() - 1e-3).all()):
                raise AssertionError(f"{name} is not a bound on {regime}")
            below = upper < threshold
            skipped[name].append(float(below.all(dim=0).float().mean()))
            of_one_row[name].append(float(below.float().mean()))
        for kept in FEWER:
            passed[kept].append(passing(q, k, w, threshold, kept))
    share = {name: sum(values) / len(values) for name, values in skipped.items()}
    return {
        "schema": 1, "regime": regime, "keys": round(seen), "tile": [T, BLOCK], "heads": H, "dim": D,
        "top_k": K, "tiles": tiles, "skipped": share,
        "of_one_row": {name: sum(values) / len(values) for name, values in of_one_row.items()},
        "passing": {str(kept): sum(values) / len(values) for kept, values in passed.items()},
        "gain": {name: 1 / (1 - share[name] + cost) for name, cost in COST.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=[65_536])
    parser.add_argument("--regimes", nargs="+", choices=REGIMES | CAPTURED, default=list(REGIMES | CAPTURED))
    parser.add_argument("--tiles", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for S in given.keys:
        if S % BLOCK or S < SLACK * K:
            parser.error(f"--keys {S}; allowed: multiples of {BLOCK}, {math.ceil(SLACK * K)} or more")
    print(f"{'regime':20} {'keys':>9}  " + "".join(f"{name:>16}" for name in COST) + "   pass 32, 64")
    lines = []
    for S in given.keys:
        for regime in given.regimes:
            print(f"{regime} {S}", file=sys.stderr)
            record = measure(regime, S, given.tiles, given.device)
            lines.append(json.dumps(record))
            cells = "".join(f"{record['skipped'][n]:>8.1%} {record['gain'][n]:>6.2f}x" for n in COST)  # type: ignore[index]
            kept = "".join(f"{each:>6.1f}K" for each in record["passing"].values())  # type: ignore[attr-defined]
            print(f"{regime:20} {record['keys']:>9}  {cells} {kept}")
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
