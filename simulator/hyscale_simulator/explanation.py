"""Everything ``hyscale explain`` says, computed: a comparison of two scenarios, and the claim held
against it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyscale_simulator.attribution import Attribution, CausalPoint, attribute, causal_curve
from hyscale_simulator.claim import (
    CLAIMED,
    PRECISIONS,
    TOLERANCE,
    BaselineCase,
    Crossover,
    PublicKernel,
    baseline_case,
    crossover,
    public_kernels,
)
from hyscale_simulator.conclusions import Claim, state
from hyscale_simulator.evaluate import Evaluator
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.sensitivity import Curve, sensitivity
from hyscale_simulator.switches import BASELINES
from hyscale_simulator.uncertainty import Band, speedup_band

__all__ = ["Causal", "ClaimStudy", "Explanation", "explain"]

SCHEMA = 1
CAUSES = 6
"""Classes of work whose causal curve is drawn: the largest of the baseline's critical path."""
HEADLINE = "C"


@dataclass(frozen=True)
class Causal:
    """The step as one class of work is sped up, in both scenarios."""

    name: str
    before: tuple[CausalPoint, ...]
    after: tuple[CausalPoint, ...]


@dataclass(frozen=True)
class ClaimStudy:
    """The published speed-up held against every baseline, precision and kernel gain."""

    headline: BaselineCase
    cases: tuple[BaselineCase, ...]
    crossovers: tuple[Crossover, ...]
    kernels: tuple[PublicKernel, ...]
    curves: tuple[Curve, ...]
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Explanation:
    """A comparison explained; ``study`` only for the comparison that the claim is about."""

    attribution: Attribution
    band: Band
    causes: tuple[Causal, ...]
    study: ClaimStudy | None
    command: str = "hyscale explain"

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        found = self.attribution
        sentence = (
            f"{found.improved.scenario.name} is predicted to train "
            f"{found.speedup:.2f}x as fast as {found.baseline.scenario.name} "
            f"(90 % band {self.band.low:.2f} to {self.band.high:.2f})."
        )
        if self.study is None:
            return sentence
        case = self.study.headline
        need = (
            f"needs a selection kernel {case.gain_claimed:.1f}x as fast as this baseline's"
            if case.gain_claimed is not None
            else "is out of reach even for a kernel that takes no time"
        )
        return (
            f"HyTopK and replay are predicted to train GLM-5.1 at 1M tokens on 512 H20 {found.speedup:.2f}x "
            f"as fast as Megatron's recommended path (90 % band {self.band.low:.2f} to "
            f"{self.band.high:.2f}), not {CLAIMED:.2f}x: {CLAIMED:.2f}x {need}, or a slower baseline."
            if found.speedup < CLAIMED * (1 - TOLERANCE)
            else f"HyTopK and replay are predicted to train GLM-5.1 at 1M tokens on 512 H20 "
            f"{found.speedup:.2f}x as fast as Megatron's recommended path (90 % band {self.band.low:.2f} to "
            f"{self.band.high:.2f}); the published figure is {CLAIMED:.2f}x."
        )

    def to_json(self) -> dict[str, Any]:
        """The record that ``hyscale explain --json`` writes."""
        found = self.attribution
        names = [switch.name for switch in found.switches]
        study = self.study
        return {
            "schema": SCHEMA,
            "baseline": _scenario_json(found, before=True),
            "improved": _scenario_json(found, before=False),
            "speedup": found.speedup,
            "speedup_low": self.band.low,
            "speedup_high": self.band.high,
            "waterfall": [
                {"switch": name, "seconds": seconds}
                for name, seconds in zip(names, found.waterfall, strict=True)
            ],
            "shapley": [
                {"switch": name, "log_share": None if math.isnan(share) else share, "seconds": seconds}
                for name, share, seconds in zip(names, found.log_shares, found.seconds, strict=True)
            ],
            "interactions": [
                {"switches": [names[first], names[second]], "log": log, "seconds": seconds}
                for (first, second), (log, seconds) in found.pairs.items()
            ],
            "critical_path": [
                {"scenario": which, "name": name, "seconds": seconds}
                for which, result in (("baseline", found.baseline), ("improved", found.improved))
                for name, seconds in result.critical_path
            ],
            "consistent_with_claim": [
                {
                    "baseline": case.baseline.letter,
                    "linear_precision": case.precision,
                    "kernel_gain": cell.kernel_gain,
                    "speedup": cell.speedup,
                }
                for case in (study.cases if study else ())
                for cell in case.cells
                if cell.consistent
            ],
            "claims": [
                {"claim": item.claim, "evidence": item.evidence, "falsified_by": item.falsified_by}
                for item in (study.claims if study else ())
            ],
        }


def _scenario_json(found: Attribution, *, before: bool) -> dict[str, Any]:
    result = found.baseline if before else found.improved
    record = result.to_json()
    del record["schema"], record["critical_path"]
    return {"description": result.scenario.description, **record}


def explain(
    baseline: Scenario,
    improved: Scenario,
    evaluate: Evaluator,
    *,
    study: bool,
    samples: int = 64,
    seed: int = 0,
    command: str = "hyscale explain",
    progress: Callable[[str], None] = lambda stage: None,
) -> Explanation:
    """Compare two scenarios; with ``study``, also hold the published claim against all baselines."""
    progress("every combination of switches")
    found = attribute(baseline, improved, evaluate)
    progress("what each class of work would give")
    kinds = [name for name, _ in found.baseline.critical_path if name != "bubble"][:CAUSES]
    causes = tuple(
        Causal(name, causal_curve(baseline, name, evaluate), causal_curve(improved, name, evaluate))
        for name in kinds
    )
    progress("how sure")
    band = speedup_band(found.baseline, found.improved, evaluate, samples=samples, seed=seed)
    return Explanation(found, band, causes, _study(found, evaluate, progress) if study else None, command)


def _study(found: Attribution, evaluate: Evaluator, progress: Callable[[str], None]) -> ClaimStudy:
    cases = []
    for baseline in BASELINES:
        progress(f"baseline {baseline.letter}")
        cases += [baseline_case(baseline, precision, evaluate) for precision in PRECISIONS]
    headline = next(c for c in cases if c.baseline.letter == HEADLINE and c.precision == "bf16")
    progress("context lengths")
    crossovers = tuple(crossover(b, evaluate) for b in BASELINES if b.letter in ("C", "E"))
    progress("sensitivity")
    curves = sensitivity(found.baseline.scenario, found.improved.scenario, evaluate)
    kernels = public_kernels(evaluate)
    claims = state(headline, cases, crossovers, kernels, curves)
    return ClaimStudy(headline, tuple(cases), crossovers, kernels, curves, claims)
