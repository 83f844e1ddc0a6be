"""Decides which waiting calls make the next batch, and when, without a clock, a task or a timer.

Why a module of its own: that no batch is too large, and no call overtaken, lost or delayed, is proved on this file
alone.

The rules, in order:

- Calls of one group are batched together, in the order in which they came. The group is the multiplexed model that a
  call is for, so a batch never mixes models.
- A batch is *closed* when the next call does not fit or nothing more can: its size has reached ``max_batch_size``. Its
  size is the number of its calls, or what ``batch_size_fn`` says of their items. A call that is larger than the
  maximum all by itself makes a batch of its own.
- A batch starts when it is closed, or when its first call has waited for ``batch_wait_timeout_s``, as soon as fewer
  than ``max_concurrent_batches`` run. Of several the one whose first call arrived first starts first.
- A call that has been withdrawn, or whose deadline has passed, is in no batch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar, final

import msgspec

NO_DEADLINE: Final = math.inf

BatchSizeFn = Callable[[list[Any]], float]
"""The size of a batch of these items; the same items always have the same size."""


class BatchRules(msgspec.Struct, kw_only=True):
    """Settings of a queue; may change at any time, after which `BatchQueue.rules_changed` must be called."""

    max_batch_size: int
    """Largest size of a batch: a number of calls, or what `batch_size_fn` returns; at least 1."""
    batch_wait_timeout_s: float
    """Seconds that the first call of a batch waits for further ones; 0 waits for none."""
    max_concurrent_batches: int
    """Batches of one instance that may run at the same time; at least 1."""
    batch_size_fn: BatchSizeFn | None = None
    """Computes the size of a batch from its items; None counts the calls."""


class WaitingCall:
    """One call that waits for a batch."""

    __slots__ = ("arrived_at", "deadline", "group", "item", "size_error")

    def __init__(self, *, item: Any, group: str, arrived_at: float, deadline: float = NO_DEADLINE) -> None:
        self.item = item
        """Argument of `BatchRules.batch_size_fn` for this call."""
        self.group = group
        self.arrived_at = arrived_at
        self.deadline = deadline
        """Latest time to start, by the clock of ``arrived_at``."""
        self.size_error: BaseException | None = None
        """Why its size cannot be computed; then it is in no batch."""


C = TypeVar("C", bound=WaitingCall)


class Decision(NamedTuple, Generic[C]):
    """What to do now."""

    batch: list[C] | None
    """Calls of a batch to start now; decide again at once, as there may be another one. None: no batch."""
    expired: list[C]
    """Calls past their deadline."""
    unsized: list[C]
    """Calls without a size; `WaitingCall.size_error` is the reason."""
    check_again_at: float | None
    """When a batch will be due if nothing else happens; None when only another event can make one due."""


@final
class _GroupQueue(Generic[C]):
    """The calls of one group: those of the next batch, and those behind them."""

    __slots__ = ("behind", "is_closed", "next_batch")

    def __init__(self) -> None:
        self.next_batch: list[C] = []
        self.behind: OrderedDict[C, None] = OrderedDict()
        self.is_closed = False

    def reopen(self) -> None:
        """Return the calls of the next batch to the queue, to fill it again."""
        for call in reversed(self.next_batch):
            self.behind[call] = None
            self.behind.move_to_end(call, last=False)
        self.next_batch = []
        self.is_closed = False


@final
class BatchQueue(Generic[C]):
    """The waiting calls of one function and one instance."""

    def __init__(self, rules: BatchRules) -> None:
        self.last_size_error: BaseException | None = None
        """What ``batch_size_fn`` raised for items that it could size one by one; they are then batched apart."""
        self._rules = rules
        self._lines: dict[str, _GroupQueue[C]] = {}
        self._unsized: list[C] = []
        self._length = 0

    def __len__(self) -> int:
        """The number of waiting calls."""
        return self._length

    def add(self, call: C) -> bool:
        """Add ``call`` to the queue; True when `decide` should run, as a batch or its due time may have changed."""
        line = self._lines.get(call.group)
        if line is None:
            line = self._lines[call.group] = _GroupQueue()
        line.behind[call] = None
        self._length += 1
        was_empty = not line.next_batch
        if not line.is_closed:
            self._fill(line)
            self._drop_if_empty(call.group, line)
        return was_empty or line.is_closed or bool(self._unsized)

    def withdraw(self, call: C) -> None:
        """Remove ``call``; does nothing when it is not waiting."""
        line = self._lines.get(call.group)
        if line is None:
            return
        if call in line.behind:
            may_have_closed_it = next(iter(line.behind)) is call
            del line.behind[call]
            if may_have_closed_it:
                line.reopen()
        elif call in line.next_batch:
            line.next_batch.remove(call)
            line.reopen()
        else:
            return
        self._length -= 1
        if not line.is_closed:
            self._fill(line)
        self._drop_if_empty(call.group, line)

    def rules_changed(self) -> None:
        """Form all batches again by the current rules."""
        for group, line in list(self._lines.items()):
            line.reopen()
            self._fill(line)
            self._drop_if_empty(group, line)

    def decide(self, now: float, *, running: int) -> Decision[C]:
        """Decide what to do at ``now``, while ``running`` batches run."""
        expired: list[C] = []
        while True:
            batch: list[C] | None = None
            check_again_at: float | None = None
            if running < self._rules.max_concurrent_batches:
                group, check_again_at = self._ready(now)
                if group is not None:
                    batch = self._take(group, now, expired)
                    if batch is None:
                        continue  # some of its calls had expired, so the batch has changed
            unsized, self._unsized = self._unsized, []
            return Decision(batch, expired, unsized, check_again_at)

    def _ready(self, now: float) -> tuple[str | None, float | None]:
        """The group whose batch is due now, and when the next one of another group is."""
        found: str | None = None
        found_arrived = check_again_at = math.inf
        for group, line in self._lines.items():
            arrived = line.next_batch[0].arrived_at
            due_at = arrived + self._rules.batch_wait_timeout_s
            if line.is_closed or due_at <= now:
                if arrived < found_arrived:
                    found, found_arrived = group, arrived
            elif due_at < check_again_at:
                check_again_at = due_at
        return found, None if check_again_at == math.inf else check_again_at

    def _take(self, group: str, now: float, expired: list[C]) -> list[C] | None:
        line = self._lines[group]
        late = [call for call in line.next_batch if call.deadline <= now]
        batch: list[C] | None = None
        if late:
            expired += late
            self._length -= len(late)
            line.next_batch = [call for call in line.next_batch if call.deadline > now]
            line.reopen()
        else:
            batch = line.next_batch
            self._length -= len(batch)
            line.next_batch = []
            line.is_closed = False
        self._fill(line)
        self._drop_if_empty(group, line)
        return batch

    def _fill(self, line: _GroupQueue[C]) -> None:
        """Move calls into the next batch until it is closed or no call is left."""
        rules = self._rules
        while line.behind and not line.is_closed:
            call = next(iter(line.behind))
            if rules.batch_size_fn is None:
                size: float = len(line.next_batch) + 1
            else:
                try:
                    size = measure(rules.batch_size_fn, (*line.next_batch, call))
                except BaseException as error:  # noqa: BLE001 - the user's function; its error is raised at the caller
                    if line.next_batch:
                        self.last_size_error = error
                        line.is_closed = True
                    else:
                        del line.behind[call]
                        self._length -= 1
                        call.size_error = error
                        self._unsized.append(call)
                    continue
            line.is_closed = size >= rules.max_batch_size
            if size <= rules.max_batch_size or not line.next_batch:
                del line.behind[call]
                line.next_batch.append(call)

    def _drop_if_empty(self, group: str, line: _GroupQueue[C]) -> None:
        if not line.next_batch:
            del self._lines[group]


def measure(size_fn: BatchSizeFn, calls: Iterable[WaitingCall]) -> float:
    """The combined size of ``calls``; raises what the function raises, and ValueError for an invalid size."""
    size = size_fn([call.item for call in calls])
    try:
        number = float(size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"batch_size_fn returned {size!r}, which is not a number") from error
    if not number >= 0:
        raise ValueError(f"batch_size_fn returned {size!r}; a size must be 0 or more")
    return number
