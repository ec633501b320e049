"""Chooses the KV heads that are cached as INT8, on a text of the operator's or on text that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from npufleet_api.calibration import Int8KvHeads
from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.engine.device import Device
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.errors import SettingsError
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.decoder import load_decoder
from npufleet_pod.models.dtypes import TORCH_DTYPES
from npufleet_pod.models.int8_heads import choose_int8_heads
from npufleet_pod.models.own_text import sample_windows
from npufleet_pod.models.perplexity import windows_of
from npufleet_pod.tokenizer import TextTokenizer

WINDOW_TOKENS = 256
WINDOWS = 8
"""Pieces of text that perplexity is measured on: the first of a file, or so many of the model's own."""
QUICK_WINDOWS = 2
MAX_TEXT_BYTES = 64 * 1024 * 1024


def choose_kv_heads(files: ModelFiles, device: Device, text: Path | None, quick: bool, tell: Callable[[str], None]) -> Int8KvHeads:
    """Load the whole model with KV in the type of its attention, and choose.

    Heads are numbered over the whole model, so that the choice holds for any number of ranks; the model has to fit one device for it.
    Raises SettingsError for a text that cannot be used, and ModelError.
    """
    windows = QUICK_WINDOWS if quick else WINDOWS
    size = min(WINDOW_TOKENS, files.max_model_length)
    pieces: Sequence[Sequence[int]] | None = None if text is None else read_windows(text, files.tokenizer, windows, size)
    plan = replace(files.precision, layers=tuple(replace(layer, int8_kv_heads=()) for layer in files.precision.layers))
    with open_checkpoint(files.path, TORCH_DTYPES[files.dtype], device.torch_device) as checkpoint:
        decoder = load_decoder(files.config, checkpoint, select_kernels(device.torch_device.type), precision=plan)
    if pieces is None:
        tell(f"int8 kv: the model writes {windows} texts of {size} tokens")
        pieces = sample_windows(decoder, windows, size)
    tell(f"int8 kv: measuring {files.config.layers * files.config.kv_heads} heads, with {torch.get_num_threads()} threads")
    choice = choose_int8_heads(decoder, pieces)
    tell(
        f"int8 kv: {choice.count} heads, which cost {choice.loss_percent:.3f} ± {choice.loss_error_percent:.3f} % of perplexity here and "
        f"{choice.divergence_percent:.3f} % on what the model would write; {choice.limit_percent} % are allowed"
    )
    return choice.calibration()


def read_windows(path: Path, tokenizer: TextTokenizer, windows: int, window_tokens: int) -> list[Sequence[int]]:
    """The beginning of a text file, in pieces of tokens. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise SettingsError(f"--text {path}: {error.strerror}: name a readable text, or leave --text out") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--text {path}: not UTF-8 at byte {error.start}: convert it, or leave --text out") from error
    if len(raw) > MAX_TEXT_BYTES:
        raise SettingsError(f"--text {path}: more than {MAX_TEXT_BYTES} bytes: cut it; {windows * window_tokens} tokens are read")
    found = windows_of(tokenizer.encode(text, add_special_tokens=False)[: windows * window_tokens], window_tokens)
    if not found:
        raise SettingsError(f"--text {path}: fewer than two tokens: give more of it, or leave --text out")
    return found
