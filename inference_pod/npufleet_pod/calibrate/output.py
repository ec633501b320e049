"""The file that `npufleet-pod calibrate` writes: whole or not at all. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import yaml

from npufleet_api.calibration import Calibration
from npufleet_pod.errors import SettingsError

HEADER = "# Written by npufleet-pod calibrate; milliseconds and tokensPerSecond are medians of what was measured.\n"


class Output:
    """A file that takes its name only once it is complete. What stood there before is left alone until then.

    Raises SettingsError at once if it could not be written, so that nobody measures for nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_dir():
            raise SettingsError(f"--output {path}: is a directory: name a file in it, such as {path / 'calibration.yaml'}")
        try:
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise self._refused(error) from error
        os.close(descriptor)
        self._unfinished = Path(name)

    def write(self, calibration: Calibration) -> None:
        """Put `calibration` in place. Raises SettingsError."""
        document = calibration.model_dump(mode="json", by_alias=True, exclude_none=True)
        try:
            with self._unfinished.open("w") as file:
                file.write(HEADER + yaml.safe_dump(document, sort_keys=False))
                file.flush()
                os.fsync(file.fileno())
            self._unfinished.chmod(0o644)
            self._unfinished.replace(self._path)
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Remove what was not finished. Harmless when repeated."""
        self._unfinished.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> SettingsError:
        return SettingsError(f"--output {self._path}: {error.strerror}: name a file in a directory that can be written, with space left")
