"""The definitions of attainment, as a table."""

from __future__ import annotations

import pytest

from npufleet_api.slo import Exchange, Judgement, Outcome, SloTargets, judge, outcome_of_status, tpot_ms

BOTH = SloTargets(ttft_ms=800, tpot_ms=60)
NONE = SloTargets()
COUNTS_AS_MET = Judgement(judged=True, attained=True)
COUNTS_AS_MISSED = Judgement(judged=True)
DOES_NOT_COUNT = Judgement(judged=False)


def streamed(outcome: Outcome = Outcome.OK, *, ttft: float | None = 100, tpot: float | None = 20, elapsed: float = 5000) -> Exchange:
    return Exchange(outcome, True, elapsed, ttft, tpot)


def whole(outcome: Outcome = Outcome.OK, elapsed: float = 5000) -> Exchange:
    return Exchange(outcome, False, elapsed)


@pytest.mark.parametrize(
    ("exchange", "targets", "judgement"),
    [
        (streamed(), BOTH, COUNTS_AS_MET),
        (streamed(ttft=800, tpot=60), BOTH, COUNTS_AS_MET),
        (streamed(ttft=801), BOTH, COUNTS_AS_MISSED),
        (streamed(tpot=60.1), BOTH, COUNTS_AS_MISSED),
        (streamed(ttft=801), SloTargets(tpot_ms=60), COUNTS_AS_MET),
        (streamed(tpot=61), SloTargets(ttft_ms=800), COUNTS_AS_MET),
        (streamed(tpot=None), BOTH, COUNTS_AS_MET),
        (streamed(ttft=None, tpot=None, elapsed=700), BOTH, COUNTS_AS_MET),
        (streamed(ttft=None, tpot=None, elapsed=900), BOTH, COUNTS_AS_MISSED),
        (streamed(ttft=10_000, tpot=10_000), NONE, COUNTS_AS_MET),
        (whole(), BOTH, COUNTS_AS_MET),
        (whole(elapsed=100_000), BOTH, COUNTS_AS_MET),
        (streamed(Outcome.SERVER_ERROR), BOTH, COUNTS_AS_MISSED),
        (streamed(Outcome.NO_REPLICA), BOTH, COUNTS_AS_MISSED),
        (streamed(Outcome.INTERRUPTED), BOTH, COUNTS_AS_MISSED),
        (whole(Outcome.SERVER_ERROR), NONE, COUNTS_AS_MISSED),
        (streamed(Outcome.TIMEOUT), BOTH, COUNTS_AS_MISSED),
        (streamed(Outcome.OVERLOADED, ttft=None, elapsed=1), BOTH, COUNTS_AS_MISSED),
        (streamed(Outcome.CLIENT_ERROR, ttft=5000), BOTH, DOES_NOT_COUNT),
        (streamed(Outcome.CANCELLED, ttft=None, elapsed=700), BOTH, DOES_NOT_COUNT),
        (streamed(Outcome.CANCELLED, ttft=None, elapsed=801), BOTH, COUNTS_AS_MISSED),
        (streamed(Outcome.CANCELLED, ttft=801), BOTH, COUNTS_AS_MISSED),
        (streamed(Outcome.CANCELLED, ttft=100, tpot=500), BOTH, DOES_NOT_COUNT),
        (whole(Outcome.CANCELLED, elapsed=100_000), BOTH, DOES_NOT_COUNT),
        (streamed(Outcome.CANCELLED, ttft=None), NONE, DOES_NOT_COUNT),
    ],
)
def test_a_request_counts_as_the_definitions_say(exchange: Exchange, targets: SloTargets, judgement: Judgement) -> None:
    assert judge(exchange, targets) == judgement


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.OK),
        (204, Outcome.OK),
        (400, Outcome.CLIENT_ERROR),
        (404, Outcome.CLIENT_ERROR),
        (429, Outcome.OVERLOADED),
        (500, Outcome.SERVER_ERROR),
        (504, Outcome.TIMEOUT),
    ],
)
def test_a_replicas_429_is_a_lack_of_capacity(status: int, outcome: Outcome) -> None:
    assert outcome_of_status(status) is outcome


@pytest.mark.parametrize(
    ("first", "last", "tokens", "tpot"), [(1.0, 1.9, 10, 100.0), (1.0, 1.0, 1, None), (1.0, 1.0, 0, None), (1.0, 1.0, 2, 0.0)]
)
def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it(
    first: float, last: float, tokens: int, tpot: float | None
) -> None:
    assert tpot_ms(first, last, tokens) == (pytest.approx(tpot) if tpot is not None else None)
