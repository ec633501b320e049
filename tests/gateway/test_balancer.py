"""Which replica is next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.affinity import home, load_bound
from npufleet_gateway.balancer import BALANCE, Balancer, Lease
from npufleet_gateway.breaker import DRAINING_SECONDS, FIRST_OPEN_SECONDS, LONGEST_OPEN_SECONDS, BreakerState
from npufleet_gateway.prediction import DEFAULT_PREFILL_SECONDS_PER_TOKEN, REPORT_TRUST_SECONDS, ReplicaFigures
from npufleet_gateway.prefix_index import SHARED_CHILDREN
from npufleet_gateway.prompt import NO_PROMPT, Prompt
from npufleet_gateway.routing import Replica, ReplicaState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def replicas(count: int) -> list[Replica]:
    return [Replica("x", f"r{n}", f"pod-{n}", "chat", frozenset(), "10.0.0.1", ReplicaState.READY) for n in range(count)]


def send(balancer: Balancer, among: list[Replica], prompt: Prompt = NO_PROMPT) -> Lease:
    lease = balancer.acquire(among, (), prompt)
    assert lease is not None
    return lease


def where(balancer: Balancer, among: list[Replica], prompt: Prompt = NO_PROMPT) -> Replica:
    """Where the next request goes; it ends at once."""
    lease = send(balancer, among, prompt)
    lease.release()
    return lease.replica


def text(content: str, session: str = "") -> Prompt:
    return Prompt.read("x/chat", prompt=content, session=session)


def test_nothing_to_choose_from_gives_nothing() -> None:
    balancer = Balancer(Clock())
    (one,) = replicas(1)
    assert balancer.acquire([]) is None
    assert balancer.acquire([one], {one.pod_uid}) is None


def test_equals_take_turns() -> None:
    balancer = Balancer(Clock())
    among = replicas(3)
    assert [where(balancer, among).pod_name for _ in range(9)] == ["r0", "r1", "r2"] * 3


def test_a_release_counts_once() -> None:
    balancer = Balancer(Clock())
    (one,) = replicas(1)
    lease, other = send(balancer, [one]), send(balancer, [one])
    for _ in range(3):
        lease.release()
        lease.first_token()
    assert balancer.outstanding(one.pod_uid) == 1
    other.release()
    assert balancer.outstanding(one.pod_uid) == 0


def test_a_failed_replica_is_left_alone_for_a_growing_but_bounded_time_and_comes_back() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    bad, good = replicas(2)
    seconds = FIRST_OPEN_SECONDS
    for _ in range(10):
        balancer.failed(bad)
        clock.now += seconds * 0.99
        leases = [send(balancer, [bad, good]) for _ in range(3)]
        assert [lease.replica for lease in leases] == [good] * 3
        clock.now += seconds * 0.02
        assert where(balancer, [bad, good]) is bad
        for lease in leases:
            lease.release()
        seconds = min(LONGEST_OPEN_SECONDS, seconds * 2)


def test_one_request_at_a_time_finds_out_whether_a_replica_is_back() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    bad, good = replicas(2)
    balancer.failed(bad)
    clock.now += FIRST_OPEN_SECONDS
    filler = [send(balancer, [good]) for _ in range(5)]
    probe = send(balancer, [bad, good])
    assert probe.replica is bad
    assert balancer.breaker_state(bad.pod_uid) is BreakerState.HALF_OPEN
    assert [send(balancer, [bad, good]).replica for _ in range(3)] == [good] * 3
    balancer.succeeded(bad)
    probe.release()
    assert balancer.breaker_state(bad.pod_uid) is BreakerState.CLOSED
    assert [send(balancer, [bad, good]).replica for _ in range(3)] == [bad] * 3
    assert len(filler) == 5


def test_a_probe_that_is_given_up_lets_the_next_one_through() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    bad, good = replicas(2)
    balancer.failed(bad)
    clock.now += FIRST_OPEN_SECONDS
    send(balancer, [good])
    assert where(balancer, [bad, good]) is bad
    assert where(balancer, [bad, good]) is bad


def test_replicas_that_failed_are_better_than_none() -> None:
    balancer = Balancer(Clock())
    (only,) = replicas(1)
    balancer.failed(only)
    assert where(balancer, [only]) is only


def test_a_draining_replica_is_left_alone_without_a_failure() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    leaving, other = replicas(2)
    balancer.draining(leaving)
    assert where(balancer, [leaving, other]) is other
    clock.now += DRAINING_SECONDS
    assert where(balancer, [leaving, other]) is leaving


def test_replicas_that_are_gone_are_forgotten_once_nothing_is_outstanding() -> None:
    balancer = Balancer(Clock())
    (one,) = replicas(1)
    lease = send(balancer, [one])
    balancer.retain(set())
    assert balancer.outstanding(one.pod_uid) == 1
    lease.release()
    balancer.retain(set())
    assert balancer.outstanding(one.pod_uid) == 0
    lease.release()
    assert balancer.outstanding(one.pod_uid) == 0


def test_a_conversation_returns_to_the_replica_that_holds_it() -> None:
    balancer = Balancer(Clock())
    among = replicas(4)
    first = where(balancer, among, text("a" * 8000))
    for _ in range(5):
        where(balancer, among, text("b" * 3000))
    assert where(balancer, among, text("a" * 8000 + "more" * 1000)) is first


def test_a_new_conversation_goes_where_least_is_held() -> None:
    balancer = Balancer(Clock())
    among = replicas(3)
    busy = {send(balancer, among, text(letter * 9000)).replica.pod_uid for letter in "ab"}
    (idle,) = {replica.pod_uid for replica in among} - busy
    assert send(balancer, among, text("c" * 9000)).replica.pod_uid == idle


def test_a_prefix_that_everyone_sends_does_not_pile_up_on_one_replica() -> None:
    balancer = Balancer(Clock())
    among = replicas(8)
    counts = Counter(send(balancer, among, text("s" * 50_000 + str(n) * 200)).replica.pod_uid for n in range(400))
    assert max(counts.values()) <= load_bound(50, BALANCE) + 1
    assert len(counts) == 8


def test_what_waits_for_its_first_token_counts_and_what_decodes_counts_less() -> None:
    balancer = Balancer(Clock())
    among = replicas(2)
    long = send(balancer, among, text("a" * 200_000))
    other = send(balancer, among, text("b" * 4000))
    assert other.replica is not long.replica
    assert where(balancer, among, text("c" * 4000)) is other.replica
    long.first_token()
    other.release()
    again = send(balancer, among, text("d" * 4000))
    assert again.replica is other.replica
    assert where(balancer, among, text("e" * 4000)) is long.replica


def test_a_slow_replica_gets_less() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = replicas(2)
    for _ in range(20):
        for replica, seconds in zip(among, (4.0, 1.0), strict=True):
            lease = send(balancer, [replica], text("m" * 8000 + str(clock.now) * 300))
            clock.now += seconds
            lease.first_token()
            lease.release(tpot_ms=40)
    counts = Counter(send(balancer, among, text(str(n) * 4000)).replica.pod_name for n in range(40))
    assert counts["r1"] > counts["r0"] > 0


def test_other_gateways_requests_count_as_far_as_the_report_is_fresh() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    busy, idle = replicas(2)
    balancer.reported(busy.pod_uid, ReplicaFigures(clock.now, running=9))
    assert {send(balancer, [busy, idle]).replica.pod_name for _ in range(6)} == {"r1"}
    clock.now += REPORT_TRUST_SECONDS
    assert [send(balancer, [busy, idle]).replica.pod_name for _ in range(6)] == ["r0"] * 6


def test_what_a_report_shows_of_our_own_requests_is_not_counted_twice() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = replicas(2)
    for replica in among:
        for _ in range(3):
            send(balancer, [replica])
    balancer.reported(among[0].pod_uid, ReplicaFigures(clock.now, running=3))
    assert [where(balancer, among).pod_name for _ in range(4)] == ["r0", "r1", "r0", "r1"]


def test_requests_of_ours_that_ended_since_the_report_was_made_are_not_taken_for_others() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = busy, _ = replicas(2)
    leases = [send(balancer, [busy]) for _ in range(5)]
    made = clock.now
    clock.now += 2
    for lease in leases:
        lease.release()
    clock.now += 1
    balancer.reported(busy.pod_uid, ReplicaFigures(made, running=5))
    assert {where(balancer, among).pod_name for _ in range(4)} == {"r0", "r1"}
    balancer.reported(busy.pod_uid, ReplicaFigures(clock.now, running=5))
    assert {where(balancer, among).pod_name for _ in range(4)} == {"r1"}


def test_a_prompt_whose_first_token_is_not_seen_is_ahead_of_others_only_as_long_as_it_should_take() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = replicas(2)
    whole = balancer.acquire([among[0]], (), Prompt.read("x/chat", prompt="a" * 40_000, streams=False))
    assert whole is not None
    send(balancer, [among[1]], text("b" * 400))
    assert where(balancer, among, text("c" * 4000)) is among[1]
    clock.now += 10_000 * DEFAULT_PREFILL_SECONDS_PER_TOKEN
    balancer.acquire([], ())
    assert {where(balancer, among, text(letter * 4000)) for letter in "def"} == {among[0]}
    whole.release()
    assert balancer.outstanding(among[0].pod_uid) == 0


def test_a_monitors_word_on_the_speed_of_prompts_goes_before_what_is_measured_here() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = replicas(2)
    for replica, seconds in zip(among, (9.0, 1.0), strict=True):
        lease = send(balancer, [replica], text("m" * 40_000))
        clock.now += seconds
        lease.first_token()
        lease.release()
    assert where(balancer, among, text("a" * 40_000)) is among[1]
    for replica, speed in zip(among, (1e-4, 9e-4), strict=True):
        balancer.reported(replica.pod_uid, ReplicaFigures(clock.now, prefill_seconds_per_token=speed))
    assert {where(balancer, among, text(letter * 40_000)) for letter in "bcd"} == {among[0]}


def test_what_other_gateways_queue_at_a_replica_does_not_make_it_look_slow() -> None:
    clock = Clock()
    balancer = Balancer(clock, lambda: 2)
    among = replicas(2)
    for replica, seconds in zip(among, (9.0, 1.0), strict=True):
        lease = send(balancer, [replica], text("m" * 40_000))
        clock.now += seconds
        lease.first_token()
        lease.release()
    homes = Counter(where(balancer, among, text(f"{n:04d}" * 5000)).pod_name for n in range(40))
    assert min(homes.values()) > 8


def test_a_replica_that_nobody_has_measured_gets_its_share_beside_one_that_reports() -> None:
    clock = Clock()
    for gateways in (1, 2):
        balancer = Balancer(clock, lambda gateways=gateways: gateways)  # type: ignore[misc]  # the default binds the loop's value
        among = replicas(2)
        balancer.reported(among[0].pod_uid, ReplicaFigures(clock.now, prefill_seconds_per_token=1e-6, tpot_seconds=0.001))
        found = Counter(where(balancer, among, text(f"{n:04d}" * 2000)).pod_name for n in range(40))
        assert min(found["r0"], found["r1"]) > 8, gateways
    balancer = Balancer(clock)
    for replica, seconds in zip(among, (1e-4, 1.1e-4), strict=True):
        balancer.reported(replica.pod_uid, ReplicaFigures(clock.now, prefill_seconds_per_token=seconds))
    assert Counter(where(balancer, among, text(f"{n:04d}" * 2000)).pod_name for n in range(40)) == {"r0": 20, "r1": 20}


def test_other_gateways_are_taken_to_fill_caches_as_this_one_does() -> None:
    clock = Clock()
    balancer = Balancer(clock, lambda: 2)
    (one,) = replicas(1)
    balancer.reported(one.pod_uid, ReplicaFigures(clock.now, kv_cache_tokens=10_000))
    where(balancer, [one], text("a" * 8000))
    where(balancer, [one], text("b" * 16_000))
    assert send(balancer, [one], text("a" * 8000)).new_tokens < 400
    where(balancer, [one], text("c" * 16_000))
    assert send(balancer, [one], text("b" * 16_000)).new_tokens < 400
    where(balancer, [one], text("d" * 40_000))
    assert send(balancer, [one], text("a" * 8000)).new_tokens == 2000


def test_gateways_that_see_the_same_report_do_not_all_send_to_the_least_loaded_until_the_next() -> None:
    clock = Clock()
    among = replicas(3)
    gateways = [Balancer(clock, lambda: 4) for _ in range(4)]
    for balancer in gateways:
        for replica, running in zip(among, (8, 8, 0), strict=True):
            balancer.reported(replica.pod_uid, ReplicaFigures(clock.now, running=running))
    picks = Counter(send(balancer, among).replica.pod_name for _ in range(6) for balancer in gateways)
    assert max(picks.values()) <= 16
    alone = Balancer(clock)
    for replica, running in zip(among, (8, 8, 0), strict=True):
        alone.reported(replica.pod_uid, ReplicaFigures(clock.now, running=running))
    assert {send(alone, among).replica.pod_name for _ in range(6)} == {"r2"}


def test_a_replica_without_room_for_kv_is_left_alone_while_the_report_says_so() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = full, other = replicas(2)
    balancer.reported(full.pod_uid, ReplicaFigures(clock.now, kv_cache_percent=99))
    assert {where(balancer, among) for _ in range(4)} == {other}
    clock.now += REPORT_TRUST_SECONDS
    assert where(balancer, among) is full
    for replica in among:
        balancer.reported(replica.pod_uid, ReplicaFigures(clock.now, kv_cache_percent=99))
    assert {where(balancer, among) for _ in range(4)} == set(among)


def test_a_prefix_that_a_cache_no_longer_holds_draws_nothing() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = replicas(2)
    for replica in among:
        balancer.reported(replica.pod_uid, ReplicaFigures(clock.now, kv_cache_tokens=10_000))
    first = send(balancer, [among[0]], text("a" * 8000))
    first.release()
    assert send(balancer, [among[0]], text("a" * 8000)).new_tokens < 400
    send(balancer, [among[0]], text("b" * 100_000))
    assert send(balancer, [among[0]], text("a" * 8000)).new_tokens == 2000


def test_an_adapter_goes_where_it_is_loaded() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    among = replicas(3)
    balancer.reported("pod-2", ReplicaFigures(clock.now, adapters=frozenset({"sql"})))
    assert {where(balancer, among, Prompt(10, adapter="sql")).pod_name for _ in range(5)} == {"r2"}
    assert {where(balancer, among, Prompt(10, adapter="other")).pod_name for _ in range(3)} == {"r0", "r1", "r2"}


def test_a_session_stays_where_it_is_as_long_as_that_replica_is_ready_and_not_overloaded() -> None:
    balancer = Balancer(Clock())
    among = replicas(4)
    first = where(balancer, among, text("hello", "s1"))
    assert {where(balancer, among, text(str(n), "s1")) for n in range(10)} == {first}
    others = [replica for replica in among if replica is not first]
    second = where(balancer, others, text("hello", "s1"))
    assert second is not first
    assert where(balancer, among, text("hello", "s1")) is second
    overload = [send(balancer, [second]) for _ in range(20)]
    assert where(balancer, among, text("hello", "s1")) is not second
    assert len(overload) == 20


def test_gateways_agree_on_a_sessions_and_on_an_unknown_conversations_home() -> None:
    among = replicas(8)
    gateways = [Balancer(Clock(), lambda: 4) for _ in range(4)]
    for n in range(20):
        assert len({where(gateway, among, text("x", f"s{n}")) for gateway in gateways}) == 1
        assert len({where(gateway, among, text(f"{n:04d}" * 2000)) for gateway in gateways}) == 1


def test_what_many_conversations_begin_with_is_nobodys_home() -> None:
    among = replicas(8)
    gateway = Balancer(Clock(), lambda: 2)
    system = "s" * 2048
    for n in range(SHARED_CHILDREN):
        where(gateway, among, text(system + f"{n:04d}" * 1000))
    found = {where(gateway, among, text(system + f"{n:04d}" * 1000)) for n in range(100, 140)}
    assert len(found) == 8
    prompt = text(system + "9999" * 1000)
    uid = home(prompt.hashes[2], [replica.pod_uid for replica in among])
    assert where(gateway, among, prompt).pod_uid == uid


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_without_prompts_the_least_loaded_is_picked(count: int, moves: list[int]) -> None:
    balancer = Balancer(Clock())
    among = replicas(count)
    running: list[Lease] = []
    for move in moves:
        if move > 6 and running:
            running.pop(move % len(running)).release()
            continue
        loads = Counter(lease.replica.pod_uid for lease in running)
        lease = send(balancer, among)
        assert loads[lease.replica.pod_uid] == min(loads[one.pod_uid] for one in among)
        running.append(lease)
    for one in among:
        assert balancer.outstanding(one.pod_uid) == sum(lease.replica is one for lease in running)


prompts = st.builds(
    lambda conversation, turns, session: text(f"{conversation:04d}" * 300 * turns, f"s{session}" if session > 6 else ""),
    st.integers(0, 6),
    st.integers(1, 8),
    st.integers(0, 9),
)


@given(st.integers(2, 6), st.integers(1, 3), st.lists(st.tuples(prompts, st.integers(0, 9), st.integers(0, 5)), max_size=50))
def test_whatever_comes_the_picked_is_a_candidate_within_its_bound(count: int, gateways: int, moves: list[tuple[Prompt, int, int]]) -> None:
    clock = Clock()
    balancer = Balancer(clock, lambda: gateways)
    among = replicas(count)
    running: list[Lease] = []
    for prompt, move, excluded in moves:
        clock.now += 0.1
        if move > 7 and running:
            ended = running.pop(0)
            ended.first_token()
            ended.release(20.0)
        if move == 7:
            balancer.failed(among[excluded % count])
        loads = Counter(lease.replica.pod_uid for lease in running)
        candidates = [one for one in among if one is not among[excluded % count]]
        lease = balancer.acquire(among, {among[excluded % count].pod_uid}, prompt)
        assert lease is not None
        assert lease.replica in candidates
        assert 0 <= lease.new_tokens <= prompt.tokens
        mean = (sum(loads[one.pod_uid] for one in candidates) + 1) / len(candidates)
        healthy = all(balancer.breaker_state(one.pod_uid) is BreakerState.CLOSED for one in candidates)
        least = min(loads[one.pod_uid] for one in candidates)
        held = loads[lease.replica.pod_uid]
        assert not healthy or held == least or held + 1 <= load_bound(mean, BALANCE)
        running.append(lease)
