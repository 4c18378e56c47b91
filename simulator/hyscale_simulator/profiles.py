"""Measured tables: kernels by shape, looked up exactly or interpolated by their own roofline.

A table holds one op, implementation, dtype and regime on one GPU.  Between two points, time is a straight
line in its floor (see :mod:`hyscale_simulator.roofline`): a fixed part, and a part that grows with the work.
Beyond the last point the ratio of the two is held: utilisation, never latency.
"""

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from hyscale_ref.profile import (
    ProfileError,
    ProfilePoint,
    Shape,
    as_shape,
    best_of,
    merge_profiles,
    read_profile,
)
from hyscale_simulator import network
from hyscale_simulator.descriptions import DATA, find, shipped
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import BYTES, OPS, Kernel
from hyscale_simulator.roofline import floor_us

__all__ = ["Lookup", "Profiles", "Table", "load_profiles"]


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


class _Ratio(NamedTuple):
    """Time over floor, how far outside the table, and a point it came from."""

    ratio: float
    stretch: float
    point: ProfilePoint


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
        self.dtype, self.regime, self.source = first.dtype, first.regime, first.source
        self.axes = OPS[self.op].axes
        self.sequence_axes, self.additive = OPS[self.op].sequence_axes, OPS[self.op].additive
        self.points = {point.shape: point for point in reversed(points)}
        rows: dict[tuple[int, ...], ProfilePoint] = {}
        for point in points:
            rows.setdefault(self._position(dict(point.shape)), point)
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

    def without(self, position: tuple[int, ...]) -> "Table":
        """The same table with one position of its axes left out, for held-out checks."""
        left = [point for point in self.points.values() if self._position(dict(point.shape)) != position]
        return Table(self.gpu, left)

    def held_out(self) -> list[tuple[Shape, float]]:
        """Leave one shape out, look it up in the rest: (shape, predicted / measured - 1) for each.

        Only shapes between two others along some axis: elsewhere the rest is extrapolated.
        """
        ends: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row in self.rows:
            for axis, x in enumerate(row):
                ends.setdefault((axis, (*row[:axis], *row[axis + 1 :])), []).append(x)
        errors = []
        for row, point in self.rows.items():
            lines = (ends[axis, (*row[:axis], *row[axis + 1 :])] for axis in range(len(row)))
            if not any(min(line) < x < max(line) for x, line in zip(row, lines, strict=True)):
                continue
            # A jagged table's neighbours of a shape never include the shape itself.
            rest = self if OPS[self.op].jagged else self.without(row)
            found = rest._interpolate(Kernel(point.op, point.dtype, point.shape))
            assert point.median_us is not None
            errors.append((point.shape, found.us / point.median_us - 1))
        return errors

    def _position(self, shape: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in self.axes)

    def _interpolate(self, call: Kernel) -> Lookup:
        shape = dict(call.shape)
        found = self._median(shape) if OPS[self.op].jagged else self._ratio(self._grid, shape, 0)
        point = found.point
        measured = Kernel(point.op, point.dtype, point.shape)
        us = found.ratio * self._floor_us(shape)
        return Lookup(us, False, found.stretch, _spread(point), _origin(point), measured)

    def _floor_us(self, shape: Mapping[str, int]) -> float:
        return floor_us(Kernel(self.op, self.dtype, as_shape(shape)), self.gpu)

    def _measured(self, point: ProfilePoint) -> _Ratio:
        assert point.median_us is not None
        return _Ratio(point.median_us / self._floor_us(dict(point.shape)), 1.0, point)

    def _median(self, shape: dict[str, int]) -> _Ratio:
        """By the median of the points up to two steps away along each axis.

        The other axes are held at the shape's coordinate, or at both that enclose it.  The last axis (a
        product's k) counts twice: the blocks of the result, and how many waves of them there are, stay.
        """
        held, near, stretch = [], [], 1.0
        for line, axis in zip(self._coordinates, self.axes, strict=True):
            x = shape[axis]
            at = bisect.bisect_left(line, x)
            exact = at < len(line) and line[at] == x
            near.append([*line[max(at - 2, 0) : at], *line[at + exact : at + exact + 2]])
            held.append([x] if exact else [*line[max(at - 1, 0) : at], *line[at : at + 1]])
            if not exact and (at == 0 or (at == len(line) and axis not in self.additive)):
                edge = line[min(at, len(line) - 1)]
                stretch = max(stretch, max(x, edge) / max(min(x, edge), 1))
        lines = [itertools.product(*held[:axis], near[axis], *held[axis + 1 :]) for axis in range(len(held))]
        places = [*dict.fromkeys(itertools.chain(*lines)), *itertools.product(*held[:-1], near[-1])]
        found = sorted(
            (self._measured(self.rows[place]) for place in places if place in self.rows),
            key=lambda item: item.ratio,
        )
        if not found:  # a hole in the grid
            found = [self._ratio(self._grid, shape, 0)]
            stretch = max(stretch, found[0].stretch)
        middle = statistics.median(item.ratio for item in found)
        return _Ratio(middle, stretch, found[(len(found) - 1) // 2].point)

    def _ratio(self, node: "_Node | ProfilePoint", shape: dict[str, int], depth: int) -> _Ratio:
        """What the grid below ``node`` says of ``shape``."""
        if isinstance(node, ProfilePoint):
            return self._measured(node)
        axis, coordinates = self.axes[depth], node.coordinates
        x = shape[axis]
        at = bisect.bisect_left(coordinates, x)
        if at < len(coordinates) and coordinates[at] == x:
            return self._line(node, at, shape, depth)
        if at == 0 or at == len(coordinates):
            edge = min(at, len(coordinates) - 1)
            found = self._line(node, edge, shape, depth)
            if OPS[self.op].memory or (at and axis in self.additive):
                return found
            low, high = sorted((max(x, 1), max(coordinates[edge], 1)))
            return found._replace(stretch=max(found.stretch, high / low))
        left, right = (self._line(node, side, shape, depth) for side in (at - 1, at))
        near, far = coordinates[at - 1], coordinates[at]
        below, here, above = (self._floor_us({**shape, axis: end}) for end in (near, x, far))
        if below < here < above:
            weight = (here - below) / (above - below)
            ratio = ((1 - weight) * left.ratio * below + weight * right.ratio * above) / here
        else:  # the work does not grow along this axis
            space = math.sqrt if axis in self.sequence_axes else math.log
            weight = (space(x) - space(max(near, 1))) / (space(far) - space(max(near, 1)))
            ratio = left.ratio ** (1 - weight) * right.ratio**weight
        point = left.point if weight < 0.5 else right.point
        return _Ratio(ratio, max(left.stretch, right.stretch), point)

    def _line(self, node: _Node, at: int, shape: dict[str, int], depth: int) -> _Ratio:
        """What coordinate ``at`` of ``node`` says of ``shape``.

        Where that is out of its reach along a later axis, and more along this axis is more of the same
        blocks, the nearest coordinate that reaches further (the larger of two as near) says how the ratio
        goes on.
        """
        found = self._ratio(node.below[at], shape, depth + 1)
        if found.stretch <= 1 or self.axes[depth] not in self.additive:
            return found
        here = node.coordinates[at]
        others = [i for i in range(len(node.coordinates)) if i != at]
        reached = {i: self._ratio(node.below[i], shape, depth + 1) for i in others}

        def distance(i: int) -> tuple[float, float, int]:
            return reached[i].stretch, abs(math.log(node.coordinates[i] / here)), -i

        other = min(others, key=distance, default=at)
        if other == at or reached[other].stretch >= found.stretch:
            return found
        edge = self._ratio(node.below[other], self._clamped(node.below[at], shape, depth + 1), depth + 1)
        there = reached[other]
        return _Ratio(found.ratio * there.ratio / edge.ratio, max(there.stretch, edge.stretch), there.point)

    def _clamped(self, node: "_Node | ProfilePoint", shape: dict[str, int], depth: int) -> dict[str, int]:
        """``shape``, moved into the reach of the grid below ``node``."""
        while isinstance(node, _Node):
            axis, coordinates = self.axes[depth], node.coordinates
            x = min(max(shape[axis], coordinates[0]), coordinates[-1])
            shape = {**shape, axis: x}
            node = node.below[bisect.bisect_left(coordinates, x)]
            depth += 1
        return shape


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


def _check(point: ProfilePoint, devices: Collection[str]) -> None:
    """:class:`ProfileError` unless the point can price something: a known device, dtype and whole shape.

    Ops that no model here runs pass: a file may hold more than a step needs.
    """
    if point.device not in devices:
        raise ProfileError(
            f"device = {point.device!r}; no GPU description has it; known: {', '.join(devices)}"
        )
    if point.op in COLLECTIVES:
        needed: tuple[str, ...] = ("ranks", "bytes")
    elif point.op in OPS:
        needed = OPS[point.op].axes
        if point.dtype not in BYTES:
            raise ProfileError(f"{point.op}: dtype = {point.dtype!r}; allowed: {', '.join(BYTES)}")
    else:
        return
    shape = {**OPS[point.op].usual, **dict(point.shape)} if point.op in OPS else dict(point.shape)
    for name in needed:
        if name not in shape:
            raise ProfileError(f"{point.op}: shape has no {name!r}; needed: {', '.join(needed)}")
    for name, size in shape.items():
        least = 2 if name == "ranks" else 1
        if size < least:
            raise ProfileError(f"{point.op}: shape.{name} = {size}; at least {least} is needed")


class Profiles:
    """All points at hand, grouped into tables, most trusted first.  :class:`ProfileError` for a useless one.

    own: sources that are the user's; their tables go first.  notes: what a user should know of their files.
    """

    def __init__(
        self,
        points: Iterable[ProfilePoint],
        gpus: Iterable[Gpu],
        own: Collection[str] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        devices: dict[str, Gpu] = {}
        for gpu in gpus:
            devices.setdefault(gpu.device, gpu)
        self.notes = notes
        self._own = frozenset(own)
        grouped: dict[_Key, list[ProfilePoint]] = {}
        best = best_of(points)
        for point in best.values():
            _check(point, devices)
            if point.op in OPS:
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
        wanted regime, or one that is not said.  Of those, what reaches the shape (extrapolation up to twice
        counts as none); then the user's own (of a jagged table, only for a measured shape); then the wanted
        windows ("untrained, causal"); then a measured point; then the least extrapolation.
        """
        candidates = self._index.get((call.op, call.dtype), [])
        if not candidates:
            return None
        wanted, _, windows = call.regime.partition(", ")

        def distance(item: tuple[str, str, str, str]) -> tuple[bool, int, bool]:
            device, implementation, regime, _ = item
            source, kind = self._gpus[device], regime.partition(", ")[0]
            near = (
                device == gpu.device,
                source.family == gpu.family,
                source.architecture == gpu.architecture,
            )
            far = near.index(True) if True in near else len(near)
            other = bool(call.implementation) and implementation not in ("", call.implementation)
            return (other, far, kind not in (wanted, ""))

        least = min(map(distance, candidates))
        tables = [self._get((call.op, call.dtype, *item)) for item in candidates if distance(item) == least]

        def reach(table: Table) -> tuple[bool, bool, bool, bool, bool, float, int]:
            found = table.lookup(call)
            jagged = OPS[call.op].jagged and not found.exact
            shipped = jagged or table.source not in self._own
            kind, _, given = table.regime.partition(", ")
            # Neighbours stand in for a shape of a jagged table: the more there are, the better.
            few = -len(table.rows) if jagged else 0
            return (
                found.stretch > 2, shipped, kind != wanted, given != windows, not found.exact,
                max(found.stretch, 2.0), few,
            )  # fmt: skip

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
    devices = [gpu.device for gpu in gpus]
    users: list[list[ProfilePoint]] = []
    notes = []
    for path in paths:
        points = read_profile(Path(path), check=lambda point: _check(point, devices))
        # Said to come from the file, so that no result credits the user's figures to this project.
        users.append([replace(point, source=point.source or path) for point in points])
        unpriced = sorted({point.op for point in points} - OPS.keys() - COLLECTIVES.keys())
        if unpriced:
            notes.append(f"{path}: no model here runs {', '.join(unpriced)}: those points are not used")
    sources = {point.source for points in users for point in points}
    return Profiles(merge_profiles(*users, _shipped_points()), gpus, sources, tuple(notes))
