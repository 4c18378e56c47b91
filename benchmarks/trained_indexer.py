"""Train an indexer in minutes, show that it learned, and capture what it scores.

    python benchmarks/trained_indexer.py                     # one H200, at most 10 minutes
    python benchmarks/trained_indexer.py --tiny --device cpu --out DIR --data FILE

The model is small: 4 layers of hidden size 768 with 16 query heads, a byte-level language model of the
sources of Python's library. Its indexer is as large as GLM-5.1's: 32 heads of 128, 2,048 keys of 32,768. What
it shows about a production model's indexer is no more than a hint; it is a regime between random and
production.

    dense    language on stretches of 2,048 bytes, whose rows select every key; the indexers do not learn
    warmup   the indexers alone learn the attention of a frozen model, over all keys (8,192)
    sparse   everything learns on 32,768 bytes, with 2,048 keys selected

The sparse KL is measured on held-out text, before the warm-up (a trained model, an untrained indexer:
"start"), after it, and during the sparse phase; recall is the attention mass on the selected keys, against
as many keys at random. Time decides how many steps each phase has. Written: a line in
results/trained_indexer.jsonl, and q, k and w of 256 rows of two layers in data/trained_indexer.npz
(hyscale_kernels.training.captured reads it).
Exit status 1 if the KL did not fall to half.

Measured on an H200 (results/trained_indexer.jsonl): in 270 s, 940 dense steps of 8,192 bytes, 132 of warm-up
and 311 sparse ones of 32,768; the KL fell to a tenth of its start.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from devices import header, one_of, prepare, surroundings

if TYPE_CHECKING:
    from hyscale_kernels.layer import Observation
    from hyscale_kernels.training import Phase, RunConfig, Trainer

HERE = Path(__file__).parent
ROWS, RESERVE_S = 256, 40.0  # rows captured of a layer; seconds for what follows the training
SHARES = {"dense": 0.4, "warmup": 0.15, "sparse": 0.45}  # of the time
HALF = 0.5  # of the start, to which the KL must fall
Option = typer.Option
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    device: Annotated[
        str | None, Option(help="cuda, or cpu for tiny; default: a GPU", callback=one_of("cpu", "cuda"))
    ] = None,
    budget: Annotated[float, Option(help="seconds, all in all")] = 540.0,
    most_steps: Annotated[int | None, Option(help="of a phase, even if there is time")] = None,
    every: Annotated[int, Option(min=1, help="sparse steps between two looks at the KL")] = 20,
    seed: Annotated[int, Option(help="of parameters and of the order of the text")] = 0,
    tiny: Annotated[bool, Option("--tiny", help="the model that fits Triton's interpreter")] = False,
    out: Annotated[Path, Option(help="folder of the record")] = HERE / "results",
    data: Annotated[Path, Option(help="file of the captured layers")] = HERE / "data" / "trained_indexer.npz",
    commit: Annotated[str, Option(help="to record; default: as git says")] = "",
) -> None:
    began = time.monotonic()
    device = prepare(device, needs="" if tiny else "the model without --tiny")
    import torch

    from hyscale_kernels.training import Trainer, library_text, retargeted
    from hyscale_kernels.training.records import append

    config = _config(tiny, seed, device)
    text = library_text(config.text_bytes)
    trainer = Trainer(config, text, torch.device(device))
    dense, warmup, sparse = config.phases
    ends, share = {}, 0.0
    for name, part in SHARES.items():
        share += part
        ends[name] = began + share * (budget - RESERVE_S)

    def run(name: str, phase: "Phase", look: "Callable[[], None]" = lambda: None) -> list[list[float]]:
        """[step, cross entropy, KL of each layer] of the phase's steps."""
        found: list[list[float]] = []
        most = phase.steps if most_steps is None else most_steps
        while len(found) < most and (time.monotonic() < ends[name] or not found):
            result = trainer.step(phase, len(found))
            found.append([result.step, result.loss, *result.kl])
            if len(found) % every == 0:
                look()
                print(_progress(name, len(found), result), file=sys.stderr, flush=True)
        return found

    whole = trainer.model
    trainer.model = retargeted(whole, kl_coefficient=0.0)
    curve = {"dense": run("dense", dense)}
    trainer.model = whole
    kl: dict[str, Any] = {"start": trainer.evaluate(sparse)[1], "during": []}
    recall = {"start": _recall(trainer, sparse)}
    curve["warmup"] = run("warmup", warmup)
    kl["after warmup"] = trainer.evaluate(sparse)[1]
    recall["after warmup"] = _recall(trainer, sparse)
    curve["sparse"] = run(
        "sparse", sparse, lambda: kl["during"].append([trainer.done, *trainer.evaluate(sparse)[1]])
    )
    language, kl["end"] = trainer.evaluate(sparse)
    recall["end"] = _recall(trainer, sparse)
    ratio = sum(kl["end"]) / sum(kl["start"])
    facts = {
        **header(commit, device), "small_model": True, "run": trainer.identity(), "text_files": text.files,
        "steps": {name: len(steps) for name, steps in curve.items()}, "held_out_loss": language,
        "kl": kl, "kl_end_over_start": ratio, "recall": recall, "seconds": time.monotonic() - began,
        "config": surroundings(),
    }  # fmt: skip
    captured = _capture(trainer, sparse, data, facts)
    record = {
        "schema": 1, **facts, "holds": ratio <= HALF, "captured": captured,
        "curve": {name: [_rounded(row) for row in steps] for name, steps in curve.items()},
    }  # fmt: skip
    append(out / "trained_indexer.jsonl", record)
    print(
        json.dumps({name: record[name] for name in ("steps", "held_out_loss", "kl_end_over_start", "recall")})
    )
    print(json.dumps(captured))
    if ratio > HALF:
        print(f"trained_indexer: the KL fell to {ratio:.2f} of its start, not to {HALF}", file=sys.stderr)
        raise typer.Exit(1)


