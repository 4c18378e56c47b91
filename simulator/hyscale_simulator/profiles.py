"""Measured tables: kernels by shape, looked up exactly or interpolated as a multiple of their own roofline.

A table holds one op, implementation, dtype and regime on one GPU.  What is interpolated is time over floor
(see :mod:`hyscale_simulator.roofline`), piecewise linear, so a measured point comes back exactly and a curve
that only follows the work is flat.  Beyond the last point the ratio is held: utilisation, never latency.
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from hyscale_ref.profile import ProfilePoint, Shape, as_shape, best_of, merge_profiles, read_profile
from hyscale_simulator import network
from hyscale_simulator.descriptions import DATA, DescriptionError, find, shipped
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import OPS, Kernel
from hyscale_simulator.roofline import floor_us

__all__ = ["Lookup", "Profiles", "Table", "load_profiles"]


QUANTILE = 0.55
"""Which of the neighbours' ratios predicts a jagged table's shape.  Slow outliers are more frequent than fast
ones, so the median is 2 % too fast on average, held out; at this quantile the mean error vanishes."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a table says about a kernel.

    exact: a measured point.  stretch: how far outside the table the shape lies, as a factor (1: inside).
    spread: half the p20-p80 width over the median, where recorded.
    """

    us: float
    exact: bool
    stretch: float
    spread: float
    source: str
    nearest: Kernel
    """The measured call that says most about it."""


class _Node:
    """One axis of a ragged grid: sorted coordinates, each with the rest of the grid below it."""

    __slots__ = ("below", "coordinates")

    def __init__(self, coordinates: list[int], below: "list[_Node] | list[ProfilePoint]") -> None:
        self.coordinates = coordinates
        self.below = below


class Table:
    """Measured points of one op, implementation, dtype and regime on one GPU."""

    def __init__(self, gpu: Gpu, points: Sequence[ProfilePoint]) -> None:
        first = points[0]
        self.gpu = gpu
        self.op, self.implementation = first.op, first.implementation
        self.dtype, self.regime = first.dtype, first.regime
        self.axes = OPS[self.op].axes
        self.sequence_axes, self.additive = OPS[self.op].sequence_axes, OPS[self.op].additive
        self.points = {point.shape: point for point in reversed(points)}
        rows: dict[tuple[int, ...], ProfilePoint] = {}
        for point in points:
            shape = dict(point.shape)
            missing = [axis for axis in self.axes if axis not in shape]
            if missing:
                raise DescriptionError(
                    f"profile point {self.op} on {point.device}: shape has no {missing[0]!r}; "
                    f"needed: {', '.join(self.axes)}"
                )
            rows.setdefault(tuple(shape[axis] for axis in self.axes), point)
        self.rows = rows
        self._grid = _grid(sorted(rows), 0, rows)
        self._coordinates = [sorted({row[axis] for row in rows}) for axis in range(len(self.axes))]

    def lookup(self, call: Kernel) -> Lookup:
        """The measured time of that shape, or an interpolated one."""
        missing = {name: size for name, size in OPS[self.op].usual.items() if name not in dict(call.shape)}
        if missing:
            call = replace(call, shape=as_shape({**dict(call.shape), **missing}))
        point = self.points.get(call.shape)
        if point is not None:
            assert point.median_us is not None
            return Lookup(point.median_us, True, 1.0, _spread(point), _origin(point), call)
        return self._interpolate(call)

    def without(self, shape: Shape) -> "Table":
        """The same table with one shape left out, for held-out checks."""
        return Table(self.gpu, [point for key, point in self.points.items() if key != shape])

    def _interpolate(self, call: Kernel) -> Lookup:
        shape = dict(call.shape)
        position = tuple(shape[axis] for axis in self.axes)
        if OPS[self.op].jagged:
            ratio, stretch, nearest = self._median(position)
        else:
            ratio, stretch, nearest = self._ratio(self._grid, position, 0)
        measured = Kernel(nearest.op, nearest.dtype, nearest.shape)
        us = ratio * floor_us(call, self.gpu)
        return Lookup(us, False, stretch, _spread(nearest), _origin(nearest), measured)

    def _median(self, position: tuple[int, ...]) -> tuple[float, float, ProfilePoint]:
        """As :meth:`_ratio`, by (about) the median of the points up to two steps away along each axis.

        The other axes are held at the position's coordinate, or at both that enclose it.
        """
        held, near, stretch = [], [], 1.0
        for axis, x in enumerate(position):
            line = self._coordinates[axis]
            at = bisect.bisect_left(line, x)
            exact = at < len(line) and line[at] == x
            near.append([*line[max(at - 2, 0) : at], *line[at + exact : at + exact + 2]])
            held.append([x] if exact else [*line[max(at - 1, 0) : at], *line[at : at + 1]])
            if not exact and (at == 0 or (at == len(line) and self.axes[axis] not in self.additive)):
                edge = line[min(at, len(line) - 1)]
                stretch = max(stretch, max(x, edge) / max(min(x, edge), 1))
        found = [self.rows[place] for place in _crossing(held, near) if place in self.rows]
        if not found:  # a hole in the grid
            ratio, far, point = self._ratio(self._grid, position, 0)
            return ratio, max(stretch, far), point
        ratios = sorted((self._ratio(point, position, 0)[0], at) for at, point in enumerate(found))
        place = QUANTILE * (len(ratios) - 1)
        low, share = int(place), place % 1
        ratio = ratios[low][0] * (1 - share) + ratios[min(low + 1, len(ratios) - 1)][0] * share
        return ratio, stretch, found[ratios[low][1]]

    def _ratio(
        self, node: "_Node | ProfilePoint", position: Sequence[int], depth: int
    ) -> tuple[float, float, ProfilePoint]:
        """(time over floor, stretch, a point it came from) at ``position`` of the grid below ``node``."""
        if isinstance(node, ProfilePoint):
            assert node.median_us is not None
            measured = Kernel(node.op, node.dtype, node.shape)
            return node.median_us / floor_us(measured, self.gpu), 1.0, node
        x, coordinates = position[depth], node.coordinates
        at = bisect.bisect_left(coordinates, x)
        if at < len(coordinates) and coordinates[at] == x:
            found = self._ratio(node.below[at], position, depth + 1)
            return self._smaller(node, at, position, depth, found)
        if at == 0 or at == len(coordinates):
            edge = min(at, len(coordinates) - 1)
            ratio, stretch, point = self._ratio(node.below[edge], position, depth + 1)
            if OPS[self.op].memory or (at and self.axes[depth] in self.additive):
                return self._smaller(node, edge, position, depth, (ratio, stretch, point))
            low, high = sorted((max(x, 1), max(coordinates[edge], 1)))
            return ratio, max(stretch, high / low), point
        space = math.sqrt if self.axes[depth] in self.sequence_axes else math.log
        below, above = space(max(coordinates[at - 1], 1)), space(coordinates[at])
        weight = (space(x) - below) / (above - below)
        left, stretch_left, point = self._ratio(node.below[at - 1], position, depth + 1)
        right, stretch_right, other = self._ratio(node.below[at], position, depth + 1)
        ratio = math.exp((1 - weight) * math.log(left) + weight * math.log(right))
        between = (ratio, max(stretch_left, stretch_right), point if weight < 0.5 else other)
        return self._smaller(node, at, position, depth, between)

    def _smaller(
        self,
        node: _Node,
        at: int,
        position: Sequence[int],
        depth: int,
        found: tuple[float, float, ProfilePoint],
    ) -> tuple[float, float, ProfilePoint]:
        """What was found at coordinate ``at``; if that is out of its grid's reach along a later axis, and
        more along this axis is more of the same blocks, the largest smaller one that reaches further."""
        if self.axes[depth] in self.additive:
            for lower in range(at - 1, -1, -1):
                if found[1] <= 1:
                    break
                other = self._ratio(node.below[lower], position, depth + 1)
                found = other if other[1] < found[1] else found
        return found

    def held_out(self) -> list[tuple[Shape, float]]:
        """Leave one shape out, predict it from the rest: (shape, predicted / measured - 1) for each.

        Shapes at the end of their line, which would be extrapolated, are not counted.
        """
        errors = []
        for position, point in self.rows.items():
            estimate = self._predict_without(position)
            if estimate is not None:
                assert point.median_us is not None
                errors.append((point.shape, estimate / point.median_us - 1))
        return errors

    def _predict_without(self, position: tuple[int, ...]) -> float | None:
        """Predict a measured position as if it were not there; None at the end of its lines."""
        target = self.rows[position]
        call = Kernel(target.op, target.dtype, target.shape)
        for axis in reversed(range(len(self.axes))):
            line = self._line(position, axis)
            at = bisect.bisect_left(line, position[axis])
            if not 0 < at < len(line) - 1:
                continue
            if OPS[self.op].jagged:
                return self._median(position)[0] * floor_us(call, self.gpu)
            space = math.sqrt if self.axes[axis] in self.sequence_axes else math.log
            x0, x, x1 = (space(max(v, 1)) for v in line[at - 1 : at + 2])
            weight = (x - x0) / (x1 - x0)
            low, high = (
                math.log(self._ratio(self.rows[(*position[:axis], v, *position[axis + 1 :])], (), 0)[0])
                for v in (line[at - 1], line[at + 1])
            )
            return math.exp((1 - weight) * low + weight * high) * floor_us(call, self.gpu)
        return None

    def _line(self, position: tuple[int, ...], axis: int) -> list[int]:
        if not hasattr(self, "_lines"):
            self._lines: dict[tuple[int, tuple[int, ...]], list[int]] = {}
            for row in sorted(self.rows):
                for i in range(len(row)):
                    self._lines.setdefault((i, (*row[:i], *row[i + 1 :])), []).append(row[i])
        return self._lines[(axis, (*position[:axis], *position[axis + 1 :]))]


def _grid(rows: list[tuple[int, ...]], depth: int, points: dict[tuple[int, ...], ProfilePoint]) -> _Node:
    coordinates: list[int] = []
    groups: list[list[tuple[int, ...]]] = []
    for row in rows:
        if not coordinates or coordinates[-1] != row[depth]:
            coordinates.append(row[depth])
            groups.append([])
        groups[-1].append(row)
    if depth + 1 == len(rows[0]):
        return _Node(coordinates, [points[group[0]] for group in groups])
    return _Node(coordinates, [_grid(group, depth + 1, points) for group in groups])


def _crossing(held: list[list[int]], near: list[list[int]]) -> list[tuple[int, ...]]:
    """Places that leave ``held`` along one axis at a time, for a place in ``near``."""
    lines = (itertools.product(*held[:axis], near[axis], *held[axis + 1 :]) for axis in range(len(held)))
    return list(dict.fromkeys(place for line in lines for place in line))


_KEYS = re.compile(r"^(\d+) keys$")


def _placed(point: ProfilePoint) -> ProfilePoint:
    """A point with the sizes that its shape leaves out: those that its op means then, or its regime says."""
    usual = OPS[point.op].usual
    missing = {name: size for name, size in usual.items() if name not in dict(point.shape)}
    if not missing:
        return point
    said = _KEYS.match(point.regime)
    if said:
        missing["keys"] = int(said[1])
    return replace(
        point, shape=as_shape({**dict(point.shape), **missing}), regime="" if said else point.regime
    )


def _spread(point: ProfilePoint) -> float:
    if point.p20_us is None or point.p80_us is None or point.median_us is None:
        return 0.0
    return (point.p80_us - point.p20_us) / 2 / point.median_us


def _origin(point: ProfilePoint) -> str:
    return point.source or f"measured by this project ({point.time_utc[:10] or 'undated'})"


_Key = tuple[str, str, str, str, str, str]
"""Op, dtype, device, implementation, regime, and who published it ("": ourselves, or the user)."""


class Profiles:
    """All points at hand, grouped into tables, most trusted first."""

    def __init__(self, points: Iterable[ProfilePoint], gpus: Iterable[Gpu]) -> None:
        devices: dict[str, Gpu] = {}
        for gpu in gpus:
            devices.setdefault(gpu.device, gpu)
        grouped: dict[_Key, list[ProfilePoint]] = {}
        best = best_of(points)
        for point in best.values():
            if point.device not in devices:
                raise DescriptionError(
                    f"profile of device {point.device!r}: no GPU description has it; "
                    f"known: {', '.join(devices)}"
                )
            if point.op in OPS:  # a profile may hold ops that no model here uses
                point = _placed(point)
                # Two benchmarks of one kernel, with their own versions and clocks, would make a table that
                # jumps between them. One library or another: a jagged table is better for each.
                who = "" if OPS[point.op].jagged else point.implementation
                group = (point.op, point.dtype, point.device, who, point.regime, point.source)
                grouped.setdefault(group, []).append(point)
        self._gpus = devices
        self._points = grouped
        self._index: dict[tuple[str, str], list[tuple[str, str, str, str]]] = {}
        for op, dtype, *kind in grouped:
            self._index.setdefault((op, dtype), []).append((kind[0], kind[1], kind[2], kind[3]))
        self._tables: dict[_Key, Table] = {}
        self._exchanges = _exchanges(best.values())

    def collectives(self, gpu: Gpu) -> tuple[network.Table, ...]:
        """Measured collectives of that very device, a table for each op and number of ranks of one node."""
        return self._exchanges.get(gpu.device, ())

    def table(self, call: Kernel, gpu: Gpu) -> Table | None:
        """The table that says most about the kernel on that GPU: its own, else one to project from.

        The wanted implementation first; then the own device, its family, its architecture, any; then the
        wanted regime, whose windows ("untrained, causal") give way where they are out of reach; then a
        measured point of that shape; then the least extrapolation (up to twice counts as none); then the
        order in which the points were given.
        """
        candidates = self._index.get((call.op, call.dtype), [])
        if not candidates:
            return None
        wanted, _, windows = call.regime.partition(", ")

        def distance(item: tuple[str, str, str, str]) -> tuple[bool, int, int]:
            device, implementation, regime, _ = item
            source, kind = self._gpus[device], regime.partition(", ")[0]
            near = (
                device == gpu.device,
                source.family == gpu.family,
                source.architecture == gpu.architecture,
            )
            far = near.index(True) if True in near else len(near)
            other = bool(call.implementation) and implementation not in ("", call.implementation)
            return (other, far, 0 if kind == wanted else 1 if kind == "" else 2)

        least = min(map(distance, candidates))
        tables = [self._get((call.op, call.dtype, *item)) for item in candidates if distance(item) == least]

        def reach(table: Table) -> tuple[bool, bool, bool, float, int]:
            found = table.lookup(call)
            others = table.regime.partition(", ")[2] != windows
            # Neighbours stand in for a shape of a jagged table: the more there are, the better.
            few = -len(table.rows) if OPS[call.op].jagged and not found.exact else 0
            return (found.stretch > 2, others, not found.exact, max(found.stretch, 2.0), few)

        return tables[0] if len(tables) == 1 else min(tables, key=reach)

    def tables(self) -> list[Table]:
        """Every table."""
        return [self._get(key) for key in self._points]

    def _get(self, key: "_Key") -> Table:
        if key not in self._tables:
            self._tables[key] = Table(self._gpus[key[2]], self._points[key])
        return self._tables[key]


COLLECTIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "alltoall",
}
"""Names in profiles, and in the network's tables."""


