"""Which device to run on, settled before Triton is imported: its interpreter is chosen at that moment."""

import os
import sys

from hyscale_verify.errors import EnvironmentLackingError

DEVICES = ("auto", "cpu", "cuda")


def prepare(device: str) -> str:
    """ "cpu" or "cuda" for one of ``DEVICES``, with this process ready for it.

    On "cpu" Triton kernels run in Triton's interpreter: sets TRITON_INTERPRET=1, which child processes
    inherit. Raises ValueError for another name, EnvironmentLackingError where the device cannot be used.
    """
    import torch

    if device not in DEVICES:
        raise ValueError(f"device: {device!r}; allowed: {', '.join(DEVICES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentLackingError(f"device cuda: torch {torch.__version__} sees no CUDA device")
        if interpreting:
            raise EnvironmentLackingError("device cuda: TRITON_INTERPRET=1 is set; unset it")
    elif not interpreting:
        if "triton" in sys.modules:
            raise EnvironmentLackingError(
                "device cpu: triton was imported without TRITON_INTERPRET=1; set it before that"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    return device
