from __future__ import annotations

from typing import Any

import pytest

from npufleet_api.model import EngineProfile, Preemption, SchedulingPolicy
from npufleet_api.profiles import PROFILES
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.profiles import scheduler_policy, with_profile
from npufleet_pod.engine.scheduler import SchedulerPolicy


def settings(**fields: Any) -> EngineSettings:
    return with_profile(EngineSettings.model_validate({"model_path": "/models", "served_name": "m", **fields}))


def test_a_file_that_names_a_profile_gets_what_it_leaves_out_from_it() -> None:
    chosen = settings(profile="BatchDocumentProcessing", max_num_sequences=7)
    assert (chosen.max_num_sequences, chosen.max_num_batched_tokens, chosen.block_size) == (7, 65536, 64)


def test_a_file_without_a_profile_gets_the_plain_defaults() -> None:
    plain = EngineSettings.model_validate({"model_path": "/models", "served_name": "m"})
    assert settings() == plain


@pytest.mark.parametrize("profile", EngineProfile)
def test_what_the_operator_writes_is_obeyed_whatever_the_profile(profile: EngineProfile) -> None:
    written = settings(profile=profile).model_dump()
    other = {**written, "pipeline_depth": 1, "max_num_sequences": 3, "preemption": Preemption.CONSERVATIVE}
    assert with_profile(EngineSettings.model_validate(other)).model_dump() == other


def test_the_scheduler_gets_its_policy_from_the_settings() -> None:
    chosen = settings(profile="BatchDocumentProcessing", starvation_steps=9)
    assert scheduler_policy(chosen) == SchedulerPolicy(
        chunked_prefill=False,
        preemption=Preemption.CONSERVATIVE,
        policy=SchedulingPolicy.THROUGHPUT_OPTIMISED,
        starvation_steps=9,
        steps_in_flight=4,
    )
    assert scheduler_policy(settings(pipeline_depth=4, asynchronous_execution=False)).steps_in_flight == 1


def test_every_profile_is_described() -> None:
    assert set(PROFILES) == set(EngineProfile)