def _config(tiny: bool, seed: int, device: str) -> "RunConfig":
    from hyscale_kernels.training import PRESETS, Phase

    endless = 10**9
    if tiny:
        config = replace(PRESETS["tiny"], dtype="bfloat16" if device == "cuda" else "float32")
        lengths, rate = (8, 4, 8, 8), 1e-2
    else:
        config, lengths, rate = PRESETS["small"], (8192, 2048, 8192, 32768), 1e-3
    phases = (
        Phase(stage="sparse", steps=endless, sequence=lengths[0], document=lengths[1], learning_rate=rate),
        Phase(stage="warmup", steps=endless, sequence=lengths[2], learning_rate=rate),
        Phase(stage="sparse", steps=endless, sequence=lengths[3], learning_rate=rate / 3),
    )
    return replace(config, phases=phases, seed=seed, recompute="none", ramp_steps=2 if tiny else 50)


def _progress(name: str, steps: int, result: Any) -> str:
    tokens = result.sequence / result.step_ms * 1e3
    return f"{name} {steps}: loss {result.loss:.3f} KL {sum(result.kl):.3f} {tokens:,.0f} bytes/s"


def _rounded(row: list[float]) -> list[float]:
    return [round(value, 5) for value in row]


def _recall(trainer: "Trainer", phase: "Phase") -> dict[str, dict[str, float]]:
    return {f"layer {layer}": each._asdict() for layer, each in trainer.recall(phase, sample=128).items()}


def _capture(trainer: "Trainer", phase: "Phase", path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write rows of two selecting layers, and say how much rounding them to fp8 changes the selection."""
    import torch

    from hyscale_kernels.hytopk import hytopk
    from hyscale_kernels.profiling import captured

    selecting = trainer.config.shape.selecting_layers
    chosen = sorted({selecting[min(1, len(selecting) - 1)], selecting[-1]})
    layers: list[captured.CapturedLayer] = []
    shared: dict[str, float] = {}

    def look(seen: "Observation") -> None:
        if seen.layer not in chosen:
            return
        T = seen.indices.shape[0]
        count = min(ROWS, T // 2)  # spread over the second half
        rows = T // 2 + torch.arange(count, device=seen.indices.device) * (T // 2 // count)
        layer = captured.CapturedLayer.of(
            seen.layer, seen.index.q[rows], seen.index.k, seen.index.w[rows], seen.rows.positions[rows]
        )
        layers.append(layer)
        q, k, w, start, end, k_scale, _ = layer.operands("fp8", device=seen.indices.device)
        again = hytopk(q, k, w, seen.indices.shape[1], start=start, end=end, k_scale=k_scale).indices
        both = torch.isin(_keyed(again), _keyed(seen.indices[rows])).sum() - (again < 0).sum()
        shared[f"layer {seen.layer}"] = float(both / (again >= 0).sum())

    batch, rows = trainer.held_out(phase)
    from hyscale_kernels.layer import Step

    trainer.model.observe(batch.tokens.to(trainer.device), Step(rows=rows), look)
    provenance = {
        "what": "a small model's indexer; see benchmarks/trained_indexer.py",
        "shared": shared,
        **facts,
    }
    size = captured.write(path, layers, provenance)
    return {
        "bytes": size, "layers": [layer.number for layer in layers], "rows": int(layers[0].w.shape[0]),
        "keys": int(layers[0].k.scale.shape[0]), "selected_keys_shared_with_unrounded": shared,
    }  # fmt: skip


def _keyed(indices: Any) -> Any:
    """Row and key in one number; -1 at unused places."""
    import torch

    row = torch.arange(indices.shape[0], device=indices.device)[:, None]
    return (row * 2**32 + indices.long()).masked_fill(indices < 0, -1)


if __name__ == "__main__":
    app()
