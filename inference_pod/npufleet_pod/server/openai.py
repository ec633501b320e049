"""The OpenAI port: routes, and the document that describes them."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from npufleet_api.contract import HEALTH_PATH, METRICS_PATH, READY_PATH
from npufleet_pod.errors import InvalidRequestError, RequestError
from npufleet_pod.server.answer import GenerationResponse
from npufleet_pod.server.api_keys import ApiKeyMiddleware
from npufleet_pod.server.bodies import read_body
from npufleet_pod.server.deadline import deadline_of
from npufleet_pod.server.embeddings import EmbeddingResponse, plan_embeddings
from npufleet_pod.server.errors import ErrorAnswer, answer_for
from npufleet_pod.server.generate import encode, plan_chat, plan_completion
from npufleet_pod.server.metrics import CONTENT_TYPE
from npufleet_pod.server.middleware import RequestContextMiddleware
from npufleet_pod.server.protocol import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Message, TokenizeBody
from npufleet_pod.server.serving import Serving
from npufleet_pod.server.tools import ToolUse

BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, EmbeddingBody, TokenizeBody, DetokenizeBody)
VERSION = importlib.metadata.version("npufleet")


def create_openai_app(serving: Serving) -> FastAPI:
    """The application behind the OpenAI port."""
    app = FastAPI(title="npufleet inference pod", version=VERSION, redirect_slashes=False)
    if serving.api_keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=serving.api_keys)
    # Added last, so outermost: refusals have an id and a line in the log too.
    app.add_middleware(
        RequestContextMiddleware,
        replica=serving.replica,
        model_header=_header_value(serving.settings.served_name),
        metrics=serving.metrics,
        tracing=serving.tracing,
    )
    add_error_handlers(app)
    _add_health(app, serving)
    _add_models(app, serving)
    _add_generation(app, serving)
    _add_tokens(app, serving)
    _describe_bodies(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Answer every refusal with an error object."""

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        return answer_for(error).response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}: see /docs for the routes"
        headers = dict(error.headers or {})
        return ErrorAnswer(error.status_code, message, "invalid_request_error", code="not_found", headers=headers).response()

    @app.exception_handler(RequestValidationError)
    async def refuse_parameters(request: Request, error: RequestValidationError) -> Response:
        return ErrorAnswer(400, "the request's parameters are wrong: see /docs", "invalid_request_error").response()


def _add_health(app: FastAPI, serving: Serving) -> None:
    @app.get(HEALTH_PATH)
    async def health() -> dict[str, str]:
        """200 as long as the process answers."""
        return {"status": "ok"}

    @app.get(READY_PATH)
    async def ready() -> Response:
        """200 once the model is warm and work is taken."""
        reason = serving.lifecycle.unready_reason
        if reason is None:
            return JSONResponse({"status": "ready"})
        return ErrorAnswer(503, f"not ready: {reason}", "service_unavailable_error", code=reason, headers={"retry-after": "1"}).response()

    @app.get(METRICS_PATH)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(serving.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The release that runs."""
        return {"version": VERSION}


def _add_models(app: FastAPI, serving: Serving) -> None:
    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": serving.created_unix,
            "owned_by": "npufleet",
            "root": serving.settings.served_name,
            "parent": None if name == serving.settings.served_name else serving.settings.served_name,
            "max_model_len": serving.max_model_length,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model under each of its names."""
        return {"object": "list", "data": [describe(name) for name in serving.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model under one name."""
        serving.check_model(name)
        return describe(name)


def _add_generation(app: FastAPI, serving: Serving) -> None:
    max_bytes = serving.settings.max_body_bytes

    @app.post("/v1/completions", openapi_extra=_body(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        deadline = deadline_of(request.headers)
        plan = await plan_completion(serving, await read_body(request, CompletionBody, max_bytes))
        return GenerationResponse(serving, plan, deadline)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        deadline = deadline_of(request.headers)
        plan = await plan_chat(serving, await read_body(request, ChatBody, max_bytes))
        return GenerationResponse(serving, plan, deadline)

    @app.post("/v1/embeddings", openapi_extra=_body(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """Vectors of texts."""
        deadline = deadline_of(request.headers)
        return EmbeddingResponse(serving, await plan_embeddings(serving, await read_body(request, EmbeddingBody, max_bytes)), deadline)


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    max_bytes = serving.settings.max_body_bytes

    @app.post("/tokenize", openapi_extra=_body(TokenizeBody))
    async def tokenize(request: Request) -> dict[str, Any]:
        """Token ids of a prompt or a conversation."""
        body = await read_body(request, TokenizeBody, max_bytes)
        serving.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("send either prompt or messages", "prompt")
        text = body.prompt or "" if body.messages is None else _conversation(serving, body, body.messages)
        special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        tokens = await encode(serving, text, add_special_tokens=special)
        strings = [serving.files.tokenizer.piece(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": serving.max_model_length, "tokens": tokens, "token_strs": strings}

    @app.post("/detokenize", openapi_extra=_body(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        body = await read_body(request, DetokenizeBody, max_bytes)
        serving.check_model(body.model)
        return {"prompt": serving.files.tokenizer.decode(body.tokens, body.skip_special_tokens)}


def _conversation(serving: Serving, body: TokenizeBody, given: list[Message]) -> str:
    """The prompt that a chat of these messages would have."""
    messages = [message.for_template() for message in given]
    tools = ToolUse.of(body.tools, None, True)
    return serving.template.render(
        messages,
        body.add_generation_prompt,
        body.chat_template_kwargs,
        None if tools is None else tools.for_template(),
        continue_final_message=body.continue_final_message,
    )


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the bodies, which the routes read themselves, to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, definitions = models_json_schema([(kind, "validation") for kind in BODIES], ref_template="#/components/schemas/{model}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way to extend its document


def _header_value(name: str) -> str:
    """A model's name as a header can hold it."""
    return re.sub(r"[^\x21-\x7e]", "?", name)
