from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from npufleet_pod.engine.drawing import CANDIDATES, draw, uniforms
from npufleet_pod.engine.request import SamplingParams

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
DRAWS = 4000


def counts(params: SamplingParams, seed: int = 0, logits: torch.Tensor = LOGITS) -> Counter[int]:
    numbers = uniforms([seed] * DRAWS, range(DRAWS))
    return Counter(draw(logits.repeat(DRAWS, 1), [params] * DRAWS, numbers).tolist())


def plain_kept(logits: list[float], params: SamplingParams) -> tuple[list[int], list[float], bool]:
    """Token ids in the order of drawing with their probabilities, by the definitions; and whether no limit was a close decision."""
    clear = True
    highest = max(logits)
    weights = [math.exp((logit - highest) / params.temperature) for logit in logits]
    whole = sum(weights)
    probabilities = [weight / whole for weight in weights]
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = probabilities[ranking[0]]
    kept = []
    for token in ranking:
        clear &= params.min_p == 0 or abs(probabilities[token] - params.min_p * best) > 1e-6 * best or token == ranking[0]
        if probabilities[token] >= params.min_p * best or token == ranking[0]:
            kept.append(token)
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total, running = sum(probabilities[token] for token in kept), 0.0
        nucleus: list[int] = []
        for token in kept:
            clear &= abs(running - params.top_p * total) > 1e-5
            if running >= params.top_p * total and nucleus:
                break
            nucleus.append(token)
            running += probabilities[token]
        kept = nucleus
    if params.top_k == 0 and params.top_p == 1:
        kept = sorted(kept)
    return kept, [probabilities[token] for token in kept], clear


def plain_draw(kept: list[int], probabilities: list[float], number: float) -> set[int]:
    """The token at `number`, and its neighbours where rounding may decide."""
    total, running, near = sum(probabilities), 0.0, set()
    for token, probability in zip(kept, probabilities, strict=True):
        if running - 1e-5 * total <= number * total <= running + probability + 1e-5 * total:
            near.add(token)
        running += probability
    return near


drawn = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 255, 256, 257, 4096, 100_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@pytest.mark.parametrize("vocabulary", [1, 2, 17, CANDIDATES + 1, 5000])
def test_every_row_equals_a_plain_implementation_and_itself_alone(vocabulary: int) -> None:
    @settings(max_examples=25 if vocabulary > 1000 else 60)
    @given(st.lists(drawn, min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.sampled_from([0.05, 1.0, 4.0]), st.booleans())
    def check(params: list[SamplingParams], seed: int, spread: float, ties: bool) -> None:
        logits = np.random.default_rng(seed).standard_normal((len(params), vocabulary)).astype(np.float32) * spread
        if ties:
            logits = np.round(logits * 2) / 2 * np.float32(-1)
        numbers = uniforms([seed] * len(params), range(len(params)))
        tokens = draw(torch.from_numpy(logits), params, numbers).tolist()
        for row, one in enumerate(params):
            alone = draw(torch.from_numpy(logits[row : row + 1]), [one], numbers[row : row + 1]).tolist()
            assert alone == [tokens[row]]
        for row, one in enumerate(params):
            if one.greedy:
                assert logits[row, tokens[row]] == logits[row].max()
                continue
            kept, probabilities, clear = plain_kept(logits[row].tolist(), one)
            assume(clear)
            assert tokens[row] in plain_draw(kept, probabilities, float(numbers[row]))

    check()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=1e-9)])
def test_greedy_takes_the_likeliest(params: SamplingParams) -> None:
    assert counts(params) == {0: DRAWS}


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
    found = counts(params)
    assert {token for token, share in enumerate(expected) if share == 0} & set(found) == set()
    for token, share in enumerate(expected):
        # Five standard deviations of a binomial: with the fixed seed this holds or fails for ever.
        assert abs(found[token] - DRAWS * share) <= 5 * (DRAWS * share * (1 - share)) ** 0.5


def test_no_number_however_near_one_draws_an_impossible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf"), float("-inf")]])
    for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(min_p=0.01)):
        # 1 is what the numbers next to it become in float32.
        for number in (0.0, 1 - 2**-53, 1.0):
            assert draw(logits, [params], torch.tensor([number], dtype=torch.float64)).tolist()[0] in (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_even_without_one_finite_logit_a_token_comes(bad: float) -> None:
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.5),
        SamplingParams(temperature=0),
    ):
        assert 0 <= draw(torch.full((1, 5), bad), [params], uniforms([0], [0])).tolist()[0] < 5


def test_a_forbidden_token_stays_impossible_beside_scores_that_are_no_numbers() -> None:
    logits = torch.tensor([float("-inf"), float("nan"), float("nan")])
    assert set(counts(SamplingParams(), logits=logits)) == {1, 2}
    assert counts(SamplingParams(temperature=0), logits=torch.tensor([float("-inf"), float("nan"), 0.0])) == {2: DRAWS}


def test_the_numbers_are_splitmix64s() -> None:
    # Its first outputs for the seed 0, as published with the reference implementation.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniforms([0] * 3, range(3)).tolist() == [(value >> 11) * 2.0**-53 for value in expected]


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_numbers_lie_between_zero_and_one_and_depend_on_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([seed for seed, _ in pairs], [position for _, position in pairs]).tolist()
    assert all(0 <= number < 1 for number in together)
    assert together == [uniforms([seed], [position]).item() for seed, position in pairs]


def test_neighbouring_seeds_share_no_numbers() -> None:
    streams = [uniforms([seed] * 500, range(500)).tolist() for seed in range(-20, 20)]
    assert len({number for stream in streams for number in stream}) == 40 * 500
