"""Which files of a source are fetched, and which names a source may not give."""

from __future__ import annotations

import pytest

from npufleet_fetch.errors import SourceRefusedError
from npufleet_fetch.files import RemoteFile, checked_path
from npufleet_fetch.selection import select_files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def chosen(*names: str, wanted: tuple[str, ...] = (), allow_pickle: bool = False) -> set[str]:
    """Paths that are fetched."""
    return {file.path for file in select_files([RemoteFile(name, 1) for name in names], wanted, allow_pickle=allow_pickle)}


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (("model.safetensors", *SHARDS, "model.safetensors.index.json", "config.json"), (), {"model.safetensors", "config.json"}),
        ((*SHARDS, "model.safetensors.index.json", "pytorch_model.bin"), (), {*SHARDS, "model.safetensors.index.json"}),
        ((*SHARDS, "consolidated-00001-of-00001.safetensors", "config.json"), (), {*SHARDS, "config.json"}),
        (("model.safetensors", "model.gguf", "pytorch_model.bin"), (), {"model.safetensors"}),
        (("a-Q4_K_M.gguf", "a-Q8_0.gguf", "README.md"), ("*Q4_K_M.gguf",), {"a-Q4_K_M.gguf"}),
        (("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"), (), {"a-00001-of-00002.gguf", "a-00002-of-00002.gguf"}),
        (
            ("model.safetensors", "modeling_x.py", "run.sh", "chat_template.jinja", ".env.json"),
            (),
            {"model.safetensors", "chat_template.jinja"},
        ),
    ],
)
def test_one_set_of_weights_and_what_stands_beside_it(names: tuple[str, ...], wanted: tuple[str, ...], expected: set[str]) -> None:
    assert chosen(*names, wanted=wanted) == expected


def test_pickles_are_fetched_only_where_the_pool_allows_them() -> None:
    with pytest.raises(SourceRefusedError, match=r"pickles .*spec\.models\.allowPickle"):
        chosen("pytorch_model.bin", "config.json")
    assert chosen("pytorch_model.bin", "config.json", allow_pickle=True) == {"pytorch_model.bin", "config.json"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a-Q4.gguf", "a-Q8.gguf"), r"several GGUF files .*name one, such as files: \[a-Q4\.gguf\]"),
        ((SHARDS[0],), r"1 of 2 files .* upload the missing ones"),
        (("README.md",), r"no safetensors and no GGUF"),
    ],
)
def test_what_leaves_open_what_to_serve_is_refused(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(SourceRefusedError, match=words):
        chosen(*names)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\\b", "", "a/./b", "a\nb", "x" * 300, "a/"])
def test_a_name_that_leads_out_of_the_model_is_refused(path: str) -> None:
    with pytest.raises(SourceRefusedError, match="no path below the model"):
        checked_path(path)
