"""The kill matrix as a document: which property convicts which planted bug, and what each property is for.

    hyscale mutants --matrix --profile quick --json benchmarks/kill_matrix.json
    python -m hyscale_verify.mutants.matrix benchmarks/kill_matrix.json

writes benchmarks/kill_matrix.md. Given more reports (of ``--only BUG``, say, after a bug was added), it takes
their bugs into the first, in place of what that one had of them; bugs that the suite no longer has go. Of a
report of ``--property PROPERTY`` it takes what that property did, and leaves what is known of the others.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyscale_ref.command import EXIT_HOLDS, EXIT_USAGE
from hyscale_ref.output import write_json
from hyscale_verify.suite import MUTANTS, PROPERTIES

ON_A_GPU = "means something on a GPU alone; the matrix is recorded on a CPU"
WHY_IT_STAYS: dict[str, str] = {
    "exact_set_of_exact_inputs": "needs nothing but indices, and any two devices must agree on it",
    "exact_set_of_own_scores": "the definition of exact; others see the same bugs by chance",
    "dense_scores_within_bounds": "judgements by the kernel's own scores rest on it",
    "certified_set": "others' kernels: judges a kernel that does not show its scores",
    "tie_rule": "others' kernels: says which rule was broken (torch.topk)",
    "nan_never_selected": "others' kernels: NaN is where comparisons, sorts and maxima differ",
    "infinities_are_ordinary": "infinite scores are where masks and sentinels collide with data",
    "short_rows_are_complete": "others' kernels: public ones read past the end of rows of fewer than K keys",
    "ascending_and_unique": "others' kernels: a key selected twice passes any judgement by sets",
    "tail_is_minus_one": "others' kernels: says what is wrong with the tail, where the set is right",
    "as_many_as_there_are": "``count`` is promised, and nothing else reads it",
    "window_is_respected": "others' kernels: the plainest statement of causality",
    "window_edges_count": "edges of a window are the best keys only if one makes them so",
    "negative_zero_is_zero": "-0 and +0 tie only by a rule of their own",
    "row_independence": "others' kernels: state that leaks between rows, or between requests of a batch",
    "chunks_of_rows": "callers chunk; the kernel's own chunks are tried by internal_sizes",
    "rank_split": "the promise that context parallelism rests on",
    "prefix_causality": "others' kernels: a future key that changes an earlier row",
    "k_is_a_prefix_of_k_plus_one": "others' kernels: needs no oracle",
    "key_permutation": "others' kernels: needs no oracle; a kernel that depends on where the best keys lie",
    "append_below_the_cut": "others' kernels: needs no oracle; lengths that cross a tile",
    "power_of_two_scaling": "others' kernels: needs no oracle; absolute thresholds and clamps",
    "keys_outside_do_not_matter": "a kernel may read keys outside a window as long as nothing comes of it",
    "repeated_calls": "others' kernels: races and atomics",
    "poisoned_memory": "memory that is never written holds what earlier calls left, which tests seldom see",
    "memory_layout": "strides are assumed sooner or later",
    "gradient_mode": "public frameworks select differently with and without gradients",
    "inputs_stay_as_they_are": "in-place arithmetic on an argument shows in the caller only",
    "second_stream": ON_A_GPU,
    "large_tensors": ON_A_GPU,
    "no_recompilation": ON_A_GPU,
    "no_host_synchronisation": ON_A_GPU,
    "cuda_graph": ON_A_GPU,
    "another_device": ON_A_GPU,
    "findings_are_waited_for": ON_A_GPU,
    "internal_sizes": "any tile and buffer is promised to give the same bits; narrower properties force some",
    "causal_passes": "calls without windows are planned on the host, calls with them are not",
    "windows_left_out": "the default windows are promised; causal_passes tries long calls alone",
    "recomputation_changes_nothing": "the promise of replay as a whole; others convict its parts",
    "forced_refill_of_the_repair_buffer": "drawn inputs seldom reach repair, let alone its refills",
    "forced_underflow": "drawn samples are seldom wrong enough",
    "no_score_table": "the point of the kernel; with more draws it convicts score_table_for_everyone",
    "only_its_own_memory": "the interpreter hides reads out of bounds",
    "statistics_are_consistent": "statistics are promised, and forced properties rely on them",
    "torch_compile": "a fake implementation is wrong until something compiles with it",
    "torch_compile_dynamic": "symbolic sizes take other paths through host code than known ones",
    "selective_checkpoint": "replay rests on it",
    "empty_calls": "empty calls launch nothing, or with a grid of 0",
    "window_builders": "the builders are not part of the mutated kernels",
    "fp8_agrees_with_bf16": "reports a number; convicts only gross faults of quantisation",
    "packed_words_follow_the_format": "the format is promised word for word",
    "changed_windows_are_refused": "nothing else changes windows between the passes",
    "selected_scores_are_the_selections": "the loss must see the very scores that selected",
    "ranks_share_the_work": "the promise that context parallelism rests on",
    "attention_rows_are_independent": "the promise that context parallelism rests on",
}
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
    """One report: of each bug of the suite what the last of ``records`` that has it says.

    Raises ValueError where only some properties are known to have been tried on a bug.
    """
    latest: dict[str, dict[str, Any]] = {}
    for record in records:
        tried = record.get("properties")
        for bug in record["mutants"]:
            name = bug["name"]
            if tried is not None and name not in latest:
                raise ValueError(f"{name}: only {', '.join(tried)} tried it; run it without --property")
            latest[name] = bug if tried is None else _tried_again(latest[name], bug, tried)
    bugs = [latest[mutant.name] for mutant in MUTANTS if mutant.name in latest]
    killed = sum(bool(bug["killed_by"]) for bug in bugs)
    return {"mutants": bugs, "summary": {"killed": killed, "survived": len(bugs) - killed}}


def _tried_again(known: dict[str, Any], bug: dict[str, Any], tried: Sequence[str]) -> dict[str, Any]:
    """What is known of a bug, with what the properties ``tried`` on it anew say now."""
    fates = {
        fate: [pair for pair in known[fate] if pair["property"] not in tried] + bug[fate]
        for fate in ("killed_by", "survives")
    }
    return {**bug, **fates}


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
        "(bugs that it let live were run again with `--profile ci`, which draws four times as many calls).",
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


def read(path: Path) -> dict[str, Any]:
    """A report of ``hyscale mutants --json``; ValueError, naming the file, for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(report, dict) or "mutants" not in report:
        raise ValueError(f"{path}: not a report of hyscale mutants")
    return report


def main(paths: Sequence[str]) -> int:
    """Merge the reports into the first and write the document beside it; 2 where one cannot be read."""
    if not paths:
        print("usage: python -m hyscale_verify.mutants.matrix REPORT.json [MORE.json ...]", file=sys.stderr)
        return EXIT_USAGE
    try:
        record = merged([read(Path(path)) for path in paths])
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    first = Path(paths[0])
    write_json(first, record)
    first.with_suffix(".md").write_text(render(record), encoding="utf-8")
    return EXIT_HOLDS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
