"""A function that somebody names on the command line, as ``module:function``. Standard library only."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function_named(spec: str) -> Callable[..., Any]:
    """The function, its module looked for in the working directory first, as ``python -m`` does.

    ValueError, beginning with "target: ", where there is none: ``spec`` is of another form, its module
    cannot be imported (for whatever reason, which is said), or has no such function.
    """
    path, _, attribute = spec.partition(":")
    if not path or not attribute:
        raise ValueError(f"target: {spec!r}; allowed: module:function, both named")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(path)
    except Exception as error:  # somebody's module may raise anything
        raise ValueError(f"target: {spec!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"target: module {path!r} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]
