"""Errors of the monitor.

MonitorError
├── SettingsError   the settings or the pod's identity cannot be used
└── ScrapeError     a source did not answer, or with what cannot be used
"""

from __future__ import annotations


class MonitorError(Exception):
    """Base of the monitor's errors."""


class SettingsError(MonitorError):
    """Settings or identity cannot be used; the message names the field, the value and the remedy."""


class ScrapeError(MonitorError):
    """A source did not answer, or with what cannot be used."""
