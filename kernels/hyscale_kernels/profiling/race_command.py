"""``hyscale profile race``: HyTopK against rivals, and the kernels of replay beside their floors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_INTERRUPTED
from hyscale_ref.output import to_standard_output, write_json

from .environment import err, need_gpu, say, stop, writable

# Races of other ops, which need more than the kernels: each entry names a module with race() and header().
RACES = "hyscale.races"

DEFAULTS = {
    "shapes": "4096x65536,4096x262144,2048x1048576",
    "dtypes": "fp8,bf16",
    "regimes": "random",
    "windows": "full",
    "rivals": "deepgemm+flashinfer,triton+flashinfer,cudnn",
}
ROUNDS, BUDGET_S = 15, 20.0


class Raced(StrEnum):
    hytopk = "hytopk"
    replay = "replay"


def listed(option: str, text: str, known: Any) -> list[str]:
    """The comma-separated names of an option; a usage error names the first that is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"no {option} {name!r}; there are: {', '.join(known)}", param_hint=f"--{option}"
            )
    if not names:
        raise typer.BadParameter(f"names at least one of: {', '.join(known)}", param_hint=f"--{option}")
    return names


def race_command(
    op: Annotated[Raced, typer.Option(help="what is raced")] = Raced.hytopk,
    shapes: Annotated[
        str | None, typer.Option(help=f"ROWSxKEYS, comma-separated [{DEFAULTS['shapes']}]")
    ] = None,
    dtypes: Annotated[str | None, typer.Option(help=f"bf16, fp16, fp8 [{DEFAULTS['dtypes']}]")] = None,
    regimes: Annotated[
        str | None, typer.Option(help=f"distributions of the scores [{DEFAULTS['regimes']}]")
    ] = None,
    windows: Annotated[str | None, typer.Option(help=f"full or causal [{DEFAULTS['windows']}]")] = None,
    rivals: Annotated[
        str | None, typer.Option(help=f"contenders beside hytopk, if installed [{DEFAULTS['rivals']}]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=3, help=f"timed calls a contender [{ROUNDS}]")] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.1, help=f"seconds of device time a race [{BUDGET_S:g}]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="append the records to this JSON Lines file")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the records as one JSON file; - for standard output")
    ] = None,
) -> None:
    """Race HyTopK against rivals: same process, same inputs, taking turns, correctness first.

    With --op replay, time the kernels of selection replay beside their floors, behind a gate of their own;
    its shape, rounds and budget are fixed.
    """
    writable("--out", out)
    writable("--json", as_json)
    given = {"shapes": shapes, "dtypes": dtypes, "regimes": regimes, "windows": windows, "rivals": rivals}
    if op is Raced.replay:
        for name, value in {**given, "rounds": rounds, "budget": budget}.items():
            if value is not None:
                raise typer.BadParameter(
                    "is for --op hytopk; replay's shape, rounds and budget are fixed", param_hint=f"--{name}"
                )
        need_gpu()
        _race_replay(out, as_json)
        return
    chosen = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    import torch

    from .cases import CAPTURED, DTYPES, REGIMES, WINDOWS, captured_case, draw
    from .contenders import CONTENDERS
    from .race import Shape, race

    try:
        sizes = [Shape.parse(text) for text in chosen["shapes"].split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shapes") from error
    names = ["hytopk", *(n for n in listed("rivals", chosen["rivals"], CONTENDERS) if n != "hytopk")]
    cases = list(
        product(
            listed("dtypes", chosen["dtypes"], DTYPES),
            sizes,
            listed("regimes", chosen["regimes"], [*REGIMES, CAPTURED]),
            listed("windows", chosen["windows"], WINDOWS),
        )
    )
    for _, shape, regime, window in cases:
        if regime != CAPTURED and window == "causal" and shape.rows > shape.keys:
            raise typer.BadParameter(
                f"{shape.rows}x{shape.keys} has more causal queries than keys", param_hint="--shapes"
            )
    need_gpu()
    results = Results(out, as_json)
    with results.kept():
        for dtype, shape, regime, window in cases:
            what = f"{shape.rows} x {shape.keys} {dtype} {regime} {window}"
            err.print(f"racing {what}", highlight=False)
            try:
                if regime == CAPTURED:
                    case = captured_case(shape.rows, shape.keys, dtype)
                else:
                    case = draw(shape.rows, shape.keys, dtype, regime=regime, windows=window)
            except (ValueError, FileNotFoundError) as error:
                raise typer.BadParameter(str(error), param_hint=f"--regimes {regime}") from error
            except torch.OutOfMemoryError as error:
                say(f"left out: {what}: its inputs do not fit ({str(error).splitlines()[0]})")
                results.failed = True
                continue
            for record in race(case, names, rounds=rounds or ROUNDS, budget_s=budget or BUDGET_S):
                results.add(record)
            del case
    results.show(table_of(results.records))
    if results.failed or any(record["status"] == "wrong" for record in results.records):
        raise typer.Exit(EXIT_FAILED)


class Results:
    """The records of a command: each goes to ``out`` at once, all to ``as_json`` at the end."""

    def __init__(self, out: Path | None, as_json: Path | None) -> None:
        self.records: list[dict[str, Any]] = []
        self.failed = False
        self._out, self._as_json = out, as_json

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """However the races end, what they found is written; an interruption is exit code 130."""
        try:
            yield
        except KeyboardInterrupt:
            raise stop(EXIT_INTERRUPTED, f"interrupted after {len(self.records)} records") from None
        finally:
            if self._as_json is not None:
                write_json(self._as_json, {"schema": 1, "races": self.records})

    def show(self, table: Table) -> None:
        if not to_standard_output(self._as_json):
            Console().print(table)


def _race_replay(out: Path | None, as_json: Path | None) -> None:
    found = {entry.name: entry for entry in entry_points(group=RACES)}
    if Raced.replay.value not in found:
        raise stop(EXIT_ENVIRONMENT, "--op replay needs the installed package, which names its gate")
    module = found[Raced.replay.value].load()
    common = module.header()
    results = Results(out, as_json)
    table = Table(title="Replay race", caption="floors in ms; a red gate stops the race")
    for heading in ("claim or call", "dtype", "median ms", "floors", "holds"):
        table.add_column(heading)
    with results.kept():
        for record in module.race():
            results.add({**common, **record})
            floors = ", ".join(f"{name} {value}" for name, value in record.get("floor_ms", {}).items())
            time = f"{record['median_ms']:.3f}" if "median_ms" in record else ""
            what = record.get("call", record["claim"])
            table.add_row(what, record.get("dtype", ""), time, floors, str(record.get("holds", "")))
            err.print(f"{what} {record.get('dtype', '')} {time}", highlight=False)
    results.show(table)
    if not all(record.get("holds", True) for record in results.records):
        raise typer.Exit(EXIT_FAILED)


def table_of(records: list[dict[str, Any]]) -> Table:
    """A row a contender and case; the ratio is its time over hytopk's in the same race."""
    table = Table(
        title="HyTopK race", caption="ratio: time over hytopk's; rate: scoring FLOPs over the whole time"
    )
    for heading in ("rows x keys", "dtype", "regime", "windows", "contender"):
        table.add_column(heading)
    for heading in ("median ms", "p20-p80", "ratio", "TFLOP/s", "extra MiB"):
        table.add_column(heading, justify="right")
    ours = {_case(r): r["median_ms"] for r in records if r["contender"] == "hytopk" and r["status"] == "ok"}
    for record in records:
        where = (
            f"{record['rows']} x {record['keys']}",
            record["dtype"],
            record["regime"],
            record["windows"],
            record["contender"],
        )
        if record["status"] != "ok":
            table.add_row(*where, record["status"], record["reason"], "", "", "")
            continue
        base = ours.get(_case(record))
        table.add_row(
            *where,
            f"{record['median_ms']:.3f}",
            f"{record['p20_ms']:.3f}-{record['p80_ms']:.3f}",
            f"{record['median_ms'] / base:.2f}" if base else "",
            f"{record['scoring_tflops']:.0f}",
            f"{record['peak_extra_bytes'] / 2**20:.0f}",
        )
    return table


def _case(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("rows", "keys", "dtype", "regime", "windows"))
