"""What rank 0 and the other ranks tell each other. Pickled over a socket that only the two hold. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.step_input import StepInput
from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.precision import PrecisionPlan


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank: load your part of the model. Answered by Loaded."""

    settings: EngineSettings
    path: Path
    config: DecoderConfig
    precision: PrecisionPlan
    rank: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Join the others. Answered by Connected.

    store_port: of the loopback, where they find each other; None: they share memory.
    """

    store_port: int | None


@dataclass(frozen=True, slots=True)
class TakeCache:
    """Take KV memory of this layout. Answered by CacheTaken."""

    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class AttachHost:
    """Map `size_bytes` of the shared host memory; each slot of it holds a page of every rank, yours at `offset`."""

    size_bytes: int
    slot_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Put a step's input on the device. Numbers grow."""

    number: int
    step: StepInput


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a prepared step and score its samples; earlier ones that were prepared are forgotten. Done answers one without tokens.

    known: rows whose token was not known when the step was prepared, each with its token.
    """

    number: int
    known: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Score rows [first, last) of the step computed last."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Close:
    """The last message to a rank: end."""


Order = Start | Connect | TakeCache | AttachHost | Prepare | Compute | Score | Close


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank's weights are on its device."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The rank has exchanged something with the others; its device has so much memory left."""

    free_memory_bytes: int


@dataclass(frozen=True, slots=True)
class CacheTaken:
    """The rank can hold KV; a page of its part takes so much."""

    page_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The step of this number is computed."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank's last message: why it ends. exit_code: of an engine that cannot start for this reason, None after the start."""

    message: str
    exit_code: int | None


Report = Loaded | Connected | CacheTaken | Done | Failed
