"""Suites: named selections of points, most valuable first."""

from collections.abc import Sequence

from .op import Entry, Op, interleaved_by_value

SUITES = {
    "quick": "a hundred points over every family, in about a minute",
    "glm-5.1": "all that a training step of GLM-5.1 consists of, over rows, keys and selection sizes",
    "dense": "the dense models of the simulator's validation cases",
    "collectives": "NCCL over the GPUs of this machine",
    "all": "glm-5.1, dense and collectives",
}


def suite(name: str, ops: Sequence[Op], only: Sequence[str] = ()) -> list[Entry]:
    """The suite's points. ``only`` keeps ops by name, family or label.

    ValueError for an unknown suite, and for a member of ``only`` that keeps nothing.
    """
    if name not in SUITES:
        raise ValueError(f"no suite {name!r}; there are: {', '.join(SUITES)}")
    names = ("glm-5.1", "dense", "collectives") if name == "all" else (name,)
    entries: dict[object, Entry] = {}
    for part in names:
        for entry in interleaved_by_value(ops, part):
            entries.setdefault(entry.key, entry)
    if not only:
        return list(entries.values())
    kept: dict[object, Entry] = {}
    for wanted in only:
        found = {key: entry for key, entry in entries.items() if wanted in names_of(entry.op)}
        if not found:
            known = sorted({entry.op.name for entry in entries.values()})
            families = sorted({entry.op.family for entry in entries.values()})
            raise ValueError(
                f"suite {name} has no op {wanted!r}; ops: {', '.join(known)}; families: {', '.join(families)}"
            )
        kept |= found
    return [entry for key, entry in entries.items() if key in kept]


def names_of(op: Op) -> tuple[str, ...]:
    """What ``--op`` may call it."""
    return (op.name, op.family, f"{op.name}/{op.implementation}", op.label)
