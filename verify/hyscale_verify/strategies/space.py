"""What sizes are worth drawing on a device.

Heads, head size and K are compile-time constants of a GPU kernel, so there a few values must do; under the
interpreter every launch costs milliseconds, so there the arrays stay small. Internal sizes are drawn besides
the kernel's own choice, which for few keys takes the shortest way through it.
"""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from hyscale_verify.cases import InternalSizes


@dataclass(frozen=True)
class Space:
    """Values to draw from; the first of each is the simplest.

    most_rows, most_keys  largest T and S; most_square where T == S
    sizes     options for each field of InternalSizes
    fixed     T, S and K, where they are not drawn
    """

    dtypes: tuple[str, ...]
    heads: tuple[int, ...]
    dims: tuple[int, ...]
    odd_dims: tuple[int, ...]
    top_k: tuple[int, ...]
    most_rows: int
    most_keys: int
    most_square: int
    sizes: dict[str, tuple[int, ...]]
    fixed: tuple[int, int, int] | None = None

    def exactly(self, rows: int, keys: int, top_k: int) -> "Space":
        """The same space with T, S and K fixed; cases then come from a seed."""
        return replace(self, fixed=(rows, keys, top_k))

    def internal_sizes(self, num_keys: int) -> st.SearchStrategy[InternalSizes]:
        """Internal sizes for so many keys: a row is never walked in more than 16 steps where that can be."""
        options = dict(self.sizes)
        quick = tuple(gather for gather in options["gather"] if gather * 16 >= num_keys)
        options["gather"] = quick or (max(options["gather"]),)
        return st.builds(InternalSizes, **{name: st.sampled_from(values) for name, values in options.items()})


CPU = Space(
    dtypes=("fp32", "bf16", "fp16", "fp8"),
    heads=(1, 2, 4, 8, 3),
    dims=(16, 32),
    odd_dims=(17, 24, 33),
    top_k=(1, 2, 3, 5, 8, 16, 33),
    most_rows=4,
    most_keys=260,
    most_square=16,
    sizes={
        "tile_rows": (4, 1, 2, 16),
        "tile_keys": (32, 64),
        "gather": (1, 2, 4, 16, 32),
        "slack": (1, 2),
        "row_group": (4, 1, 16),
        "samples": (64, 128),
        "segment_tiles": (0, 1, 2),
        "row_tiles": (4, 1, 2),
        "key_tiles": (8, 1, 2),
        "repair_splits": (4, 1, 2),
        "table_keys": (0, 260, 100),
        "consumers": (0,),
        "prune_keys": (0, 1, 256),
    },
)

CUDA = Space(
    dtypes=("bf16", "fp16", "fp8"),
    heads=(2, 32),
    dims=(16, 64, 128),
    odd_dims=(72,),
    top_k=(1, 3, 64, 200),
    most_rows=150,
    most_keys=6000,
    most_square=900,
    # Tiles and gathers of 64 and more: below, the tensor core rounds fp8 otherwise.
    sizes={
        "tile_rows": (64,),
        "tile_keys": (128,),
        "gather": (128,),
        "slack": (1,),
        "row_group": (1,),
        "samples": (256, 512, 2048),
        "segment_tiles": (0, 1, 3),
        "row_tiles": (4, 1),
        "key_tiles": (64, 1, 7),
        "repair_splits": (64,),
        "table_keys": (0, 6000, 3000),
        "consumers": (3, 0, 2),
        "prune_keys": (0, 1),
    },
)
