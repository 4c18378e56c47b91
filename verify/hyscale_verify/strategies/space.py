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

    shapes    pairs of H and D; odd_shapes where no size is round
    most_rows, most_keys  largest T and S; most_square where T == S
    most_work largest T S H D of a case, which the oracle computes in float64
    sizes     options for each field of InternalSizes
    fixed     T, S and K, where they are not drawn
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    odd_shapes: tuple[tuple[int, int], ...]
    top_k: tuple[int, ...]
    most_rows: int
    most_keys: int
    most_square: int
    most_work: int
    sizes: dict[str, tuple[int, ...]]
    fixed: tuple[int, int, int] | None = None

    def exactly(self, rows: int, keys: int, top_k: int) -> "Space":
        """The same space with T, S and K fixed; cases then come from a seed."""
        return replace(self, fixed=(rows, keys, top_k))

    def internal_sizes(self, num_queries: int, num_keys: int) -> st.SearchStrategy[InternalSizes]:
        """Internal sizes for a call: at most 4 chunks of rows and of keys, 16 gathers a row if possible."""
        options = dict(self.sizes)
        quick = tuple(gather for gather in options["gather"] if gather * 16 >= num_keys)
        options["gather"] = quick or (max(options["gather"]),)

        def few_chunks(sizes: InternalSizes) -> InternalSizes:
            row_tiles = -(-num_queries // (4 * sizes.tile_rows))
            key_tiles = -(-num_keys // (4 * sizes.tile_keys))
            return replace(
                sizes,
                row_tiles=max(sizes.row_tiles, row_tiles),
                key_tiles=max(sizes.key_tiles, key_tiles),
            )

        drawn = {name: st.sampled_from(values) for name, values in options.items()}
        return st.builds(InternalSizes, **drawn).map(few_chunks)


CPU = Space(
    dtypes=("fp32", "bf16", "fp16", "fp8"),
    shapes=((1, 16), (2, 16), (4, 16), (3, 32), (8, 32)),
    odd_shapes=((1, 17), (3, 24), (5, 33)),
    top_k=(1, 2, 3, 5, 8, 16, 33),
    most_rows=4,
    most_keys=260,
    most_square=16,
    most_work=10**8,
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
    },
)

CUDA = Space(
    dtypes=("bf16", "fp16", "fp8"),
    shapes=((2, 16), (32, 128)),
    odd_shapes=((3, 72),),
    top_k=(1, 3, 64, 200),
    most_rows=150,
    most_keys=6000,
    most_square=700,
    most_work=10**9,
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
    },
)
