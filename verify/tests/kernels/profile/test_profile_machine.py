"""The clock of a real GPU, on a pretended one: what is timed, in which order, how often; what is recorded."""

import itertools
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyscale_kernels.profiling import machine
from hyscale_kernels.profiling.machine import (
    LEAST_SAMPLES,
    MOST_SAMPLES,
    STRETCHES,
    SUSTAINED_S,
    CudaMachine,
    conditions,
)
from hyscale_kernels.profiling.op import Work

UUID = "8bc9e85a-4fbe-9bdc-c844-f27587a2d688"


class Gpu:
    """Stands in for torch.cuda: events read a clock that calls advance, and everything is logged."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []
        self.allocated = 1000
        self.peak = 1000

    def event(self, enable_timing: bool = False) -> Any:
        assert enable_timing
        found = SimpleNamespace(at=0.0)

        def record() -> None:
            self.log.append("event")
            found.at = self.now_ms

        found.record = record
        found.elapsed_time = lambda other: other.at - found.at
        return found

    def call(self, name: str, ms: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now_ms += ms()
            self.peak = max(self.peak, self.allocated + 500)

        return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    def reset(device: Any) -> None:
        made.peak = made.allocated

    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.log.append("spin"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: made.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: made.allocated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, total_memory=150 * 10**9, uuid=UUID
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "SETTLE_S", 0.0)
    return made


@pytest.fixture
def clocked(gpu: Gpu) -> CudaMachine:
    made = object.__new__(CudaMachine)
    made.device = torch.device("cpu")
    made._asked = float("-inf")
    flush: Any = SimpleNamespace(zero_=lambda: gpu.log.append("flush"))
    made._flush = flush
    return made


def test_a_sample_is_one_call_after_a_flush_and_a_spin(gpu: Gpu, clocked: CudaMachine) -> None:
    first, second = gpu.call("first", lambda: 2.0), gpu.call("second", lambda: 3.0)
    found = clocked.time([Work(first, reset=lambda: gpu.log.append("reset")), Work(second)], seconds=5.0)
    timed = gpu.log[gpu.log.index("flush") :]
    assert timed[:10] == [
        "flush", "spin", "event", "first", "event",
        "flush", "spin", "event", "second", "event",
    ]  # fmt: skip
    assert gpu.log[gpu.log.index("flush") - 1] == "reset"
    assert found.milliseconds[:4] == [2.0, 3.0, 2.0, 3.0]
    assert found.peak_extra_bytes == 500


def test_steady_calls_take_the_least_samples_and_noisy_ones_the_most(gpu: Gpu, clocked: CudaMachine) -> None:
    assert len(clocked.time([Work(gpu.call("a", lambda: 1.0))], 5.0).milliseconds) == LEAST_SAMPLES
    noise = itertools.cycle([1.0, 1.5, 2.5, 1.2, 3.0])
    assert len(clocked.time([Work(gpu.call("b", lambda: next(noise)))], 5.0).milliseconds) == MOST_SAMPLES


def test_a_long_call_is_timed_three_times(gpu: Gpu, clocked: CudaMachine) -> None:
    assert len(clocked.time([Work(gpu.call("a", lambda: 1e4))], seconds=0.0).milliseconds) == 3


def test_the_inputs_turn_in_every_sample(gpu: Gpu, clocked: CudaMachine) -> None:
    works = [Work(gpu.call(name, lambda: 1.0)) for name in "abc"]
    clocked.time(works, 5.0)
    calls = [entry for entry in gpu.log[gpu.log.index("flush") :] if entry in "abc"]
    assert calls == list("abc") * (LEAST_SAMPLES // 3)


def test_sustained_calls_run_back_to_back_and_their_second_half_counts(
    gpu: Gpu, clocked: CudaMachine
) -> None:
    """A card that reaches its power limit after 0.3 s: the rate before does not show."""

    def ms() -> float:
        return 1.0 if gpu.now_ms < 300.0 else 2.0

    works = [Work(gpu.call(name, ms), sustained=True) for name in "ab"]
    found = clocked.time(works, seconds=0.01)
    assert found.milliseconds == [2.0] * STRETCHES
    assert found.peak_extra_bytes == 500
    after = len(gpu.log) - gpu.log[::-1].index("spin")  # the last of the calls that say how long one takes
    single, stretches = gpu.log[after : after + 3], gpu.log[after + 3 :]
    assert single == ["event", "b", "event"]
    assert stretches.count("event") == STRETCHES + 1
    assert "flush" not in stretches
    calls = [entry for entry in stretches if entry != "event"]
    assert calls == list("ab") * (len(calls) // 2)
    assert gpu.now_ms >= 1e3 * SUSTAINED_S


def test_sustained_calls_cannot_be_reset(gpu: Gpu, clocked: CudaMachine) -> None:
    with pytest.raises(ValueError, match="cannot be reset"):
        clocked.time([Work(lambda: None, reset=lambda: None, sustained=True)], seconds=0.01)


def nvidia_smi(answers: dict[str, str]) -> Callable[..., Any]:
    def run(command: list[str], **options: Any) -> Any:
        field = next((part for part in command if part.startswith("--query-gpu=")), "")
        if command[0] != "nvidia-smi":
            return SimpleNamespace(returncode=1, stdout="")
        assert f"--id=GPU-{UUID}" in command
        return SimpleNamespace(returncode=0, stdout=answers.get(field.partition("=")[2], "[N/A]") + "\n")

    return run


def test_conditions_are_read_from_the_card(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"serial": "1650924043271", "power.limit": "700.00", "driver_version": "580.159.04"}
    monkeypatch.setattr(subprocess, "run", nvidia_smi(answers))
    found = conditions("abcdef")
    assert (found.name, found.serial, found.gpus) == ("NVIDIA H200", "1650924043271", 2)
    assert (found.power_limit_w, found.commit) == (700.0, "abcdef")
    versions = dict(found.versions)
    assert versions["driver"] == "580.159.04"
    assert {"torch", "triton", "python", "sources"} <= versions.keys()
    assert list(found.versions) == sorted(found.versions)


def test_what_the_card_does_not_say_is_left_empty(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", nvidia_smi({}))
    found = conditions()
    assert found.serial == UUID
    assert found.power_limit_w is None
    assert "driver" not in dict(found.versions)

    def absent(command: list[str], **options: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    assert conditions().power_limit_w is None


def test_the_clock_comes_from_nvml_or_now_and_then_from_nvidia_smi(
    gpu: Gpu, clocked: CudaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    assert clocked.clock_mhz() == 1980.0

    def missing(device: Any) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    monkeypatch.setattr(subprocess, "run", nvidia_smi({"clocks.sm": "1755"}))
    assert clocked.clock_mhz() == 1755.0
    assert clocked.clock_mhz() is None  # asked a moment ago


def test_memory_is_given_back_when_much_is_held(
    clocked: CudaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    clocked.clear(60)
    assert not freed
    clocked.clear(40)
    clocked.clear()
    assert len(freed) == 2


def test_no_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match="PyTorch sees none"):
        CudaMachine()
