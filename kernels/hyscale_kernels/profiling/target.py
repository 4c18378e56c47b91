"""Anyone's kernel through the same clock.

A target ``module:function`` is called as ``function(rows=4096, keys=65536)``, a shape's sizes as keywords
(and ``seed``, if it has that parameter, to draw other inputs). It allocates what it needs and returns the
call to time, a function without arguments.
"""

import inspect
import itertools
from collections.abc import Sequence

from hyscale_ref.named import function_named

from .op import Cost, Draw, Entry, Op, Shape, Work


def parse_shapes(texts: Sequence[str], names: Sequence[str] | None = None) -> list[Shape]:
    """``rows=512:4096,keys=65536`` as every combination of its sizes. ValueError otherwise.

    names: where they are given, each text must give every one of them one size, and nothing else.
    """
    shapes: list[Shape] = []
    for text in texts:
        axes: dict[str, list[int]] = {}
        for part in text.split(","):
            name, equals, sizes = (piece.strip() for piece in part.partition("="))
            values = sizes.split(":")
            if not equals or not name.isidentifier() or not all(v.strip().isdigit() for v in values):
                raise ValueError(
                    f"shape {text!r}: {part!r} is not NAME=SIZE or NAME=SIZE:SIZE, such as rows=512:4096"
                )
            if name in axes:
                raise ValueError(f"shape {text!r}: {name} is given twice; allowed: {name}=SIZE:SIZE")
            axes[name] = [int(value) for value in values]
        if names is not None and (axes.keys() != set(names) or any(len(v) > 1 for v in axes.values())):
            raise ValueError(f"shape {text!r}; allowed: one size for each of {', '.join(names)}")
        shapes += [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]
    return shapes


def entries(
    target: str, shapes: Sequence[Shape], *, op: str, implementation: str, dtype: str, known: Sequence[Op]
) -> list[Entry]:
    """Points of a target. The work of an op in ``known`` by that name and dtype is counted; no other.

    ValueError where the target cannot be found.
    """
    function = function_named(target)
    try:
        seeded = "seed" in inspect.signature(function).parameters
    except ValueError as error:  # of some builtins
        raise ValueError(f"target: {target!r} does not show its parameters: {error}") from error
    like = next((each for each in known if each.name == op and each.dtype == dtype), None)

    def build(inputs: Draw, shape: Shape) -> Work:
        call = function(**shape, **({"seed": inputs.seed} if seeded else {}))
        if not callable(call):
            raise TypeError(f"{target} returned {type(call).__name__}; the call to time is needed")
        return Work(call)

    def cost(shape: Shape) -> Cost:
        if like is None or not set(like.tiny) <= set(shape):
            return Cost()
        return like.cost(shape)

    found = Op(
        name=op,
        implementation=implementation,
        dtype=dtype,
        family="target",
        cost=cost,
        build=build,
        shapes={"target": shapes},
        tiny=shapes[0] if shapes else {},
        compile_s=5.0,
        link=like is None,
    )
    return [Entry(found, shape) for shape in shapes]
