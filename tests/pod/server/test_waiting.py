"""Streams that wait, and requests whose client does not wait for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from npufleet_api.contract import TIMEOUT_HEADER
from support.pod_process import PodProcess, start_pod

LONG: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
SHORT: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def narrow(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """A server that runs one request at a time and does not let streams be silent."""
    with start_pod(
        tiny_model, tmp_path_factory.mktemp("pod"), max_num_sequences=1, preemption="Conservative", heartbeat_seconds=0.05
    ) as process:
        process.wait_ready()
        yield process


def test_a_stream_that_waits_hears_comments_which_clients_skip(narrow: PodProcess) -> None:
    with httpx.stream("POST", f"{narrow.url}/v1/completions", json={**LONG, "n": 8, "stream": True}, timeout=60) as first:
        begun = first.iter_raw()
        next(begun)
        got = bytearray()
        with httpx.stream("POST", f"{narrow.url}/v1/completions", json={**SHORT, "stream": True}, timeout=60) as second:
            assert second.status_code == 200
            chunks = second.iter_raw()
            got += next(chunks)
            assert got.startswith(b": waiting\n\n")
            first.close()
            for chunk in chunks:
                got += chunk
    events = got.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert [json.loads(one.removeprefix("data: "))["choices"][0]["index"] for one in events if one.startswith("data: {")]
    with OpenAI(base_url=f"{narrow.url}/v1", api_key="unused", max_retries=0) as client:
        holder = threading.Thread(target=lambda: narrow.http.post(f"{narrow.url}/v1/completions", json={**LONG, "max_tokens": 300}))
        holder.start()
        narrow.wait(lambda: narrow.state()["running"] == 1, "running")
        stream = client.completions.create(**{key: value for key, value in SHORT.items() if key != "ignore_eos"}, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
        holder.join()


@pytest.mark.parametrize("path", ["completions", "embeddings"])
def test_a_request_that_is_not_done_in_its_time_is_given_up(narrow: PodProcess, path: str) -> None:
    body = {**LONG, "input": [[5] * 1500] * 100}
    answer = narrow.http.post(f"{narrow.url}/v1/{path}", json=body, headers={TIMEOUT_HEADER: "50"})
    assert answer.status_code == 504
    assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == ("deadline_exceeded", "timeout_error")
    narrow.wait(lambda: narrow.state()["running"] == 0 and narrow.metric("vllm:kv_cache_usage_perc") == 0, "free")


def test_a_stream_that_has_begun_ends_with_an_event_that_says_why(narrow: PodProcess) -> None:
    with OpenAI(base_url=f"{narrow.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny",
            prompt=[5, 6],
            max_tokens=2000,
            n=8,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={TIMEOUT_HEADER: "400"},
        )
        with pytest.raises(openai.APIError, match="took longer than its x-npufleet-timeout-ms allows"):
            list(stream)
    narrow.wait(lambda: narrow.state()["running"] == 0, "free")


@pytest.mark.parametrize("given", ["0", "-5", "1.5", "soon", "٣", "9" * 30, ""])
def test_a_time_that_is_none_is_refused(narrow: PodProcess, given: str) -> None:
    headers = [(TIMEOUT_HEADER.encode(), given.encode())]
    answer = narrow.http.post(f"{narrow.url}/v1/completions", json=SHORT, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == TIMEOUT_HEADER


def test_enough_time_changes_nothing(narrow: PodProcess) -> None:
    answers = [
        narrow.http.post(f"{narrow.url}/v1/completions", json=SHORT, headers=headers).json()["choices"]
        for headers in ({}, {TIMEOUT_HEADER: "86400000"})
    ]
    assert answers[0] == answers[1]
