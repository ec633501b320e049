"""What counts as unchanged: everything that we ask for is there; what others added is theirs."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_operator.shell.compare import satisfies


@pytest.mark.parametrize(
    ("live", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"ports": [{"name": "http", "port": 1, "nodePort": 3}]}, {"ports": [{"name": "http", "port": 1}]}, True),
        ({"ports": [{"name": "x", "port": 9}, {"name": "http", "port": 1}]}, {"ports": [{"name": "http", "port": 1}]}, True),
        ({"ports": [{"name": "http", "port": 2}]}, {"ports": [{"name": "http", "port": 1}]}, False),
        ({"args": ["a", "b"]}, {"args": ["a"]}, False),
        ({"args": "a"}, {"args": ["a"]}, False),
        ({"metadata": {"labels": {"theirs": "x", "ours": "y"}}}, {"metadata": {"labels": {"ours": "y"}}}, True),
        ({"selector": {"a": "b"}}, {"selector": {"a": "b"}}, True),
        ({"selector": {"a": "b", "theirs": "c"}}, {"selector": {"a": "b"}}, False),
        ({"podSelector": {"matchLabels": {"a": "b"}}}, {"podSelector": {}}, False),
        ({"ingress": [{"from": [{"podSelector": {}, "namespaceSelector": {}}]}]}, {"ingress": [{"from": [{"podSelector": {}}]}]}, False),
        ({"ingress": [{"ports": [{"port": 1, "endPort": 9}]}]}, {"ingress": [{"ports": [{"port": 1}]}]}, False),
    ],
)
def test_live_against_wanted(live: Any, wanted: Any, expected: bool) -> None:
    assert satisfies(live, wanted) is expected


values = st.recursive(
    st.integers() | st.text(max_size=4), lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=3)
)


@given(values)
def test_everything_satisfies_itself(value: Any) -> None:
    assert satisfies(value, value)
