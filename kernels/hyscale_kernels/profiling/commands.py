"""``hyscale profile``: measure kernels on this machine's GPU."""

import json
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

EXIT_FAILED, EXIT_ENVIRONMENT = 1, 3

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
err = Console(stderr=True)


class Op(StrEnum):
    hytopk = "hytopk"


@app.callback()
def _profile() -> None:
    """Measure kernels on this machine's GPU."""


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        err.print(
            "hyscale profile: needs a CUDA device, and PyTorch sees none on this machine", highlight=False
        )
        raise typer.Exit(EXIT_ENVIRONMENT)


def _listed(option: str, text: str, known: Any) -> list[str]:
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


@app.command("race")
def race_command(
    op: Annotated[Op, typer.Option(help="what is raced")] = Op.hytopk,
    shapes: Annotated[
        str, typer.Option(help="ROWSxKEYS, comma-separated")
    ] = "4096x65536,4096x262144,2048x1048576",
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, fp8")] = "fp8,bf16",
    regimes: Annotated[str, typer.Option(help="distributions of the scores")] = "random",
    windows: Annotated[str, typer.Option(help="full or causal")] = "full",
    rivals: Annotated[str, typer.Option(help="contenders beside hytopk; those not installed say so")] = (
        "deepgemm+flashinfer,cudnn"
    ),
    rounds: Annotated[int, typer.Option(min=3, help="timed calls a contender")] = 15,
    budget: Annotated[float, typer.Option(min=0.1, help="seconds of device time a race")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="append the records to this JSON Lines file")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the records as one JSON file")] = None,
) -> None:
    """Race HyTopK against rivals: same process, same inputs, taking turns, correctness first."""
    from .cases import DTYPES, REGIMES, WINDOWS, draw
    from .contenders import CONTENDERS
    from .race import Shape, race

    try:
        sizes = [Shape.parse(text) for text in shapes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shapes") from error
    names = ["hytopk", *(n for n in _listed("rivals", rivals, CONTENDERS) if n != "hytopk")]
    cases = product(
        _listed("dtypes", dtypes, DTYPES),
        sizes,
        _listed("regimes", regimes, REGIMES),
        _listed("windows", windows, WINDOWS),
    )
    _need_gpu()
    records: list[dict[str, Any]] = []
    for dtype, shape, regime, window in cases:
        err.print(f"racing {shape.rows} x {shape.keys} {dtype} {regime} {window}", highlight=False)
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


def profile(argv: list[str]) -> int:
    """Run ``hyscale profile`` with ``argv`` and return its exit code."""
    try:
        app(args=argv, prog_name="hyscale profile")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
