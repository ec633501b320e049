"""The waiting helper."""

from __future__ import annotations

import pytest

from devcluster.errors import CommandError
from devcluster.testing import WaitTimeoutError, wait_until


def test_the_first_true_result_is_returned() -> None:
    results = iter(["", None, 0, "found", "later"])
    assert wait_until("it", lambda: next(results)) == "found"


def test_a_failing_command_is_asked_again() -> None:
    refusals = [CommandError("not yet")]

    def ask() -> str:
        if refusals:
            raise refusals.pop()
        return "found"

    assert wait_until("it", ask) == "found"


def test_the_time_limit_names_what_was_waited_for_and_what_was_seen() -> None:
    with pytest.raises(WaitTimeoutError, match=r"waited 0 s for the moon; last seen: \[\]"):
        wait_until("the moon", list, timeout_seconds=0)

    def refuse() -> str:
        raise CommandError("no route to it")

    with pytest.raises(WaitTimeoutError, match="last seen: no route to it"):
        wait_until("the moon", refuse, timeout_seconds=0)


def test_other_errors_are_not_waited_out() -> None:
    def broken() -> str:
        raise KeyError("a mistake in the test")

    with pytest.raises(KeyError):
        wait_until("it", broken)
