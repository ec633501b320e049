"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from npufleet_api.model import ToolCallFormat
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.encoding import EncoderFiles
from npufleet_pod.engine.engine import Engine
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.request import Pooling
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.errors import ModelNotFoundError, NotReadyError
from npufleet_pod.server.api_keys import ApiKeys
from npufleet_pod.server.chat_template import ChatTemplate
from npufleet_pod.server.grammars import GrammarCompiler
from npufleet_pod.server.lifecycle import Lifecycle
from npufleet_pod.server.metrics import EngineMetrics
from npufleet_pod.server.pooling import load_pooling
from npufleet_pod.server.reasoning import ReasoningFormat
from npufleet_pod.server.tools import ToolFormat
from npufleet_pod.server.tracing import Tracing


@dataclass
class Serving:
    """One model as it is served."""

    settings: EngineSettings
    files: ModelFiles | EncoderFiles
    template: ChatTemplate
    engine: Engine
    lifecycle: Lifecycle
    metrics: EngineMetrics
    grammars: GrammarCompiler
    replica: str
    """Name of the pod."""
    created_unix: int
    loaded_limits: SchedulerLimits | None = None
    """None until the model is loaded."""
    api_keys: ApiKeys | None = None
    """None: nobody is asked for a key."""
    tracing: Tracing | None = None
    """None: nothing is traced."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may send as model; the served one first."""
        return (self.settings.served_name, *self.settings.aliases)

    @property
    def limits(self) -> SchedulerLimits:
        """The engine's bounds. Raises NotReadyError while the model loads."""
        if self.loaded_limits is None:
            raise NotReadyError("the model is loading: try again later", draining=False)
        return self.loaded_limits

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model writes its thoughts; None if it has none."""
        return ReasoningFormat.of(self.files.tokenizer, self.template.source)

    @cached_property
    def pooling(self) -> Pooling:
        """How the model's states become a vector: as it says, else an encoder's by their mean (sentence-transformers' default), a decoder's
        by the last token, which alone has seen all of the prompt."""
        return load_pooling(self.files.path, Pooling.MEAN if self.encodes else Pooling.LAST)

    @property
    def encodes(self) -> bool:
        """Whether the model makes vectors only."""
        return isinstance(self.files, EncoderFiles)

    @property
    def max_model_length(self) -> int | None:
        """Tokens of prompt and answer that the model holds; None while it loads."""
        limits = self.loaded_limits
        # An encoder's text is followed by the one token that the engine counts for it.
        return None if limits is None else limits.max_model_length - self.encodes

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model calls tools; None if its chat template has no place for them."""
        chosen = self.settings.tool_format
        return ToolFormat.of(self.template.source) if chosen is ToolCallFormat.AUTO else ToolFormat(chosen.value.lower())

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless `name` is served; None stands for the only model."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(f"the model {name!r} does not exist: this replica serves {', '.join(self.names)}", "model")
