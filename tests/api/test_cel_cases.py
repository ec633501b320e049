"""The table of accepted and refused objects leaves out no rule of the CRDs, and the operator's own models agree with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api.cel_cases import CASES, CEL_CASES, Case
from npufleet_api import MODEL_PLURAL, POOL_PLURAL
from npufleet_api.crd import ascend_model_crd, inference_pool_crd
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec

SPECS: dict[str, type[BaseModel]] = {"InferencePool": InferencePoolSpec, "AscendModel": AscendModelSpec}
BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
SCHEMA_CASES = [case for case in CASES if case not in CEL_CASES and not case.name.endswith(("spec required refused",))]


def specs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every node of both specs: plural, path, schema."""
    for plural, crd in ((POOL_PLURAL, inference_pool_crd()), (MODEL_PLURAL, ascend_model_crd())):
        (version,) = crd["spec"]["versions"]
        yield from walk(plural, "spec", version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def walk(plural: str, path: str, node: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    yield plural, path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(plural, f"{path}.{name}", child)
    if isinstance(node.get("items"), dict):
        yield from walk(plural, f"{path}[]", node["items"])
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(plural, f"{path}{{}}", node["additionalProperties"])


def has(name: str) -> bool:
    return any(case.name == name for case in CASES)


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(names) == sorted(set(names))


def test_every_bound_has_a_case_on_either_side() -> None:
    missing: list[str] = []
    for plural, path, node in specs():
        alternatives = str(node.get("pattern", "")).startswith("^(") and "|" in node["pattern"]
        for rule in BOUNDS:
            if rule not in node or (rule in ("minLength", "maxLength") and alternatives and not has(f"{plural} {path} {rule} accepted")):
                continue
            missing += [f"{plural} {path} {rule} {side}" for side in ("accepted", "refused") if not has(f"{plural} {path} {rule} {side}")]
    assert not missing


def test_every_form_and_every_type_has_a_case() -> None:
    missing: list[str] = []
    for plural, path, node in specs():
        if node["type"] == "object" and "properties" in node:
            continue
        if not has(f"{plural} {path} value accepted"):
            missing.append(f"{plural} {path} value accepted")
        if ("pattern" in node or "enum" in node) and not has(f"{plural} {path} form refused"):
            missing.append(f"{plural} {path} form refused")
    assert not missing


def test_every_cel_rule_has_a_case_on_either_side() -> None:
    rules = [(plural, path, rule) for plural, path, node in specs() for rule in node.get("x-kubernetes-validations", [])]
    assert rules
    for plural, path, rule in rules:
        sides = {case.message for case in CEL_CASES if case.name.startswith(f"{plural} {path} ")}
        assert rule["message"] in sides, f"no refused case for {plural} {path}: {rule['message']}"
        assert None in sides, f"no accepted case for {plural} {path}"


def test_every_cel_message_says_what_to_write_instead() -> None:
    for _, path, node in specs():
        for rule in node.get("x-kubernetes-validations", []):
            assert ": " in rule["message"], f"{path}: {rule['message']!r} names no remedy"


@pytest.mark.parametrize("case", [case for case in CASES if case.message is None], ids=lambda case: case.name)
def test_the_models_parse_what_the_api_server_accepts(case: Case) -> None:
    SPECS[case.object["kind"]].model_validate(case.object["spec"])


@pytest.mark.parametrize("case", [case for case in SCHEMA_CASES if case.message is not None], ids=lambda case: case.name)
def test_the_models_refuse_what_the_schema_refuses(case: Case) -> None:
    with pytest.raises(ValidationError):
        SPECS[case.object["kind"]].model_validate(case.object["spec"])
