"""A real model and texts of this repository that it is measured on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from npufleet_pod.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
TEXT_FILES = ("README.md", "docs/architecture.md", "docs/testing.md", "LICENSE")
"""None of them is what a calibration measures on, which is the model's own text."""


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, where the demo keeps it; converted there if it is not yet."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npufleet" / "models" / "smollm2-135m-instruct"
    subprocess.run([sys.executable, str(ROOT / "tools" / "smollm2.py"), str(folder)], check=True, stdout=sys.stderr)
    return folder


def text_tokens(model: Path, count: int, files: Sequence[str] = TEXT_FILES) -> list[int]:
    """The first tokens of the files, as many of each and `count` in all, or all they have."""
    tokenizer = load_tokenizer(model)
    share = -(-count // len(files))
    parts = [tokenizer.encode((ROOT / name).read_text(), add_special_tokens=False)[:share] for name in files]
    return [token for part in parts for token in part][:count]


def progress(text: str) -> None:
    """Tell people how far it is."""
    print(text, file=sys.stderr)
