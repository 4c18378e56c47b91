"""Tasks over worker processes: results stream back, deaths are survived."""

import os
import time

import pytest

from hyscale_verify.workers import Died, run_tasks


def double(number: int) -> int:
    return 2 * number


def perish_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), 9)
    if number == 4:
        os._exit(5)
    return number


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_answered_once(jobs: int) -> None:
    assert sorted(run_tasks(double, list(range(7)), jobs)) == [(n, 2 * n) for n in range(7)]


def test_more_processes_than_tasks_and_no_task() -> None:
    assert list(run_tasks(double, [5], 3)) == [(5, 10)]
    assert list(run_tasks(double, [], 2)) == []


def test_a_death_loses_its_task_alone() -> None:
    answers = dict(run_tasks(perish_at_three, list(range(6)), 2))
    assert {n: answers[n] for n in (0, 1, 2, 5)} == {0: 0, 1: 1, 2: 2, 5: 5}
    assert str(answers[3]) == "the process died by SIGKILL"
    assert answers[4] == Died(5)
    assert str(answers[4]) == "the process ended with exit code 5"


def test_closing_early_ends_the_processes() -> None:
    tasks = run_tasks(sleep, [0.0, 300.0], 2)
    assert next(tasks) == (0.0, 0.0)
    begun = time.monotonic()
    tasks.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begun < 60
