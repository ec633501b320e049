"""Runs in an environment of its own: asks a server through LangChain's ChatOpenAI and LiteLLM, and prints what each answered as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import litellm
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "hello"


class City(BaseModel):
    """What structured output asks for: a random model would not end a form without bounds."""

    name: Literal["Rome", "Oslo"]
    size: Literal[1, 2]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return city


def langchain(base_url: str, model: str) -> dict[str, Any]:
    """Everything that applications use of ChatOpenAI."""
    common: dict[str, Any] = {"base_url": base_url, "api_key": "unused", "model": model, "max_retries": 0}
    chat = ChatOpenAI(**common, temperature=0, max_tokens=24)
    messages = [SystemMessage("be brief"), HumanMessage(QUESTION)]
    whole = chat.invoke(messages)
    chunks = list(chat.stream(messages, stream_usage=True))
    structured = ChatOpenAI(**common, temperature=0, max_tokens=200).with_structured_output(City, method="json_schema")
    called = ChatOpenAI(**common, temperature=0, max_tokens=200).bind_tools([weather], tool_choice="weather", strict=True).invoke(messages)
    # OpenAI's own tokenizer, by which it would cut long texts, would have to be downloaded.
    embeddings = OpenAIEmbeddings(base_url=base_url, api_key="unused", model=model, max_retries=0, check_embedding_ctx_length=False)
    return {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"] if whole.usage_metadata else None,
        "finish_reason": whole.response_metadata["finish_reason"],
        "streamed": "".join(str(chunk.content) for chunk in chunks),
        "streamed_usage": [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata],
        "batch": [answer.content for answer in chat.batch([messages, messages])],
        "structured": structured.invoke(messages).model_dump(),
        "calls": called.tool_calls,
        "completion": OpenAI(**common, temperature=0, max_tokens=8).invoke(QUESTION),
        "logprobs": len(chat.bind(logprobs=True).invoke(messages).response_metadata["logprobs"]["content"]),
        "embedding": len(embeddings.embed_query(QUESTION)),
    }


def lite(base_url: str, model: str) -> dict[str, Any]:
    """LiteLLM as a client library."""
    litellm.telemetry = False
    common: dict[str, Any] = {"model": f"openai/{model}", "api_base": base_url, "api_key": "unused", "num_retries": 0}
    asked = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(**common, messages=asked, temperature=0, max_tokens=24)
    pieces = litellm.completion(**common, messages=asked, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True})
    streamed = list(pieces)
    text = litellm.text_completion(**common, prompt=QUESTION, temperature=0, max_tokens=8)
    try:
        litellm.completion(**common, messages=asked, temperature=-1)
        refused = None
    except litellm.BadRequestError as error:
        refused = error.status_code
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in streamed if piece.choices),
        "completion": text.choices[0].text,
        "refused": refused,
        "embedding": len(litellm.embedding(**common, input=[QUESTION]).data[0]["embedding"]),
    }


if __name__ == "__main__":
    print(json.dumps({"langchain": langchain(*sys.argv[1:]), "litellm": lite(*sys.argv[1:])}))
