"""The profile record: one measured kernel, and the JSON-lines files that hold many of them.

A profile is where the two halves of the project meet: kernels write it on a GPU, the simulator reads it
anywhere.  A file is plain or gzipped (``.gz``) JSON lines.  A *header* line carries ``"schema"`` and any
field shared by the points that follow it; a *point* line carries the rest.  A file starts with a header,
may hold several (so files can be concatenated), and describes one device.

Units are in the field names.  Standard library only.
"""

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

SCHEMA = 1
STATUSES = ("ok", "failed")

Shape = tuple[tuple[str, int], ...]


class ProfileError(ValueError):
    """A profile file or point that cannot be used; the message names the file, line, field and value."""


class UnknownSchemaError(ProfileError):
    """A header of a version that is not read here."""


def as_shape(dimensions: Mapping[str, int]) -> Shape:
    """Named integers as a sorted, hashable tuple."""
    return tuple(sorted(dimensions.items()))


def shape_text(shape: Mapping[str, int] | Shape) -> str:
    """``rows=4096 keys=65536``: a shape for people."""
    return " ".join(f"{name}={size}" for name, size in dict(shape).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One measured call.

    op, implementation, dtype: what ran, e.g. ``gemm``, ``cublas``, ``bf16``.
    shape: named integers, sorted by name; build it with :func:`as_shape`.
    regime: what else the time depends on (``trained``, ``flat scores``, ``causal``); "" when nothing.
    device: the GPU model as the driver names it; serial: the board, "" when unknown.
    median_us, p20_us, p80_us: microseconds a call; p20 <= median <= p80.  None only for a failed point.
    samples: how many calls the median is over (0 when the source does not say).
    flops_per_s, bytes_per_s: achieved rates by the op's own count of work, where it has one.
    ceiling_fraction: time of the measured floor / median, in (0, 1.5] (a floor is itself measured).
    peak_extra_bytes: peak memory above inputs and outputs.
    versions: package -> version.  commit, clock_mhz, power_limit_w, time_utc (ISO 8601): the conditions.
    source: "" for our own measurement, otherwise where the figure was published.
    status, error: ``failed`` keeps an op that could not run, with the reason.
    """

    op: str
    implementation: str
    dtype: str
    shape: Shape
    device: str
    median_us: float | None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    regime: str = ""
    serial: str = ""
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    ceiling_fraction: float | None = None
    peak_extra_bytes: int | None = None
    versions: tuple[tuple[str, str], ...] = ()
    commit: str = ""
    clock_mhz: float | None = None
    power_limit_w: float | None = None
    time_utc: str = ""
    source: str = ""
    status: str = "ok"
    error: str = ""

    def __post_init__(self) -> None:
        for name in ("op", "implementation", "dtype", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ProfileError(f"{name} = {value!r}; a non-empty string is needed")
        for name in ("regime", "serial", "commit", "time_utc", "source", "error"):
            if not isinstance(getattr(self, name), str):
                raise ProfileError(f"{name} = {getattr(self, name)!r}; a string is needed")
        if self.status not in STATUSES:
            raise ProfileError(f"status = {self.status!r}; allowed: {', '.join(STATUSES)}")
        if not isinstance(self.shape, tuple):
            raise ProfileError(f"shape = {self.shape!r}; build it with as_shape")
        for key, size in self.shape:
            if not isinstance(key, str) or type(size) is not int or size < 0:
                raise ProfileError(f"shape.{key} = {size!r}; a non-negative integer is needed")
        for package, release in self.versions:
            if not isinstance(package, str) or not isinstance(release, str):
                raise ProfileError(f"versions.{package} = {release!r}; a string is needed")
        if list(self.shape) != sorted(self.shape):
            raise ProfileError(f"shape = {self.shape!r}; names must be sorted (use as_shape)")
        if type(self.samples) is not int or self.samples < 0:
            raise ProfileError(f"samples = {self.samples!r}; a non-negative integer is needed")
        if self.peak_extra_bytes is not None and (
            type(self.peak_extra_bytes) is not int or self.peak_extra_bytes < 0
        ):
            raise ProfileError(f"peak_extra_bytes = {self.peak_extra_bytes!r}; an integer >= 0 is needed")
        self._check_times()
        for name in ("flops_per_s", "bytes_per_s", "clock_mhz", "power_limit_w"):
            _check_positive(name, getattr(self, name))
        _check_positive("ceiling_fraction", self.ceiling_fraction, at_most=1.5)

    def _check_times(self) -> None:
        for name in ("median_us", "p20_us", "p80_us"):
            _check_positive(name, getattr(self, name))
        if self.status == "failed":
            if self.median_us is not None:
                raise ProfileError(f"median_us = {self.median_us!r}; a failed point has no time")
            return
        if self.median_us is None:
            raise ProfileError("median_us = None; microseconds > 0 are needed")
        low = self.median_us if self.p20_us is None else self.p20_us
        high = self.median_us if self.p80_us is None else self.p80_us
        if not low <= self.median_us <= high:
            raise ProfileError(
                f"p20_us, median_us, p80_us = {low}, {self.median_us}, {high}; they must not decrease"
            )

    @property
    def key(self) -> tuple[str, str, str, str, str, Shape]:
        """What was measured, without when and how: device, op, implementation, dtype, regime, shape."""
        return (self.device, self.op, self.implementation, self.dtype, self.regime, self.shape)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, ready for ``json.dumps``."""
        record: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                record[item.name] = dict(value) if item.name in ("shape", "versions") else value
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The point a JSON object describes; :class:`ProfileError` names a bad field and value."""
        if record.keys() - _NAMES:
            raise ProfileError(f"unknown field {sorted(record.keys() - _NAMES)[0]!r}; known: {_KNOWN}")
        missing = _REQUIRED - record.keys() - ({"median_us"} if record.get("status") == "failed" else set())
        if missing:
            raise ProfileError(f"field {sorted(missing)[0]!r} is missing")
        values = dict(record)
        values.setdefault("median_us", None)
        for name in ("shape", "versions"):
            if name in values:
                if not isinstance(values[name], Mapping):
                    raise ProfileError(f"{name} = {values[name]!r}; an object is needed")
                values[name] = tuple(sorted(values[name].items()))
        for name in _FLOATS:
            value = values.get(name)
            if type(value) is int:
                try:
                    values[name] = float(value)
                except OverflowError:
                    raise ProfileError(f"{name} = {value}; a finite number > 0 is needed") from None
        return cls(**values)


_NAMES = {item.name for item in fields(ProfilePoint)}
_KNOWN = ", ".join(item.name for item in fields(ProfilePoint))
_REQUIRED = {"op", "implementation", "dtype", "shape", "device", "median_us"}
_FLOATS = (
    "median_us", "p20_us", "p80_us", "flops_per_s", "bytes_per_s", "ceiling_fraction", "clock_mhz",
    "power_limit_w",
)  # fmt: skip


def _check_positive(name: str, value: float | None, at_most: float = math.inf) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= at_most:
        limit = "a finite number > 0" if at_most == math.inf else f"a number in (0, {at_most}]"
        raise ProfileError(f"{name} = {value!r}; {limit} is needed")


def read_profile(
    path: str | Path,
    *,
    one_device: bool = True,
    check: Callable[[ProfilePoint], None] | None = None,
    faults: list[str] | None = None,
) -> list[ProfilePoint]:
    """Every point of a file, in order.

    :class:`ProfileError` names the file, line and field of the first bad line: not JSON, truncated, an
    unknown schema or field, a bad value, or (``one_device``) a second device.

    check: what else a reader asks of each point; it raises :class:`ProfileError`.

    faults: where it is given, a bad line is described there and passed over, so that what was measured
    before and after it is not lost; an unknown schema still raises, because nothing below it is understood.
    """
    points: list[ProfilePoint] = []
    shared: dict[str, Any] | None = None
    number = 0

    def take(line: str) -> None:
        nonlocal shared
        record = _object(line)
        if "schema" in record:
            shared = _header(record)
            return
        if shared is None:
            raise ProfileError('the first line must be a header with "schema"')
        point = ProfilePoint.from_json(shared | record if shared else record)
        if one_device and points and point.device != points[0].device:
            raise ProfileError(
                f"device = {point.device!r}; this file began with {points[0].device!r}, "
                "and a file holds one GPU model"
            )
        if check is not None:
            check(point)
        points.append(point)

    try:
        with _open(Path(path)) as lines:
            for line in lines:
                number += 1  # read again where an error is reported
                if not line.strip():
                    continue
                try:
                    take(_text(line))
                except UnknownSchemaError:
                    raise
                except ProfileError as error:
                    if faults is None:
                        raise
                    faults.append(f"{path}:{number}: {error}")
    except ProfileError as error:
        raise type(error)(f"{path}:{number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        fault = f"{path}:{number + 1}: unreadable: {error}"
        if faults is None or not number:
            raise ProfileError(fault) from error
        faults.append(fault)
    if shared is None and not faults:
        raise ProfileError(f"{path}:1: empty; a profile starts with a header line")
    return points


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(f"not UTF-8 text ({error.reason}): {line.strip()[:60]!r}") from None


def _object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ProfileError(f"not JSON ({error.msg}): {line.strip()[:60]!r}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise ProfileError(f"not JSON of a profile ({error}): {line.strip()[:60]!r}") from None
    if not isinstance(record, dict):
        raise ProfileError(f"not a JSON object: {line.strip()[:60]!r}")
    return record


def _header(record: dict[str, Any]) -> dict[str, Any]:
    shared = dict(record)
    schema = shared.pop("schema")
    if schema != SCHEMA:
        raise UnknownSchemaError(f"schema = {schema!r}; this version reads schema {SCHEMA}")
    if shared.keys() - _NAMES:
        raise ProfileError(f"unknown field {sorted(shared.keys() - _NAMES)[0]!r}; known: {_KNOWN}")
    return shared


def write_profile(path: str | Path, points: Sequence[ProfilePoint], *, append: bool = False) -> None:
    """Write points as JSON lines, gzipped when the name ends in ``.gz``; deterministic bytes.

    Fields equal in every point go to one header.  ``append`` adds a header and the points to an existing
    file, so a measurement in progress loses nothing when it stops.
    """
    text = "".join(f"{line}\n" for line in _lines(points)).encode()
    path = Path(path)
    data = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    with path.open("ab" if append else "wb") as stream:
        stream.write(data)


class ProfileWriter:
    """Adds points to a plain file, each on disk before :meth:`add` returns; a context manager.

    shared: fields most points have in common; they go to one header. What an interrupted run left, a broken
    last line included, stays as it is. ProfileError for a ``.gz`` name (it cannot be added to safely).
    """

    def __init__(self, path: str | Path, shared: Mapping[str, Any]) -> None:
        path = Path(path)
        if path.suffix == ".gz":
            raise ProfileError(f"{path}: a run writes plain lines; compress the file when it is done")
        self._shared = {
            name: dict(value) if name == "versions" else value
            for name, value in shared.items()
            if value not in ("", None, ())
        }
        unknown = self._shared.keys() - _NAMES
        if unknown:
            raise ProfileError(f"unknown field {sorted(unknown)[0]!r}; known: {_KNOWN}")
        broken = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._stream = path.open("a", encoding="utf-8")
        if broken:
            self._stream.write("\n")
        self._write({"schema": SCHEMA, **self._shared})

    def add(self, point: ProfilePoint) -> None:
        """Write one point."""
        record = point.to_json()
        for name in self._shared.keys() - record.keys():  # a default, where the header has something else
            record[name] = dict(point.versions) if name == "versions" else getattr(point, name)
        self._write({name: value for name, value in record.items() if self._shared.get(name, ...) != value})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lines(points: Sequence[ProfilePoint]) -> Iterator[str]:
    records = [point.to_json() for point in points]
    shared: dict[str, Any] = {}
    if records:
        first = records[0]
        shared = {
            name: first[name]
            for name in first
            if name != "median_us" and all(name in r and r[name] == first[name] for r in records)
        }
    yield json.dumps({"schema": SCHEMA, **shared}, ensure_ascii=False)
    for record in records:
        own = {name: value for name, value in record.items() if name not in shared}
        yield json.dumps(own, ensure_ascii=False, separators=(",", ":"))


def merge_profiles(*profiles: Iterable[ProfilePoint]) -> list[ProfilePoint]:
    """All points, earlier profiles first, exact repeats dropped.

    Points that measured the same thing under other conditions all stay, each with its own provenance:
    what to make of them is the reader's decision (:attr:`ProfilePoint.key` groups them).
    """
    return list(dict.fromkeys(point for profile in profiles for point in profile))


def best_of(points: Iterable[ProfilePoint]) -> dict[tuple[str, str, str, str, str, Shape], ProfilePoint]:
    """One successful point for each key: the first that appears, so put the preferred profile first."""
    chosen: dict[tuple[str, str, str, str, str, Shape], ProfilePoint] = {}
    for point in points:
        if point.status == "ok":
            chosen.setdefault(point.key, point)
    return chosen
