"""A real server whose model lies on two ranks: the official client notices nothing, and every end is bounded, told and clean."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.pod_process import PodProcess, start_pod
from support.rank_processes import is_gone, rank_pids

pytestmark = pytest.mark.slow
RANKS: dict[str, Any] = {"tensor_parallel": 2, "cpu_threads": 2}
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "the hello", "max_tokens": 40, "temperature": 0}


def endless(client: OpenAI) -> openai.Stream[Any]:
    """A stream that has begun and does not end by itself."""
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=2000, extra_body={"ignore_eos": True}, stream=True)
    next(iter(stream))
    return stream


def test_the_official_client_gets_the_answers_of_one_rank_and_sigterm_ends_both(tiny_model: Path, tmp_path: Path, pod: PodProcess) -> None:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as client:
        expected = client.completions.create(**ASKED, logprobs=1)
    with start_pod(tiny_model, tmp_path, host_cache_mi=1, **RANKS) as ranked:
        ranked.wait_ready()
        (worker,) = rank_pids(ranked.process.pid)
        with OpenAI(base_url=f"{ranked.url}/v1", api_key="unused", max_retries=0) as client:
            answer = client.completions.create(**ASKED, logprobs=1)
            assert answer.choices[0].text == expected.choices[0].text
            chunks = list(client.completions.create(**ASKED, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
            assert ranked.metric("vllm:generation_tokens_total") == 80
            stream = client.completions.create(
                model="tiny",
                prompt="a",
                max_tokens=200,
                extra_body={"ignore_eos": True},
                stream=True,
                stream_options={"include_usage": True},
            )
            next(iter(stream))
            ranked.terminate()
            usage = list(stream)[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 200, "what has begun is finished before the ranks end"
        assert ranked.wait_end() == 0
        assert ranked.stderr == ""
        assert is_gone(worker)
        by_rank = {line.get("rank") for line in ranked.logs()}
        assert by_rank == {None, 1}, "the log says which rank speaks"


def test_a_rank_that_is_killed_ends_the_process_and_kubernetes_learns_which(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "termination-log").write_text("")
    with start_pod(tiny_model, tmp_path, **RANKS) as ranked:
        ranked.wait_ready()
        (worker,) = rank_pids(ranked.process.pid)
        with OpenAI(base_url=f"{ranked.url}/v1", api_key="unused", max_retries=0) as client:
            stream = endless(client)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="the engine stopped: try again"):
                list(stream)
        assert ranked.wait_end() == 1
        told = (tmp_path / "termination-log").read_text()
        assert told.startswith(f"engine ended: rank 1 (pid {worker}) was killed by SIGKILL: if nobody did it, memory ran out")
        assert ranked.stderr == f"{told}\n"
        assert is_gone(worker)


def test_a_rank_that_is_stopped_ends_the_process_within_its_timeout(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "termination-log").write_text("")
    with start_pod(tiny_model, tmp_path, rank_timeout_seconds=4, **RANKS) as ranked:
        ranked.wait_ready()
        (worker,) = rank_pids(ranked.process.pid)
        with OpenAI(base_url=f"{ranked.url}/v1", api_key="unused", max_retries=0) as client:
            stream = endless(client)
            os.kill(worker, signal.SIGSTOP)
            with pytest.raises(openai.APIError, match="the engine stopped: try again"):
                list(stream)
        assert ranked.wait_end() == 1
        told = (tmp_path / "termination-log").read_text()
        assert told == f"engine ended: rank 1 (pid {worker}) is stopped by a signal: no rank moved for 4 s, rankTimeoutSeconds is 4"
        assert is_gone(worker)


def test_ranks_do_not_outlive_a_rank_0_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    with start_pod(tiny_model, tmp_path, **RANKS) as ranked:
        ranked.wait_ready()
        (worker,) = rank_pids(ranked.process.pid)
        os.kill(worker, signal.SIGSTOP)  # It could not obey its closed channel.
        ranked.process.kill()
        assert ranked.wait_end() == -signal.SIGKILL
        wait_gone(worker)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)
