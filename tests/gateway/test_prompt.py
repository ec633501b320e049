"""What routing reads of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npufleet_gateway.prompt import BYTES_PER_TOKEN, Prompt
from npufleet_gateway.proxy import MAX_PROMPT_BODY_BYTES, parse_head, read_prompt
from npufleet_gateway.routing import Model, ModelRoute, build_table

TABLE = build_table([Model("team", "chat", "uid", "2026-01-01T00:00:00Z", "gpt", "chat")], [])
ROUTE: ModelRoute = TABLE.routes[0]
LONG = "x" * 5000


def prompt(headers: list[tuple[bytes, bytes]] | None = None, **body: Any) -> Prompt:
    raw = json.dumps({"model": "gpt", **body}).encode()
    return read_prompt(parse_head(raw), headers or [], ROUTE, len(raw))


def test_tokens_are_estimated_from_bytes_and_a_huge_prompt_from_its_body() -> None:
    assert prompt(prompt="x" * 400).tokens == 400 // BYTES_PER_TOKEN
    assert prompt().tokens < 10
    assert prompt(prompt="x" * 10**6).tokens >= 10**6 // BYTES_PER_TOKEN
    assert prompt(prompt=LONG).tokens_to(2) == 512
    assert prompt(prompt=LONG).tokens_to(0) == 0


def test_a_model_has_the_same_prefixes_under_both_its_names() -> None:
    assert prompt(prompt=LONG).hashes == prompt(prompt=LONG, model="team/chat").hashes


@pytest.mark.parametrize("change", [{"cache_salt": "tenant-1"}, {"model": "gpt:sql"}], ids=["salt", "adapter"])
def test_salt_and_adapter_separate_prefixes(change: dict[str, Any]) -> None:
    assert not set(prompt(prompt=LONG).hashes) & set(prompt(prompt=LONG, **change).hashes)


@pytest.mark.parametrize(
    ("name", "adapter"), [("gpt", ""), ("team/chat", ""), ("gpt:sql", "sql"), ("team/chat:sql", "sql"), ("gpt:", ""), ("other:sql", None)]
)
def test_an_adapter_stands_behind_a_colon(name: str, adapter: str | None) -> None:
    route = TABLE.find(name)
    assert (route is None) == (adapter is None)
    if adapter is not None:
        assert prompt(model=name).adapter == adapter


def test_a_session_is_asked_for_by_header_or_cache_key_and_the_header_goes_first() -> None:
    header = [(b"x-npufleet-session", b"s1")]
    assert prompt().session is None
    assert prompt(prompt_cache_key=7).session is None
    assert prompt(header).session == prompt(prompt_cache_key="s1").session is not None
    assert prompt(header, prompt_cache_key="s2").session == prompt(header).session
    assert prompt([(b"x-npufleet-session", b"")]).session is None


def test_the_prompt_of_a_huge_body_is_not_read_but_its_length_and_session_count() -> None:
    found = prompt(prompt="x" * MAX_PROMPT_BODY_BYTES, prompt_cache_key="s1")
    assert found.hashes == ()
    assert found.tokens >= MAX_PROMPT_BODY_BYTES // BYTES_PER_TOKEN
    assert found.session == prompt(prompt_cache_key="s1").session
    assert len(prompt(prompt="x" * (MAX_PROMPT_BODY_BYTES - 100)).hashes) > 30
