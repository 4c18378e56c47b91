"""Every op the profiler knows, a module a family. To add one: declare it in its family's ``OPS``."""

from ..op import Op
from . import (
    attention,
    collectives,
    copies,
    dense_attention,
    eager,
    elementwise,
    linears,
    moe,
    optimizer,
    replay,
    selection,
    stages,
)

FAMILIES = (
    selection,
    stages,
    replay,
    attention,
    moe,
    linears,
    elementwise,
    eager,
    optimizer,
    dense_attention,
    copies,
    collectives,
)

ALL: tuple[Op, ...] = tuple(op for family in FAMILIES for op in family.OPS)
