"""Thousands of scenarios from one: a grid over any fields, evaluated anywhere, resumable.

Each finished point is appended to a journal at once, under a key of the resolved scenario, the profiles and
the simulator's own sources; a later run takes from it what it holds.  The table written at the end is in grid
order, so that it is the same bytes whatever the executor and the order of completion.
"""

import csv
import hashlib
import io
import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyscale_ref import output
from hyscale_simulator.descriptions import Description, DescriptionError
from hyscale_simulator.durations import MissingProfileError
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.executors import Executor
from hyscale_simulator.memory import GIB
from hyscale_simulator.scenario import Scenario

__all__ = ["OBJECTIVES", "Journal", "Objective", "Point", "Vary", "grid", "pareto", "sweep", "write"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Vary:
    """A field and the values it takes."""

    field: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> "Vary":
        """``field=v1,v2``: TOML values; a bare word is a string."""
        field, equals, listed = text.partition("=")
        if not equals or not field.strip() or not listed.strip():
            raise DescriptionError(f"--vary {text!r}: field=v1,v2 is wanted: layout.context_parallel=32,64")
        try:
            values = tomllib.loads(f"values = [{listed}]")["values"]
        except tomllib.TOMLDecodeError:
            values = [_value(item.strip()) for item in listed.split(",")]
        return cls(field.strip(), tuple(tuple(v) if isinstance(v, list) else v for v in values))


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@dataclass(frozen=True)
class Point:
    """One point of a grid: what was set, and the scenario, or why there is none."""

    settings: tuple[tuple[str, Any], ...]
    scenario: Scenario | None
    refused: str = ""


def grid(scenario: Scenario, varied: Sequence[Vary]) -> list[Point]:
    """Every combination, the last field fastest.

    A combination that contradicts itself is a refused point; a field that does not exist, or a value that no
    combination accepts, is a :class:`DescriptionError`.
    """
    fields = [vary.field for vary in varied]
    for field in fields:
        if fields.count(field) > 1:
            raise DescriptionError(f"--vary {field}: given twice")
        check_field(scenario, field)
    points = []
    accepted: set[tuple[int, int]] = set()
    reasons: dict[tuple[int, int], str] = {}
    for choice in itertools.product(*(range(len(vary.values)) for vary in varied)):
        settings = tuple((vary.field, vary.values[at]) for vary, at in zip(varied, choice, strict=True))
        try:
            point = Point(settings, scenario.with_(**dict(settings)))
            accepted.update(enumerate(choice))
        except DescriptionError as error:
            point = Point(settings, None, str(error))
            for item in enumerate(choice):
                reasons.setdefault(item, str(error))
        points.append(point)
    for item, reason in reasons.items():
        if item not in accepted:
            vary = varied[item[0]]
            raise DescriptionError(f"--vary {vary.field}={vary.values[item[1]]}: {reason}")
    return points


def check_field(scenario: Scenario, path: str) -> Any:
    """The value of a field by dotted path (into the model, cluster and GPU too); :class:`DescriptionError`
    says what there is instead."""
    described: Mapping[str, Any] = {
        "model": scenario.model_description,
        "cluster": scenario.cluster_description,
        "cluster.gpu": scenario.gpu_description,
    }
    value: Any = scenario
    walked: list[str] = []
    for part in path.split("."):
        known = list(type(value).model_fields) if isinstance(value, Description) else []
        if part not in known:
            where = ".".join(walked) or "the scenario"
            raise DescriptionError(
                f"{path}: no such field; {where} has " + (", ".join(known) if known else "no fields inside")
            )
        walked.append(part)
        name = ".".join(walked)
        value = described[name] if name in described and name != path else getattr(value, part)
    return value


@dataclass(frozen=True)
class Objective:
    """What is best: a column, and whether more of it is better."""

    column: str
    more_is_better: bool = False


OBJECTIVES: Mapping[str, Objective] = {
    "step_time": Objective("step_time_s"),
    "tokens_per_gpu_s": Objective("tokens_per_s_per_gpu", more_is_better=True),
    "cost": Objective("dollars_per_million_tokens"),
}

METRICS = (
    "step_time_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "peak_gib", "fits",
    "dollars_per_million_tokens", "gpus", "scenario_hash", "refused",
)  # fmt: skip


def evaluate_row(task: tuple[Scenario, tuple[str, ...]]) -> Row:
    """The metrics of one scenario; a layout that breaks a rule gives a row that says so."""
    scenario, profiles = task
    row: Row = dict.fromkeys(METRICS)
    row |= {"gpus": scenario.gpus, "scenario_hash": scenario.hash, "refused": ""}
    try:
        result = evaluator(profiles)(scenario)
    except (DescriptionError, MissingProfileError) as error:
        return row | {"refused": str(error.args[0])}
    low, high = result.uncertainty_s
    price = scenario.cluster_description.dollars_per_gpu_hour
    tokens_per_hour = result.tokens_per_s_per_gpu * 3600
    return row | {
        "step_time_s": result.step_time_s,
        "low_s": low,
        "high_s": high,
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
        "mfu": result.mfu,
        "peak_gib": result.memory.peak_bytes / GIB,
        "fits": result.memory.fits,
        "dollars_per_million_tokens": None if price is None else price / tokens_per_hour * 1e6,
    }


@cache
def sources_digest() -> str:
    """SHA-256 of the simulator's sources and data: results of another simulator are not reused."""
    digest = hashlib.sha256()
    root = resources.files("hyscale_simulator")
    with resources.as_file(root) as folder:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".jsonl", ".gz"):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Journal:
    """Finished points on disk, one JSON line each: ``{"key": …, "row": {…}}``.

    An entry that cannot be read is a :class:`DescriptionError` naming the line, before any work; a last line
    without its end, which an interruption leaves, is cut off and counted in ``torn``.
    """

    def __init__(self, path: Path | None, profiles: tuple[str, ...] = ()) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.torn = 0
        digest = hashlib.sha256(sources_digest().encode())
        for name in profiles:
            digest.update(Path(name).read_bytes())
        self._salt = digest.hexdigest()
        if path is not None and path.exists():
            self._read(path)
        if path is not None:
            with path.open("a", encoding="utf-8"):
                pass  # an unwritable path fails here, before any work

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            self.torn = 1
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = json.loads(line)
                key, row = entry["key"], entry["row"]
                if not isinstance(key, str) or not isinstance(row, dict) or set(row) != set(METRICS):
                    raise ValueError("not an entry of this kind")
            except (ValueError, KeyError, TypeError) as error:
                raise DescriptionError(
                    f"{path}: line {number} is corrupt ({error}): delete the line, or the file to start anew"
                ) from None
            self.rows[key] = row

    def key(self, scenario: Scenario) -> str:
        """What a scenario's row is kept under."""
        return hashlib.sha256(f"{self._salt}{scenario.hash}".encode()).hexdigest()[:24]

    def add(self, key: str, row: Row) -> None:
        """Keep a row, on disk at once."""
        self.rows[key] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "row": row}) + "\n")


