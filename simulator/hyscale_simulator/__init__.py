"""Predicts the training step of a large model on a GPU cluster from measured kernels.

>>> import hyscale_simulator as hs
>>> scenario = hs.load("glm-5.1-1m-512xh20")
>>> result = hs.evaluate(scenario)
>>> result.step_time_s, result.breakdown, result.memory.fits
>>> hs.compare(result, hs.evaluate(scenario.with_(**{"recompute.replay": False})))
"""

from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.evaluate import Evaluator, evaluate, evaluator
from hyscale_simulator.result import Result, compare
from hyscale_simulator.scenario import Scenario, load, presets

__all__ = [
    "DescriptionError",
    "Evaluator",
    "Result",
    "Scenario",
    "compare",
    "evaluate",
    "evaluator",
    "load",
    "presets",
]
