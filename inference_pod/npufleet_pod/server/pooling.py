"""Reads how a model's hidden states become one vector."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from npufleet_pod.engine.request import Pooling
from npufleet_pod.errors import ModelError, describe_validation_error
from npufleet_pod.models.config import read_json

POOLING_FILE = "1_Pooling/config.json"
"""Where sentence-transformers keeps it."""


class _PoolingConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


def load_pooling(model_dir: Path, default: Pooling) -> Pooling:
    """How the model says that its states are pooled, else `default`. Raises ModelError."""
    path = model_dir / POOLING_FILE
    if not path.exists():
        return default
    try:
        config = _PoolingConfig.model_validate(read_json(path))
    except ValidationError as error:
        raise ModelError(f"{path}: {describe_validation_error(error)}: copy the file again") from error
    chosen = [
        pooling
        for pooling, asked in (
            (Pooling.FIRST, config.pooling_mode_cls_token),
            (Pooling.MEAN, config.pooling_mode_mean_tokens),
            (Pooling.LAST, config.pooling_mode_lasttoken),
        )
        if asked
    ]
    if len(chosen) != 1:
        raise ModelError(f"{path}: pools in {len(chosen)} known ways: only mean, first (cls) and last token are served, one at a time")
    return chosen[0]
