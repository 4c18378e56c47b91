"""Pipeline schedules: orders of passes, the graphs they make, and the closed forms they have to meet."""

from hyscale_simulator.schedules.generators import dualpipe, gpipe, interleaved, one_f_one_b, zb_h1
from hyscale_simulator.schedules.pipeline import PassTimes, pipeline_graph
from hyscale_simulator.schedules.schedule import Input, Op, Schedule, Slot, Step

__all__ = [
    "Input",
    "Op",
    "PassTimes",
    "Schedule",
    "Slot",
    "Step",
    "dualpipe",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipeline_graph",
    "zb_h1",
]
