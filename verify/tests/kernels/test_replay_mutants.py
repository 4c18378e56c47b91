"""Planted bugs of replay whose conviction needs a whole run of the machine."""

import pytest

from hyscale_verify.lifecycles.catalogue import MUTANTS
from hyscale_verify.lifecycles.machine import run_machine
from hyscale_verify.mutants.harness import planted
from hyscale_verify.properties.base import FalsifiedError


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
