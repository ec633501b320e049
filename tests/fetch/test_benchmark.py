"""The benchmark of fetching: every figure is there, and a start from the cache fetches nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.model_load import run


def test_each_source_and_its_cache_have_figures(tmp_path: Path) -> None:
    size = 3 << 20
    found = run(size, tmp_path)["model_load"]
    assert found["disk_gb_per_second"] > 0
    for source in ("hf", "s3"):
        assert found[source]["bytes_fetched"] == size + 2
        assert found[f"{source}_from_cache"]["bytes_fetched"] == 0
        assert set(found[source]["phases_seconds"]) == {"Listing", "Downloading", "Checking"}
