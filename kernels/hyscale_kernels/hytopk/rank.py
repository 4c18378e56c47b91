"""Finding the n-th best of a row of ordered scores that lies in memory, by halving its range of values.

Rows are read again for every step: they are short (a few thousand words), so they come from the L1 cache,
and a program that keeps nothing in registers leaves room for many others beside it. Whole blocks are read,
unmasked, so that loads are wide: rows are as wide as a number of blocks, and what lies behind a row's last
column is not looked at.

Shape letters: ROWS rows of one program, BLOCK columns a step.
"""

import triton
import triton.language as tl

from .score import NEVER, unordered


@triton.jit
def row_pointer(pointer, row, width, BLOCK: tl.constexpr):
    """Start of ``row`` in a table ``width`` columns wide, a multiple of BLOCK; the compiler now knows."""
    return pointer + row.to(tl.int64) * (width // BLOCK * BLOCK)


@triton.jit
def load_columns(p_row, columns, last):
    """Ordered scores [ROWS, BLOCK] of a row's columns; NEVER from column ``last`` [ROWS] on."""
    return tl.where(columns < last[:, None], tl.load(p_row + columns), NEVER)


@triton.jit
def survey(p_row, last, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(present, low, high) [ROWS]: number and range of the scores in columns [0, last), NEVER aside."""
    present = tl.zeros((ROWS, BLOCK), tl.int32)
    low = tl.zeros((ROWS, BLOCK), tl.int32) + (2**31 - 1)
    high = tl.zeros((ROWS, BLOCK), tl.int32) + NEVER
    for i in range(0, tl.max(last), BLOCK):
        key = load_columns(p_row, (i + tl.arange(0, BLOCK))[None, :], last)
        present += (key != NEVER).to(tl.int32)
        low = tl.minimum(low, tl.where(key == NEVER, 2**31 - 1, key))
        high = tl.maximum(high, key)
    return tl.sum(present, axis=1), tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit
def _narrow(low, high, reach, over, searching, bar, count, rank):
    """The range of ``nth_best`` after ``count`` scores were found to reach ``bar``."""
    up = searching & (count >= rank)
    down = searching & (count < rank) & (bar <= high)
    low = tl.where(up, bar, low)
    reach = tl.where(up, count, reach)
    high = tl.where(down, bar - 1, high)
    over = tl.where(down, count, over)
    return low, high, reach, over


@triton.jit
def nth_best(p_row, last, present, low, high, rank, slack, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(bar, reach, over) [ROWS]: a value that ``reach`` scores reach, rank <= reach <= rank + slack.

    ``present``, ``low``, ``high`` come from ``survey``. When no value qualifies (equal scores at the cut),
    bar is the rank-th best score itself, and ``over`` scores lie above it. Rows with no more than ``rank``
    scores get NEVER.

    Each step counts against three values and keeps a quarter of the range: reading is what costs.
    """
    reach = present
    over = tl.zeros((ROWS,), tl.int32)
    low = tl.where(present > rank, low, NEVER)
    high = tl.where(present > rank, high, NEVER)
    searching = (low < high) & (reach > rank + slack)
    while tl.max(searching.to(tl.int32)) > 0:
        span = high.to(tl.int64) - low.to(tl.int64)
        bar1 = low + ((span + 3) // 4).to(tl.int32)
        bar2 = low + ((span + 1) // 2).to(tl.int32)
        bar3 = low + ((3 * span + 3) // 4).to(tl.int32)
        count1 = tl.zeros((ROWS, BLOCK), tl.int32)
        count2 = tl.zeros((ROWS, BLOCK), tl.int32)
        count3 = tl.zeros((ROWS, BLOCK), tl.int32)
        for i in range(0, tl.max(last), BLOCK):
            key = load_columns(p_row, (i + tl.arange(0, BLOCK))[None, :], last)
            count1 += (key >= bar1[:, None]).to(tl.int32)
            count2 += (key >= bar2[:, None]).to(tl.int32)
            count3 += (key >= bar3[:, None]).to(tl.int32)
        # From the lowest value up: the last that enough scores reach counts, and the first that too few do.
        reach1 = tl.sum(count1, axis=1)
        reach2 = tl.sum(count2, axis=1)
        reach3 = tl.sum(count3, axis=1)
        low, high, reach, over = _narrow(low, high, reach, over, searching, bar1, reach1, rank)
        low, high, reach, over = _narrow(low, high, reach, over, searching, bar2, reach2, rank)
        low, high, reach, over = _narrow(low, high, reach, over, searching, bar3, reach3, rank)
        searching = (low < high) & (reach > rank + slack)
    return low, reach, over


@triton.jit
def best(p_row, last, top_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What decides the top_k best of columns [0, last): (present, bar, room), each int32 [ROWS].

    Taken are the scores above bar, and of those equal to bar the first ``room``.
    """
    present, low, high = survey(p_row, last, ROWS, BLOCK)
    bar, reach, over = nth_best(p_row, last, present, low, high, top_k, 0, ROWS, BLOCK)
    crowded = present > top_k
    tied = crowded & (reach > top_k)  # else the value that exactly top_k scores reach serves as it is
    return present, tl.where(crowded & ~tied, bar - 1, bar), tl.where(tied, top_k - over, 0)


@triton.jit
def ranks(key, bar, room, above, equal):
    """(taken, position, above, equal) of the next columns ``key`` [ROWS, BLOCK] of a row cut at bar, room.

    ``above`` and ``equal`` [ROWS] count the columns seen so far that are above and equal to the bar.
    """
    over = (key > bar[:, None]).to(tl.int32)
    same = ((key == bar[:, None]) & (key != NEVER)).to(tl.int32)
    # One cumulative sum for both: columns above in the low half of the word, equal ones in the high.
    seen = tl.cumsum(over + (same << 16), axis=1)
    seen_above = above[:, None] + (seen & 0xFFFF)
    seen_equal = equal[:, None] + (seen >> 16)
    taken = (over != 0) | ((same != 0) & (seen_equal <= room[:, None]))
    position = seen_above + tl.minimum(seen_equal, room[:, None]) - 1
    return taken, position, above + tl.sum(over, axis=1), equal + tl.sum(same, axis=1)


@triton.jit
def place(
    p_row,
    p_index,
    last,
    bar,
    room,
    wanted,
    p_out,
    p_score,
    WITH_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the keys of columns [0, last) that bar and room take to p_out, those of ``wanted`` rows.

    p_index holds the key of each column; all pointers are [ROWS, 1].
    """
    above = tl.zeros((ROWS,), tl.int32)
    equal = tl.zeros((ROWS,), tl.int32)
    for i in range(0, tl.max(last), BLOCK):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_columns(p_row, o_c, last)
        taken, position, above, equal = ranks(key, bar, room, above, equal)
        taken = taken & wanted[:, None]
        tl.store(p_out + position, tl.load(p_index + o_c, mask=taken, other=0), mask=taken)
        if WITH_SCORES:
            tl.store(p_score + position, unordered(key), mask=taken)
