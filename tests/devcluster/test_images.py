"""Image archives, read back as the OCI layout they claim to be."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devcluster import images
from devcluster.errors import UnsupportedMachineError


def opened(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}


def unpacked(archive: bytes) -> tuple[dict[str, Any], dict[str, tarfile.TarInfo], dict[str, Any]]:
    """(image configuration, members of its layer, index), with every digest and size checked."""
    files = opened(archive)
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"

    def blob(descriptor: dict[str, Any]) -> bytes:
        content = files["blobs/sha256/" + descriptor["digest"].removeprefix("sha256:")]
        assert len(content) == descriptor["size"]
        return content

    index = json.loads(files["index.json"])
    manifest = json.loads(blob(index["manifests"][0]))
    config = json.loads(blob(manifest["config"]))
    layer = gzip.decompress(blob(manifest["layers"][0]))
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        members = {member.name: member for member in tar}
    return config, members, index


def test_the_same_input_gives_the_same_bytes() -> None:
    assert images.pause_image("a/pause:1", b"binary") == images.pause_image("a/pause:1", b"binary")


def test_an_archive_names_its_image_for_containerd() -> None:
    config, members, index = unpacked(images.pause_image("a/pause:1", b"binary"))
    assert index["manifests"][0]["annotations"] == {"io.containerd.image.name": "a/pause:1"}
    assert config["config"]["Entrypoint"] == ["/pause"]
    assert members["pause"].mode == 0o755


def test_the_development_image_runs_as_nobody_in_particular_with_the_environments_programs_first() -> None:
    archive = images.dev_image("d:dev", [Path("/usr")], {"bin": "usr/bin"}, Path("/srv/x/.venv"))
    config, members, _ = unpacked(archive)
    assert config["config"]["User"] == "65532:65532"
    assert "PATH=/srv/x/.venv/bin:/usr/local/bin:/usr/bin:/bin" in config["config"]["Env"]
    assert members["tmp"].mode == 0o1777
    assert members["bin"].linkname == "usr/bin"


steps = st.lists(st.sampled_from(("usr", "opt", "root", "work", "a")), min_size=1, max_size=3)


@given(st.lists(steps.map(lambda parts: Path("/", *parts)), unique=True, max_size=4))
def test_each_mount_is_a_link_that_anyone_can_reach(mounts: list[Path]) -> None:
    mounts = [m for m in mounts if not any(m != other and m.is_relative_to(other) for other in mounts)]
    seen: dict[str, images.Entry] = {}
    for entry in images.dev_image_entries(mounts, {}):
        path = entry.path.strip("/")
        parent = path.rpartition("/")[0]
        assert not parent or isinstance(seen.get(parent), images.Folder), f"{path} comes before its folder"
        if isinstance(entry, images.Folder):
            assert entry.mode & 0o005 == 0o005
        seen[path] = entry
    for mount in mounts:
        link = seen[str(mount).strip("/")]
        assert isinstance(link, images.Link)
        assert link.target == f"/.devcluster{mount}"
        assert isinstance(seen[link.target.strip("/").rpartition("/")[0]], images.Folder)


def test_an_unknown_machine_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with pytest.raises(UnsupportedMachineError, match="machine type 'pdp11' is not supported: x86_64 or aarch64"):
        images.architecture()
