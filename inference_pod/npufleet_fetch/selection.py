"""Which of a source's files an engine needs: one set of weights, and what stands beside it. Code is never among them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from npufleet_fetch.errors import SourceRefusedError
from npufleet_fetch.files import RemoteFile

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
SIDE_NAMES = frozenset({"LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "merges.txt"})
SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.[a-z]+)$")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
INDEXES = {".safetensors": INDEX_FILE, ".bin": "pytorch_model.bin.index.json"}


def select_files(files: Sequence[RemoteFile], wanted: Sequence[str], *, allow_pickle: bool) -> tuple[RemoteFile, ...]:
    """The files to fetch, by path. `wanted`: globs that narrow the weights. Raises SourceRefusedError."""
    top = [file for file in files if "/" not in file.path] if not wanted else list(files)
    candidates = [file for file in top if not wanted or any(fnmatch.fnmatchcase(file.path, glob) for glob in wanted)]
    weights = _weights(candidates, wanted, allow_pickle=allow_pickle)
    folder = weights[0].path.rpartition("/")[0]
    suffix = "." + weights[0].path.rpartition(".")[2]
    index = INDEXES.get(suffix, "")
    whole = {file.path.rpartition("/")[2] for file in weights}
    side = [
        file
        for file in files
        if file.path.rpartition("/")[0] in {folder, ""}
        and _stands_beside(file.path.rpartition("/")[2])
        and (not file.path.endswith(".index.json") or (file.path.endswith(index) and SINGLE_FILE not in whole and bool(index)))
    ]
    return tuple(sorted({file.path: file for file in (*weights, *side)}.values(), key=lambda file: file.path))


def _stands_beside(name: str) -> bool:
    return name in SIDE_NAMES or (name.endswith(SIDE_SUFFIXES) and not name.startswith("."))


def _weights(candidates: Sequence[RemoteFile], wanted: Sequence[str], *, allow_pickle: bool) -> list[RemoteFile]:
    tensors = [file for file in candidates if file.path.endswith(".safetensors")]
    if tensors:
        return _one_set(tensors)
    gguf = [file for file in candidates if file.path.endswith(".gguf")]
    if gguf:
        return _one_gguf(gguf)
    pickles = [file for file in candidates if file.path.endswith(PICKLES)]
    if pickles and allow_pickle:
        return _one_set(pickles)
    if pickles:
        raise SourceRefusedError(
            f"model.uri: the weights are pickles ({pickles[0].path}), which can run code when they are read: take a revision with "
            "safetensors, or have spec.models.allowPickle set in the pool"
        )
    narrowed = f" among {', '.join(wanted)} of model.files" if wanted else ""
    raise SourceRefusedError(f"model.uri: no safetensors and no GGUF file is there{narrowed}: name a model that has one")


def _one_set(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Without what holds the same tensors again: shards beside a single file, and other tools' copies beside `model`."""
    names = {file.path.rpartition("/")[2] for file in files}
    single = SINGLE_FILE if SINGLE_FILE in names else "pytorch_model.bin" if "pytorch_model.bin" in names else ""
    if single:
        return [file for file in files if file.path.rpartition("/")[2] == single]
    stems: dict[tuple[str, str], list[RemoteFile]] = {}
    for file in files:
        match = SHARD.fullmatch(file.path.rpartition("/")[2])
        if match:
            stems.setdefault((match["stem"], match["count"]), []).append(file)
    preferred = next((key for key in stems if key[0] in ("model", "pytorch_model")), next(iter(stems), None))
    if preferred is None:
        return list(files)
    shards = stems[preferred]
    if len(shards) != int(preferred[1]):
        raise SourceRefusedError(
            f"model.uri: {len(shards)} of {int(preferred[1])} files {preferred[0]}-…-of-{preferred[1]} are there: upload the missing ones"
        )
    return shards


def _one_gguf(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    if len(files) == 1:
        return list(files)
    groups = {(match["stem"], match["count"]) if (match := SHARD.fullmatch(f.path)) else (f.path, "") for f in files}
    if len(groups) == 1:
        return list(files)
    names = ", ".join(sorted(f.path for f in files)[:8])
    raise SourceRefusedError(
        f"model.files: several GGUF files are there ({names}): name one, such as files: [{sorted(f.path for f in files)[0]}]"
    )
