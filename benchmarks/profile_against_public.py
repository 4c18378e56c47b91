"""Our own profile of an H200 against the public tables, wherever both measured the same shape.

    python benchmarks/profile_against_public.py        # writes benchmarks/profile_against_public.md; no GPU

Pairs are those of ``hyscale profile compare OURS TABLE --any-implementation``. Beside them stand DeepGEMM's
scores, whose lengths differ by a few percent (the table is interpolated between two lengths of as many
queries), and NCCL's collectives. A pair more than 15 % apart gets the first reason below that its figures
bear out; the rules are :func:`reason`'s.
"""

import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from hyscale_kernels.profiling.compare import APART, Pair, compare
from hyscale_ref.profile import ProfilePoint, read_profile

HERE = Path(__file__).parent
PROFILES = HERE.parent / "simulator" / "hyscale_simulator" / "data" / "profiles"
NEAR = 0.1  # of our sustained rate: a call as fast as that ran at the power limit
L2_BYTES = 50e6  # of an H200's second-level cache, all of it written by the flush before each of our calls
LARGE = 2**36  # FLOPs above which a product's rate varies slowly with its sizes
COLLECTIVES = {"alltoall": "all_to_all"}  # the table's name: ours
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Sizes = tuple[int, int, int]


class Table:
    """The public products of one dtype: TFLOP/s by (m, n, k)."""

    def __init__(self, points: Sequence[ProfilePoint], dtype: str) -> None:
        self.rates = {sizes(point): tflops(point) for point in points if point.dtype == dtype}
        self._along: dict[tuple[int, Sizes], list[int]] = {}
        for at in self.rates:
            for axis in range(3):
                self._along.setdefault((axis, placed(at, axis, 0)), []).append(at[axis])
        for found in self._along.values():
            found.sort()

    def around(self, at: Sizes) -> float:
        """Median rate of the next smaller and larger size along each axis."""
        found = []
        for axis in range(3):
            line = self._along[axis, placed(at, axis, 0)]
            place = line.index(at[axis])
            for near in (place - 1, place + 1):
                if 0 <= near < len(line):
                    found.append(self.rates[placed(at, axis, line[near])])
        return median(found)

    def scatter(self) -> tuple[int, float]:
        """How many large products there are, and the share more than APART from those around them."""
        large = [at for at in self.rates if 2 * at[0] * at[1] * at[2] >= LARGE and min(at) >= 1024]
        off = sum(abs(self.rates[at] / self.around(at) - 1) > APART for at in large)
        return len(large), off / len(large)


@dataclass(frozen=True)
class Facts:
    """What the reasons need beside a pair. launch_us: the shortest launch; sustained: TFLOP/s by dtype."""

    launch_us: float
    bytes_per_s: float
    sustained: dict[str, float]
    burst: dict[str, float]
    quantise_bytes_per_s: float
    tables: dict[str, Table]

    @classmethod
    def of(cls, own: Sequence[ProfilePoint], public: Sequence[ProfilePoint]) -> "Facts":
        ceilings = {(p.implementation, p.dtype): p for p in own if p.op == "ceiling"}
        quantise = [p.bytes_per_s or 0.0 for p in own if p.op == "quantise"]
        return cls(
            microseconds(ceilings["launch", "fp32"]),
            ceilings["copy", "bf16"].bytes_per_s or 0.0,
            {p.dtype: tflops(p) for p in own if p.op == "gemm" and p.regime == "sustained"},
            {dtype: tflops(ceilings["gemm", dtype]) for dtype in ("bf16", "fp8")},
            max(quantise),
            {dtype: Table(public, dtype) for dtype in ("bf16", "fp8")},
        )

    def quantised_us(self, pair: Pair) -> tuple[float, float]:
        """Microseconds that quantising the input [m, k] takes: at the copy rate, and at our own kernel's."""
        m, _, k = sizes(pair.first)
        moved = m * k * (2 + 1 + 4 / 128)
        return 1e6 * moved / self.bytes_per_s, 1e6 * moved / self.quantise_bytes_per_s


