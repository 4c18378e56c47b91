"""What the profiler measures: an operation, its least work, and how to prepare one call of it.

An :class:`Op` is declared once (ops/, a file a family) and says everything: the name under which the
simulator reads it, who implements it, the shapes worth measuring, the work it cannot do without, and how its
inputs are made. Nothing in a declaration touches a GPU before :attr:`Op.build` is called.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hyscale_ref.profile import shape_text

Shape = Mapping[str, int]
Call = Callable[[], object]

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Cost:
    """The work that no implementation can do without.

    tensor_flops: on tensor cores, at the dtype's rate (multiply and add are two).
    lane_ops: on CUDA cores, in fused multiply-adds of one lane.
    bytes: through device memory, each input read once and each output written once.
    """

    tensor_flops: float = 0.0
    lane_ops: float = 0.0
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.tensor_flops + 2 * self.lane_ops


@dataclass(frozen=True, slots=True)
class Work:
    """One prepared call: ``call()`` does all of it and returns its outputs; ``reset()`` (not timed) undoes
    what the last call did to its inputs. ``sustained`` calls are timed back to back, for as long as the card
    needs to reach its power limit; there is no reset between them."""

    call: Call
    reset: Call | None = None
    sustained: bool = False


class Draw:
    """Fresh inputs on one device from one seed; random, never zeros."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self.seed = seed
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: str = "bf16", scale: float = 1.0) -> torch.Tensor:
        """Normal numbers times ``scale``; drawn in bf16 for fp8."""
        drawn = DTYPES["bf16" if dtype == "fp8" else dtype]
        values = torch.randn(*shape, device=self.device, dtype=drawn, generator=self.generator)
        if scale != 1.0:
            values *= scale
        return values.to(DTYPES[dtype])

    def uniform(self, *shape: int) -> torch.Tensor:
        """fp32 in [0, 1)."""
        return torch.rand(*shape, device=self.device, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, device=self.device, dtype=dtype, generator=self.generator)

    def permutation(self, size: int) -> torch.Tensor:
        """0 .. size-1 in random order."""
        return torch.randperm(size, device=self.device, generator=self.generator)

    def empty(self, *shape: int, dtype: str = "bf16") -> torch.Tensor:
        """Unwritten memory for an output."""
        return torch.empty(*shape, device=self.device, dtype=DTYPES[dtype])

    def selection(self, rows: int, keys: int, top_k: int) -> torch.Tensor:
        """int32 [rows, top_k], strictly ascending, one key drawn from each of top_k even parts of the keys.

        ValueError unless top_k <= keys.
        """
        if top_k > keys:
            raise ValueError(f"top_k is {top_k}; at most keys = {keys} can be selected")
        first = torch.arange(top_k, device=self.device) * keys // top_k
        return (first + self.integers(0, keys // top_k, rows, top_k)).to(torch.int32)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One measured operation.

    name, implementation, dtype, regime: as recorded (:class:`hyscale_ref.profile.ProfilePoint`) and as the
    simulator asks for them.
    family: the file it is declared in.
    cost: its least work from a shape.
    build: allocates inputs on a device and returns one call.
    shapes: for each suite, the shapes to measure, the most telling first.
    tiny: a shape that a CPU does in well under a second.
    value: how much the simulator gains from it; an op of value 2 is measured twice as early as one of 1.
    efficiency: the fraction of its floor that it is expected to reach: for planning alone.
    compile_s: seconds that its first call spends compiling, likewise; once for all ops that name the same
    ``compiles``, and again for every other size of an axis in ``recompiles``.
    needs: modules without which it is left out.
    triton: whether a CPU needs Triton's interpreter for it.
    link: its bytes go over a link between devices, which has no ceiling here.
    timing_s: seconds that its timing takes at least: for planning alone.
    """

    name: str
    implementation: str
    dtype: str
    family: str
    cost: Callable[[Shape], Cost]
    build: Callable[[Draw, Shape], Work]
    shapes: Mapping[str, Sequence[Shape]]
    tiny: Shape
    regime: str = ""
    value: float = 1.0
    efficiency: float = 0.6
    compile_s: float = 0.3
    compiles: str = ""
    recompiles: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    triton: bool = False
    link: bool = False
    timing_s: float = 0.0

    @property
    def label(self) -> str:
        """``name/implementation/dtype`` and the regime, where there is one."""
        return "/".join([self.name, self.implementation, self.dtype, *([self.regime] if self.regime else [])])

    def missing(self) -> str | None:
        """The first module that it needs and that is not installed."""
        for module in self.needs:
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                found = None
            if found is None:
                return module
        return None


@dataclass(frozen=True)
class Entry:
    """One point to measure."""

    op: Op
    shape: Shape = field(hash=False)

    @property
    def key(self) -> tuple[str, str, str, str, tuple[tuple[str, int], ...]]:
        """What tells it from every other point of a device."""
        op = self.op
        return (op.name, op.implementation, op.dtype, op.regime, tuple(sorted(self.shape.items())))

    @property
    def label(self) -> str:
        return f"{self.op.label} {shape_text(self.shape)}"

    @property
    def compiled(self) -> tuple[str, ...]:
        """What its first call compiles: the same kernels for points that share them."""
        op = self.op
        return (op.compiles or op.label, *(f"{axis}={self.shape[axis]}" for axis in op.recompiles))


def grid(**axes: int | Sequence[int]) -> list[Shape]:
    """Every combination of the axes' sizes, the last axis fastest."""
    values = [[size] if isinstance(size, int) else list(size) for size in axes.values()]
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*values)]


def streaming(bytes_per_element: float, lane_ops: float = 4.0) -> Callable[[Shape], Cost]:
    """The cost of a kernel that streams over [rows, width] elements."""

    def cost(shape: Shape) -> Cost:
        elements = float(shape["rows"]) * shape["width"]
        return Cost(lane_ops=lane_ops * elements, bytes=bytes_per_element * elements)

    return cost


def backward(outputs: torch.Tensor, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> Work:
    """The backward pass of ``outputs`` alone: the forward pass has been run and is kept."""
    return Work(lambda: torch.autograd.grad(outputs, list(inputs), gradient, retain_graph=True))


def chained(*parts: Sequence[Shape]) -> list[Shape]:
    """Parts in order, repeats of a shape dropped."""
    seen: dict[tuple[tuple[str, int], ...], Shape] = {}
    for shape in itertools.chain(*parts):
        seen.setdefault(tuple(sorted(shape.items())), shape)
    return list(seen.values())


def interleaved_by_value(ops: Sequence[Op], suite: str) -> Iterator[Entry]:
    """The suite's points, most valuable first: each op's i-th shape stands at i / value; ties in op order."""
    ranked = [
        (place / op.value, order, place, Entry(op, shape))
        for order, op in enumerate(ops)
        for place, shape in enumerate(op.shapes.get(suite, ()))
    ]
    for *_, entry in sorted(ranked, key=lambda item: item[:3]):
        yield entry
