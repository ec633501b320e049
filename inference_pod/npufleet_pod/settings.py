"""Reads the settings file that the operator wrote."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from npufleet_api.settings import EngineSettings
from npufleet_pod.calibration import load_calibration
from npufleet_pod.engine.profiles import with_profile
from npufleet_pod.errors import SettingsError, describe_validation_error, one_line

MAX_SETTINGS_BYTES = 1024 * 1024


def load_settings(path: Path, *, calibrated: bool = True) -> EngineSettings:
    """Parse the YAML file at `path`, and the calibration that it names, unless that is not wanted. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SETTINGS_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}: mount the engine's ConfigMap there, or pass --settings") from error
    if len(raw) > MAX_SETTINGS_BYTES:
        raise SettingsError(f"settings file {path}: more than {MAX_SETTINGS_BYTES} bytes: this is not an engine settings file")
    try:
        document = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"settings file {path}: not YAML: {one_line(str(error))}: write one mapping of settings") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise SettingsError(f"settings file {path}: holds {kind}, not a mapping: write fields such as modelPath: /models")
    try:
        settings = EngineSettings.model_validate(document)
    except ValidationError as error:
        reason = describe_validation_error(error)
        raise SettingsError(f"settings file {path}: {reason}: correct this field of the engine settings") from error
    if not calibrated or settings.calibration_path is None:
        return with_profile(settings)
    return with_profile(settings, load_calibration(Path(settings.calibration_path)))
