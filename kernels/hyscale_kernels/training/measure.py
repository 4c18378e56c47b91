"""Measuring steps in several modes, in turns, and how long a sequence fits.

Shape letters: T rows, S keys, H indexer heads, D indexer head size.
"""

import gc
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import distributed

from ..layer import ContextParallel, LayerConfig, PartTimer, Rows
from ..layer.config import SelectionName
from ..layer.indexer import Projections, scored
from ..layer.selection import select

GIB = 2**30
TABLES = (GIB, 4 * GIB, 8 * GIB)  # chunks of the score table that are tried on a GPU
SMALL_TABLES = (2**20,)  # and on a CPU
SHARE = 16  # candidates are timed on every 16th part of a sequence: its middle rows
TRIES = 4  # of lengths, to find the longest
LOST = 4  # a candidate whose first run takes so many times the best so far is not run again


@dataclass(frozen=True)
class Baseline:
    """How a score table is best materialised here, and the milliseconds of everything that was tried."""

    selection: SelectionName
    table_bytes: int
    tried: dict[str, float | str]


def best_baseline(
    layer: LayerConfig,
    sequence: int,
    device: torch.device,
    tables: Sequence[int] | None = None,
    *,
    rivals: bool = True,
) -> Baseline:
    """The fastest materialised selection of random operands, over the rows in the middle of a sequence.

    PyTorch and, if ``rivals``, DeepGEMM with FlashInfer (both installed, and the indexer fp8), each with
    every size of the table, ``tables`` in bytes (default: TABLES, on a CPU SMALL_TABLES). Each runs
    three times, and the better of the last two counts; one whose first run takes LOST times the best is left
    at that. RuntimeError if none runs.
    """
    if tables is None:
        tables = TABLES if device.type == "cuda" else SMALL_TABLES
    indexer, dtype = layer.shape.indexer, layer.dtype
    unit = SHARE * indexer.key_ratio
    whole = max(unit, sequence // unit * unit)
    rows = Rows.of(whole, ratio=indexer.key_ratio, num_ranks=SHARE, rank=SHARE // 2, device=device)
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    T, S, H, D = rows.num_rows, rows.num_keys, indexer.heads, indexer.head_dim
    operands = scored(layer, Projections(normal(T, H, D).to(dtype), normal(S, D).to(dtype), normal(T, H)))
    selections: list[SelectionName] = ["materialised"]
    installed = all(map(importlib.util.find_spec, ("deep_gemm", "flashinfer")))
    if rivals and installed and layer.indexer_dtype == "fp8":
        selections.insert(0, "deepgemm+flashinfer")
    best: tuple[float, SelectionName, int] | None = None
    tried: dict[str, float | str] = {}
    for selection, table in product(selections, tables):
        config = _with(layer, selection, table)
        name = f"{'torch' if selection == 'materialised' else selection}, table of {table / GIB:g} GiB"
        took = None
        call = partial(select, config, operands, rows)
        try:
            took = _timed(call, device)
            if best is None or took < LOST * best[0]:
                took = min(_timed(call, device) for _ in range(2))
        except torch.OutOfMemoryError:
            took, tried[name] = None, "out of memory"
        clear(device)
        if took is None:
            continue
        tried[name] = took
        if best is None or took < best[0]:
            best = (took, selection, table)
    if best is None:
        raise RuntimeError(f"no materialised selection of {whole} positions runs here: {tried}")
    return Baseline(best[1], best[2], tried)


@dataclass
class Turns:
    """Samples of several modes that take turns."""

    samples: dict[str, list[Any]]
    faults: dict[str, str]


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    *,
    warmups: int,
    rounds: int,
    go_on: Callable[[], bool] = lambda: True,
    device: torch.device,
) -> Turns:
    """Run each call ``warmups`` + ``rounds`` times, in an order that rotates; keep what the rounds return.

    A call that runs out of memory is left out from then on, and the reason kept. ``go_on`` is asked before
    every round but the first; every rank must answer alike.
    """
    turns = Turns({name: [] for name in calls}, {})
    names = list(calls)
    for turn in range(warmups + rounds):
        if turn > warmups and not go_on():
            break
        first = turn % len(names)
        for name in [each for each in names[first:] + names[:first] if each not in turns.faults]:
            result = None
            try:
                result = calls[name]()
            except torch.OutOfMemoryError as error:
                turns.faults[name] = f"out of memory: {str(error).splitlines()[0][:200]}"
            if name in turns.faults:  # the error is gone by now, and with it the frames that held tensors
                clear(device)
                continue
            if turn >= warmups:
                turns.samples[name].append(result)
    for name in turns.faults:
        del turns.samples[name]
    return turns


def longest(
    peak: Callable[[int], int | None], *, start: int, unit: int, capacity: int, limit: int
) -> tuple[int, list[tuple[int, int | None]]]:
    """The longest length, a multiple of ``unit``, that fits ``capacity`` bytes; and what was tried.

    ``peak(length)`` runs a step and gives its peak bytes, None if it ran out of memory. Memory is a line in
    the length, so two short lengths predict the longest, which is then tried; if it fails, a sixteenth less,
    then what lies halfway between the longest that fits and the shortest that does not. 0 if nothing was seen
    to fit.
    """
    start = max(unit, start // unit * unit)
    tried: list[tuple[int, int | None]] = []

    def run(length: int) -> int | None:
        tried.append((length, peak(length)))
        return tried[-1][1]

    short, double = run(start), run(2 * start)
    if short is None or double is None:
        return (start if short is not None else 0), tried
    slope = max((double - short) / start, 1e-9)
    guess = min(limit, int((capacity - short) / slope) + start)
    fits, fails = 2 * start, limit + unit
    for number in range(TRIES):
        guess = guess // unit * unit
        if not fits < guess < fails:
            break
        if run(guess) is not None:
            fits = guess
            if number == 0:
                break
        else:
            fails = guess
        guess = fails * 15 // 16 if number == 0 else (fits + fails) // 2
    return fits, tried


def over_ranks(value: Any, context: ContextParallel | None) -> list[Any]:
    """``value`` of every rank, on every rank."""
    if context is None:
        return [value]
    found: list[Any] = [None] * context.size
    distributed.all_gather_object(found, value, group=context.group)
    return found


def rank_0_says(value: Any, context: ContextParallel | None) -> Any:
    """Rank 0's ``value``, on every rank: for decisions that depend on the time."""
    return over_ranks(value, context)[0]


def clear(device: torch.device) -> None:
    """Give back what a failed or finished step left allocated."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _with(layer: LayerConfig, selection: SelectionName, table_bytes: int) -> LayerConfig:
    return replace(layer, selection=selection, recompute="full", table_bytes=table_bytes)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    timer = PartTimer(device)
    timer.start()
    call()
    return sum(timer.report().values())
