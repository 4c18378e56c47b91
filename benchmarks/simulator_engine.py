"""How fast the simulator's engine and its longest-path pass are: tasks per second, median of several runs.

    python benchmarks/simulator_engine.py [--layers 10] [--json FILE]

The graph is a pipeline of eight stages with sixteen microbatches; each pass of a stage is a chain of ten
kernels per layer, every tenth with a message beside it. `contended` lets the messages take SMs from the
kernels, which only the engine can answer.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simpy

from hyscale_simulator.engine import simulate
from hyscale_simulator.graph import Graph, GraphBuilder
from hyscale_simulator.longest_path import LongestPath
from hyscale_simulator.schedules import one_f_one_b

STAGES, MICROBATCHES, KERNELS_PER_LAYER = 8, 16, 10


def layer_block(layers: int, *, contended: bool) -> Graph:
    """The kernels and messages of one pass through one stage."""
    builder = GraphBuilder()
    for layer in range(layers):
        for kernel in range(KERNELS_PER_LAYER):
            last = builder.add(f"layer{layer}/kernel{kernel}", "kernel", "compute", 1000 + 7 * kernel)
        taken = {"compute": 0.15} if contended else None
        builder.add(f"layer{layer}/message", "p2p", "comm", 2500, [last], sm_taken=taken)
    return builder.build()


def training_step(layers: int, *, contended: bool = False) -> Graph:
    """1F1B over the blocks."""
    builder = GraphBuilder()
    block = layer_block(layers, contended=contended)
    ends: dict[tuple[int, int], list[int]] = {}
    for step in one_f_one_b(STAGES, MICROBATCHES).steps():
        names = {stream: f"stage{step.stage}/{stream}" for stream in ("compute", "comm")}
        after = [task for given in step.inputs for task in ends[given.stage, given.slot]]
        first = builder.include(block, label=str(step.ops[0]), rename=names, after=after)
        ends[step.stage, step.slot] = (first + block.exits).tolist()
    return builder.build()


def measure(what: str, graph: Graph, run: Callable[[], object], repeats: int) -> dict[str, object]:
    """Median and spread of the time of one call, and tasks per second."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    row = {
        "what": what,
        "tasks": len(graph),
        "median_s": round(median, 5),
        "fastest_s": round(min(seconds), 5),
        "slowest_s": round(max(seconds), 5),
        "tasks_per_s": round(len(graph) / median),
    }
    print(f"{what:28} {len(graph):9,} tasks {median * 1e3:9.2f} ms {row['tasks_per_s']:12,} tasks/s")
    return row


def main() -> None:
    """Measure, print, and write one JSON line per measurement if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=10, help="layers on each stage (default 10)")
    parser.add_argument("--json", type=Path, help="append one JSON line per measurement to this file")
    options = parser.parse_args()
    if options.layers < 1:
        parser.error(f"--layers: {options.layers}; at least 1 is wanted")

    graph = training_step(options.layers)
    contended = training_step(options.layers, contended=True)
    plan = LongestPath(graph)
    price = np.random.default_rng(0).integers(500, 2000, len(graph))
    timeline = plan.run(graph)
    assert simulate(graph).end_ns.tolist() == timeline.end_ns.tolist()
    rows = [
        measure("build the graph", graph, lambda: training_step(options.layers), 3),
        measure("plan the longest path", graph, lambda: LongestPath(graph), 5),
        measure("reprice and run it", graph, lambda: plan.run(graph.with_durations(price)), 9),
        measure("engine", graph, lambda: simulate(graph), 3),
        measure("engine, SMs contended", contended, lambda: simulate(contended), 3),
    ]
    if options.json:
        versions = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "simpy": simpy.__version__,
            "machine": platform.machine(),
        }
        with options.json.open("a") as file:
            file.writelines(json.dumps({**row, **versions}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
