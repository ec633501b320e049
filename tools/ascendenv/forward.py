"""Runs tests in the environment with torch_npu, from a pytest of one that has none: each is reported as if it had run here.

A conftest hands over the tests that need it. All of them run in one process, whose start takes longer than most of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ascendenv.environment import REPORTS_ENV, npu_environment
from ascendenv.errors import EnvironmentBuildError

TIMEOUT_SECONDS = 900
SHOWN_LINES = 60


def is_child() -> bool:
    """Whether this pytest is the one inside."""
    return REPORTS_ENV in os.environ


class Forward:
    """The reports of one run inside, by test."""

    def __init__(self) -> None:
        self._reports: dict[str, list[pytest.TestReport]] | None = None
        self._output = ""

    def run(self, item: pytest.Item, among: Sequence[pytest.Item]) -> None:
        """Report `item`; the first call runs all of `among`."""
        if self._reports is None:
            self._reports = self._run(item.config, [one.nodeid for one in among])
        reports = self._reports.get(item.nodeid, [])
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        if not any(report.when == "teardown" for report in reports):
            item.ihook.pytest_runtest_logreport(report=self._unfinished(item))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _run(self, config: pytest.Config, names: Sequence[str]) -> dict[str, list[pytest.TestReport]]:
        try:
            python = npu_environment()
        except EnvironmentBuildError as error:
            self._output = str(error)
            return {}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reports"
            file.touch()
            # One thread: what is computed is small, and other tests' figures must not depend on how many there are.
            environment = {**os.environ, REPORTS_ENV: str(file), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
            command = [str(python), "-m", "pytest", "-p", "ascendenv.child", "-p", "no:cacheprovider", *names]
            try:
                done = subprocess.run(
                    command, cwd=config.rootpath, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
                )
                self._output = done.stdout + done.stderr
            except subprocess.TimeoutExpired:
                self._output = f"the tests inside took longer than {TIMEOUT_SECONDS} s"
            found: dict[str, list[pytest.TestReport]] = {}
            for line in file.read_text().splitlines():
                report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
                found.setdefault(report.nodeid, []).append(report)
            return found

    def _unfinished(self, item: pytest.Item) -> pytest.TestReport:
        tail = "\n".join(self._output.splitlines()[-SHOWN_LINES:])
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"it did not come to an end in the environment with torch_npu:\n{tail}",
            when="call",
        )
