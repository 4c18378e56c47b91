"""What is written down of a measured step: one JSON line, complete enough to hold a prediction against it.

``config.scenario`` is the run as ``hyscale_simulator`` describes runs, its model given whole; ``hyscale
validate --steps FILE`` reads the lines. Simplifications are the simulator's own terms: weights are replicated
(ZeRO stage 0), and no collective is counted as hidden, because only the gather of the latents is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..baselines.materialised import BYTES_PER_SCORE
from ..layer import LayerConfig
from ..layer.config import Recompute, SelectionName
from ..layer.rows import Split
from .config import RunConfig

SCHEMA = 1
CLUSTER = "h200-64x8"
Mode = Literal["materialised", "hytopk", "hytopk+replay"]
MODES: tuple[Mode, ...] = ("materialised", "hytopk", "hytopk+replay")
TABLE_BYTES_A_SCORE = {"materialised": BYTES_PER_SCORE, "deepgemm+flashinfer": 4}
RIVALS = {"materialised": ("torch", "torch.topk"), "deepgemm+flashinfer": ("deepgemm", "flashinfer")}


def layer_options(mode: Mode, baseline: SelectionName, table_bytes: int) -> dict[str, Any]:
    """Fields of ``LayerConfig`` that make a layer run in ``mode``; ``baseline`` is how it materialises."""
    recompute: Recompute = "full+replay" if mode == "hytopk+replay" else "full"
    selection: SelectionName = baseline if mode == "materialised" else "hytopk"
    return {"selection": selection, "recompute": recompute, "table_bytes": table_bytes}


def scenario(
    config: RunConfig,
    mode: Mode,
    *,
    sequence: int,
    gpus: int,
    split: Split = "zigzag",
    baseline: SelectionName = "materialised",
    table_bytes: int = 8 * 2**30,
) -> dict[str, Any]:
    """The step as a scenario of ``hyscale_simulator``: plain JSON.

    ValueError for a model without per-head up-projections, which a scenario cannot describe.
    """
    shape = config.shape
    if shape.qk_nope_dim is None or shape.v_dim is None:
        raise ValueError(f"shape: {shape.name}; allowed: shapes with qk_nope_dim and v_dim")
    indexer, table = shape.indexer, mode == "materialised"
    scorer, selector = RIVALS[baseline] if table else ("", "hytopk")
    keys = max(1, sequence // indexer.key_ratio)
    rows = max(1, table_bytes // (TABLE_BYTES_A_SCORE[baseline] * keys)) if table else 0
    return {
        "name": f"{shape.name} {mode} {sequence} on {gpus}",
        "model": {
            "name": shape.name,
            "source": "hyscale_kernels.training",
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocabulary": config.decoder().vocabulary,
            "feed_forward": config.mlp,
            "attention": {
                "kind": "latent", "heads": shape.heads, "q_rank": shape.q_lora_rank,
                "kv_rank": shape.value_dim, "nope_dim": shape.qk_nope_dim,
                "rope_dim": shape.latent_dim - shape.value_dim, "value_dim": shape.v_dim,
            },
            "indexer": {
                "heads": indexer.heads, "head_dim": indexer.head_dim, "top_k": indexer.top_k,
                "key_ratio": indexer.key_ratio,
                "computing_layers": list(shape.selecting_layers)
                if len(shape.selecting_layers) < shape.layers else [],
            },
        },
        "cluster": CLUSTER,
        "gpus": gpus,
        "layout": {"context_parallel": gpus, "context_split": split, "zero_stage": 0},
        "batch": {"sequence_tokens": sequence, "sequences_per_step": 1},
        "selection": {
            "table": table, "scorer": scorer, "selector": selector, "table_rows": rows,
            "scoring_dtype": "fp8" if config.indexer_dtype == "fp8" else "bf16",
            "record": "packed" if mode == "hytopk+replay" else "int32",
        },
        "recompute": {"policy": "full", "replay": mode == "hytopk+replay"},
        "overlap": {"context": False, "gradients": False, "parameters": False},
    }  # fmt: skip


def step_record(
    *,
    commit: str,
    gpu: str,
    gpus: int,
    sequence: int,
    mode: Mode,
    step_ms: float,
    parts: Mapping[str, float],
    peak_bytes: int,
    loss: float,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """A line of ``train_step.jsonl`` or ``scaling.jsonl``; ``config`` holds all else, ``scenario`` included.

    ValueError without a scenario.
    """
    if "scenario" not in config:
        raise ValueError("config: without 'scenario'; allowed: with it, so that the step can be predicted")
    return {
        "schema": SCHEMA, "commit": commit, "gpu": gpu, "gpus": gpus, "sequence": sequence, "mode": mode,
        "step_ms": step_ms, "parts": dict(parts), "peak_bytes": peak_bytes, "loss": loss,
        "config": dict(config),
    }  # fmt: skip


def layer_record(layer: LayerConfig) -> dict[str, Any]:
    """A layer's options in plain JSON, its shape by name."""
    names = ("selection", "recompute", "indexer_dtype", "kl_coefficient", "row_block", "table_bytes")
    return {"shape": layer.shape.name, "dtype": str(layer.dtype).removeprefix("torch.")} | {
        name: getattr(layer, name) for name in names
    }


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
