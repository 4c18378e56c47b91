"""Kernels under test run on the GPU where there is one, else in Triton's interpreter.

The interpreter is chosen when Triton's kernels are first imported, so before any test module of this folder.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    if torch.cuda.is_available():
        return "cuda"
    from hyscale_verify.interpreter import quicken

    quicken()
    return "cpu"
