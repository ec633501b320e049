"""The choice of INT8 heads: what it measures is what an INT8 cache does, it takes the cheapest, and it keeps its limits."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from npufleet_api.calibration import Int8KvHeads
from npufleet_api.model import Dtype
from npufleet_api.precision import KvCacheDtype
from npufleet_api.settings import PrecisionSettings
from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.step_cache import StepCache
from npufleet_pod.errors import LoadCancelledError
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.config import load_config
from npufleet_pod.models.decoder import Decoder, load_decoder
from npufleet_pod.models.int8_heads import BUDGET_SHARE, choose_int8_heads, head_sensitivities
from npufleet_pod.models.own_text import sample_windows
from npufleet_pod.models.perplexity import divergence, hidden_states, loss_percent, perplexity, token_losses, windows_of
from npufleet_pod.models.precision import plan_precision
from support.tiny_model import write_tiny_model
from support.tiny_model_decoder import load_tiny_decoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model", seed=3, layers=3, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_tiny_decoder(model)


@pytest.fixture(scope="module")
def windows(decoder: Decoder) -> list[list[int]]:
    return sample_windows(decoder, 4, 48)


def test_own_text_is_the_models_own_and_the_same_for_a_seed(decoder: Decoder) -> None:
    text = sample_windows(decoder, 4, 48, seed=1)
    assert text == sample_windows(decoder, 4, 48, seed=1) != sample_windows(decoder, 4, 48, seed=2)
    assert {len(window) for window in text} == {48}
    drawn = perplexity(token_losses(decoder, text))
    evenly = perplexity(token_losses(decoder, torch.randint(decoder.config.vocab_size, (4, 48)).tolist()))
    assert drawn < 0.9 * evenly


def test_losses_are_those_of_the_next_tokens(decoder: Decoder) -> None:
    window = [5, 9, 200, 30]
    logits = decoder.logits(hidden_states(decoder, window))
    expected = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(window[1:]), reduction="none")
    torch.testing.assert_close(token_losses(decoder, [window]), expected)
    assert windows_of([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]


def test_a_rise_of_perplexity_comes_with_its_error() -> None:
    before = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rise, error = loss_percent(before, before + torch.tensor([0.01, 0.02, 0.03, 0.02]))
    assert rise == pytest.approx(100 * (math.exp(0.02) - 1))
    assert rise == pytest.approx(100 * (perplexity(before + 0.02) / perplexity(before) - 1))
    assert error == pytest.approx(100 * math.exp(0.02) * 0.00816496 / 2, rel=1e-4)
    assert loss_percent(before, before) == (0, 0)


@pytest.mark.parametrize("heads", [[[0], [], [1, 3]], [[0, 1, 2, 3]] * 3, [[], [2], []]], ids=str)
def test_what_is_measured_is_what_an_int8_cache_does(heads: list[list[int]], model: Path, decoder: Decoder) -> None:
    config, window = load_config(model), [(11 * i) % 260 + 3 for i in range(40)]
    chosen = Int8KvHeads(layers=heads, perplexity_loss_percent=0, limit_percent=1)
    plan = plan_precision(PrecisionSettings(kv_cache=KvCacheDtype.INT8_HEADS), Dtype.FLOAT32, config, chosen)
    with open_checkpoint(model, torch.float32, CPU) as checkpoint:
        quantising = load_decoder(config, checkpoint, select_kernels("cpu"), precision=plan)
    layout = CacheLayout(16, 16, 3)
    counts = [len(layer) for layer in plan.int8_kv_heads]
    cache = ZeroCopyKVCache(layout, config.layers, config.kv_heads, config.head_size, torch.float32, CPU, int8_heads=counts)
    table = HierarchicalBlockTable(layout)
    table.pages = [2, 0, 1]
    step = StepCache(cache, [cache.place(table, 40)], cache.slots(table, 0, 40))
    with torch.inference_mode():
        actual = quantising.forward(torch.tensor(window), torch.arange(40), [40], step)
    torch.testing.assert_close(actual, hidden_states(decoder, window, heads), rtol=1e-4, atol=1e-4)
    assert divergence(decoder, hidden_states(decoder, window), actual) > 1e-9


def test_the_expected_rise_on_the_models_text_is_the_divergence(decoder: Decoder) -> None:
    text, heads = sample_windows(decoder, 24, 64, seed=5), [[0, 1, 2, 3]] * 3
    rise, error = loss_percent(token_losses(decoder, text), token_losses(decoder, text, heads))
    moved = sum(divergence(decoder, hidden_states(decoder, one), hidden_states(decoder, one, heads)) for one in text) / len(text)
    assert moved > 0
    assert abs(rise - 100 * math.expm1(moved)) < 4 * error


def test_the_cheapest_heads_are_taken_as_far_as_the_limit_goes(decoder: Decoder, windows: list[list[int]]) -> None:
    sensitivities = head_sensitivities(decoder, windows)
    assert all(cost > 0 for layer in sensitivities for cost in layer)
    everything = [list(range(4))] * 3
    whole = sum(divergence(decoder, hidden_states(decoder, one), hidden_states(decoder, one, everything)) for one in windows) / len(windows)
    counts = []
    for share in (0.01, 0.3, 0.6, 50):
        limit = 100 * math.expm1(whole * share / BUDGET_SHARE)
        choice = choose_int8_heads(decoder, windows, limit, ranking_tokens=10_000)
        assert choice.sensitivities == sensitivities
        assert choice.divergence_percent <= BUDGET_SHARE * limit * 1.001
        assert choice.loss_percent <= limit
        taken = {(layer, head) for layer, heads in enumerate(choice.heads) for head in heads}
        left = set(itertools.product(range(3), range(4))) - taken
        assert max((sensitivities[a][b] for a, b in taken), default=0) <= min((sensitivities[a][b] for a, b in left), default=math.inf)
        counts.append(choice.count)
        assert choice.calibration().layers == [list(layer) for layer in choice.heads]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 12


def test_few_tokens_rank_the_heads_as_many_do(decoder: Decoder) -> None:
    many, few = (head_sensitivities(decoder, sample_windows(decoder, count, 48, seed=count)) for count in (12, 2))
    ranks = [torch.tensor(costs).flatten().argsort().argsort().double() for costs in (many, few)]
    spearman = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    assert spearman > 0.6


def test_a_text_of_nothing_is_refused_and_a_cancelled_choice_ends(decoder: Decoder, windows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no two tokens: give more of it"):
        choose_int8_heads(decoder, [[5]])
    with pytest.raises(LoadCancelledError):
        choose_int8_heads(decoder, windows, keep_going=lambda: False)
