"""Finding the n-th best of a row of ordered scores that lies in memory, by bisection over its values.

Rows are read again for every step: they are short (a few thousand words), so they come from the L1 cache,
and a program that keeps nothing in registers leaves room for many others beside it.

Shape letters: ROWS rows of one program, BLOCK columns a step.
"""

import triton
import triton.language as tl

from .score import NEVER, ordered


@triton.jit
def load_ordered(p_row, columns, mask, TABLE: tl.constexpr):
    """Ordered scores [ROWS, BLOCK]; NEVER off mask. TABLE: memory holds float32 scores, not ordered ones."""
    if TABLE:
        return tl.where(mask, ordered(tl.load(p_row + columns, mask=mask, other=0.0)), NEVER)
    else:
        return tl.load(p_row + columns, mask=mask, other=NEVER)


@triton.jit
def survey(p_row, first, last, TABLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(present, low, high) [ROWS]: count and range of the scores of columns [first, last) other than NEVER."""
    present = tl.zeros((ROWS, BLOCK), tl.int32)
    low = tl.zeros((ROWS, BLOCK), tl.int32) + (2**31 - 1)
    high = tl.zeros((ROWS, BLOCK), tl.int32) + NEVER
    for i in range(tl.min(first), tl.max(last), BLOCK):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_ordered(p_row, o_c, (o_c >= first[:, None]) & (o_c < last[:, None]), TABLE)
        present += (key != NEVER).to(tl.int32)
        low = tl.minimum(low, tl.where(key == NEVER, 2**31 - 1, key))
        high = tl.maximum(high, key)
    return tl.sum(present, axis=1), tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit
def reaching(p_row, first, last, bar, TABLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [ROWS]: how many scores of columns [first, last) are at least ``bar`` [ROWS]."""
    count = tl.zeros((ROWS, BLOCK), tl.int32)
    for i in range(tl.min(first), tl.max(last), BLOCK):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_ordered(p_row, o_c, (o_c >= first[:, None]) & (o_c < last[:, None]), TABLE)
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
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(bar, reach) [ROWS]: a value that ``reach`` scores reach; rank <= reach <= rank + slack if one can.

    ``present``, ``low``, ``high`` come from ``survey``. When no value qualifies (equal scores at the cut),
    bar is the rank-th best score itself. Rows with no more than ``rank`` scores get NEVER.
    """
    reach = present
    low = tl.where(present > rank, low, NEVER)
    high = tl.where(present > rank, high, NEVER)
    while tl.max(((low < high) & (reach > rank + slack)).to(tl.int32)) > 0:
        middle = low + ((high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
        count = reaching(p_row, first, last, middle, TABLE, ROWS, BLOCK)
        searching = (low < high) & (reach > rank + slack)
        up = searching & (count >= rank)
        high = tl.where(searching & (count < rank), middle - 1, high)
        low = tl.where(up, middle, low)
        reach = tl.where(up, count, reach)
    return low, reach


@triton.jit
def best(p_row, first, last, top_k, TABLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What decides the top_k best of columns [first, last): (present, bar, room), each int32 [ROWS].

    Taken are the scores above bar, and of those equal to bar the first ``room``.
    """
    present, low, high = survey(p_row, first, last, TABLE, ROWS, BLOCK)
    bar, _ = nth_best(p_row, first, last, present, low, high, top_k, 0, TABLE, ROWS, BLOCK)
    above = reaching(p_row, first, last, bar + 1, TABLE, ROWS, BLOCK)
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
