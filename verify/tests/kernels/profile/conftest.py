"""A machine that runs nothing on a GPU and tells whatever time a test wants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from hyscale_kernels.profiling.machine import Conditions, Measurement
from hyscale_kernels.profiling.op import Cost, Draw, Entry, Op, Work
from hyscale_ref.profile import ProfilePoint

H200 = Conditions(
    name="NVIDIA H200",
    serial="1234",
    power_limit_w=700.0,
    versions=(("torch", "2.11.0"), ("triton", "3.6.0")),
    commit="0123456789ab",
)


@dataclass
class Time:
    """Seconds that pass only when something is measured."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class PretendMachine:
    """Runs each call once on the CPU; the time is ``us`` of a call's own, or 100, times ``slow``."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    conditions: Conditions = H200
    clock: Time = field(default_factory=Time)
    seconds_a_point: float = 1.0
    slow: float = 1.0
    lost: bool = False
    cleared: int = 0
    timed: int = 0

    def time(self, works: Sequence[Work], seconds: float) -> Measurement:
        self.clock.now += self.seconds_a_point
        self.timed += 1
        for work in works:
            if work.reset is not None:
                work.reset()
            work.call()
        us = float(getattr(works[0].call, "us", 100.0)) * self.slow
        return Measurement([us * share / 1e3 for share in (0.98, 0.99, 1.0, 1.01, 1.02)], 2**20)

    def clock_mhz(self) -> float | None:
        return 1980.0

    def alive(self) -> bool:
        return not self.lost

    def clear(self, above_bytes: float = 0.0) -> None:
        self.cleared += above_bytes == 0


class Pretended:
    """A call that does nothing and takes ``us``."""

    def __init__(self, us: float) -> None:
        self.us = us

    def __call__(self) -> None:
        return None


@dataclass
class Memory:
    """A sink that keeps points."""

    points: list[ProfilePoint] = field(default_factory=list)

    def add(self, point: ProfilePoint) -> None:
        self.points.append(point)


def pretended_op(
    name: str = "thing",
    *,
    us: float | Callable[[Mapping[str, int]], float] = 100.0,
    raises: Callable[[], BaseException] | None = None,
    sizes: Sequence[int] = (1, 2, 3),
    value: float = 1.0,
    compile_s: float = 0.0,
    needs: tuple[str, ...] = (),
    cost: Cost | None = None,
) -> Op:
    """An op whose call takes ``us`` microseconds, or whose building raises."""

    def build(inputs: Draw, shape: Mapping[str, int]) -> Work:
        if raises is not None:
            raise raises()
        return Work(Pretended(us(shape) if callable(us) else us))

    return Op(
        name=name,
        implementation="mine",
        dtype="bf16",
        family="tests",
        cost=lambda shape: cost or Cost(),
        build=build,
        shapes={"tests": [{"size": size} for size in sizes]},
        tiny={"size": 1},
        value=value,
        compile_s=compile_s,
        needs=needs,
    )


def entries_of(*ops: Op) -> list[Entry]:
    return [Entry(op, shape) for op in ops for shape in op.shapes["tests"]]


@dataclass(frozen=True)
class Tools:
    """What the tests of a run build on."""

    Machine: type[PretendMachine] = PretendMachine
    Memory: type[Memory] = Memory
    Pretended: type[Pretended] = Pretended
    conditions: Conditions = H200
    op: Callable[..., Op] = pretended_op
    entries: Callable[..., list[Entry]] = entries_of


@pytest.fixture
def tools() -> Tools:
    return Tools()
