"""One training run on one rank: a step at a time, each with its losses, time by part and peak memory.

Shape letters: L layers.
"""

import math
import os
import resource
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..layer import (
    ContextParallel,
    Decoder,
    Losses,
    Observation,
    PartTimer,
    Recall,
    Rows,
    Step,
    attention_recall,
)
from .config import Phase, RunConfig
from .text import Batch, Text, draw

BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, over all ranks; times and memory are this rank's.

    step           counted from 1
    loss           cross entropy, nats a byte
    kl             of each layer's indexer (times kl_coefficient), a mean over rows; 0 for a layer that shares
    parts          milliseconds by part, which add up to step_ms (see ``hyscale_kernels.layer.PartTimer``)
    peak_bytes     allocated on the GPU at most; on a CPU, the process's largest resident size so far
    """

    step: int
    stage: str
    sequence: int
    loss: float
    kl: list[float]
    gradient_norm: float
    learning_rate: float
    step_ms: float
    parts: dict[str, float]
    peak_bytes: int


class Trainer:
    """A model, its optimizer, and where they are in the run.

    ``context`` is the context-parallel group; every rank makes a Trainer of the same configuration and calls
    the same methods. Parameters are drawn from ``config.seed``.

    Raises ValueError for a sequence that the ranks, or the text, cannot divide.
    """

    def __init__(
        self,
        config: RunConfig,
        text: Text,
        device: torch.device | str,
        context: ContextParallel | None = None,
    ) -> None:
        self.config, self.text, self.context = config, text, context
        self.device = torch.device(device)
        for phase in config.phases:
            self._rows(self._batch(phase, 0), phase)  # refuses odd splits before anything is allocated
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        with self.device:
            self.model = Decoder(config.decoder())
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=BETAS, weight_decay=config.weight_decay, fused=fused
        )
        self.done = 0
        self.timer = PartTimer(self.device)

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to go on bit for bit."""
        context = self.context
        return {
            **self.config.as_json(),
            "text_sha256": self.text.sha256,
            "ranks": 1 if context is None else context.size,
            "split": None if context is None else context.split,
        }

    def step(self, phase: Phase | None = None, place: int | None = None) -> StepResult:
        """One step of ``phase`` (default: the one that is due), the ``place``-th of it.

        FloatingPointError if the loss is not finite; parameters are then as they were, as after any error.
        """
        if phase is None:
            phase, place = self.config.place(self.done)
        rate = phase.learning_rate * min(1.0, ((place or 0) + 1) / max(1, self.config.ramp_steps))
        batch = self._batch(phase, self.done)
        rows = self._rows(batch, phase)
        tokens, targets = (rows.of_sequence(each).to(self.device) for each in batch[:2])
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.timer.start()
        step = Step(rows=rows, context=self.context, stage=phase.stage, timer=self.timer)
        try:
            losses = self.model(tokens, targets, step)
            losses.total.backward()
            language, kl, norm = self._update(losses, rate)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        parts = self.timer.report()
        self.done += 1
        return StepResult(
            step=self.done, stage=phase.stage, sequence=phase.sequence, loss=language, kl=kl,
            gradient_norm=norm, learning_rate=rate, step_ms=sum(parts.values()), parts=parts,
            peak_bytes=peak_bytes(self.device),
        )  # fmt: skip

    def _update(self, losses: Losses, rate: float) -> tuple[float, list[float], float]:
        """Gradients summed over ranks and clipped, then the optimizer; (cross entropy, KL, gradient norm)."""
        self.timer.switch("other")
        if self.context is not None:
            self.context.sum_gradients(self.model.parameters(), self.timer)
        self.timer.switch("optimizer")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip))
        language, kl = self._over_ranks(losses.language, losses.indexer)
        if not math.isfinite(language + sum(kl) + norm):
            raise FloatingPointError(
                f"step {self.done + 1}: loss {language}, KL {kl}, gradient norm {norm}; not finite"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return language, kl, norm

    @torch.no_grad()
    def evaluate(self, phase: Phase) -> tuple[float, list[float]]:
        """(cross entropy, KL of each layer) of text that is never trained on, in the phase's stage."""
        batch, rows = self.held_out(phase)
        tokens, targets = (rows.of_sequence(each).to(self.device) for each in batch[:2])
        losses = self.model(tokens, targets, Step(rows=rows, context=self.context, stage=phase.stage))
        return self._over_ranks(losses.language, losses.indexer)

    def recall(self, phase: Phase, *, sample: int = 64) -> dict[int, Recall]:
        """Attention mass that each selecting layer's selection recalls on held-out text; see ``Recall``.

        A mean over the ranks that have rows with a choice.
        """
        found: dict[int, Recall] = {}

        def look(seen: Observation) -> None:
            found[seen.layer] = attention_recall(seen, sample=sample)

        batch, rows = self.held_out(phase)
        tokens = rows.of_sequence(batch.tokens).to(self.device)
        self.model.observe(tokens, Step(rows=rows, context=self.context), look)
        if self.context is None:
            return found
        table = torch.tensor([found[layer] for layer in sorted(found)], device=self.device).float()
        seen = self.context.sum_over_ranks((~table.isnan()).float())
        table = self.context.sum_over_ranks(table.nan_to_num(0)) / seen
        return {layer: Recall(*row) for layer, row in zip(sorted(found), table.tolist(), strict=True)}

    def held_out(self, phase: Phase) -> tuple[Batch, Rows]:
        """A sequence that is never trained on, and this rank's rows of it."""
        batch = self._batch(phase, 0, held_out=True)
        return batch, self._rows(batch, phase)

    def _batch(self, phase: Phase, step: int, held_out: bool = False) -> Batch:
        return draw(
            self.text, phase.sequence, phase.document, seed=self.config.seed, step=step, held_out=held_out
        )

    def _rows(self, batch: Batch, phase: Phase) -> Rows:
        documents = None if batch.cu_seqlens is None else batch.cu_seqlens.to(self.device)
        ratio = self.config.shape.indexer.key_ratio
        if self.context is None:
            return Rows.of(phase.sequence, cu_seqlens=documents, ratio=ratio, device=self.device)
        return self.context.rows(phase.sequence, cu_seqlens=documents, ratio=ratio, device=self.device)

    def _over_ranks(self, language: torch.Tensor, kl: torch.Tensor) -> tuple[float, list[float]]:
        values = torch.cat([language.reshape(1), kl])
        if self.context is not None:
            values = self.context.sum_over_ranks(values)
        first, *rest = values.tolist()
        return first, rest


def retargeted(model: Decoder, **layer: Any) -> Decoder:
    """A decoder with the same parameters (the very tensors) whose layers run otherwise.

    ``layer`` are fields of ``LayerConfig``, such as selection and recompute.
    """
    config = replace(model.config, layer=replace(model.config.layer, **layer))
    with torch.device("meta"):
        other = Decoder(config)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return other


def peak_bytes(device: torch.device) -> int:
    """Allocated on a GPU at most since the count was reset; else the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
