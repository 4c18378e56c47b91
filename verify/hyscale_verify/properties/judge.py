"""Comparisons shared by the properties; each failure names the row and the keys at fault."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hyscale_ref.topk import Selection, topk
from hyscale_verify.cases import Case
from hyscale_verify.properties.base import FalsifiedError
from hyscale_verify.targets import Result

FloatTable = NDArray[np.floating]


@contextmanager
def own_memory(what: str) -> Iterator[None]:
    """On a CPU: a load or store outside the launch's tensors falsifies; it is no mere crash."""
    try:
        yield
    except Exception as error:
        from hyscale_verify.interpreter import access_error_in

        wrong = access_error_in(error)
        if wrong is None:
            raise
        raise FalsifiedError(f"{what}: {wrong}") from error


def expected(case: Case, scores: FloatTable) -> Selection:
    """The oracle's selection from ``scores`` [T, S] under the case's windows."""
    return topk(scores, case.top_k, case.start, case.end)


def members(row: Sequence[int] | NDArray[np.integer]) -> list[int]:
    """The keys of one row of indices, ascending; negative entries are the tail."""
    return sorted(int(key) for key in row if key >= 0)


def same_sets(result: Result, wanted: NDArray[np.integer], scores: FloatTable, of: str) -> None:
    """Each row selects exactly the wanted keys, whatever their order; ``of`` says whose scores decide."""
    for t, (have, want) in enumerate(zip(result.indices, wanted, strict=True)):
        chosen, right = members(have), members(want)
        if chosen == right:
            continue
        extra, lost = sorted(set(chosen) - set(right)), sorted(set(right) - set(chosen))
        parts = [f"row {t} selects {_listed(chosen)}, the top-k of {of} is {_listed(right)}"]
        if extra:
            parts.append(f"not in it: {_scored(extra, scores[t])}")
        if lost:
            parts.append(f"missing: {_scored(lost, scores[t])}")
        if not extra and not lost:
            parts.append("a key is repeated")
        raise FalsifiedError("; ".join(parts), (t,), tuple(lost[:2] + extra[:2]))


def same_bits(first: Result, second: Result, what: str) -> None:
    """Two answers are the same in every bit: indices with their order, counts, scores."""
    for name in ("indices", "count", "scores"):
        one, two = getattr(first, name), getattr(second, name)
        if one is None or two is None:
            continue
        differ = one.view(np.int32) != two.view(np.int32)
        if differ.any():
            t = int(np.argwhere(differ)[0][0])
            raise FalsifiedError(
                f"{what}: row {t} of {name} differs: {_listed(one[t])} against {_listed(two[t])}", (t,)
            )


def same_set_rows(first: Result, second: Result, what: str) -> None:
    """Two answers select the same keys in every row."""
    for t, (one, two) in enumerate(zip(first.indices, second.indices, strict=True)):
        if members(one) != members(two):
            keys = tuple(sorted(set(members(one)) ^ set(members(two))))
            raise FalsifiedError(
                f"{what}: row {t} selects {_listed(members(one))} against {_listed(members(two))}", (t,), keys
            )


def taken(result: Result, rows: NDArray[np.integer] | slice) -> Result:
    """Some rows of an answer."""
    return Result(
        result.indices[rows],
        None if result.count is None else result.count[rows],
        None if result.scores is None else result.scores[rows],
    )


def joined(results: Sequence[Result]) -> Result:
    """Answers for consecutive rows as one."""
    counts = [r.count for r in results if r.count is not None]
    scores = [r.scores for r in results if r.scores is not None]
    return Result(
        np.concatenate([r.indices for r in results]),
        np.concatenate(counts) if len(counts) == len(results) else None,
        np.concatenate(scores) if len(scores) == len(results) else None,
    )


def _listed(values: object) -> str:
    items = np.asarray(values).reshape(-1).tolist()
    if len(items) <= 12:
        return str(items)
    head = ", ".join(str(item) for item in items[:10])
    return f"[{head}, ... {len(items)} in all]"


def _scored(keys: Sequence[int], row: NDArray[np.floating]) -> str:
    shown = [f"key {key} (score {row[key]:.9g})" if key < len(row) else f"key {key}" for key in keys[:4]]
    return ", ".join(shown) + (f", ... {len(keys)} in all" if len(keys) > 4 else "")
