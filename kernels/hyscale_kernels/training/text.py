"""Text to train on that every machine has: the sources of Python's own library, as bytes.

The order of the files is fixed, and the SHA-256 of the whole says which text it was. What a step sees depends
on the seed and the step's number alone, so that a run that is resumed sees what it would have seen.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hyscale_ref.arrays import as_count

from ..layer import next_tokens

VOCABULARY = 256
SEPARATOR = b"\0"  # between files
HELD_OUT = 20  # the last 1/20 of the text is never trained on
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Text:
    """data uint8 [N]; the SHA-256 of its bytes; how many files, from where."""

    data: torch.Tensor
    sha256: str
    files: int
    source: str

    def part(self, held_out: bool) -> torch.Tensor:
        """What is trained on, or the rest."""
        cut = self.data.shape[0] - self.data.shape[0] // HELD_OUT
        return self.data[cut:] if held_out else self.data[:cut]


class Batch(NamedTuple):
    """One sequence: tokens and targets int64 [S]; bounds of its documents int32, None if it is one."""

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor | None


def library_text(limit_bytes: int | None = None, folder: Path | None = None) -> Text:
    """All ``.py`` files under ``folder`` (default: Python's library, installed packages left out), by path.

    FileNotFoundError where there are none.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = [
        path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts[:-1])
    ]
    digest, pieces, size, files = hashlib.sha256(), [], 0, 0
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        piece = path.read_bytes() + SEPARATOR
        if limit_bytes is not None:
            piece = piece[: limit_bytes - size]
        digest.update(piece)
        pieces.append(piece)
        size, files = size + len(piece), files + 1
        if size == limit_bytes:
            break
    if not size:
        raise FileNotFoundError(f"{root}: no .py files to train on")
    data = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    return Text(data, digest.hexdigest(), files, f"*.py of Python {sysconfig.get_python_version()}")


def draw(
    text: Text, sequence: int, document: int | None, *, seed: int, step: int, held_out: bool = False
) -> Batch:
    """The sequence of a step: one stretch of the text, or stretches of ``document`` bytes side by side.

    Places are drawn with ``seed`` and ``step``. ValueError for a sequence longer than the text, or one that
    its documents do not fill.
    """
    sequence = as_count("sequence", sequence, minimum=1)
    length = sequence if document is None else as_count("document", document, minimum=1)
    if sequence % length:
        raise ValueError(f"document: {length}; allowed: a divisor of the sequence of {sequence}")
    part = text.part(held_out)
    if length > part.shape[0]:
        name = "sequence" if document is None else "document"
        raise ValueError(f"{name}: {length}; allowed with this text: at most {part.shape[0]} bytes")
    generator = torch.Generator().manual_seed(2 * (seed * 2**32 + step) + held_out)
    places = torch.randint(part.shape[0] - length + 1, (sequence // length,), generator=generator)
    tokens = torch.cat([part[place : place + length] for place in places.tolist()]).long()
    bounds = None if document is None else torch.arange(0, sequence + 1, length, dtype=torch.int32)
    return Batch(tokens, next_tokens(tokens, bounds), bounds)
