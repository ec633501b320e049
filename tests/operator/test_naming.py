"""Names of children are DNS labels whatever the resource is called, and stay apart."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_operator.core.naming import gateway_child, model_child, monitor_child, pod_name, settings_child, slug

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
subdomains = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?){0,4}", fullmatch=True)


@pytest.mark.parametrize("name", ["tiny", "qwen72b", "a-b-c"])
def test_a_name_that_is_a_label_is_its_own_slug(name: str) -> None:
    assert slug(name) == name


def test_a_changed_name_carries_a_hash() -> None:
    assert re.fullmatch(r"qwen2-5-0-1b-[0-9a-f]{6}", slug("qwen2.5-0.1b"))
    assert slug("a.b") != slug("a-b")


@given(subdomains)
def test_every_child_name_is_a_label(name: str) -> None:
    for child in (
        model_child(name),
        settings_child(name, "0123abcd"),
        monitor_child(name),
        gateway_child(name),
        pod_name(name, "0123abcd", 1023),
    ):
        assert LABEL.fullmatch(child), child


@given(subdomains, subdomains)
def test_different_names_have_different_slugs(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)
