"""Fields that other servers know and this one cannot obey: refused unless they ask for nothing, so that no answer silently differs."""

from __future__ import annotations

from typing import Any

from npufleet_pod.errors import InvalidRequestError
from npufleet_pod.server.body import Body

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
"""Values by which every field asks for nothing."""


class UnservedFields(Body):
    """Known and not served. Names are OpenAI's and vLLM's."""

    use_beam_search: Any = None
    length_penalty: Any = None
    chat_template: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    thinking_token_budget: Any = None
    return_token_offsets: Any = None
    return_prompt_text: Any = None
    return_mm_kwargs: Any = None
    return_weight_versions: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None

    def check_served(self) -> None:
        """Raise InvalidRequestError for a field that asks for what is not served."""
        for name, (neutral, remedy) in REMEDIES.items():
            value = getattr(self, name)
            if not any(value is one or (type(value) is type(one) and value == one) for one in (*NOTHING, *neutral)):
                raise InvalidRequestError(f"{name} is not supported: {remedy}", name)


LEAVE_OUT = "leave it out"
REMEDIES: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((), "sample several answers with n"),
    "length_penalty": ((1, 1.0), "it belongs to beam search: leave it out"),
    "chat_template": ((), "only the model's own template is run: send the prompt to /v1/completions"),
    "logprob_token_ids": ((), "ask for top_logprobs"),
    "prompt_embeds": ((), "send text or token ids as prompt"),
    "logits_processors": ((), "use logit_bias, bad_words or structured_outputs"),
    "kv_transfer_params": ((), LEAVE_OUT),
    "ec_transfer_params": ((), LEAVE_OUT),
    "repetition_detection": ((), "use repetition_penalty or frequency_penalty"),
    "watermarking": ((), LEAVE_OUT),
    "thinking_token_budget": ((), "bound the answer with max_tokens"),
    "return_token_offsets": ((), "ask for logprobs, which tell text offsets"),
    "return_prompt_text": ((), "ask /tokenize for the prompt"),
    "return_mm_kwargs": ((), LEAVE_OUT),
    "return_weight_versions": ((), LEAVE_OUT),
    "functions": ((), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "audio": ((), "only text is answered: leave it out"),
    "modalities": ((["text"],), 'only text is answered: leave it out, or send ["text"]'),
}
"""Further values that ask for nothing, and what to do instead."""
