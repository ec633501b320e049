"""Traffic of all models, by the class that each request was given. Pure but for injected clocks; memory is bounded.

A stream that still waits for its first token when its TTFT target passes is a miss at that moment, not when it ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from npufleet_api.history import History
from npufleet_api.report import TrafficHistory, WindowAttainment
from npufleet_api.slo import Exchange, Judgement, SloTargets
from npufleet_api.traffic import WINDOW_SECONDS, AttainmentWindow, TrafficSummary, TrafficWindow, summarise

SHORT_SECONDS = 60.0
LONG_SECONDS = 3600.0
MAX_CLASSES = 32
"""Classes of a model's requests; those of further ones are counted as the model's first class."""


SPARE_DEADLINES = 1024
"""Deadlines of ended requests that may be kept, beyond as many as requests are live."""

ModelKey = tuple[str, str]
"""Namespace and name of an AscendModel."""
FirstToken = Callable[[], float | None]


class Tally:
    """A request from its arrival to its end. `first_token` tells when its client got the first token; it is None for what is no stream."""

    __slots__ = ("arrived_unix", "ended", "first_token", "key", "missed", "targets", "workload_class")

    def __init__(
        self, key: ModelKey, workload_class: str, targets: SloTargets, arrived_unix: float, first_token: FirstToken | None
    ) -> None:
        self.key = key
        self.workload_class = workload_class
        self.targets = targets
        self.arrived_unix = arrived_unix
        self.first_token = first_token
        self.missed = False
        """Its miss was counted."""
        self.ended = False


class _ClassWindows:
    def __init__(self, window_seconds: float) -> None:
        self.window = TrafficWindow(window_seconds)
        self.long = AttainmentWindow(LONG_SECONDS)


@dataclass(slots=True)
class _ModelBook:
    classes: dict[str, _ClassWindows] = field(default_factory=dict)
    history: History = field(default_factory=History)
    last_request: float | None = None

    @property
    def in_flight(self) -> int:
        return sum(windows.window.in_flight for windows in self.classes.values())


class Accounting:
    """The books of all models. `missed` hears of each request, by model and class, whose miss counts before it ends."""

    def __init__(
        self,
        clock: Callable[[], float],
        window_seconds: float = WINDOW_SECONDS,
        wall_clock: Callable[[], float] = lambda: 0.0,
        missed: Callable[[ModelKey, str], None] = lambda _key, _class: None,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._window_seconds = window_seconds
        self._missed = missed
        self._books: dict[ModelKey, _ModelBook] = {}
        self._deadlines: list[tuple[float, int, Tally]] = []
        self._number = 0
        self._live = 0
        self._began = clock()

    @property
    def uptime_seconds(self) -> float:
        """Since counting began."""
        return self._clock() - self._began

    def started(
        self,
        key: ModelKey,
        workload_class: str,
        targets: SloTargets,
        *,
        arrived: float | None = None,
        first_token: FirstToken | None = None,
    ) -> Tally:
        """A request for a model arrived, at `arrived` of the clock or now. For a stream, `first_token` tells when its first token came."""
        now = self._clock()
        self._sweep(now)
        book = self._book(key)
        if workload_class not in book.classes and len(book.classes) >= MAX_CLASSES:
            workload_class = next(iter(book.classes))
        tally = Tally(key, workload_class, targets, self._wall_clock(), first_token)
        self._windows(book, workload_class).window.in_flight += 1
        book.history.arrived(tally.arrived_unix)
        book.last_request = now
        self._live += 1
        if targets.ttft_ms is not None and first_token is not None:
            self._number += 1
            heapq.heappush(self._deadlines, ((now if arrived is None else arrived) + targets.ttft_ms / 1000, self._number, tally))
            if len(self._deadlines) > 2 * self._live + SPARE_DEADLINES:
                self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
                heapq.heapify(self._deadlines)
        return tally

    def finished(self, tally: Tally, exchange: Exchange) -> Judgement:
        """The request has ended. A miss that was counted before is not judged again."""
        now = self._clock()
        self._sweep(now)
        tally.ended = True
        self._live -= 1
        book = self._book(tally.key)
        windows = self._windows(book, tally.workload_class)
        windows.window.in_flight = max(0, windows.window.in_flight - 1)
        judgement = windows.window.record(exchange, tally.targets, now, missed=tally.missed)
        windows.long.count(now, judgement)
        book.history.ended(tally.arrived_unix, exchange.prompt_tokens, exchange.generated_tokens)
        book.last_request = now
        return judgement

    def summary(self, key: ModelKey) -> TrafficSummary:
        """A model's window over all classes; an empty one if it had no traffic."""
        now = self._clock()
        self._sweep(now)
        book = self._books.get(key)
        return summarise([windows.window for windows in book.classes.values()] if book else [], self._window_seconds, now)

    def classes(self, key: ModelKey) -> dict[str, TrafficSummary]:
        """A model's window by class, as far as there were requests."""
        now = self._clock()
        self._sweep(now)
        book = self._books.get(key)
        return {name: windows.window.summary(now) for name, windows in sorted(book.classes.items())} if book else {}

    def windows(self, key: ModelKey, workload_class: str | None = None) -> list[WindowAttainment]:
        """Attainment in a shorter and in a longer window, of all classes or of one."""
        now = self._clock()
        self._sweep(now)
        book = self._books.get(key)
        chosen = [w for name, w in book.classes.items() if workload_class in (None, name)] if book else []
        short = [w.window.attainment(now, SHORT_SECONDS) for w in chosen]
        long = [w.long.attainment(now) for w in chosen]
        return [
            WindowAttainment(window_seconds=seconds, judged=sum(judged for judged, _ in counts), attained=sum(met for _, met in counts))
            for seconds, counts in ((SHORT_SECONDS, short), (LONG_SECONDS, long))
        ]

    def history(self, key: ModelKey) -> TrafficHistory | None:
        """What was asked of a model; None if nothing was in a whole stretch of time."""
        book = self._books.get(key)
        return book.history.render(self._wall_clock()) if book else None

    def last_request_age_seconds(self, key: ModelKey) -> float | None:
        """Since a request last arrived or ended."""
        book = self._books.get(key)
        return max(0.0, self._clock() - book.last_request) if book and book.last_request is not None else None

    def retain(self, keys: Collection[ModelKey]) -> None:
        """Forget models that are gone and have nothing in flight."""
        self._books = {key: book for key, book in self._books.items() if book.in_flight or key in keys}

    def _sweep(self, now: float) -> None:
        """Count those whose TTFT target has passed."""
        while self._deadlines and self._deadlines[0][0] < now:
            deadline, _, tally = heapq.heappop(self._deadlines)
            first = tally.first_token() if tally.first_token is not None else None
            if tally.ended or (first is not None and first <= deadline):
                continue
            tally.missed = True
            windows = self._windows(self._book(tally.key), tally.workload_class)
            windows.window.miss(deadline, now)
            windows.long.count(now, Judgement(judged=True))
            self._missed(tally.key, tally.workload_class)

    def _book(self, key: ModelKey) -> _ModelBook:
        book = self._books.get(key)
        if book is None:
            book = self._books[key] = _ModelBook()
        return book

    def _windows(self, book: _ModelBook, workload_class: str) -> _ClassWindows:
        windows = book.classes.get(workload_class)
        if windows is None:
            windows = book.classes[workload_class] = _ClassWindows(self._window_seconds)
        return windows
