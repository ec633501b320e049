"""What a client makes of a supervisor that misbehaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devcluster.control import Request, ask
from devcluster.errors import ComponentError, NotRunningError
from devcluster.paths import Layout


@contextmanager
def answering(root: Path, answer: bytes) -> Iterator[Layout]:
    """A control socket that reads one request, sends `answer` and closes."""
    layout = Layout(root)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(layout.control))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        yield layout
        server.join()


def test_one_that_ends_before_it_answers_does_not_run(tmp_path: Path) -> None:
    with (
        answering(tmp_path, b"") as layout,
        pytest.raises(NotRunningError, match="ended before it answered status; start it with `devcluster up"),
    ):
        ask(layout, Request(action="status"))


@pytest.mark.parametrize("answer", [b"{", b"[]", b'{"processes": [{}]}', b"\xff", b'{"error": 1}'])
def test_nonsense_is_refused_with_what_was_asked(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path, answer) as layout, pytest.raises(ComponentError, match="answers status with what is no reply"):
        ask(layout, Request(action="status"))


def test_an_endless_answer_is_cut_off(tmp_path: Path) -> None:
    with answering(tmp_path, b" " * (1 << 20) + b"{}") as layout, pytest.raises(ComponentError, match="more than 1048576 bytes"):
        ask(layout, Request(action="status"))
