"""The plugin under test is also what these tests use. It is registered here when nobody has done so."""

from __future__ import annotations

import pytest

PLUGIN = "devcluster.pytest_plugin"


def pytest_configure(config: pytest.Config) -> None:
    """Also called when this file is loaded late, with the first test of the folder."""
    if not config.pluginmanager.has_plugin(PLUGIN):
        config.pluginmanager.import_plugin(PLUGIN)
