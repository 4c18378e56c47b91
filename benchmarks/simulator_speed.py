"""Speed and memory of the simulator: one preset from a cold start, changed scenarios, and large clusters.

    python benchmarks/simulator_speed.py [--out benchmarks/results/simulator_speed.jsonl]

CPU seconds (``time.process_time``), so that a shared machine does not disturb them; memory is the peak of the
process.  Appends one JSON line.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COLD = """
import resource, time
from hyscale_simulator.evaluate import evaluate
from hyscale_simulator.scenario import load
start = time.process_time()
result = evaluate(load("glm-5.1-1m-512xh20"))
result.to_json()
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def cold_start() -> tuple[float, float]:
    """(CPU seconds after import, peak MiB) of the preset in a fresh process; median of three."""
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=True)
        seconds, kib = done.stdout.split()
        runs.append((float(seconds), float(kib) / 1024))
    return statistics.median(run[0] for run in runs), max(run[1] for run in runs)


def measure() -> dict[str, Any]:
    """All figures."""
    from hyscale_simulator.evaluate import Evaluator
    from hyscale_simulator.scenario import load

    cold_s, cold_mib = cold_start()
    evaluate = Evaluator()
    glm = load("glm-5.1-1m-512xh20")
    evaluate(glm)
    changes: list[dict[str, Any]] = [
        {"selection.record": "int32"},
        {"recompute.replay": False},
        {"layout.context_split": "contiguous"},
        {"layout.schedule": "zero_bubble"},
        {"batch.sequences_per_step": 32},
        *({"batch.sequence_tokens": tokens} for tokens in (262144, 524288, 2097152)),
        *({"selection.skipped_fraction": skipped} for skipped in (0.1, 0.3, 0.5)),
    ]
    changed = []
    for change in changes:
        start = time.process_time()
        evaluate(glm.with_(**change)).to_json()
        changed.append(time.process_time() - start)
    large = {}
    for gpus in (8192, 16384):
        scenario = load("llama3-405b-8192xh100").with_(gpus=gpus)
        start = time.process_time()
        evaluate(scenario).to_json()
        large[str(gpus)] = time.process_time() - start
    return {
        "benchmark": "simulator_speed",
        "cold_cpu_s": round(cold_s, 3),
        "cold_peak_mib": round(cold_mib),
        "changed_cpu_s": {"median": round(statistics.median(changed), 4), "worst": round(max(changed), 4)},
        "gpus_cpu_s": {gpus: round(seconds, 2) for gpus, seconds in large.items()},
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    """Measure, print, and append to the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    record = measure()
    print(json.dumps(record, indent=2))
    if out is not None:
        with out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
