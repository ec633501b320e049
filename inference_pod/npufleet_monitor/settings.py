"""The settings file, read again whenever it changes, and the pod's identity."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from npufleet_api.contract import POD_NAME_ENV, POD_NAMESPACE_ENV, POD_UID_ENV
from npufleet_api.settings import MonitorSettings
from npufleet_monitor.errors import SettingsError

logger = logging.getLogger(__name__)

MAX_SETTINGS_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """The pod that the monitor speaks for."""

    pod_name: str
    pod_namespace: str
    pod_uid: str


def read_identity(environment: Mapping[str, str]) -> Identity:
    """From the environment that the operator sets. Raises SettingsError."""
    missing = [name for name in (POD_NAME_ENV, POD_NAMESPACE_ENV, POD_UID_ENV) if not environment.get(name)]
    if missing:
        raise SettingsError(f"environment variable {missing[0]} is not set: the pod's manifest must set it from the downward API")
    return Identity(environment[POD_NAME_ENV], environment[POD_NAMESPACE_ENV], environment[POD_UID_ENV])


def parse_settings(raw: bytes) -> MonitorSettings:
    """The settings in a YAML document. Raises SettingsError."""
    if len(raw) > MAX_SETTINGS_BYTES:
        raise SettingsError(f"the settings have {len(raw)} bytes, at most {MAX_SETTINGS_BYTES} are read")
    try:
        document = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SettingsError(f"not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(document, dict):
        raise SettingsError(f"the settings are {type(document).__name__}, not a mapping of fields")
    try:
        return MonitorSettings.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        found = "" if first["type"] == "missing" else f" (it is {str(first['input'])[:80]!r})"
        raise SettingsError(f"{where}: {first['msg']}{found}") from error


class SettingsFile:
    """A settings file that may change at any time: the kubelet swaps a symbolic link, so its content is what is compared."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = self._read()
        self.settings = self._parse(self._raw)
        self.error: str | None = None
        """Why the file's present content is not in force; None while it is."""

    def refresh(self) -> bool:
        """Read the file again; True if other settings came into force. Content that cannot be used keeps the old settings."""
        try:
            raw = self._read()
            if raw == self._raw:
                self.error = None
                return False
            settings = self._parse(raw)
        except SettingsError as error:
            if str(error) != self.error:
                logger.error("%s; the previous settings stay in force", error)
            self.error = str(error)
            return False
        self._raw, self.error = raw, None
        changed = settings != self.settings
        self.settings = settings
        if changed:
            logger.info("new settings from %s", self.path)
        return changed

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_SETTINGS_BYTES + 1)
        except OSError as error:
            raise SettingsError(f"{self.path}: {error.strerror or error}: mount the monitor's settings there") from error

    def _parse(self, raw: bytes) -> MonitorSettings:
        try:
            return parse_settings(raw)
        except SettingsError as error:
            raise SettingsError(f"{self.path}: {error}") from error
