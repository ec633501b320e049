"""Serves a BERT-type encoder through the engine: whole texts in one step, one vector each. What needs torch is imported while loading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from npufleet_api.model import Dtype
from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.changes import Added, Change
from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.loaded import LoadedEngine
from npufleet_pod.engine.model_files import fitting_tokenizer
from npufleet_pod.engine.request import GenerationRequest, SampledToken
from npufleet_pod.engine.scheduler import SchedulerLimits, SchedulerPolicy
from npufleet_pod.engine.step import Step
from npufleet_pod.errors import DeviceError, SettingsError
from npufleet_pod.models.architectures import ENCODER_ARCHITECTURES
from npufleet_pod.models.config import CONFIG_FILE, read_json
from npufleet_pod.models.encoder_config import EncoderConfig, parse_encoder_config
from npufleet_pod.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from npufleet_pod.engine.device import Device as ComputeDevice
    from npufleet_pod.models.encoder import Encoder

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """What can be read of an encoder without torch."""

    path: Path
    config: EncoderConfig
    tokenizer: TextTokenizer


def inspect_encoder(settings: EngineSettings) -> EncoderFiles | None:
    """Check the files of an encoder; None if the model is none. Raises SettingsError or ModelError."""
    path = Path(settings.model_path)
    document = read_json(path / CONFIG_FILE) if (path / CONFIG_FILE).exists() else {}
    named = document.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in ENCODER_ARCHITECTURES:
        return None
    config = parse_encoder_config(document)
    if settings.tensor_parallel > 1:
        raise SettingsError(f"tensorParallel: {settings.tensor_parallel} ranks, but an encoder is served by one: set it to 1")
    tokenizer = fitting_tokenizer(path, config.vocab_size)
    wanted = settings.max_model_length
    if wanted is not None and wanted > config.max_positions:
        raise SettingsError(f"maxModelLength: {wanted} is beyond the model's {config.max_positions} positions: lower maxModelLength")
    return EncoderFiles(path, config, tokenizer)


def load_encoder_engine(settings: EngineSettings, files: EncoderFiles, keep_going: Callable[[], bool]) -> LoadedEngine:
    """Load the model. Raises DeviceError or ModelError."""
    started = time.monotonic()
    device = open_device(settings)

    import torch

    from npufleet_kernels.dispatch import select_kernels
    from npufleet_kernels.errors import KernelError
    from npufleet_pod.models.checkpoint import Checkpoint
    from npufleet_pod.models.dtypes import TORCH_DTYPES
    from npufleet_pod.models.encoder import load_encoder

    dtype = settings.dtype
    if dtype is Dtype.AUTO:
        dtype = Dtype.FLOAT32 if settings.device is Device.CPU else Dtype.FLOAT16
    try:
        kernels = select_kernels(device.torch_device.type)
    except KernelError as error:
        raise DeviceError(str(error)) from error
    with Checkpoint(files.path, TORCH_DTYPES[dtype], device.torch_device) as checkpoint:
        encoder = load_encoder(files.config, checkpoint, kernels)
    limits = encoder_limits(settings, files.config)
    logger.info(
        "model loaded",
        extra={
            "architecture": files.config.architecture,
            "dtype": dtype.value,
            "device": device.torch_device.type,
            "threads": torch.get_num_threads(),
            "max_model_length": limits.max_model_length - 1,
            "load_seconds": round(time.monotonic() - started, 3),
        },
    )
    return LoadedEngine(
        EncoderRunner(encoder, device),
        limits,
        frozenset(),
        files.tokenizer.decode,
        policy=SchedulerPolicy(chunked_prefill=False, policy=settings.scheduling_policy, starvation_steps=settings.starvation_steps),
        prefix_cache=False,
    )


def encoder_limits(settings: EngineSettings, config: EncoderConfig) -> SchedulerLimits:
    """Bounds by which a text is computed in one step, and never waits for memory: an encoder keeps nothing between steps."""
    # The engine counts a token that each request is answered with.
    longest = (settings.max_model_length or config.max_positions) + 1
    return SchedulerLimits(
        max_num_sequences=settings.max_num_sequences,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, longest),
        max_queued_requests=settings.max_queued_requests,
        max_model_length=longest,
        kv_blocks=settings.max_num_sequences * -(-longest // BLOCK_TOKENS),
        kv_block_tokens=BLOCK_TOKENS,
    )


class EncoderRunner:
    """Computes vectors where a decoder's runner computes tokens; see `loaded.Runner`."""

    def __init__(self, encoder: Encoder, device: ComputeDevice) -> None:
        self._encoder = encoder
        self._device = device
        self._requests: dict[str, GenerationRequest] = {}

    def prepare(self, step: Step, changes: Sequence[Change]) -> tuple[Step, Sequence[Change]]:
        """Nothing: texts are short."""
        return step, changes

    def compute(self, batch: tuple[Step, Sequence[Change]]) -> dict[str, SampledToken]:
        """The vector of each text, with a token that means nothing."""
        import torch

        from npufleet_pod.engine.pooling import PooledPrompt

        step, changes = batch
        for change in changes:
            if isinstance(change, Added):
                self._requests[change.request.request_id] = change.request
            else:
                self._requests.pop(change, None)
        names = [name for name in step.tokens if name in step.samples]
        if not names:
            return {}
        prompts = [self._requests[name].prompt_token_ids for name in names]
        lengths = [len(prompt) for prompt in prompts]
        with torch.inference_mode():
            token_ids = self._device.to_device(torch.tensor([token for prompt in prompts for token in prompt]))
            hidden = torch.split(self._encoder.forward(token_ids, lengths), lengths)
        sampled = {}
        for name, states in zip(names, hidden, strict=True):
            pooling = self._requests[name].pooling
            assert pooling is not None  # noqa: S101 - an encoder is asked for nothing else
            pooled = PooledPrompt(pooling, states.shape[0])
            pooled.observe(0, states)
            sampled[name] = SampledToken(0, vector=pooled.vector())
        return sampled
