"""Which class a request belongs to, as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npufleet_gateway.classification import ClassSource, Shape, answer_tokens, bounded_priority, classify_request, deadline_seconds
from npufleet_gateway.entitlement import ClassPolicy
from npufleet_gateway.entrance import _bounded
from npufleet_gateway.errors import ApiError

CLASSES = {
    "chat": ClassPolicy("chat", 3, 0.2, 0.5),
    "document": ClassPolicy("document", 2, 0.3, 0.6, claimable=True),
    "code": ClassPolicy("code", 1, 0.1, 0.4),
}
SHORT = Shape(200, 64, True)
LONG = Shape(200_000, None, False)


def classify(**changed: Any) -> tuple[str, ClassSource]:
    given: dict[str, Any] = {
        "key_class": None, "key_claims": (), "header": None, "model_class": "chat", "shape": SHORT, "classes": CLASSES, **changed,
    }  # fmt: skip
    found = classify_request(**given)
    return found.name, found.source


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("chat", ClassSource.MODEL)),
        ({"key_class": "code"}, ("code", ClassSource.KEY)),
        ({"header": "document"}, ("document", ClassSource.HEADER)),
        ({"key_class": "code", "header": "code"}, ("code", ClassSource.KEY)),
        ({"key_class": "code", "key_claims": {"chat"}, "header": "chat"}, ("chat", ClassSource.HEADER)),
        ({"key_claims": {"code"}, "header": "code"}, ("code", ClassSource.HEADER)),
        ({"model_class": "gone"}, ("chat", ClassSource.SHAPE)),
        ({"model_class": "gone", "shape": LONG}, ("code", ClassSource.SHAPE)),
        ({"model_class": "gone", "classes": {}}, ("gone", ClassSource.MODEL)),
    ],
)
def test_key_then_header_then_model_then_shape(changed: dict[str, Any], expected: tuple[str, ClassSource]) -> None:
    assert classify(**changed) == expected


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"header": "chat"}, 403, "class_not_allowed"),
        ({"header": "none"}, 400, "unknown_class"),
        ({"key_class": "code", "header": "document"}, 403, "class_not_allowed"),
        ({"header": "document", "classes": {}}, 403, "class_not_allowed"),
    ],
)
def test_what_may_not_be_claimed_is_refused(changed: dict[str, Any], status: int, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        classify(**changed)
    assert (refused.value.status, refused.value.code) == (status, code)


@pytest.mark.parametrize(
    ("asked", "policy", "passed"),
    [(-5, CLASSES["chat"], -3), (-5, CLASSES["code"], -1), (-1, CLASSES["chat"], -1), (7, CLASSES["chat"], 7), (-5, None, 0)],
)
def test_a_requests_priority_is_bounded_by_its_class(asked: int, policy: ClassPolicy | None, passed: int) -> None:
    assert bounded_priority(asked, policy) == passed
    body = json.dumps({"model": "chat", "priority": asked, "nested": {"priority": -9}}).encode()
    assert json.loads(_bounded(body, asked, policy)) == {"model": "chat", "priority": passed, "nested": {"priority": -9}}


@pytest.mark.parametrize("priority", ["soon", 1.5, True, [1]])
def test_a_priority_that_is_no_number_is_refused(priority: object) -> None:
    with pytest.raises(ApiError):
        _bounded(b"{}", priority, None)


def test_a_body_without_a_priority_is_not_touched() -> None:
    body = b'{ "model": "chat" }'
    assert _bounded(body, None, None) is body


def test_limits_and_deadlines_are_read() -> None:
    assert answer_tokens(None, 5) == 5
    assert answer_tokens(True, -1, "7") is None
    assert deadline_seconds(b"1500") == 1.5
    assert deadline_seconds(None) is None
    for wrong in (b"0", b"-1", b"x", b"", b"1" * 10):
        with pytest.raises(ApiError):
            deadline_seconds(wrong)
