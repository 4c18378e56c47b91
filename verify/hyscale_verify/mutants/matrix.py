"""The kill matrix as a document: which property convicts which planted bug, and what each property is for.

    hyscale mutants --matrix --profile quick --json benchmarks/kill_matrix.json
    python -m hyscale_verify.mutants.matrix benchmarks/kill_matrix.json

writes benchmarks/kill_matrix.md. Given more reports (of ``--only BUG``, say, after a bug was added), it takes
their bugs into the first, in place of what that one had of them; bugs that the suite no longer has go.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyscale_verify.suite import MUTANTS, PROPERTIES

WHY_IT_STAYS: dict[str, str] = {}
"""For each property that is the only killer of no planted bug: what it is for all the same."""

COMMAND = "hyscale mutants --matrix --profile quick --device cpu --json benchmarks/kill_matrix.json"


def killers(bug: dict[str, Any]) -> dict[str, list[str]]:
    """The properties that killed a bug, each with the regimes on which it did."""
    found: dict[str, list[str]] = {}
    for pair in bug["killed_by"]:
        found.setdefault(pair["property"], []).append(pair["regime"])
    return found


def only_killer(record: dict[str, Any]) -> dict[str, list[str]]:
    """For each property the bugs that no other one kills."""
    found: dict[str, list[str]] = {}
    for bug in record["mutants"]:
        names = list(killers(bug))
        if len(names) == 1:
            found.setdefault(names[0], []).append(bug["name"])
    return found


def survives_random_normal(bug: dict[str, Any]) -> bool:
    """No property kills the bug on normal random inputs, the only ones that most test suites draw."""
    return all(pair["regime"] != "random_normal" for pair in bug["killed_by"])


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report: of each bug of the suite what the last of ``records`` that has it says."""
    latest = {bug["name"]: bug for record in records for bug in record["mutants"]}
    bugs = [latest[mutant.name] for mutant in MUTANTS if mutant.name in latest]
    killed = sum(bool(bug["killed_by"]) for bug in bugs)
    return {"mutants": bugs, "summary": {"killed": killed, "survived": len(bugs) - killed}}


def render(record: dict[str, Any]) -> str:
    """The document, from the JSON report of ``hyscale mutants --matrix``."""
    bugs = record["mutants"]
    lines = [
        "# Kill matrix",
        "",
        f"{len(bugs)} planted bugs in copies of the real kernels, each run against every property of its "
        "part of the suite. Generated from kill_matrix.json, which is the report of",
        "",
        f"    {COMMAND}",
        "",
        f"Killed: {record['summary']['killed']}. Surviving: {record['summary']['survived']}. "
        f"Surviving normal random inputs: {sum(map(survives_random_normal, bugs))}.",
        "",
        "## Planted bugs",
        "",
        "Regimes in brackets are those on which the property fails, of all on which it is tried.",
        "",
        "| bug | stage | what is wrong | killed by | normal random inputs |",
        "|---|---|---|---|---|",
    ]
    for bug in bugs:
        by = "; ".join(f"{name} ({', '.join(regimes)})" for name, regimes in killers(bug).items())
        fate = "let it live" if survives_random_normal(bug) else "kill it"
        lines.append(_row(bug["name"], bug["stage"], bug["description"], by or "**nothing**", fate))
    lines += [
        "",
        "## Properties",
        "",
        "| property | contract row | kills | only killer of | why it stays otherwise |",
        "|---|---|---|---|---|",
    ]
    alone = only_killer(record)
    for name, prop in PROPERTIES.items():
        kills = sum(name in killers(bug) for bug in bugs)
        only = ", ".join(alone.get(name, []))
        why = "" if only else WHY_IT_STAYS.get(name, "")
        lines.append(_row(name, prop.row, str(kills), only, why))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(paths: Sequence[str]) -> None:
    """Merge the reports into the first and write the document beside it."""
    first = Path(paths[0])
    record = merged([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])
    first.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    first.with_suffix(".md").write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
