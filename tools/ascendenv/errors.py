"""Errors of the environments."""

from __future__ import annotations


class AscendEnvError(Exception):
    """Base of every error that ascendenv raises on its own."""


class EnvironmentBuildError(AscendEnvError):
    """An environment cannot be made; the message says which step failed and what it printed."""


class StubError(AscendEnvError):
    """Stand-ins for CANN cannot be made for this torch_npu."""


class SimulationError(AscendEnvError):
    """A call that the simulated device refuses: a documented constraint of the operator does not hold."""
