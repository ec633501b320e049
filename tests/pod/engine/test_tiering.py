from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.memory.errors import TierError
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.tiering import open_tiers
from npufleet_pod.errors import DeviceError

MIB = 2**20


def settings(model: str | Path = "/models", **fields: Any) -> EngineSettings:
    return EngineSettings.model_validate({"model_path": str(model), "served_name": "m", "device": "CPU", **fields})


def test_sizes_are_given_in_whole_pages_and_closing_ends_the_worker(tmp_path: Path) -> None:
    before = threading.active_count()
    tiers = open_tiers(settings(host_cache_mi=1, disk_cache_mi=3, disk_cache_path=str(tmp_path / "kv")), 100_000)
    assert tiers.host is not None
    assert tiers.disk is not None
    assert (tiers.host.slots, tiers.disk.pages) == (MIB // 100_000, 3 * MIB // 100_000)
    assert threading.active_count() == before + 1
    tiers.close()
    tiers.close()
    assert threading.active_count() == before


def test_without_sizes_there_are_no_tiers() -> None:
    tiers = open_tiers(settings(), 4096)
    assert (tiers.host, tiers.disk) == (None, None)
    tiers.close()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"host_cache_mi": 1}, r"hostCacheMi: 1 MiB hold no page of 2097152 bytes of KV: raise it, or set it to 0"),
        ({"host_cache_mi": 8, "disk_cache_mi": 1}, "diskCacheMi: 1 MiB hold no page"),
    ],
)
def test_a_size_that_holds_no_page_is_refused_by_name(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        open_tiers(settings(**sizes), 2 * MIB)


def test_a_directory_that_cannot_be_made_stops_the_engine_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    chosen = settings(tiny_model, host_cache_mi=1, disk_cache_mi=1, disk_cache_path=str(tmp_path / "file" / "kv"))
    before = threading.active_count()
    with pytest.raises(TierError, match="Not a directory: mount a writable volume there"):
        open_tiers(chosen, 4096)
    with pytest.raises(DeviceError, match=r"KV directory .*/file/kv: Not a directory"):
        load_engine(chosen, inspect_model(chosen), lambda: True)
    assert threading.active_count() == before
