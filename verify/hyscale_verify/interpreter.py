"""Triton's CPU interpreter, made quick enough for property-based tests.

The interpreter replaces the members of ``triton.language`` for the length of a call, and does it anew
for every helper a kernel calls, ``tl.sum`` included: four walks over the whole module each time, some
0.25 ms, thousands of times a launch. ``quicken`` makes the outermost call patch once and nested calls
nothing. The values computed are the same; only the bookkeeping is skipped.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Outermost:
    """Stands in for ``interpreter._patch_lang``: patches on the outermost call alone."""

    def __init__(self, patch_lang: Any) -> None:
        self._patch_lang = patch_lang
        self._open = False

    def __call__(self, fn: Any) -> Any:
        if self._open:
            return interpreter._LangPatchScope()
        self._open = True
        scope = self._patch_lang(_Visible)
        restore = scope.restore

        def close() -> None:
            self._open = False
            restore()

        scope.restore = close
        return scope


class _Visible:
    """Looks to ``_patch_lang`` like a kernel that sees both language modules."""

    __globals__ = {"tl": tl, "core": tl.core}


def quicken() -> None:
    """Patch the interpreter once; later calls do nothing. RuntimeError when Triton has changed inside."""
    patch_lang = getattr(interpreter, "_patch_lang", None)
    if isinstance(patch_lang, _Outermost):
        return
    if patch_lang is None or not hasattr(interpreter, "_LangPatchScope"):
        raise RuntimeError(
            "this Triton's interpreter is organised differently (no _patch_lang); "
            "the versions in constraints.txt are known to work"
        )
    interpreter._patch_lang = _Outermost(patch_lang)
