"""What a machine lacks is said all at once, with a way out."""

from __future__ import annotations

import re

import pytest

from devcluster.errors import UnsupportedMachineError
from devcluster.preflight import Machine, check, packages_for, problems, program
from devcluster.versions import KUBERNETES

GOOD = Machine("linux", 0, (), has_apt=True)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (GOOD, []),
        (Machine("linux", 0, ("runc",), has_apt=True), []),
        (Machine("darwin", 501, (), has_apt=False), ["this is darwin: devcluster needs Linux"]),
        (Machine("linux", 1000, (), has_apt=True), ["user id 1000 is not root: run it with sudo"]),
        (Machine("linux", 0, ("runc", "/usr/lib/cni/bridge"), has_apt=False), ["on Debian: containernetworking-plugins runc"]),
        (Machine("linux", 1000, ("iptables",), has_apt=False), ["not root", "missing programs: iptables"]),
    ],
)
def test_problems_name_the_cause_and_the_remedy(machine: Machine, said: list[str]) -> None:
    found = problems(machine)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_the_refusal_shows_the_kind_commands() -> None:
    with pytest.raises(UnsupportedMachineError, match=re.escape(f"kind create cluster --name dev --image kindest/node:v{KUBERNETES}")):
        check(Machine("darwin", 501, (), has_apt=False))
    check(GOOD)


def test_each_package_is_installed_once() -> None:
    assert packages_for(["unshare", "nsenter", "runc"]) == ("runc", "util-linux")


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devcluster.preflight._find", lambda _: None)
    with pytest.raises(UnsupportedMachineError, match="runc is not installed; it is in Debian's package runc"):
        program("runc")
