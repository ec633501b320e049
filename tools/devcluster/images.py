"""OCI image archives, written without a container tool."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import UnsupportedMachineError
from devcluster.files import HOST_MOUNT_ROOT

USER_ID = 65532  # "nonroot" of the distroless images, which most restricted pods use

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PASSWD = f"root:x:0:0:root:/root:/bin/sh\nnonroot:x:{USER_ID}:{USER_ID}:nonroot:/tmp:/bin/sh\n"
_GROUP = f"root:x:0:\nnonroot:x:{USER_ID}:\n"


@dataclass(frozen=True)
class Folder:
    """A directory in an image."""

    path: str
    mode: int = 0o755


@dataclass(frozen=True)
class Link:
    """A symbolic link in an image."""

    path: str
    target: str


@dataclass(frozen=True)
class File:
    """A regular file in an image."""

    path: str
    content: bytes
    mode: int = 0o644


Entry = Folder | Link | File


def architecture() -> str:
    """This machine's architecture in OCI's words; raises UnsupportedMachineError for one never tried."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise UnsupportedMachineError(f"machine type {machine!r} is not supported: x86_64 or aarch64 is needed")
    return _ARCHITECTURES[machine]


def _layer(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path.strip("/"))
            match entry:
                case Folder():
                    info.type, info.mode = tarfile.DIRTYPE, entry.mode
                    archive.addfile(info)
                case Link():
                    info.type, info.mode, info.linkname = tarfile.SYMTYPE, 0o777, entry.target
                    archive.addfile(info)
                case File():
                    info.size, info.mode = len(entry.content), entry.mode
                    archive.addfile(info, io.BytesIO(entry.content))
    return buffer.getvalue()


def archive(reference: str, entries: Iterable[Entry], config: Mapping[str, object]) -> bytes:
    """An OCI archive (tar) of a one-layer image called `reference`; the same input gives the same bytes.

    `config` is the image's run-time configuration (OCI image specification, `config` of the image JSON).
    """
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    layer = _layer(entries)
    image = {
        "architecture": architecture(),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(image).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [blob(gzip.compress(layer, mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip")],
    }
    described = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    described["annotations"] = {"io.containerd.image.name": reference}
    index = json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()
    files = [File("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), File("index.json", index)]
    files += [File(f"blobs/sha256/{digest}", content) for digest, content in blobs.items()]
    return _layer(files)


def pause_image(reference: str, binary: bytes) -> bytes:
    """The image of the process that holds a pod's namespaces."""
    return archive(reference, [File("pause", binary, 0o755)], {"Entrypoint": ["/pause"], "User": "65535:65535"})


def _parents(path: str) -> Iterable[str]:
    steps = path.strip("/").split("/")
    return ("/".join(steps[:length]) for length in range(1, len(steps)))


def dev_image_entries(mounts: Sequence[Path], root_links: Mapping[str, str]) -> list[Entry]:
    """The development image: links to where the runtime mounts the host's folders, and empty places to write.

    `root_links` are the host's own top-level links, such as `bin` → `usr/bin`.
    """
    folders = {"etc": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "var": 0o755, "root": 0o755}
    folders |= {"tmp": 0o1777, "var/tmp": 0o1777, "var/run": 0o755, "opt": 0o755, "home": 0o755}
    entries: list[Entry] = []
    for mount in mounts:
        for parent in _parents(str(mount)):
            folders.setdefault(parent, 0o755)
        for parent in _parents(f"{HOST_MOUNT_ROOT}{mount}"):
            folders.setdefault(parent, 0o755)
        entries.append(Link(str(mount), f"{HOST_MOUNT_ROOT}{mount}"))
    entries += [Link(name, target) for name, target in sorted(root_links.items())]
    entries += [File("etc/passwd", _PASSWD.encode()), File("etc/group", _GROUP.encode())]
    return [Folder(path, mode) for path, mode in sorted(folders.items())] + entries


def dev_image(reference: str, mounts: Sequence[Path], root_links: Mapping[str, str], python_prefix: Path) -> bytes:
    """The development image as an OCI archive; its programs come from the host when a container starts."""
    config = {
        "Cmd": ["/bin/sh"],
        "User": f"{USER_ID}:{USER_ID}",
        "WorkingDir": "/tmp",  # noqa: S108 -- a folder inside the image
        "Env": [
            f"PATH={python_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME=/tmp",
            "LANG=C.UTF-8",
            "PYTHONDONTWRITEBYTECODE=1",
            "PYTHONUNBUFFERED=1",
        ],
    }
    return archive(reference, dev_image_entries(mounts, root_links), config)


def host_root_links() -> dict[str, str]:
    """Top-level links of this machine's file system into /usr (`bin`, `lib`, …)."""
    links = {}
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            links[name] = str(path.readlink())
    return links
