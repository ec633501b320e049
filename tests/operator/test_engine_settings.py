"""Profile, overrides and resources become the settings that an engine reads."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_api.model import EngineProfile
from npufleet_operator.core.engine_settings import PROFILES, engine_settings, whole_cpus
from support.fleet import model_spec, pool_spec


@pytest.mark.parametrize(("quantity", "cpus"), [("1", 1), ("16", 16), ("50m", 1), ("1500m", 2), ("2.5", 3), ("0", 1), ("1k", 1000)])
def test_cpus_are_rounded_up(quantity: str, cpus: int) -> None:
    assert whole_cpus(quantity) == cpus


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", fullmatch=True))
def test_every_quantity_that_the_schema_takes_gives_settings(quantity: str) -> None:
    settings = engine_settings("team", "tiny", model_spec(resources={"cpu": quantity}), pool_spec())
    assert settings.cpu_threads is not None


@pytest.mark.parametrize("profile", list(EngineProfile))
def test_overrides_win_over_the_profile(profile: EngineProfile) -> None:
    plain = engine_settings("team", "tiny", model_spec(engine={"profile": profile}), pool_spec())
    assert plain.max_num_sequences == PROFILES[profile].max_num_sequences
    own = engine_settings("team", "tiny", model_spec(engine={"profile": profile, "maxNumSequences": 3}), pool_spec())
    assert (own.max_num_sequences, own.max_num_batched_tokens) == (3, PROFILES[profile].max_num_batched_tokens)


def test_clients_may_use_both_names() -> None:
    settings = engine_settings("team", "tiny", model_spec(model={"uri": "pvc://x", "servedName": "assistant"}), pool_spec())
    assert (settings.served_name, settings.aliases) == ("assistant", ["team/tiny"])
    same = engine_settings("team", "tiny", model_spec(model={"uri": "pvc://x", "servedName": "team/tiny"}), pool_spec())
    assert (same.served_name, same.aliases) == ("team/tiny", [])