def sweep(
    points: Sequence[Point],
    run: Executor,
    journal: Journal,
    profiles: tuple[str, ...] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """A row for each point, in order: its settings, then its metrics.

    Equal scenarios are evaluated once, and none that the journal holds.  Interrupted, what is finished is in
    the journal.
    """
    waiting: dict[str, Scenario] = {}
    for point in points:
        if point.scenario is not None and (key := journal.key(point.scenario)) not in journal.rows:
            waiting.setdefault(key, point.scenario)
    keys = list(waiting)
    progress(0, len(keys))
    results = run.run(evaluate_row, [(waiting[key], profiles) for key in keys])
    for finished, (index, row) in enumerate(results, start=1):
        journal.add(keys[index], row)
        progress(finished, len(keys))
    rows = []
    for point in points:
        metrics: Row = {**dict.fromkeys(METRICS), "refused": point.refused}
        if point.scenario is not None:
            metrics = journal.rows[journal.key(point.scenario)]
        rows.append({**dict(point.settings), **metrics})
    return rows


def ranked(rows: Sequence[Row], objective: Objective, fits: bool) -> list[Row]:
    """Rows that can run (and fit, if asked for), best first."""
    able = [row for row in rows if row[objective.column] is not None and (row["fits"] or not fits)]
    return sorted(able, key=lambda row: row[objective.column], reverse=objective.more_is_better)


def pareto(rows: Sequence[Row], objective: Objective) -> list[Row]:
    """Rows that no other beats in the objective, the memory and the number of GPUs at once, best first."""
    sign = -1.0 if objective.more_is_better else 1.0

    def position(row: Row) -> tuple[float, float, float]:
        return sign * row[objective.column], row["peak_gib"], row["gpus"]

    front: list[Row] = []
    best: list[tuple[float, float, float]] = []
    for row in sorted((r for r in rows if r[objective.column] is not None), key=position):
        here = position(row)
        if not any(all(a <= b for a, b in zip(other, here, strict=True)) for other in best):
            front.append(row)
            best.append(here)
    return front


def write(rows: Sequence[Row], path: Path) -> None:
    """The table as ``.csv``, ``.jsonl`` or ``.parquet``, replacing the file in one move."""
    check_output(path)
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".parquet":
        import pandas as pd

        pd.DataFrame(rows).to_parquet(partial)
    elif path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else list(METRICS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        partial.write_text(text.getvalue(), encoding="utf-8")
    else:
        partial.write_text("".join(_lines(rows)), encoding="utf-8")
    partial.replace(path)


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row) + "\n"


def check_output(path: Path) -> None:
    """Before any work: the format is one we write, and the folder takes files."""
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise DescriptionError(f"--out {path}: the name has to end in .csv, .jsonl or .parquet")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise DescriptionError(f"--out {path}: parquet needs the package 'pyarrow': pip install pyarrow")
    check_writable(path, "--out")


def check_writable(path: Path, option: str) -> None:
    """:class:`DescriptionError`, naming the option, for a path that a result cannot be written to."""
    try:
        output.check_writable(path)
    except ValueError as error:
        raise DescriptionError(f"{option} cannot be written: {error}") from None
