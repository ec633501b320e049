"""Reads the file that `npufleet-pod calibrate` wrote, and tells whether it was made for what is to be served."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from npufleet_api.calibration import CalibratedFor, Calibration
from npufleet_api.model import Dtype
from npufleet_pod.errors import SettingsError, describe_validation_error, one_line, shorten
from npufleet_pod.models.config import DecoderConfig

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


def calibrated_for(config: DecoderConfig, dtype: Dtype, device: str, tensor_parallel: int) -> CalibratedFor:
    """What a calibration of this model, in this type, on this kind of device is made for."""
    return CalibratedFor(
        architecture=config.architecture,
        layers=config.layers,
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        device=device,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
    )


def check_calibration(path: Path, calibration: Calibration, served: CalibratedFor) -> None:
    """Raise SettingsError, with the first difference, unless `calibration` was made for what is served."""
    made = calibration.made_for.model_dump(mode="json", by_alias=True)
    for field, value in served.model_dump(mode="json", by_alias=True).items():
        if made[field] != value:
            raise SettingsError(
                f"calibrationPath {path}: madeFor.{field}: {shorten(made[field])}, but {shorten(value)} is served: "
                "run npufleet-pod calibrate for this model on this device, or unset calibrationPath"
            )
