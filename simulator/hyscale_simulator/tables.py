"""Measured tables: kernels by shape, looked up exactly or interpolated by their own roofline.

A table holds one op, implementation, dtype and regime on one GPU.  Between two points, time is a straight
line in its floor (see :mod:`hyscale_simulator.roofline`): a fixed part, and a part that grows with the work.
Beyond the last point the ratio of the two is held: utilisation, never latency.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hyscale_ref.profile import ProfilePoint, Shape, as_shape
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import OPS, Kernel
from hyscale_simulator.roofline import floor_us

__all__ = ["Lookup", "Table", "origin"]


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
        self._ratios: dict[Shape, _Ratio] = {}
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
            return Lookup(point.median_us, True, 1.0, _spread(point), origin(point), call)
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
        return Lookup(us, False, found.stretch, _spread(point), origin(point), measured)

    def _floor_us(self, shape: Mapping[str, int]) -> float:
        return floor_us(Kernel(self.op, self.dtype, as_shape(shape)), self.gpu)

    def _measured(self, point: ProfilePoint) -> _Ratio:
        found = self._ratios.get(point.shape)
        if found is None:
            assert point.median_us is not None
            found = _Ratio(point.median_us / self._floor_us(dict(point.shape)), 1.0, point)
            self._ratios[point.shape] = found
        return found

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
        if below < above and below <= here <= above:
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

        Where that is out of its reach along a later axis, the nearest coordinate that reaches further (the
        larger of two as near) says how the ratio goes on.
        """
        found = self._ratio(node.below[at], shape, depth + 1)
        if found.stretch <= 1:
            return found
        here = node.coordinates[at]
        others = [i for i in range(len(node.coordinates)) if i != at]
        reached = {i: self._ratio(node.below[i], shape, depth + 1) for i in others}

        def distance(i: int) -> tuple[float, float, int]:
            return reached[i].stretch, abs(math.log(node.coordinates[i] / here)), -i

        other = min(others, key=distance, default=at)
        if other == at or reached[other].stretch >= found.stretch:
            return found
        there = reached[other]
        edge = self._ratio(node.below[other], self._clamped(node.below[at], shape, depth + 1), depth + 1)
        if edge.stretch > 1:  # nothing in common: the other stands for this one
            return there
        return there._replace(ratio=found.ratio * there.ratio / edge.ratio)

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


def _spread(point: ProfilePoint) -> float:
    if point.p20_us is None or point.p80_us is None or point.median_us is None:
        return 0.0
    return (point.p80_us - point.p20_us) / 2 / point.median_us


def origin(point: ProfilePoint) -> str:
    """Who measured it."""
    return point.source or f"measured by this project ({point.time_utc[:10] or 'undated'})"
