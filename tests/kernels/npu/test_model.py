"""A whole tiny model by NPU operators: with their CPU implementations, and through the engine on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npufleet_kernels.dispatch import VARIANTS, select_kernels
from npufleet_kernels.npu import routes
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.config import load_config
from npufleet_pod.models.decoder import load_decoder
from support.local_engine import generate, local_engine, request
from support.tiny_model import write_tiny_model
from support.tiny_model_decoder import CPU, decoder_greedy, decoder_logits, load_tiny_decoder

PROMPTS = [list(range(5, 140)), [7], list(range(30, 37))]
COUNT = 12
HALF = {"BFloat16": 0.3, "Float16": 0.15}
"""How far below the best score a choice may lie for its type's rounding, and that of INT8 keys."""


def model(folder: Path, head_size: int, layers: int = 2) -> Path:
    return write_tiny_model(folder / "model", layers=layers, heads=4, kv_heads=2, config={"head_dim": head_size})


@pytest.mark.parametrize("head_size", [64, 128])
def test_npu_operators_choose_the_reference_s_tokens(tmp_path: Path, head_size: int) -> None:
    folder = model(tmp_path, head_size)
    answers = []
    for kernels in (select_kernels("npu"), select_kernels("cpu", dict.fromkeys(VARIANTS, "reference"))):
        with open_checkpoint(folder, torch.float32, CPU) as checkpoint:
            answers.append(decoder_greedy(load_decoder(load_config(folder), checkpoint, kernels), PROMPTS, COUNT))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("dtype", "head_size", "kv_cache"), [("Float32", 64, "Auto"), ("Float32", 128, "Int8")])
async def test_the_engine_on_the_simulated_device_chooses_the_tokens_of_the_one_on_the_cpu(
    tmp_path: Path, dtype: str, head_size: int, kv_cache: str
) -> None:
    folder, answers = model(tmp_path, head_size), []
    for device in ("NPU", "CPU"):
        async with local_engine(folder, device=device, dtype=dtype, precision={"kv_cache": kv_cache}) as engine:
            answers.append(await generate(engine, *(request(str(i), prompt, COUNT) for i, prompt in enumerate(PROMPTS))))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("dtype", "head_size", "kv_cache"), [(dtype, size, kv) for dtype in HALF for size in (64, 128) for kv in ("Auto", "Int8")]
)
async def test_in_half_precision_each_token_is_the_best_in_float32_but_for_rounding(
    tmp_path: Path, dtype: str, head_size: int, kv_cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model(tmp_path, head_size)
    routes._say.cache_clear()
    async with local_engine(folder, device="NPU", dtype=dtype, precision={"kv_cache": kv_cache}) as engine:
        answers = await generate(engine, *(request(str(i), prompt, COUNT) for i, prompt in enumerate(PROMPTS)))
    exact = load_tiny_decoder(folder)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        scores = decoder_logits(exact, [*prompt, *answer])[len(prompt) - 1 : -1]
        short = scores.amax(-1) - scores.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        # A token drawn at random falls short by about 3.
        assert short.max() < HALF[dtype]
    other = {(record.__dict__["operation"], record.__dict__["path"]) for record in caplog.records if record.name == routes.logger.name}
    expected = set()
    if kv_cache == "Int8":
        expected.add(("attention_int8", "in blocks"))
    elif (dtype, head_size) != ("BFloat16", 128):
        expected.add(("attention", "layout BSND, prompts one by one"))
    assert {path for path in other if path != ("attention", "reference, in blocks")} == expected
