"""Plugin of the pytest that runs tests beside torch_npu: opens the simulated device, and hands every report to the pytest outside.

Loaded by name (`-p ascendenv.child`) before any test module.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from ascendenv.environment import REPORTS_ENV

with warnings.catch_warnings():
    # Of torch_npu's own sources; torch brings it with it.
    warnings.simplefilter("ignore")
    from ascendenv import simulate

simulate.install()

_config: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    """Keep what turns a report into JSON."""
    _config.append(config)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write it down at once, so that a crash shows which test it was."""
    data = _config[0].hook.pytest_report_to_serializable(config=_config[0], report=report)
    with Path(os.environ[REPORTS_ENV]).open("a") as file:
        file.write(json.dumps(data) + "\n")
