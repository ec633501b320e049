"""The tests in this folder run beside torch_npu, with stand-ins for CANN and a simulated device, in an environment of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendenv.forward import TIMEOUT_SECONDS, Forward, is_child

FOLDER = Path(__file__).parent

_forward: pytest.StashKey[Forward] = pytest.StashKey()


def _is_own(item: pytest.Item) -> bool:
    return FOLDER in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The process that runs them takes a while to start, and the first of them waits for all; inside, each has its own time."""
    for item in items:
        if _is_own(item):
            item.add_marker(pytest.mark.slow)
            if not is_child():
                item.add_marker(pytest.mark.timeout(2 * TIMEOUT_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Hand over the tests of this folder, unless this is the process that they are handed to."""
    if is_child() or not _is_own(item):
        return None
    session = item.session
    session.stash.setdefault(_forward, Forward()).run(item, [one for one in session.items if _is_own(one)])
    return True
