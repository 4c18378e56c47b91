"""One attention layer, forward, recomputation and backward: a materialised selection against HyTopK + replay.

    python benchmarks/layer_gains.py                                     # three models at 64K and 128K
    python benchmarks/layer_gains.py --model deepseek-v3.2 --longest     # and the longest that fits both
    python benchmarks/layer_gains.py --model tiny --device cpu --tokens 16

GLM-5.1 (32 indexer heads, 64 query heads), DeepSeek-V3.2 (64 and 128) and DeepSeek-V4-Flash (keys compressed
4:1, 512 of them selected), with random weights and normal inputs, fp8 indexer. Records go to
benchmarks/results/layer_gains.jsonl: one line a model, length and mode, with the milliseconds of the middle
round (of two, the faster), by part, and peak memory above the weights and inputs.

Time, as measured on an H200: a layer of 128K tokens takes 2.7 to 2.9 s for V3.2, 0.7 s for V4-Flash and 1.5
to 1.7 s for GLM-5.1, half of that or less at 64K, in every mode, where DeepGEMM and FlashInfer are
installed. Three models at two lengths, 1 + 5 rounds of three modes, take two and a half minutes, and
compilation. No round begins after --budget.
"""

import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from devices import MODES, each_of, header, one_of, prepare, surroundings

if TYPE_CHECKING:
    from hyscale_kernels.layer import LayerConfig
    from hyscale_kernels.training.measure import Baseline

RESULTS = Path(__file__).parent / "results"
MODELS = ("deepseek-v3.2", "deepseek-v4-flash", "glm-5.1")
Option = typer.Option
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Sample:
    """One forward and backward pass."""

    ms: float
    parts: dict[str, float]
    peak_extra_bytes: int


class Bench:
    """A layer of one model at one length, its input and output gradient; ``run`` is one step of it."""

    def __init__(self, layer: "LayerConfig", tokens: int, device: Any, seed: int = 0) -> None:
        import torch

        from hyscale_kernels.layer import DsaAttention, PartTimer, Rows

        self.device = device
        self.rows = Rows.of(tokens, ratio=layer.shape.indexer.key_ratio, device=device)
        torch.manual_seed(seed)
        with device:
            self.layer = DsaAttention(layer)
            self.x = torch.randn(tokens, layer.shape.hidden, dtype=layer.dtype).requires_grad_()
            self.gradient = torch.randn(tokens, layer.shape.hidden, dtype=layer.dtype)
        self.timer = PartTimer(device)

    def reconfigured(self, layer: "LayerConfig") -> Any:
        """The same parameters under another configuration."""
        import torch

        from hyscale_kernels.layer import DsaAttention

        with torch.device("meta"):
            other = DsaAttention(layer)
        other.load_state_dict(self.layer.state_dict(keep_vars=True), assign=True)
        return other

    def run(self, layer: Any) -> Sample:
        """Forward, recomputation and backward, under the layer's own policy."""
        import torch

        from hyscale_kernels.layer import Step, recomputed
        from hyscale_kernels.training.trainer import peak_bytes

        before = 0
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

        def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, loss, _ = layer(x, step)
            return out, loss

        self.timer.start()
        step = Step(rows=self.rows, timer=self.timer)
        try:
            out, loss = recomputed(layer.config.recompute, "layer", whole, self.x)
            torch.autograd.backward([out, loss], [self.gradient, torch.ones_like(loss)])
            parts = self.timer.report()
        finally:
            layer.zero_grad(set_to_none=True)
            self.x.grad = None
        return Sample(sum(parts.values()), parts, peak_bytes(self.device) - before)


@app.command(help=__doc__)
def main(
    model: Annotated[list[str] | None, Option(help=f"may be repeated; default: {', '.join(MODELS)}")] = None,
    tokens: Annotated[list[int] | None, Option(help="length; may be repeated; default: 65536 131072")] = None,
    longest: Annotated[bool, Option("--longest", help="the longest that every mode fits, too")] = False,
    only: Annotated[
        list[str] | None,
        Option(help="mode; may be repeated; default: all three", callback=each_of(*MODES)),
    ] = None,
    device: Annotated[
        str | None, Option(help="cuda, or cpu for tiny; default: a GPU", callback=one_of("cpu", "cuda"))
    ] = None,
    rounds: Annotated[int, Option(min=1, help="timed steps of a mode")] = 5,
    warmups: Annotated[int, Option(min=0, help="steps before them")] = 1,
    budget: Annotated[float, Option(help="seconds after which no round begins")] = 540.0,
    out: Annotated[Path, Option(help="folder of the records")] = RESULTS,
    commit: Annotated[str, Option(help="to record; default: as git says")] = "",
) -> None:
    large = [name for name in model or MODELS if name != "tiny"]
    device = prepare(device, needs=f"--model {large[0]}" if large else "")
    import torch

    from hyscale_kernels.layer import LayerConfig
    from hyscale_kernels.training.records import append

    modes, deadline, own = tuple(only or MODES), time.monotonic() + budget, torch.device(device)
    common = {"schema": 1, **header(commit, device)}
    for name in model or MODELS:
        try:
            layer = LayerConfig(
                shape=_shape(name), dtype=torch.bfloat16 if device == "cuda" else torch.float32,
                indexer_dtype="fp8" if device == "cuda" else "as layer",
            )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from None
        lengths = list(tokens or (65536, 131072))
        if longest:
            lengths.append(_longest(layer, modes, own))
        for length in filter(None, lengths):
            for mode, fields in _measure(layer, length, modes, own, warmups, rounds, deadline).items():
                fields["config"] = {"longest": longest and length == lengths[-1], **fields["config"]}
                append(
                    out / "layer_gains.jsonl",
                    {**common, "model": name, "tokens": length, "mode": mode, **fields},
                )
                print(f"{name:18} {length:>8} {mode:14} {fields.get('ms', fields.get('fault'))}", flush=True)


