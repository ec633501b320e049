from __future__ import annotations

import logging

import pytest

from npufleet_kernels import linear
from npufleet_kernels.dispatch import VARIANTS, select_kernels
from npufleet_kernels.errors import VariantMissingError


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_every_operation_is_chosen_and_the_choice_is_logged(device_type: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernels = select_kernels(device_type)
    assert set(kernels.variants) == set(VARIANTS)
    assert kernels.linear is linear.reference
    assert caplog.records[0].__dict__["variants"] == kernels.variants


@pytest.mark.parametrize(
    ("device_type", "overrides", "named"),
    [("gpu", {}, "'gpu'"), ("cpu", {"conv": "reference"}, "'conv'"), ("cpu", {"rope": "amx"}, "rope has no variant amx")],
)
def test_what_is_not_there_is_named(device_type: str, overrides: dict[str, str], named: str) -> None:
    with pytest.raises(VariantMissingError, match=named):
        select_kernels(device_type, overrides)
