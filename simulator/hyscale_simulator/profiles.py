"""Profiles: all measured points at hand, grouped into tables, and which table prices a call."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from hyscale_ref.profile import (
    ProfileError,
    ProfilePoint,
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
from hyscale_simulator.tables import Table, origin

__all__ = ["Profiles", "load_profiles"]

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


LEAST = 0.01
"""Of its floor: what takes less is in another unit.  (Caches and fusion make a tenth possible.)"""


def _check_users(point: ProfilePoint, devices: Mapping[str, Gpu]) -> None:
    """:func:`_check`, and a time that the work can be done in."""
    _check(point, devices)
    if point.op not in OPS or point.median_us is None:
        return
    placed, gpu = _placed(point), devices[point.device]
    try:
        floor = floor_us(Kernel(placed.op, placed.dtype, placed.shape), gpu)
    except KeyError as error:
        raise ProfileError(
            f"{point.op}: shape has no {error.args[0]!r}, which its work is counted by"
        ) from None
    if point.median_us < LEAST * floor:
        raise ProfileError(
            f"{point.op}: median_us = {point.median_us}: at least {LEAST * floor:.4g} is possible, 1 % "
            f"of what the work takes at the best rates of {gpu.name}; is it microseconds?"
        )


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
        source = origin(next(iter(sizes.values())))
        table = network.Table(op, ranks, tuple(sorted(sizes)), latencies, source)
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
    devices = {gpu.device: gpu for gpu in reversed(gpus)}
    users: list[list[ProfilePoint]] = []
    notes = []
    for path in paths:
        points = read_profile(Path(path), check=lambda point: _check_users(point, devices))
        # Said to come from the file, so that no result credits the user's figures to this project.
        users.append([replace(point, source=point.source or path) for point in points])
        unpriced = sorted({point.op for point in points} - OPS.keys() - COLLECTIVES.keys())
        if unpriced:
            notes.append(f"{path}: no model here runs {', '.join(unpriced)}: those points are not used")
    sources = {point.source for points in users for point in points}
    return Profiles(merge_profiles(*users, _shipped_points()), gpus, sources, tuple(notes))
