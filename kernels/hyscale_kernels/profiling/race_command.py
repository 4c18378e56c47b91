"""``hyscale profile race``: HyTopK against rivals, and the kernels of replay beside their floors."""

import json
from enum import StrEnum
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .environment import EXIT_ENVIRONMENT, EXIT_FAILED, err, need_gpu, stop

# Races of other ops, which need more than the kernels: each entry names a module with race() and header().
RACES = "hyscale.races"

DEFAULTS = {
    "shapes": "4096x65536,4096x262144,2048x1048576",
    "dtypes": "fp8,bf16",
    "regimes": "random",
    "windows": "full",
    "rivals": "deepgemm+flashinfer,cudnn",
}


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
    rounds: Annotated[int, typer.Option(min=3, help="timed calls a contender")] = 15,
    budget: Annotated[float, typer.Option(min=0.1, help="seconds of device time a race")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="append the records to this JSON Lines file")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the records as one JSON file")] = None,
) -> None:
    """Race HyTopK against rivals: same process, same inputs, taking turns, correctness first.

    With --op replay, time the kernels of selection replay beside their floors, behind a gate of their own;
    its shape, rounds and budget are fixed.
    """
    given = {"shapes": shapes, "dtypes": dtypes, "regimes": regimes, "windows": windows, "rivals": rivals}
    if op is Raced.replay:
        for name, value in given.items():
            if value is not None:
                raise typer.BadParameter("is for --op hytopk; replay has one shape", param_hint=f"--{name}")
        need_gpu()
        _race_replay(out, as_json)
        return
    chosen = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    from .cases import CAPTURED, DTYPES, REGIMES, WINDOWS, captured_case, draw
    from .contenders import CONTENDERS
    from .race import Shape, race

    try:
        sizes = [Shape.parse(text) for text in chosen["shapes"].split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shapes") from error
    names = ["hytopk", *(n for n in listed("rivals", chosen["rivals"], CONTENDERS) if n != "hytopk")]
    cases = product(
        listed("dtypes", chosen["dtypes"], DTYPES),
        sizes,
        listed("regimes", chosen["regimes"], [*REGIMES, CAPTURED]),
        listed("windows", chosen["windows"], WINDOWS),
    )
    need_gpu()
    records: list[dict[str, Any]] = []
    for dtype, shape, regime, window in cases:
        err.print(f"racing {shape.rows} x {shape.keys} {dtype} {regime} {window}", highlight=False)
        if regime == CAPTURED:
            try:
                case = captured_case(shape.rows, shape.keys, dtype)
            except (ValueError, FileNotFoundError) as error:
                raise typer.BadParameter(str(error), param_hint="--regimes captured") from error
        else:
            case = draw(shape.rows, shape.keys, dtype, regime=regime, windows=window)
        for record in race(case, names, rounds=rounds, budget_s=budget):
            records.append(record)
            if out is not None:
                with out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(record) + "\n")
        del case
    if as_json is not None:
        as_json.write_text(json.dumps({"schema": 1, "races": records}, indent=1), encoding="utf-8")
    Console().print(table_of(records))
    if any(record["status"] == "wrong" for record in records):
        raise typer.Exit(EXIT_FAILED)


def _race_replay(out: Path | None, as_json: Path | None) -> None:
    found = {entry.name: entry for entry in entry_points(group=RACES)}
    if Raced.replay.value not in found:
        raise stop(EXIT_ENVIRONMENT, "--op replay needs the installed package, which names its gate")
    module = found[Raced.replay.value].load()
    common = module.header()
    records: list[dict[str, Any]] = []
    table = Table(title="Replay race", caption="floors in ms; a red gate stops the race")
    for heading in ("claim or call", "dtype", "median ms", "floors", "holds"):
        table.add_column(heading)
    for record in module.race():
        records.append({**common, **record})
        if out is not None:
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(records[-1]) + "\n")
        floors = ", ".join(f"{name} {value}" for name, value in record.get("floor_ms", {}).items())
        time = f"{record['median_ms']:.3f}" if "median_ms" in record else ""
        what = record.get("call", record["claim"])
        table.add_row(what, record.get("dtype", ""), time, floors, str(record.get("holds", "")))
        err.print(f"{what} {record.get('dtype', '')} {time}", highlight=False)
    if as_json is not None:
        as_json.write_text(json.dumps({"schema": 1, "races": records}, indent=1), encoding="utf-8")
    Console().print(table)
    if not all(record.get("holds", True) for record in records):
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
