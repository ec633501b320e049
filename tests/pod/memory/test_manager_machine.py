"""Everything at once: whatever happens in whatever order, each request reads its own KV, and nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from npufleet_pod.engine.memory.layout import NO_SCOPE, CacheLayout, CacheScope, Room, Transfer
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier
from pod.memory.simulation import DeferredWorker, MemoryStore, SimulatedMemory, kv_of

PAGES = 10
SCOPES = (CacheScope(adapter="a"), CacheScope(salt="a"))
MAX_TOKENS = 150


@dataclass
class Request:
    """What a client of the manager knows of its request."""

    scope: CacheScope
    tokens: list[int]
    scheduled: int
    written: int


@dataclass
class FlyingStep:
    """A step that has begun; its transfers and writes have not run yet."""

    number: int
    writes: dict[str, tuple[int, int]]
    work: list[tuple[int, int]]
    transfers: tuple[Transfer, ...]
    ran: bool = False


class ManagerMachine(RuleBasedStateMachine):
    """Drives a manager as a scheduler would, with steps that run late and a disk that fails."""

    @initialize(
        sizes=st.sampled_from([(16, 16), (16, 32), (16, 64)]),
        host=st.sampled_from([4, 3, 0]),
        disk=st.sampled_from([20, 3, 0]),
        colliding=st.sampled_from([False, False, True]),
    )
    def start(self, sizes: tuple[int, int], host: int, disk: int, colliding: bool) -> None:
        self.layout = CacheLayout(*sizes, PAGES)
        self.memory = SimulatedMemory(self.layout, bytearray(max(1, host) * sizes[1] * 8))
        self.store, self.worker, self.seconds = MemoryStore(), DeferredWorker(), 0.0
        host_tier = HostTier(host, self.memory.page_bytes, memoryview(self.memory.host)) if host else None
        disk_tier = DiskTier(self.store, self.worker, disk, lambda: self.seconds) if disk else None
        extra = {"digest": lambda data: bytes([sum(data) % 7])} if colliding else {}
        self.manager = KVCacheManager(self.layout, lambda: self.seconds, host=host_tier, disk=disk_tier, **extra)  # type: ignore[arg-type]  # one keyword, or none
        self.requests: dict[str, Request] = {}
        self.flying: list[FlyingStep] = []
        self.names = 0

    prompts = st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=4), st.sampled_from([0, 5, 16])).map(
        lambda parts: [token for token in parts[0] for _ in range(32)] + [3] * parts[1]
    )

    @rule(prompt=prompts, scope=st.sampled_from((NO_SCOPE, NO_SCOPE, *SCOPES)), prefetch=st.booleans())
    def admit(self, prompt: list[int], scope: CacheScope, prefetch: bool) -> None:
        self.admit_one(prompt, scope, prefetch)

    def admit_one(self, prompt: list[int], scope: CacheScope, prefetch: bool) -> str | None:
        if self.layout.pages_for(len(prompt)) > PAGES:
            return None
        if prefetch:
            self.manager.prefetch(prompt, scope)
        name, self.names = f"r{self.names}", self.names + 1
        match = self.manager.match(prompt, scope)
        cached = self.manager.admit(name, prompt, scope)
        assert match.device_tokens <= cached < len(prompt)
        assert cached % self.layout.block_tokens == 0
        self.requests[name] = Request(scope, prompt, cached, cached)
        return name

    @precondition(lambda self: self.requests and len(self.flying) < 3)
    @rule(count=st.sampled_from([1, 16, 100]), skipped=st.integers(0, 3), token=st.integers(1, 2))
    def begin_step(self, count: int, skipped: int, token: int) -> None:
        writes: dict[str, tuple[int, int]] = {}
        for name, request in list(self.requests.items())[skipped if len(self.requests) > skipped else 0 :]:
            if request.scheduled == len(request.tokens) < MAX_TOKENS:
                request.tokens += [token] * count
            end = min(len(request.tokens), request.scheduled + count)
            if end == request.scheduled:
                continue
            room = self.manager.reserve(name, end)
            if room is Room.AFTER_STEP:
                assert self.manager.fenced_pages
            if room is Room.READY:
                writes[name] = (request.scheduled, end)
        number = self.manager.begin_step(writes)
        work: list[tuple[int, int]] = []
        for name, (begin, end) in writes.items():
            request, table = self.requests[name], self.manager.table(name)
            work += [(table.slot(position), kv_of(request.scope, request.tokens, position)) for position in range(begin, end)]
            request.scheduled = end
        assert len({slot for slot, _ in work}) == len(work), "two requests write to one place"
        busy = {slot for step in self.flying for slot, _ in step.work}
        assert not busy & {slot for slot, _ in work}, "a place is written again while a step in flight may still write it"
        self.flying.append(FlyingStep(number, writes, work, self.manager.take_transfers()))

    @precondition(lambda self: not self.flying)
    @rule(prompt=prompts, works=st.booleans())
    def serve(self, prompt: list[int], works: bool) -> None:
        self.manager.prefetch(prompt)
        if works:
            self.work(4)
        name = self.admit_one(prompt, NO_SCOPE, False)
        if name is None:
            return
        self.begin_step(128, 0, 1)
        self.run_step()
        self.end_step()
        self.free_one(name)
        if works:
            self.work(4)

    @precondition(lambda self: not self.flying)
    @rule(prompts=st.lists(prompts, min_size=3, max_size=6))
    def serve_alone(self, prompts: list[list[int]]) -> None:
        for name in list(self.requests):
            self.free_one(name)
        for prompt in prompts:
            self.serve(prompt, True)

    @precondition(lambda self: any(not step.ran for step in self.flying))
    @rule()
    def run_step(self) -> None:
        step = next(step for step in self.flying if not step.ran)
        self.memory.execute(step.transfers)
        for slot, number in step.work:
            self.memory.device[slot] = number
        step.ran = True

    @precondition(lambda self: self.flying and self.flying[0].ran)
    @rule()
    def end_step(self) -> None:
        step = self.flying.pop(0)
        for name, (begin, end) in step.writes.items():
            request = self.requests.get(name)
            if request is None:
                self.manager.commit(name, [1])
                continue
            self.manager.commit(name, request.tokens[begin:end])
            request.written = end
        self.manager.end_step(step.number)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_one(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        parent = self.requests[name]
        child, self.names = f"r{self.names}", self.names + 1
        self.manager.fork(name, child)
        self.requests[child] = Request(parent.scope, [*parent.tokens[: parent.written], 1], parent.written, parent.written)

    def free_one(self, name: str) -> None:
        del self.requests[name]
        self.manager.free(name)
        self.manager.free(name)

    @rule(count=st.integers(1, 3))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.worker.work()

    @rule(failing=st.sampled_from([False, False, True]), seconds=st.sampled_from([0.1, 20, 4000]), pages=st.integers(-4, 4))
    def the_world_changes(self, failing: bool, seconds: float, pages: int) -> None:
        self.store.failing = failing
        self.seconds += seconds
        if pages > 0:
            self.manager.restore_host(pages)
        elif pages:
            self.manager.shrink_host(-pages)

    @invariant()
    def books_are_kept(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    @invariant()
    def each_request_reads_its_own_kv(self) -> None:
        if not hasattr(self, "manager") or self.flying:
            return
        # What the last admissions queued runs with the next step.
        step = self.manager.begin_step([])
        self.memory.execute(self.manager.take_transfers())
        self.manager.end_step(step)
        for name, request in self.requests.items():
            table = self.manager.table(name)
            for position in range(request.written):
                assert self.memory.device[table.slot(position)] == kv_of(request.scope, request.tokens, position)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.flying:
            if not self.flying[0].ran:
                self.run_step()
            self.end_step()
        for name in list(self.requests):
            self.manager.free(name)
        self.store.failing = False
        while self.worker.queued:
            self.work(3)
        self.manager.prefetch([1])
        self.manager.check_integrity()
        assert self.manager.usage == 0
        assert self.manager.free_pages == PAGES


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
