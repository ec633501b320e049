"""Reads the file that `npufleet-pod calibrate` wrote."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from npufleet_api.calibration import Calibration
from npufleet_pod.errors import SettingsError, describe_validation_error, one_line

MAX_CALIBRATION_BYTES = 16 * 1024 * 1024


def load_calibration(path: Path) -> Calibration:
    """Parse the YAML file at `path`. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CALIBRATION_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"calibrationPath {path}: {error.strerror}: mount the calibration there, or unset calibrationPath") from error
    if len(raw) > MAX_CALIBRATION_BYTES:
        raise SettingsError(f"calibrationPath {path}: more than {MAX_CALIBRATION_BYTES} bytes: this is no calibration")
    try:
        return Calibration.model_validate(yaml.safe_load(raw))
    except ValidationError as error:
        raise SettingsError(f"calibrationPath {path}: {describe_validation_error(error)}: run npufleet-pod calibrate again") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"calibrationPath {path}: not YAML: {one_line(str(error))}: run npufleet-pod calibrate again") from error