def _exchanges(points: Iterable[ProfilePoint]) -> dict[str, tuple[network.Table, ...]]:
    """Tables of collectives by device; their shapes are ``ranks`` and ``bytes``, the whole."""
    found: dict[tuple[str, str, int], dict[int, ProfilePoint]] = {}
    for point in points:
        if point.op in COLLECTIVES:
            shape = dict(point.shape)
            missing = {"ranks", "bytes"} - shape.keys()
            if missing:
                raise DescriptionError(
                    f"profile point {point.op} on {point.device}: shape has no {min(missing)!r}; "
                    "needed: ranks, bytes"
                )
            sizes = found.setdefault((point.device, COLLECTIVES[point.op], shape["ranks"]), {})
            sizes.setdefault(shape["bytes"], point)
    tables: dict[str, tuple[network.Table, ...]] = {}
    for (device, op, ranks), sizes in found.items():
        latencies = tuple(sizes[size].median_us or 0.0 for size in sorted(sizes))
        origin = _origin(next(iter(sizes.values())))
        table = network.Table(op, ranks, tuple(sorted(sizes)), latencies, origin)
        tables[device] = (*tables.get(device, ()), table)
    return tables


@cache
def _shipped_points() -> tuple[ProfilePoint, ...]:
    folder = DATA / "profiles"
    names = sorted(item.name for item in folder.iterdir() if ".jsonl" in item.name)
    found: list[list[ProfilePoint]] = []
    for name in names:
        with resources.as_file(folder / name) as path:
            found.append(read_profile(path))
    # Our own measurements (no source) go before published ones.
    points = merge_profiles(*found)
    return tuple(sorted(points, key=lambda point: bool(point.source)))


@lru_cache(maxsize=8)
def load_profiles(paths: tuple[str, ...] = (), own: tuple[Gpu, ...] = ()) -> Profiles:
    """The shipped profiles, with the user's files ahead of them; ``ProfileError`` names a bad line.

    own: GPU descriptions of the user's, whose devices the files may be of.
    """
    gpus = [*own, *(find(Gpu, "gpus", name) for name in shipped("gpus"))]
    users = [read_profile(Path(path)) for path in paths]
    return Profiles(merge_profiles(*users, _shipped_points()), gpus)
