"""Planted bugs in the real kernels, and which property of the suite convicts each."""

from hyscale_verify.mutants.catalogue import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
