"""Planted bugs of replay: each still fits the sources, and lifecycle bugs are killed by the machine."""

from pathlib import Path

import pytest

import hyscale_kernels
from hyscale_verify.lifecycles.catalogue import MUTANTS
from hyscale_verify.lifecycles.machine import run_machine
from hyscale_verify.mutants.catalogue import Mutant
from hyscale_verify.mutants.harness import planted
from hyscale_verify.properties.base import FalsifiedError

PACKAGE = Path(hyscale_kernels.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_the_edit_fits_once_and_changes_something(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.parametrize(
    "name",
    [
        "one_frame_for_all",
        "record_survives_its_use",
        "first_consumer_takes_all",
        "failed_forward_leaves_its_record",
        "failed_backward_uses_up",
        "inputs_not_noted",
        "leftovers_forgotten",
        "preview_consumes",
        "copy_on_the_device_kept",
        "nothing_fetched_ahead",
    ],
)
def test_the_machine_convicts(name: str, device: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    with planted(mutant) as package:

        def schedules() -> None:
            for seed in range(8):  # some seeds miss a bug
                run_machine(package, device, seed=seed)

        with pytest.raises(FalsifiedError):
            schedules()
