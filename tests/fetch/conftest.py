"""A hub on loopback with a small model, and fetching from it."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from npufleet_api.fetching import FetchOutcome, FetchSettings
from npufleet_fetch.fetch import Places, fetch_model
from npufleet_fetch.meter import Meter
from support.hub_server import Hub, serve_hub

Fetch = Callable[..., Coroutine[Any, Any, FetchOutcome]]
WEIGHTS = "model.safetensors"


def small_model(seed: int = 0) -> dict[str, bytes]:
    """A repository as hubs have them: what is needed, what is needed by nobody, and the same weights again."""
    bits = random.Random(seed)  # noqa: S311  # weights of a test, the same in every run
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": b"# tiny",
        "LICENSE": b"Apache-2.0",
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "seed": seed}).encode(),
        "tokenizer.json": json.dumps({"vocab": list(range(2000))}).encode(),
        "modeling_tiny.py": b"raise SystemExit('code of a repository was run')",
        WEIGHTS: bits.randbytes(3 * 1024 * 1024 + 17),
        "pytorch_model.bin": bits.randbytes(8192),
        "original/consolidated.00.pth": bits.randbytes(8192),
        "onnx/model.onnx": bits.randbytes(8192),
    }


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    """The hub, while the test runs."""
    async with serve_hub(Hub(small_model())) as serving:
        yield serving


async def no_pause(_: float) -> None:
    """Attempts follow at once: their pauses are tested as figures."""


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Fetch:
    """Fetches from the hub into a cache of the test's own. Keyword arguments change the settings."""
    (tmp_path / "models").mkdir()

    async def run(pin: str = "", *, cache: Path | None = None, meter: Meter | None = None, **changes: object) -> FetchOutcome:
        given = {"uri": "hf://org/tiny", "endpoint": hub.url, "part_mi": 1, **changes}
        settings = FetchSettings.model_validate(given)
        places = Places(cache or tmp_path / "cache", tmp_path / "credentials", tmp_path / "models" / "current")
        return await fetch_model(settings, pin, places, meter or Meter(), pause=no_pause)

    return run


@pytest.fixture
def secret(tmp_path: Path) -> Callable[..., None]:
    """Mounts a Secret with these entries."""

    def mount(**entries: str) -> None:
        (tmp_path / "credentials").mkdir(exist_ok=True)
        for name, value in entries.items():
            (tmp_path / "credentials" / name).write_text(value)

    return mount