def reason(pair: Pair, facts: Facts) -> str:
    """Why a pair is more than APART from each other, with the figure that says so; "" if it is not."""
    if abs(pair.ratio - 1) <= APART:
        return ""
    ours, theirs = microseconds(pair.first), microseconds(pair.second)
    if pair.first.op != "gemm":
        return f"another kernel: {pair.first.implementation} against {pair.second.implementation}"
    if pair.ratio < 1:
        left = ours - theirs - facts.launch_us
        if left <= APART * theirs:
            return f"launch: {ours - theirs:.1f} us, of which {facts.launch_us:.1f} are the shortest launch"
        return f"launch, then cache: {left:.1f} us beyond the shortest launch"
    table = facts.tables[pair.first.dtype]
    dtype, around = pair.first.dtype, table.around(sizes(pair.first))
    if dtype == "fp8":
        least, own = facts.quantised_us(pair)
        low, high = (theirs - own) / ours, (theirs - least) / ours
        if low <= 1 + APART and high >= 1 - APART:
            return f"quantises: ratio {low:.2f} to {high:.2f} without {own:,.0f} to {least:,.0f} us for it"
        slower = facts.burst[dtype] / facts.sustained[dtype]
        if 1 + APART < low <= slower * (1 + APART):
            return f"quantises ({low:.2f} to {high:.2f} without it), then power (x {slower:.2f})"
        return "not explained"
    near_ours, near_it = (abs(tflops(point) / around - 1) for point in (pair.first, pair.second))
    if near_ours <= min(APART, near_it):
        return f"outlier: around it the table has {around:,.0f} TFLOP/s"
    if tflops(pair.second) >= (1 - NEAR) * facts.sustained[dtype]:
        return f"power: we sustain {facts.sustained[dtype]:,.0f} TFLOP/s"
    return "not explained"


def scores(own: Sequence[ProfilePoint], public: Sequence[ProfilePoint]) -> Iterator[tuple[str, ...]]:
    """DeepGEMM's scores: rows, keys, ours, the two lengths of the table, its time between them, ratio."""
    lines: dict[int, list[tuple[int, float]]] = {}
    for point in public:
        if point.op == "index_scores":
            shape = dict(point.shape)
            lines.setdefault(shape["rows"], []).append((shape["keys"], microseconds(point)))
    for point in own:
        shape = dict(point.shape)
        if (point.op, point.implementation) != ("index_scores", "deepgemm"):
            continue
        line = sorted(lines.get(shape["rows"], []))
        below = [place for place in line if place[0] <= shape["keys"]]
        above = [place for place in line if place[0] > shape["keys"]]
        if not below or not above:
            continue
        (low, low_us), (high, high_us) = below[-1], above[0]
        theirs = low_us + (high_us - low_us) * (shape["keys"] - low) / (high - low)
        ours = microseconds(point)
        yield (
            f"{shape['rows']:,}", f"{shape['keys']:,}", f"{ours:,.1f}", f"{low:,} and {high:,}",
            f"{theirs:,.1f}", f"{theirs / ours:.3f}",
        )  # fmt: skip


def collectives(own: Sequence[ProfilePoint]) -> Iterator[tuple[str, ...]]:
    """NCCL on two GPUs: op, bytes, ours, the table's, ratio, difference."""
    text = io.StringIO(gzip.decompress((PROFILES / "h200-nccl.csv.gz").read_bytes()).decode())
    public = {
        (COLLECTIVES.get(row["op"], row["op"]), int(row["num_gpus"]), int(row["bytes"])): row["latency_us"]
        for row in csv.DictReader(text)
        if row["dtype"] == "half"
    }
    for point in own:
        shape = dict(point.shape)
        found = public.get((point.op, shape.get("ranks", 0), shape.get("bytes", 0)))
        if point.implementation == "nccl" and found is not None:
            ours, theirs = microseconds(point), float(found)
            yield (
                point.op, f"{shape['bytes']:,}", f"{ours:,.1f}", f"{theirs:,.1f}", f"{theirs / ours:.3f}",
                f"{ours - theirs:+.1f}" if abs(theirs / ours - 1) > APART else "",
            )  # fmt: skip


def placed(at: Sizes, axis: int, value: int) -> Sizes:
    m, n, k = (value if each == axis else size for each, size in enumerate(at))
    return m, n, k


def sizes(point: ProfilePoint) -> Sizes:
    shape = dict(point.shape)
    return shape["m"], shape["n"], shape["k"]


def microseconds(point: ProfilePoint) -> float:
    assert point.median_us is not None
    return point.median_us


def tflops(point: ProfilePoint) -> float:
    m, n, k = sizes(point)
    return 2e-6 * m * n * k / microseconds(point)


