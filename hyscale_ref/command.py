"""The ``hyscale`` command: finds a verb among the installed entry points and hands it the arguments.

Standard library only, and nothing of a verb is imported before it is chosen, so that ``hyscale --help``
answers at once and a light installation works without torch or simpy.

Exit codes, for every verb: 0 holds, 1 falsified or failed, 2 usage, 3 environment, 130 interrupted.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

EXIT_HOLDS = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_INTERRUPTED = 130

GROUP = "hyscale.commands"

# What each optional package belongs to, for the message of a light installation.
EXTRAS = {
    "torch": "kernels",
    "triton": "kernels",
    "hypothesis": "verify",
    "pytest": "verify",
    "simpy": "simulator",
    "scipy": "simulator",
    "pydantic": "simulator",
    "pandas": "simulator",
    "matplotlib": "simulator",
}

SUMMARIES = {
    "verify": "check a selection kernel against the exact oracle with property-based tests",
    "mutants": "plant named bugs in the kernel and see which property convicts each",
    "doctor": "show versions and devices, and what can run here",
    "profile": "measure kernels, compare and plot the profiles",
    "simulate": "predict one training step of a scenario or preset",
    "presets": "list the shipped scenarios, models, GPUs and clusters",
    "validate": "hold the simulator against published and measured step times",
    "explain": "attribute a speed-up to its causes",
    "sweep": "vary any field of a scenario over a grid",
    "plan": "search the legal layouts of a model on a cluster",
}


def _help(verbs: Sequence[str]) -> str:
    width = max((len(verb) for verb in verbs), default=0)
    lines = [
        "usage: hyscale VERB [ARGUMENT ...]",
        "",
        "Exact top-k selection for learned sparse attention: verify kernels, measure them, and predict",
        "what they are worth on a cluster.",
        "",
        "verbs:",
        *(f"  {verb:<{width}}  {SUMMARIES.get(verb, '')}".rstrip() for verb in verbs),
        "",
        "hyscale VERB --help explains one verb. Exit codes: 0 holds, 1 falsified or failed, 2 usage,",
        "3 environment, 130 interrupted.",
    ]
    return "\n".join(lines)


def _run(entry: EntryPoint, arguments: list[str]) -> int:
    """Import a verb and run it; 3, with the reason on stderr, when an optional package is missing."""
    try:
        run: Callable[[list[str]], int] = entry.load()
        return run(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(
            f"hyscale {entry.name}: needs the package {package!r}, which is not installed; "
            f"pip install 'hyscale[{EXTRAS[package]}]'",
            file=sys.stderr,
        )
        return EXIT_ENVIRONMENT


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hyscale`` with ``argv`` (default: the process's arguments) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    order = [verb for verb in SUMMARIES if verb in entries]
    verbs = order + sorted(set(entries) - set(order))
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(verbs))
        return EXIT_HOLDS if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"hyscale {version('hyscale')}")
        return EXIT_HOLDS
    verb, rest = arguments[0], arguments[1:]
    if verb not in entries:
        print(f"hyscale: no verb {verb!r}; there are: {', '.join(verbs)}", file=sys.stderr)
        return EXIT_USAGE
    return _run(entries[verb], rest)


if __name__ == "__main__":
    sys.exit(main())
