"""API keys: parsing, comparison, limits, and a folder that changes."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.support import loopback, model_object
from gateway.test_admission import pool_object
from npufleet_gateway.errors import ApiError
from npufleet_gateway.keys import ApiKey, KeyRing, RateLimits, parse_key

SECRET = "sk-very-secret-1"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not YAML"),
        ("just text", "Input should be"),
        ("{}", "either key or sha256"),
        ("key: short", "key"),
        ("key: with a space in it", "key"),
        (f"key: {SECRET}\nsha256: {'a' * 64}", "either key or sha256"),
        ("sha256: ABC", "sha256"),
        (f"key: {SECRET}\nmodel: x", "model"),
        (f"key: {SECRET}\nrequestsPerMinute: 0", "requestsPerMinute: Input should be greater than or equal to 1"),
        (f"key: {SECRET}\ntokensPerMinute: -5", "tokensPerMinute: Input should be greater than or equal to 1"),
        (f"key: {SECRET}\nrequestsPerMinute: many", "requestsPerMinute: Input should be a valid integer"),
        (f"key: {SECRET}\nclass: [chat]", "class: Input should be a valid string"),
        (f"[{{key: {SECRET}}}]", "Input should be"),
        ("\x00", "not YAML"),
    ],
)
def test_a_file_that_is_no_key_says_why_and_never_shows_the_key(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r".+") as refused:
        parse_key("team-a", text.encode())
    assert says in str(refused.value)
    assert SECRET not in str(refused.value)
    assert "with a space" not in str(refused.value)


def test_a_key_stands_as_itself_or_as_its_digest() -> None:
    digest = hashlib.sha256(SECRET.encode()).digest()
    text = f"sha256: {digest.hex()}\nclass: chat\nclasses: [code]\nmodels: [a, team-b/*]\ntokensPerMinute: 5"
    assert parse_key("n", f"key: {SECRET}".encode())[0] == digest
    assert parse_key("n", text.encode()) == (digest, ApiKey("n", "chat", frozenset({"code"}), ("a", "team-b/*"), None, 5))


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_is_a_key_or_refused(text: bytes) -> None:
    try:
        digest, _ = parse_key("n", text)
    except ValueError:
        return
    assert len(digest) == 32


def test_the_ring_follows_its_folder_and_is_closed_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "keys"
    ring = KeyRing(folder)
    ring.load()
    headers = [(b"authorization", f"Bearer {SECRET}".encode())]
    with pytest.raises(ApiError):
        ring.identify(headers)
    folder.mkdir()
    (folder / "team-a").write_text(f"key: {SECRET}")
    (folder / "team-b").write_text(f"secret: {SECRET}")
    (folder / "..data").mkdir()
    with caplog.at_level(logging.INFO):
        ring.load()
    found = ring.identify(headers)
    assert found is not None
    assert found.name == "team-a"
    assert ring.refused == ("team-b",)
    assert ring.identify([(b"api-key", SECRET.encode())]) == found
    assert SECRET not in caplog.text
    assert SECRET not in repr(found)
    (folder / "team-a").unlink()
    ring.load()
    with pytest.raises(ApiError):
        ring.identify(headers)


def test_a_key_that_two_entries_hold_belongs_to_the_first_and_the_other_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "team-a").write_text(f"key: {SECRET}")
    (tmp_path / "team-b").write_text(f"sha256: {hashlib.sha256(SECRET.encode()).hexdigest()}")
    ring = KeyRing(tmp_path)
    ring.load()
    found = ring.identify([(b"api-key", SECRET.encode())])
    assert found is not None
    assert (found.name, ring.valid, ring.refused) == ("team-a", 1, ("team-b",))
    assert "the same as that of team-a" in caplog.text


def test_classes_that_the_pool_does_not_have_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "team-a").write_text(f"key: {SECRET}\nclass: caht\nclasses: [code]")
    classes: list[str] = []
    ring = KeyRing(tmp_path, lambda: classes)
    ring.load()
    ring.tell_unknown_classes()
    assert caplog.text == "", "the pool's classes are not known yet"
    classes += ["chat", "code"]
    for _ in range(2):
        ring.tell_unknown_classes()
    assert len(caplog.records) == 1
    assert "API key team-a names the class 'caht'" in caplog.text
    assert "chat, code" in caplog.text
    classes.append("caht")
    ring.tell_unknown_classes()
    assert ring.unknown_classes == frozenset()


async def test_keys_are_counted_in_the_metrics_and_a_class_that_is_not_there_has_the_lowest_priority(tmp_path: Path) -> None:
    (tmp_path / "team-a").write_text(f"key: {SECRET}\nclass: caht")
    (tmp_path / "team-b").write_text("nothing")
    async with loopback(keys_dir=tmp_path) as pool:
        await pool.engine()
        pool.gateway.pool.replace([pool_object()])
        pool.gateway.keys.tell_unknown_classes()
        async with pool.post(headers=bearer(SECRET)) as response:
            assert response.status == 200
        await pool.settled()
        counted = {state: pool.metric("npufleet_gateway_api_keys", state=state) for state in ("valid", "refused", "unknown_class")}
        assert counted == {"valid": 1, "refused": 1, "unknown_class": 1}
        assert pool.metric("npufleet_gateway_requests_total", workload_class="caht", outcome="ok") == 1


def test_limits_refill_and_are_shared_among_gateways() -> None:
    now = 0.0
    gateways = 1
    limits = RateLimits(lambda: now, lambda: gateways)
    key = ApiKey("a", requests_per_minute=60)
    for _ in range(60):
        limits.take(key)
    with pytest.raises(ApiError) as refused:
        limits.take(key)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_seconds) == (429, "rate_limit_exceeded", 1)
    now = 1.0
    limits.take(key)
    with pytest.raises(ApiError):
        limits.take(key)
    gateways = 2
    for _ in range(30):
        limits.take(key)
    with pytest.raises(ApiError):
        limits.take(key)


def test_tokens_are_paid_for_afterwards() -> None:
    now = 0.0
    limits = RateLimits(lambda: now, lambda: 1)
    key = ApiKey("a", tokens_per_minute=600)
    limits.take(key)
    limits.spend(key, 700)
    with pytest.raises(ApiError) as refused:
        limits.take(key)
    assert refused.value.retry_after_seconds == 11
    now = 11.0
    limits.take(key)
    limits.take(None)
    limits.spend(None, 5)


async def test_through_the_gateway_a_key_is_asked_for_and_bounds_what_it_may_do(tmp_path: Path) -> None:
    (tmp_path / "team-a").write_text(f"key: {SECRET}\nmodels: [chat]\nrequestsPerMinute: 2")
    async with loopback(keys_dir=tmp_path) as pool:
        pool.models = [model_object(), model_object("other")]
        engine = await pool.engine()
        await pool.engine(model="other")
        for headers, status, code in (
            ({}, 401, "missing_api_key"),
            (bearer("sk-wrong-key"), 401, "invalid_api_key"),
            (bearer(SECRET[:-1]), 401, "invalid_api_key"),
        ):
            async with pool.post(headers=headers) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == code
            async with pool.session.get(f"{pool.url}/v1/models", headers=headers) as response:
                assert response.status == 401
        assert engine.seen == []
        async with pool.session.get(f"{pool.url}/v1/models", headers=bearer(SECRET)) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["chat"]
        async with pool.session.get(f"{pool.url}/v1/models/other", headers=bearer(SECRET)) as response:
            assert response.status == 404
        async with pool.post({"model": "other"}, headers=bearer(SECRET)) as response:
            assert response.status == 403
        for status in (200, 200, 429):
            async with pool.post(headers=bearer(SECRET)) as response:
                assert response.status == status
        assert int(response.headers["retry-after"]) > 0
        assert SECRET not in str(engine.seen)
        for path in ("/health", "/ready", "/metrics", "/report"):
            async with pool.session.get(pool.url + path) as response:
                assert response.status == 200
        await pool.settled()
        outcomes = pool.traffic().outcomes
        assert (outcomes.total, pool.traffic().judged) == (2, 2)
        os.replace(tmp_path / "team-a", tmp_path / "..old")  # noqa: PTH105  # as the kubelet does
        pool.gateway.keys.load()
        async with pool.post(headers=bearer(SECRET)) as response:
            assert response.status == 401