def rows_of(pairs: Sequence[Pair], facts: Facts) -> Iterator[tuple[str, ...]]:
    """A row a product: dtype, sizes, both times, ratio, both rates, reason."""
    for pair in sorted(pairs, key=lambda pair: (pair.first.dtype, -abs(pair.ratio - 1))):
        m, n, k = sizes(pair.first)
        yield (
            pair.first.dtype, f"{m} x {n} x {k}", f"{microseconds(pair.first):,.1f}",
            f"{microseconds(pair.second):,.1f}", f"{pair.ratio:.3f}", f"{tflops(pair.first):,.0f}",
            f"{tflops(pair.second):,.0f}", reason(pair, facts) or ("noise" if pair.noise else ""),
        )  # fmt: skip


def summary(pairs: Sequence[Pair], facts: Facts) -> Iterator[tuple[str, ...]]:
    """A row an op: shapes, median ratio, least, most, how many are apart, and the reasons counted."""
    for name in dict.fromkeys((pair.first.op, pair.first.dtype) for pair in pairs):
        found = [pair for pair in pairs if (pair.first.op, pair.first.dtype) == name]
        ratios = [pair.ratio for pair in found]
        said = [text.split(":")[0].split(" (")[0] for pair in found if (text := reason(pair, facts))]
        counted = ", ".join(f"{said.count(word)} {word}" for word in dict.fromkeys(said))
        yield (
            " ".join(name), f"{len(found)}", f"{median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}", f"{len(said)}", counted,
        )  # fmt: skip


def table(headings: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown; ``headings`` are separated by bars."""
    names = [name.strip() for name in headings.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(own: Sequence[ProfilePoint], gemms: Sequence[ProfilePoint], sparse: Sequence[ProfilePoint]) -> str:
    """The whole page."""
    facts = Facts.of(own, gemms)
    products = compare(own, gemms, any_implementation=True).pairs
    attention = compare(own, sparse, any_implementation=True).pairs
    scattered = {dtype: each.scatter() for dtype, each in facts.tables.items()}
    drain = 1e6 * L2_BYTES / facts.bytes_per_s
    scored = list(scores(own, sparse))
    text = (HERE / "profile_against_public.txt").read_text(encoding="utf-8")
    return text.format(
        pairs=len(products) + len(attention),
        summary=table(
            "op | shapes | median ratio | ratios | over 15 % | why",
            summary([*products, *attention], facts),
        ),
        launch=facts.launch_us, drain=drain, copy=facts.bytes_per_s / 1e12,
        quantise=facts.quantise_bytes_per_s / 1e12,
        bf16_burst=facts.burst["bf16"], bf16_sustained=facts.sustained["bf16"],
        fp8_burst=facts.burst["fp8"], fp8_sustained=facts.sustained["fp8"],
        bf16_large=scattered["bf16"][0], bf16_scatter=100 * scattered["bf16"][1],
        fp8_large=scattered["fp8"][0], fp8_scatter=100 * scattered["fp8"][1],
        scored=len(scored), furthest=100 * max(abs(float(row[-1]) - 1) for row in scored),
        products=table(
            "dtype | m x n x k | ours us | table us | ratio | ours TFLOP/s | table TFLOP/s | why",
            rows_of(products, facts),
        ),
        attention=table(
            "rows | ours us | FlashMLA us | ratio",
            (
                (
                    f"{dict(pair.first.shape)['rows']:,}", f"{microseconds(pair.first):,.1f}",
                    f"{microseconds(pair.second):,.1f}", f"{pair.ratio:.3f}",
                )
                for pair in sorted(attention, key=lambda pair: dict(pair.first.shape)["rows"])
            ),
        ),
        scores=table("rows | keys | ours us | table's keys | table us | ratio", scored),
        collectives=table(
            "op | bytes | ours us | table us | ratio | ours - table, where apart", collectives(own)
        ),
    )  # fmt: skip


@app.command(help=__doc__)
def main(
    own: Annotated[Path, typer.Option(help="our own profile")] = PROFILES / "h200-own.jsonl.gz",
    out: Annotated[Path, typer.Option(help="the page")] = HERE / "profile_against_public.md",
) -> None:
    gemms = read_profile(PROFILES / "h200-gemm.jsonl.gz")
    sparse = read_profile(PROFILES / "h200-sparse-attention.jsonl.gz")
    out.write_text(page(read_profile(own), gemms, sparse), encoding="utf-8")
    print(out, file=sys.stderr)


if __name__ == "__main__":
    app()
