from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from npufleet_pod.engine.pipeline import DoubleBuffer, PipelineController, ThreeStagePipeline


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Source:
    """Prepares numbers, of which at most `depth` are on their way; as the engine's prepare does."""

    def __init__(self, count: int, depth: int) -> None:
        self._numbers: Iterator[int] = iter(range(count))
        self._changed = threading.Condition()
        self._room = depth
        self._stopped = False
        self.most_in_flight = 0
        self._in_flight = 0

    def prepare(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._room > self._in_flight or self._stopped)
            number = None if self._stopped else next(self._numbers, None)
            if number is not None:
                self._in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self._in_flight)
            return number

    def done(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_step_passes_every_stage_in_order_and_no_more_than_the_depth_are_in_flight(depth: int) -> None:
    source = Source(200, depth)
    computed: list[int] = []
    answered: list[tuple[int, int]] = []

    def compute(number: int) -> int:
        computed.append(number)
        return number * number

    def output(number: int, square: int) -> None:
        answered.append((number, square))
        source.done()

    ThreeStagePipeline(source.prepare, compute, output, PipelineController(depth), source.stop).run()
    assert computed == list(range(200))
    assert answered == [(number, number * number) for number in range(200)]
    assert 1 <= source.most_in_flight <= depth


def test_a_step_is_prepared_and_another_answered_while_a_third_computes() -> None:
    prepared = [threading.Event() for _ in range(4)]
    answering, answered = threading.Event(), threading.Event()
    source = Source(3, 3)

    def prepare() -> int | None:
        number = source.prepare()
        prepared[3 if number is None else number].set()
        return number

    def compute(number: int) -> int:
        # Each waits for what can only happen beside it: alone, this never ends.
        if number == 0:
            prepared[1].wait()
        if number == 1:
            answering.wait()
            answered.set()
        return number

    def output(number: int, _: int) -> None:
        if number == 0:
            answering.set()
            answered.wait()
        source.done()

    ThreeStagePipeline(prepare, compute, output, PipelineController(3), source.stop).run()
    assert source.most_in_flight > 1


def test_with_depth_one_a_step_ends_before_the_next_begins_on_one_thread() -> None:
    events: list[tuple[str, int]] = []
    threads: set[int] = set()
    source = Source(3, 1)

    def note(stage: str, number: int) -> None:
        events.append((stage, number))
        threads.add(threading.get_ident())

    def prepare() -> int | None:
        number = source.prepare()
        if number is not None:
            note("prepare", number)
        return number

    def compute(number: int) -> int:
        note("compute", number)
        return number

    def output(number: int, _: int) -> None:
        note("output", number)
        source.done()

    ThreeStagePipeline(prepare, compute, output, PipelineController(1), source.stop).run()
    assert events == [(stage, number) for number in range(3) for stage in ("prepare", "compute", "output")]
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("stage", ["prepare", "compute", "output"])
def test_what_a_stage_raises_ends_all_stages_and_reaches_the_caller(stage: str, depth: int) -> None:
    source = Source(1000, depth)

    def fail(here: str, number: int) -> None:
        if here == stage and number == 5:
            raise ValueError(f"{stage} broke")

    def prepare() -> int | None:
        number = source.prepare()
        if number is not None:
            fail("prepare", number)
        return number

    def compute(number: int) -> int:
        fail("compute", number)
        return number

    def output(number: int, _: int) -> None:
        fail("output", number)
        source.done()

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"{stage} broke"):
        ThreeStagePipeline(prepare, compute, output, PipelineController(depth), source.stop).run()
    assert threading.active_count() == before


def test_a_buffer_is_filled_again_only_after_it_was_released() -> None:
    buffers = DoubleBuffer(["one", "two"])
    first, second = buffers.acquire(), buffers.acquire()
    assert (first, second) == ("one", "two")
    taken: list[str | None] = []
    producer = threading.Thread(target=lambda: taken.append(buffers.acquire()))
    producer.start()
    buffers.publish("one")
    assert buffers.read() == "one"
    assert taken == []
    buffers.release("one")
    producer.join()
    assert taken == ["one"]


def test_after_a_close_the_consumer_gets_what_was_filled_and_the_producer_nothing() -> None:
    buffers = DoubleBuffer([1, 2])
    filled = buffers.acquire()
    assert filled is not None
    buffers.publish(filled)
    buffers.close()
    assert buffers.acquire() is None
    assert [buffers.read(), buffers.read()] == [filled, None]


@pytest.mark.parametrize("depth", [0, 5])
def test_a_depth_that_the_buffers_cannot_hold_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"pipeline depth is {depth}: choose 1 to 4"):
        PipelineController(depth)


def test_the_stall_ratio_is_the_share_of_busy_time_that_compute_waited() -> None:
    clock = Clock()
    controller = PipelineController(2, clock)
    assert controller.stall_ratio == 0
    clock.seconds += 3
    controller.account_compute(clock.seconds - 3)
    clock.seconds += 1
    controller.account_wait(clock.seconds - 1)
    assert controller.stall_ratio == pytest.approx(0.25)
    assert controller.waited_seconds == pytest.approx(1)
    assert controller.computed_seconds == pytest.approx(3)


def test_time_without_work_is_no_stall_and_old_stalls_are_forgotten() -> None:
    clock = Clock()
    controller = PipelineController(2, clock)
    began = clock.seconds
    clock.seconds += 60
    controller.mark_busy()
    clock.seconds += 1
    controller.account_wait(began)
    assert controller.waited_seconds == pytest.approx(1)
    assert controller.stall_ratio == 1
    clock.seconds += 12
    assert controller.stall_ratio == 0