def _shape(name: str) -> Any:
    """A published shape, or the one that fits the interpreter."""
    from hyscale_kernels.training import PRESETS
    from hyscale_ref.shapes import model_shape

    return PRESETS["tiny"].shape if name == "tiny" else model_shape(name)


def _measure(
    layer: "LayerConfig",
    tokens: int,
    modes: tuple[str, ...],
    device: Any,
    warmups: int,
    rounds: int,
    deadline: float,
) -> dict[str, dict[str, Any]]:
    """Fields of each mode's record."""
    from functools import partial

    import numpy as np

    from hyscale_kernels.training.measure import clear, in_turns
    from hyscale_kernels.training.records import layer_options, layer_record

    clear(device)
    baseline = _baseline(layer, tokens, modes, device)
    bench, calls, configs = None, {}, {}
    try:
        bench = Bench(layer, tokens, device)
    except Exception as error:
        if not _out_of_memory(error):
            raise
    if bench is None:
        return {mode: {"fault": "out of memory: weights and inputs", "config": {}} for mode in modes}
    for mode in modes:
        options = layer_options(mode, baseline.selection, baseline.table_bytes)  # type: ignore[arg-type]
        configs[mode] = replace(layer, **options)
        calls[mode] = partial(bench.run, bench.reconfigured(configs[mode]))
    turns = in_turns(
        calls, warmups=warmups, rounds=rounds, device=device, go_on=lambda: time.monotonic() < deadline
    )
    records: dict[str, dict[str, Any]] = {}
    for mode in modes:
        config = {
            "layer": layer_record(configs[mode]), "shape": asdict(layer.shape),
            "baseline": asdict(baseline) if mode == "materialised" else None, **surroundings(),
        }  # fmt: skip
        if mode in turns.faults:
            records[mode] = {"fault": turns.faults[mode], "config": config}
            continue
        samples = sorted(turns.samples[mode], key=lambda sample: sample.ms)
        middle = samples[(len(samples) - 1) // 2]
        p20, p80 = np.percentile([sample.ms for sample in samples], [20, 80])
        records[mode] = {
            "ms": middle.ms, "p20_ms": float(p20), "p80_ms": float(p80), "samples": len(samples),
            "parts": middle.parts, "peak_extra_bytes": max(sample.peak_extra_bytes for sample in samples),
            "config": config,
        }  # fmt: skip
    return records


def _baseline(layer: "LayerConfig", tokens: int, modes: tuple[str, ...], device: Any) -> "Baseline":
    from hyscale_kernels.training.measure import Baseline, best_baseline

    if "materialised" not in modes:
        return Baseline("materialised", layer.table_bytes, {})
    return best_baseline(layer, tokens, device)


def _longest(layer: "LayerConfig", modes: tuple[str, ...], device: Any) -> int:
    """The longest sequence that every mode fits; 0 if there is none."""
    import torch

    from hyscale_kernels.training.measure import clear, longest
    from hyscale_kernels.training.records import layer_options

    gpu = device.type == "cuda"
    unit = 8192 if gpu else 8
    capacity = int(torch.cuda.get_device_properties(device).total_memory * 0.96) if gpu else 2**40
    baseline = _baseline(layer, 16 * unit, modes, device)
    found = []
    for mode in modes:
        config = replace(layer, **layer_options(mode, baseline.selection, baseline.table_bytes))  # type: ignore[arg-type]

        def peak(tokens: int, config: "LayerConfig" = config) -> int | None:
            result = bench = None
            with suppress(torch.OutOfMemoryError):
                bench = Bench(config, tokens, device)
                sample = bench.run(bench.layer)
                result = torch.cuda.max_memory_allocated(device) if gpu else sample.peak_extra_bytes
            del bench
            clear(device)
            return result

        length, tried = longest(peak, start=4 * unit, unit=unit, capacity=capacity, limit=128 * unit)
        print(f"{layer.shape.name}: {mode} fits {length} of {tried}", file=sys.stderr, flush=True)
        found.append(length)
    return min(found)


def _out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


if __name__ == "__main__":
    app()
