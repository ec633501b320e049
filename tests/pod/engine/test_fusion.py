"""Which operations compute a step follows fusion level and length of sequence; what they give does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npufleet_kernels.dispatch import VARIANTS, Kernels, select_kernels
from npufleet_pod.engine import fusion
from npufleet_pod.engine.fusion import ORDER, DynamicFusionManager, FusionThresholds
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.config import load_config
from npufleet_pod.models.decoder import Decoder, load_decoder
from npufleet_pod.models.fusion_plan import AttentionRun, AttentionStrategy, FusionPlan, plan_of, uniform_plan
from support.tiny_model import write_tiny_model
from support.tiny_model_decoder import CPU, ListCache

FULL, TWO_PHASE, BLOCKED = ORDER
COMPOSITES = {"layer", "attention_input", "attention_output", "feed_forward"}
LENGTHS = [3, 40, 1, 90, 17]
LAYERS = 2


def recording(kernels: Kernels, calls: Counter[str]) -> Kernels:
    """The same operations, each of which counts how often it is called."""

    def counted(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return operation(*arguments, **options)

        return call

    operations = [one.name for one in fields(kernels) if one.name != "variants"]
    counting: dict[str, Any] = {name: counted(name, getattr(kernels, name)) for name in operations}
    return replace(kernels, **counting)


def decoder_of(folder: Path, kernels: Kernels) -> Decoder:
    with open_checkpoint(folder, torch.float32, CPU) as checkpoint:
        return load_decoder(load_config(folder), checkpoint, kernels)


def answer(decoder: Decoder, plan: FusionPlan) -> torch.Tensor:
    """Logits of a batch of prompts and of the token after each."""
    caches = [ListCache(decoder.config) for _ in LENGTHS]
    ids = torch.arange(sum(LENGTHS)) * 37 % 250 + 3
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.inference_mode():
        first = decoder.logits(decoder.forward(ids, positions, LENGTHS, caches, plan=plan))
        following = decoder.forward(torch.full((len(LENGTHS),), 9), torch.tensor(LENGTHS), [1] * len(LENGTHS), caches, plan=plan)
        return torch.cat([first, decoder.logits(following)])


@pytest.mark.parametrize(
    ("length", "expected"), [(1, FULL), (512, FULL), (513, TWO_PHASE), (2048, TWO_PHASE), (2049, BLOCKED), (131072, BLOCKED)]
)
def test_short_sequences_are_computed_at_once_middle_ones_in_two_phases_long_ones_in_blocks(
    length: int, expected: AttentionStrategy
) -> None:
    manager = DynamicFusionManager(2, 8)
    assert manager.strategy(length, length) is expected
    assert manager.strategy(1, length) is expected


def test_measured_thresholds_go_before_the_defaults() -> None:
    manager = DynamicFusionManager(2, 8, FusionThresholds(full_tokens=10, two_phase_tokens=10))
    assert [manager.strategy(1, length) for length in (10, 11)] == [FULL, BLOCKED]


def test_scores_never_take_more_memory_than_was_counted_on() -> None:
    manager = DynamicFusionManager(2, 128, FusionThresholds(full_tokens=1 << 20, two_phase_tokens=1 << 20))
    # 128 heads x 724² x 4 bytes are just below 256 MiB; in two phases a block of 256 queries is held.
    assert [manager.strategy(length, length) for length in (724, 725, 2048, 2049)] == [FULL, TWO_PHASE, TWO_PHASE, BLOCKED]
    assert manager.strategy(1, 1 << 19) is FULL


@given(
    sequences=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), max_size=40),
    heads=st.integers(1, 200),
    full=st.integers(1, 4000),
    more=st.integers(0, 4000),
    level=st.integers(1, 3),
)
def test_a_batch_is_ordered_by_strategy_and_loses_nobody(
    sequences: list[tuple[int, int]], heads: int, full: int, more: int, level: int
) -> None:
    manager = DynamicFusionManager(level, heads, FusionThresholds(full, full + more))
    counts, lengths = [new for new, _ in sequences], [new + earlier for new, earlier in sequences]
    places, plan = manager.order(counts, lengths)
    assert sorted(places) == list(range(len(sequences)))
    assert plan.level == level
    assert len(plan.runs) <= len(ORDER)
    assert len({run.strategy for run in plan.runs}) == len(plan.runs)
    planned = [run.strategy for run in plan.runs for _ in range(run.sequences)]
    assert planned == [manager.strategy(counts[place], lengths[place]) for place in places]
    for strategy in ORDER:
        same = [place for place in places if manager.strategy(counts[place], lengths[place]) is strategy]
        assert same == sorted(same), "requests of one strategy keep their order"
    # A longer sequence never goes back to a strategy for shorter ones.
    chosen = [ORDER.index(manager.strategy(7, length)) for length in sorted(lengths) if length >= 7]
    assert chosen == sorted(chosen)


def test_a_plan_joins_neighbours_of_one_strategy() -> None:
    assert plan_of(1, [FULL, FULL, BLOCKED, FULL]).runs == (AttentionRun(FULL, 2), AttentionRun(BLOCKED, 1), AttentionRun(FULL, 1))
    assert plan_of(1, []) == FusionPlan(1, ())


@pytest.mark.parametrize("strategy", ORDER)
def test_the_strategy_is_what_computes_attention(strategy: AttentionStrategy, tiny_model: Path) -> None:
    calls: Counter[str] = Counter()
    answer(decoder_of(tiny_model, recording(select_kernels("cpu"), calls)), uniform_plan(len(LENGTHS), strategy))
    operation = {FULL: "attention_full", TWO_PHASE: "attention_two_phase", BLOCKED: "attention_blocked"}[strategy]
    assert {name: count for name, count in calls.items() if name.startswith("attention_") and name not in COMPOSITES} == {
        operation: 2 * LAYERS
    }


def test_a_mixed_batch_is_computed_by_each_of_its_strategies(tiny_model: Path) -> None:
    calls: Counter[str] = Counter()
    decoder = decoder_of(tiny_model, recording(select_kernels("cpu"), calls))
    answer(decoder, plan_of(2, [FULL, TWO_PHASE, TWO_PHASE, BLOCKED, FULL]))
    steps = 2 * LAYERS
    assert (calls["attention_full"], calls["attention_two_phase"], calls["attention_blocked"]) == (2 * steps, steps, steps)


@pytest.mark.parametrize(
    ("level", "composites"),
    [(1, set()), (2, {"attention_input", "attention_output", "feed_forward"}), (3, COMPOSITES)],
)
def test_the_level_says_how_much_one_operation_computes(level: int, composites: set[str], tiny_model: Path) -> None:
    calls: Counter[str] = Counter()
    answer(decoder_of(tiny_model, recording(select_kernels("cpu"), calls)), uniform_plan(len(LENGTHS), FULL, level))
    assert {name: count for name, count in calls.items() if name in COMPOSITES} == dict.fromkeys(composites, 2 * LAYERS)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"])
def test_neither_level_nor_strategy_changes_what_is_computed(architecture: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", architecture=architecture, seed=5, config={"head_dim": 16})
    plain = decoder_of(model, select_kernels("cpu", dict.fromkeys(VARIANTS, "reference")))
    expected = answer(plain, uniform_plan(len(LENGTHS), FULL, 1))
    decoder = decoder_of(model, select_kernels("cpu"))
    mixes = [[one] * len(LENGTHS) for one in ORDER] + [[FULL, TWO_PHASE, BLOCKED, TWO_PHASE, FULL]]
    for level in (1, 2, 3):
        for mix in mixes:
            for tried in (plain, decoder):
                found = answer(tried, plan_of(level, mix))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_blocks_that_memory_is_counted_by_are_the_kernels_own() -> None:
    from npufleet_kernels import attention

    assert fusion.QUERY_BLOCK_TOKENS == attention.QUERY_BLOCK_TOKENS
