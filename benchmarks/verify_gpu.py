"""The whole suite on a GPU, once a dtype, with versions: JSON lines.

python benchmarks/verify_gpu.py --out benchmarks/results/verify_h200.jsonl [--profile ci] [--jobs 8]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from hyscale_kernels.provenance import environment
from hyscale_verify.commands import verify

PACKAGES = ("hytopk", "indexer", "replay", "attention")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="append the records to this file")
    parser.add_argument("--profile", default="quick", help="how hard to look: quick, ci or deep")
    parser.add_argument("--jobs", default="4", help="processes that share the GPU")
    parser.add_argument("--dtypes", default="bf16,fp16,fp8", help="comma-separated")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("verify_gpu: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 3
    worst = 0
    for dtype in options.dtypes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            arguments = ["--device", "cuda", "--dtype", dtype, "--profile", options.profile]
            code = verify([*arguments, "--jobs", options.jobs, "--json", str(report)])
            found = json.loads(report.read_text(encoding="utf-8"))
        properties: dict[str, dict[str, object]] = {}
        for row in found["properties"]:
            held = properties.setdefault(row["name"], {"examples": 0, "verdict": row["verdict"]})
            held["examples"] += row["examples"]  # type: ignore[operator]
            if row["verdict"] == "falsified" or held["verdict"] == "skipped":
                held["verdict"] = row["verdict"]
        record = {
            "schema": 1,
            "op": "verify",
            "dtype": dtype,
            "profile": options.profile,
            **environment(*PACKAGES),
            "properties": properties,
            "summary": found["summary"],
            "holds": code == 0,
        }
        with options.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
