from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI

from npufleet_pod.server.api_keys import ApiKeys
from support.pod_process import start_pod

KEY, OTHER = "sk-0123456789", "sk-abcdefghij"


def test_only_who_has_a_key_is_served_and_no_key_is_logged(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "team-a").write_text(KEY + "\n")
    with start_pod(tiny_model, tmp_path, arguments=["--api-keys", str(keys)]) as pod:
        pod.wait_ready()
        with OpenAI(base_url=f"{pod.url}/v1", api_key=KEY, max_retries=0) as client:
            assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
            for wrong in (OTHER, KEY + "x", KEY[:-1]):
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.with_options(api_key=wrong).models.list()
                assert caught.value.code == "invalid_api_key"
        refused = pod.http.post(f"{pod.url}/v1/completions", content=b"{")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["x-request-id"]
        assert pod.http.get(f"{pod.url}/v1/models", headers={"x-api-key": KEY}).status_code == 200
        for path in ("/tokenize", "/docs", "/openapi.json", "/version", "/anything"):
            assert pod.http.get(f"{pod.url}{path}").status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert pod.http.get(f"{pod.url}{path}").status_code == 200

        (keys / "team-a").unlink()
        (keys / "team-b").write_text(f"sha256:{hashlib.sha256(OTHER.encode()).hexdigest()}")
        pod.wait(lambda: pod.http.get(f"{pod.url}/v1/models", headers={"api-key": OTHER}).status_code == 200, "the new key")
        assert pod.http.get(f"{pod.url}/v1/models", headers={"api-key": KEY}).status_code == 401
        pod.wait(lambda: any(line.get("api_key") == "team-b" for line in pod.logs()), "logged")
        assert KEY not in json.dumps(pod.logs())
        assert OTHER not in json.dumps(pod.logs())


def test_a_folder_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    keys = ApiKeys(tmp_path / "missing")
    keys.read()
    assert keys.name_of({"authorization": f"Bearer {KEY}"}) is None
    assert keys.name_of({}) is None


@pytest.mark.parametrize("content", [b"", b"short", b"with space in it", b"sha256:1234", b"\xff" * 20, b"x" * 2000])
def test_a_file_that_is_no_key_is_told_by_name_once(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad").write_bytes(content)
    (tmp_path / "..data").mkdir()
    (tmp_path / "good").write_text(KEY)
    keys = ApiKeys(tmp_path)
    with caplog.at_level(logging.INFO):
        keys.read()
        keys.read()
    assert keys.names == {"good"}
    assert [record.__dict__["file"] for record in caplog.records if record.levelno == logging.WARNING] == ["bad"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40))
def test_no_text_but_the_key_itself_lets_in(tmp_path: Path, text: str) -> None:
    (tmp_path / "only").write_text(KEY)
    keys = ApiKeys(tmp_path)
    keys.read()
    assert keys.name_of({"authorization": f"Bearer {text}"}) == ("only" if text.strip() == KEY else None)
    assert keys.name_of({"authorization": text}) is None
