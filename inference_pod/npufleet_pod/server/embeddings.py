"""Answers `POST /v1/embeddings`: one vector per input."""

from __future__ import annotations

import asyncio
import base64
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams
from npufleet_pod.errors import ContextLengthError, InvalidRequestError, RequestError
from npufleet_pod.server.answer import run_until_disconnect, within
from npufleet_pod.server.errors import answer_for
from npufleet_pod.server.generate import checked_ids, encode
from npufleet_pod.server.protocol import EmbeddingBody
from npufleet_pod.server.serving import Serving

logger = logging.getLogger(__name__)

LONG_ANSWER_INPUTS = 16
"""Answers with more vectors are written on a thread, so that other clients' tokens are not held up."""


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """What is to be computed, and how it is told."""

    model: str
    requests: tuple[GenerationRequest, ...]
    base64: bool
    normalize: bool


async def plan_embeddings(serving: Serving, body: EmbeddingBody) -> EmbeddingPlan:
    """What a request asks for. Raises RequestError."""
    serving.check_model(body.model)
    serving.lifecycle.check_admits()
    width = serving.files.config.hidden_size
    if body.dimensions is not None and body.dimensions != width:
        raise InvalidRequestError(f"dimensions {body.dimensions} is not supported: this model's vectors have {width}", "dimensions")
    answer_id = f"embd-{uuid.uuid4().hex}"
    requests = []
    for index, given in enumerate(body.inputs()):
        tokens = await _tokens(serving, body, given)
        requests.append(
            GenerationRequest(
                request_id=f"{answer_id}-{index}",
                prompt_token_ids=tuple(tokens),
                stop=StopParams(max_tokens=1, ignore_eos=True),
                sampling=SamplingParams(temperature=0),
                priority=body.priority or 0,
                pooling=serving.pooling,
            )
        )
    return EmbeddingPlan(body.model, tuple(requests), body.encoding_format == "base64", body.normalize)


async def _tokens(serving: Serving, body: EmbeddingBody, given: str | list[int]) -> list[int]:
    # The engine computes one token besides.
    limit = serving.limits.max_model_length - 1
    keep = body.truncate_prompt_tokens
    if isinstance(given, str):
        if not given:
            raise InvalidRequestError("input holds an empty text: leave it out", "input")
        tokens = await encode(serving, given, add_special_tokens=body.add_special_tokens)
    else:
        tokens = checked_ids(serving, given, "input")
    if not tokens:
        raise InvalidRequestError("input holds a text without tokens: leave it out", "input")
    if keep is not None and keep != 0:
        count = limit if keep == -1 else keep
        if serving.encodes and len(tokens) > count > 1:
            # An encoder's text begins and ends with tokens that it was trained with.
            tokens = [*tokens[: count - 1], tokens[-1]]
        tokens = tokens[-count:]
    if len(tokens) > limit:
        raise ContextLengthError(
            f"an input has {len(tokens)} tokens, the model holds {limit}: shorten it, or truncate_prompt_tokens", "input"
        )
    return tokens


class EmbeddingResponse(Response):
    """Computes as many inputs at a time as the engine runs, so that one request does not fill the queue."""

    def __init__(self, serving: Serving, plan: EmbeddingPlan, deadline: float | None = None) -> None:
        """deadline: when the client no longer waits, in the event loop's time."""
        super().__init__()
        self._serving = serving
        self._plan = plan
        self._deadline = deadline
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; what is left is given up when the client leaves."""
        try:
            async with within(self._deadline):
                with self._serving.lifecycle.admit():
                    if not await run_until_disconnect(receive, self._answer(scope, receive, send)):
                        logger.info("client left", extra={"request_id": scope.get("state", {}).get("request_id")})
        except RequestError as error:
            if not self._begun:
                await answer_for(error).response()(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests = self._plan.requests
        at_once = self._serving.limits.max_num_sequences
        vectors: list[bytes] = []
        for start in range(0, len(requests), at_once):
            vectors += await self._compute(requests[start : start + at_once])
        many = len(vectors) > LONG_ANSWER_INPUTS
        answer = await asyncio.to_thread(self._word, vectors) if many else self._word(vectors)
        self._begun = True
        await answer(scope, receive, send)

    async def _compute(self, requests: Sequence[GenerationRequest]) -> list[bytes]:
        vectors = [b""] * len(requests)
        with self._serving.engine.submit(requests) as generation:
            while not generation.finished:
                index, output = await generation.next()
                vectors[index] = output.vector or b""
        return vectors

    def _word(self, vectors: Sequence[bytes]) -> Response:
        plan = self._plan
        tokens = sum(len(request.prompt_token_ids) for request in plan.requests)
        data = [{"object": "embedding", "index": index, "embedding": self._value(vector)} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": plan.model, "usage": usage})

    def _value(self, raw: bytes) -> Any:
        vector = np.frombuffer(raw, dtype="<f4")
        if self._plan.normalize:
            vector = (vector / max(float(np.linalg.norm(vector.astype(np.float64))), 1e-12)).astype("<f4")
        return base64.b64encode(vector.tobytes()).decode() if self._plan.base64 else vector.tolist()
