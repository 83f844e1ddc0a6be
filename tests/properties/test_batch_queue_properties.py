"""The queue of batches under every order of events: nothing too large, nobody overtaken, lost or kept waiting."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muster.batching.queue import BatchQueue, BatchRules, WaitingCall

GROUPS = ["", "m1", "m2"]


class Unsizable(Exception):
    pass


def size_of(items: list[int]) -> int:
    """Items are their own size; a 13 cannot be sized at all, and 7 and 8 not together."""
    if 13 in items:
        raise Unsizable
    if 7 in items and 8 in items:
        raise Unsizable
    return sum(items)


class Queue(RuleBasedStateMachine):
    """What is true of a batch is checked when it is decided, by rules too simple to be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.running = 0
        self.check_again_at: float | None = None
        self.waiting: list[WaitingCall] = []  # in the order in which they came

    @initialize(
        most=st.integers(1, 12),
        wait=st.sampled_from([0.0, 1.0, 5.0]),
        concurrent=st.integers(1, 3),
        by_size=st.booleans(),
    )
    def begin(self, most, wait, concurrent, by_size) -> None:
        self.rules = BatchRules(
            max_batch_size=most,
            batch_wait_timeout_s=wait,
            max_concurrent_batches=concurrent,
            batch_size_fn=size_of if by_size else None,
        )
        self.queue: BatchQueue[WaitingCall] = BatchQueue(self.rules)

    def size(self, calls) -> float:
        return len(calls) if self.rules.batch_size_fn is None else size_of([call.item for call in calls])

    @rule(
        item=st.integers(0, 14), group=st.sampled_from(GROUPS), within=st.sampled_from([0.5, 3.0, math.inf])
    )
    def call(self, item, group, within) -> None:
        call = WaitingCall(item=item, group=group, arrived_at=self.now, deadline=self.now + within)
        self.waiting.append(call)
        if self.queue.add(call):
            self.look()
        # When it is said that nothing can have come of it, nothing has.
        assert not self.due()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data) -> None:
        call = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(call)
        self.queue.withdraw(call)
        self.queue.withdraw(call)
        self.look()

    @rule(by_s=st.sampled_from([0.1, 1.0, 7.0]))
    def time_passes(self, by_s) -> None:
        self.now += by_s
        self.look()

    @precondition(lambda self: self.running)
    @rule()
    def batch_ends(self) -> None:
        self.running -= 1
        self.look()

    @rule(most=st.integers(1, 12), wait=st.sampled_from([0.0, 2.0]))
    def rules_change(self, most, wait) -> None:
        self.rules.max_batch_size = most
        self.rules.batch_wait_timeout_s = wait
        self.queue.rules_changed()
        self.look()

    def look(self) -> None:
        while True:
            decision = self.queue.decide(self.now, running=self.running)
            # One whose size cannot be told closes the batch before it, also when both leave by one decision.
            were_waiting = [call for call in self.waiting if call not in decision.expired]
            for call in decision.unsized:
                assert isinstance(call.size_error, Unsizable)
                assert call.item == 13
                self.waiting.remove(call)
            for call in decision.expired:
                assert call.deadline <= self.now
                self.waiting.remove(call)
            if decision.batch is None:
                self.check_again_at = decision.check_again_at
                return
            self.check(decision.batch, were_waiting)
            self.running += 1

    def check(self, batch, were_waiting) -> None:
        assert self.running < self.rules.max_concurrent_batches
        assert batch
        assert len({call.group for call in batch}) == 1
        assert len(batch) == 1 or self.size(batch) <= self.rules.max_batch_size
        assert all(call.deadline > self.now for call in batch)
        in_line = [call for call in self.waiting if call.group == batch[0].group]
        assert batch == in_line[: len(batch)]
        may_go = batch[0].arrived_at + self.rules.batch_wait_timeout_s <= self.now
        were_in_line = [call for call in were_waiting if call.group == batch[0].group]
        assert may_go or self.is_closed(batch, were_in_line[were_in_line.index(batch[0]) :])
        self.waiting = [call for call in self.waiting if call not in batch]

    def is_closed(self, batch, in_line) -> bool:
        if self.size(batch) >= self.rules.max_batch_size:
            return True
        following = in_line[len(batch) :]
        if not following:
            return False
        try:
            return self.size([*batch, following[0]]) > self.rules.max_batch_size
        except Unsizable:
            return True

    def due(self) -> list[WaitingCall]:
        if self.running >= self.rules.max_concurrent_batches:
            return []
        return [
            call
            for call in self.waiting
            if call.arrived_at + self.rules.batch_wait_timeout_s <= self.now and call.deadline > self.now
        ]

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.waiting)

    @invariant()
    def nobody_waits_longer_than_the_timeout_while_a_batch_may_run(self) -> None:
        if hasattr(self, "queue"):
            assert not self.due()
            live = [call for call in self.waiting if call.deadline > self.now]
            if live and self.running < self.rules.max_concurrent_batches:
                goes_at = min(call.arrived_at for call in live) + self.rules.batch_wait_timeout_s
                assert self.check_again_at is not None
                assert self.check_again_at <= goes_at


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
