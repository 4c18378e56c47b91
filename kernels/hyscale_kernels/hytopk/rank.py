"""Finding the n-th best of a row of ordered scores that lies in memory, by halving its range of values.

Rows are read again for every step: they are short (a few thousand words), so they come from the L1 cache,
and a program that keeps nothing in registers leaves room for many others beside it.

Shape letters: ROWS rows of one program, BLOCK columns a step.
"""

import triton
import triton.language as tl

from .score import NEVER, unordered


@triton.jit
def load_columns(p_row, columns, mask):
    """Ordered scores [ROWS, BLOCK] of a row's columns; NEVER off mask."""
    return tl.load(p_row + columns, mask=mask, other=NEVER)


@triton.jit
def survey(p_row, first, last, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(present, low, high) [ROWS]: number and range of the scores in columns [first, last), NEVER aside."""
    present = tl.zeros((ROWS, BLOCK), tl.int32)
    low = tl.zeros((ROWS, BLOCK), tl.int32) + (2**31 - 1)
    high = tl.zeros((ROWS, BLOCK), tl.int32) + NEVER
    for i in range(tl.min(first), tl.max(last), BLOCK):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_columns(p_row, o_c, (o_c >= first[:, None]) & (o_c < last[:, None]))
        present += (key != NEVER).to(tl.int32)
        low = tl.minimum(low, tl.where(key == NEVER, 2**31 - 1, key))
        high = tl.maximum(high, key)
    return tl.sum(present, axis=1), tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit
def reaching(p_row, first, last, bar, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [ROWS]: how many scores of columns [first, last) are at least ``bar`` [ROWS]."""
    count = tl.zeros((ROWS, BLOCK), tl.int32)
    for i in range(tl.min(first), tl.max(last), BLOCK):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_columns(p_row, o_c, (o_c >= first[:, None]) & (o_c < last[:, None]))
        count += (key >= bar[:, None]).to(tl.int32)
    return tl.sum(count, axis=1)


@triton.jit
def nth_best(
    p_row,
    first,
    last,
    present,
    low,
    high,
    rank,
    slack,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(bar, reach) [ROWS]: a value that ``reach`` scores reach; rank <= reach <= rank + slack if one can.

    ``present``, ``low``, ``high`` come from ``survey``. When no value qualifies (equal scores at the cut),
    bar is the rank-th best score itself. Rows with no more than ``rank`` scores get NEVER.

    Each step counts against three values and keeps a quarter of the range: reading is what costs.
    """
    reach = present
    low = tl.where(present > rank, low, NEVER)
    high = tl.where(present > rank, high, NEVER)
    while tl.max(((low < high) & (reach > rank + slack)).to(tl.int32)) > 0:
        span = high.to(tl.int64) - low.to(tl.int64)
        bar1 = low + ((span + 3) // 4).to(tl.int32)
        bar2 = low + ((span + 1) // 2).to(tl.int32)
        bar3 = low + ((3 * span + 3) // 4).to(tl.int32)
        count1 = tl.zeros((ROWS, BLOCK), tl.int32)
        count2 = tl.zeros((ROWS, BLOCK), tl.int32)
        count3 = tl.zeros((ROWS, BLOCK), tl.int32)
        for i in range(tl.min(first), tl.max(last), BLOCK):
            o_c = (i + tl.arange(0, BLOCK))[None, :]
            key = load_columns(p_row, o_c, (o_c >= first[:, None]) & (o_c < last[:, None]))
            count1 += (key >= bar1[:, None]).to(tl.int32)
            count2 += (key >= bar2[:, None]).to(tl.int32)
            count3 += (key >= bar3[:, None]).to(tl.int32)
        reach1 = tl.sum(count1, axis=1)
        reach2 = tl.sum(count2, axis=1)
        reach3 = tl.sum(count3, axis=1)
        searching = (low < high) & (reach > rank + slack)
        ceiling = tl.where(reach2 >= rank, bar3 - 1, tl.where(reach1 >= rank, bar2 - 1, bar1 - 1))
        high = tl.where(searching & (reach3 < rank), ceiling, high)
        floor = tl.where(reach3 >= rank, bar3, tl.where(reach2 >= rank, bar2, bar1))
        up = searching & (reach1 >= rank)
        low = tl.where(up, floor, low)
        reached = tl.where(reach3 >= rank, reach3, tl.where(reach2 >= rank, reach2, reach1))
        reach = tl.where(up, reached, reach)
    return low, reach


@triton.jit
def best(p_row, first, last, top_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What decides the top_k best of columns [first, last): (present, bar, room), each int32 [ROWS].

    Taken are the scores above bar, and of those equal to bar the first ``room``.
    """
    present, low, high = survey(p_row, first, last, ROWS, BLOCK)
    bar, _ = nth_best(p_row, first, last, present, low, high, top_k, 0, ROWS, BLOCK)
    above = reaching(p_row, first, last, bar + 1, ROWS, BLOCK)
    return present, bar, tl.where(present > top_k, top_k - above, 0)


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
    first,
    last,
    bar,
    room,
    wanted,
    p_out,
    p_score,
    IDENTITY: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the keys of columns [first, last) that bar and room take to p_out, those of ``wanted`` rows.

    p_index holds the key of each column (IDENTITY: the column is the key); all pointers are [ROWS, 1].
    """
    above = tl.zeros((ROWS,), tl.int32)
    equal = tl.zeros((ROWS,), tl.int32)
    for i in range(tl.min(first), tl.max(last), BLOCK):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_columns(p_row, o_c, (o_c >= first[:, None]) & (o_c < last[:, None]))
        taken, position, above, equal = ranks(key, bar, room, above, equal)
        taken = taken & wanted[:, None]
        if IDENTITY:
            index = tl.broadcast_to(o_c, (ROWS, BLOCK))
        else:
            index = tl.load(p_index + o_c, mask=taken, other=0)
        tl.store(p_out + position, index, mask=taken)
        if WITH_SCORES:
            tl.store(p_score + position, unordered(key), mask=taken)
