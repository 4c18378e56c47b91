"""Where a recorded figure comes from: versions, device, and the sources that were measured."""

import hashlib
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch
import triton


def source_hash(*packages: str) -> str:
    """SHA-256 (first 16 hex digits) of the Python sources of subpackages of hyscale_kernels, by name.

    Line ends and trailing blanks do not count. ValueError when a package has no sources.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for package in sorted(packages):
        files = sorted((root / package).rglob("*.py"))
        if not files:
            raise ValueError(f"package {package!r} has no Python sources under {root.name}")
        for path in files:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            for line in path.read_text(encoding="utf-8").splitlines():
                digest.update(line.rstrip().encode() + b"\n")
    return digest.hexdigest()[:16]


def environment(*packages: str) -> dict[str, Any]:
    """A record's header: sources of ``packages``, versions, GPU and time of day in UTC."""
    record: dict[str, Any] = {
        "source_hash": source_hash(*packages),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "serial": str(getattr(properties, "uuid", "")),
        }
    return record
