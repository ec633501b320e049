"""Traces of both formats, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_operator.errors import InputError
from npufleet_operator.simulator.traces import TraceRequest, _mooncake, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_lines_are_sorted_and_begin_at_zero(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 2500, "input_length": 10, "output_length": 3, "hash_ids": [1]}\n\n'
        '{"timestamp": 1000, "input_length": 20, "output_length": 0, "extra": true}\n'
    )
    assert read_trace(written(tmp_path, text)) == [TraceRequest(0, 20, 1), TraceRequest(1.5, 10, 3)]


@pytest.mark.parametrize("name", ["trace.csv", "trace"])
def test_azure_rows_with_seven_digits_of_a_second(tmp_path: Path, name: str) -> None:
    text = AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    first, second = read_trace(written(tmp_path, text, name))
    assert first == TraceRequest(0, 4808, 10)
    assert second.seconds == pytest.approx(0.052)
    assert (second.input_tokens, second.output_tokens) == (3180, 8)


def test_azure_times_with_a_zone_and_columns_in_any_order(tmp_path: Path) -> None:
    text = "GeneratedTokens,Model,TIMESTAMP,ContextTokens\r\n5,x,2024-05-10 00:00:01+00:00,7\r\n6,y,2024-05-10 00:00:00.5+00:00,8\r\n"
    assert read_trace(written(tmp_path, text)) == [TraceRequest(0, 8, 6), TraceRequest(0.5, 7, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column TIMESTAMP"),
        (AZURE, "no request"),
        ("a,b\n1,2\n", "line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (AZURE + "2023-11-16 18:17:03,12,-1\n", "line 2: GeneratedTokens"),
        (AZURE + "2023-11-16 18:17:03,12\n", "line 2: GeneratedTokens"),
        (AZURE + "2023-11-16 18:17:03,12,1\nyesterday,12,1\n", "line 3: TIMESTAMP"),
        (AZURE + "2023-11-16 18:17:03,1e99,1\n", "line 2: ContextTokens"),
        ('{"timestamp": 1, "input_length": 1}\n', "line 1: output_length"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 1: timestamp"),
        ('{"timestamp": 1, "input_length": -4, "output_length": 1}\n', "line 1: input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n{"timestamp": \n', "line 2: not JSON"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n[1]\n', "line 2"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, text))
    assert message in str(caught.value)
    assert "give" in str(caught.value)


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError, match="trace"):
        read_trace(path)
    with pytest.raises(InputError, match="nosuch"):
        read_trace(tmp_path / "nosuch")


@given(st.lists(st.text(max_size=80), max_size=5))
def test_any_line_is_read_or_refused(lines: list[str]) -> None:
    try:
        rows = list(_mooncake(Path("t"), lines))
    except InputError:
        return
    assert all(not line.strip() for line in lines) or rows
