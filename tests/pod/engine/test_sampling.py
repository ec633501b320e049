from __future__ import annotations

from collections import Counter

import pytest
import torch

from npufleet_pod.engine.request import SamplingParams
from npufleet_pod.engine.sampling import forbid, new_generator, sample

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
DRAWS = 4000


def draw(params: SamplingParams, seed: int = 0, logits: torch.Tensor = LOGITS) -> Counter[int]:
    generator = new_generator(seed)
    return Counter(sample(logits, params, generator) for _ in range(DRAWS))


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=1e-9)])
def test_greedy_takes_the_likeliest(params: SamplingParams) -> None:
    assert draw(params) == {0: DRAWS}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (SamplingParams(top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (SamplingParams(top_k=99), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (SamplingParams(top_p=0.5), [4 / 7, 3 / 7, 0, 0, 0]),
        (SamplingParams(top_p=0.4), [1, 0, 0, 0, 0]),
        (SamplingParams(top_p=1e-6), [1, 0, 0, 0, 0]),
        (SamplingParams(min_p=0.3), [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        (SamplingParams(min_p=1), [1, 0, 0, 0, 0]),
        (SamplingParams(top_k=3, top_p=0.8), [4 / 7, 3 / 7, 0, 0, 0]),
        (SamplingParams(temperature=0.5), [x * x / 0.285 for x in (0.4, 0.3, 0.15, 0.1, 0.05)]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_the_parameters_leave(params: SamplingParams, expected: list[float]) -> None:
    counts = draw(params)
    assert {token for token, share in enumerate(expected) if share == 0} & set(counts) == set()
    for token, share in enumerate(expected):
        # Five standard deviations of a binomial: with the fixed seed this holds or fails for ever.
        assert abs(counts[token] - DRAWS * share) <= 5 * (DRAWS * share * (1 - share)) ** 0.5


def test_a_seed_repeats_and_seeds_differ() -> None:
    def tokens(seed: int) -> list[int]:
        generator = new_generator(seed)
        return [sample(LOGITS, SamplingParams(), generator) for _ in range(40)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)


def test_forbidden_tokens_are_never_chosen_and_the_logits_stay_as_they_are() -> None:
    before = LOGITS.clone()
    counts = draw(SamplingParams(), logits=forbid(LOGITS, [0, 2, 9999]))
    assert set(counts) == {1, 3, 4}
    assert torch.equal(before, LOGITS)


def test_even_without_one_finite_logit_a_token_comes() -> None:
    for logits in (torch.full((5,), float("nan")), torch.full((5,), float("-inf"))):
        assert 0 <= sample(logits, SamplingParams(top_p=0.9), new_generator(0)) < 5
