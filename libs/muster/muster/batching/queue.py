"""Which waiting calls make the next batch, and when: decided without a clock, a task or a timer.

Why apart: that no batch is too large, that nobody is overtaken, lost or kept waiting is proved on this file alone.

The rules, in order:

- Calls of one group are batched together, in the order in which they came. The group is the multiplexed model that a
  call is for, so a batch never mixes models.
- A batch is *closed* when the next call does not fit or nothing more can: its size has reached ``max_batch_size``. Its
  size is the number of its calls, or what ``batch_size_fn`` says of their items. A call that is larger than the
  maximum all by itself makes a batch of its own.
- A batch goes when it is closed, or when its first call has waited for ``batch_wait_timeout_s``, as soon as fewer than
  ``max_concurrent_batches`` run. Of several the one whose first call came first goes first.
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
    """What a queue goes by; may change at any time, after which `BatchQueue.rules_changed` is to be called."""

    max_batch_size: int
    batch_wait_timeout_s: float
    max_concurrent_batches: int
    batch_size_fn: BatchSizeFn | None = None


class WaitingCall:
    """One call that waits to be in a batch."""

    __slots__ = ("arrived_at", "deadline", "group", "item", "size_error")

    def __init__(self, *, item: Any, group: str, arrived_at: float, deadline: float = NO_DEADLINE) -> None:
        self.item = item
        """What `BatchRules.batch_size_fn` is given for it."""
        self.group = group
        self.arrived_at = arrived_at
        self.deadline = deadline
        """By the same clock as ``arrived_at``."""
        self.size_error: BaseException | None = None
        """Why it has no size; then it is in no batch."""


C = TypeVar("C", bound=WaitingCall)


class Decision(NamedTuple, Generic[C]):
    """What is to be done now."""

    batch: list[C] | None
    """Runs now; ask again at once, for there may be another one."""
    expired: list[C]
    """Are past their deadline."""
    unsized: list[C]
    """`WaitingCall.size_error` says why."""
    look_again_at: float | None
    """When there will be a batch if nothing else happens; None when only something else can bring one."""


@final
class _Line(Generic[C]):
    """The calls of one group: those that will be in the next batch, and those behind them."""

    __slots__ = ("behind", "is_closed", "next_batch")

    def __init__(self) -> None:
        self.next_batch: list[C] = []
        self.behind: OrderedDict[C, None] = OrderedDict()
        self.is_closed = False

    def reopen(self) -> None:
        """Measure the next batch from its beginning."""
        for call in reversed(self.next_batch):
            self.behind[call] = None
            self.behind.move_to_end(call, last=False)
        self.next_batch = []
        self.is_closed = False


@final
class BatchQueue(Generic[C]):
    """The calls that wait, of one function and one instance."""

    def __init__(self, rules: BatchRules) -> None:
        self.last_misfit_error: BaseException | None = None
        """What ``batch_size_fn`` raised for items together that it could size alone; they are then batched apart."""
        self._rules = rules
        self._lines: dict[str, _Line[C]] = {}
        self._unsized: list[C] = []
        self._length = 0

    def __len__(self) -> int:
        """How many calls wait."""
        return self._length

    def add(self, call: C) -> bool:
        """Take ``call`` into the queue; True when it is time to `decide`, for something has come that may go."""
        line = self._lines.get(call.group)
        if line is None:
            line = self._lines[call.group] = _Line()
        line.behind[call] = None
        self._length += 1
        was_empty = not line.next_batch
        if not line.is_closed:
            self._fill(line)
            self._drop_if_empty(call.group, line)
        return was_empty or line.is_closed or bool(self._unsized)

    def withdraw(self, call: C) -> None:
        """Forget ``call``; nothing happens when it does not wait (any more)."""
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
        """Measure all batches by the rules as they are now."""
        for group, line in list(self._lines.items()):
            line.reopen()
            self._fill(line)
            self._drop_if_empty(group, line)

    def decide(self, now: float, *, running: int) -> Decision[C]:
        """What is to be done at ``now``, while ``running`` batches run."""
        expired: list[C] = []
        while True:
            batch: list[C] | None = None
            look_again_at: float | None = None
            if running < self._rules.max_concurrent_batches:
                group, look_again_at = self._ready(now)
                if group is not None:
                    batch = self._take(group, now, expired)
                    if batch is None:
                        continue  # some of it had expired, so it is another one now
            unsized, self._unsized = self._unsized, []
            return Decision(batch, expired, unsized, look_again_at)

    def _ready(self, now: float) -> tuple[str | None, float | None]:
        """The group whose batch goes now, or when the next one will."""
        found: str | None = None
        found_arrived = look_again_at = math.inf
        for group, line in self._lines.items():
            arrived = line.next_batch[0].arrived_at
            goes_at = arrived + self._rules.batch_wait_timeout_s
            if line.is_closed or goes_at <= now:
                if arrived < found_arrived:
                    found, found_arrived = group, arrived
            elif goes_at < look_again_at:
                look_again_at = goes_at
        return found, None if look_again_at == math.inf else look_again_at

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

    def _fill(self, line: _Line[C]) -> None:
        """Move calls into the next batch until it is closed or nobody is left."""
        rules = self._rules
        while line.behind and not line.is_closed:
            call = next(iter(line.behind))
            if rules.batch_size_fn is None:
                size: float = len(line.next_batch) + 1
            else:
                try:
                    size = measure(rules.batch_size_fn, (*line.next_batch, call))
                except BaseException as error:  # noqa: BLE001 - it is the user's function, and the caller is told
                    if line.next_batch:
                        self.last_misfit_error = error
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

    def _drop_if_empty(self, group: str, line: _Line[C]) -> None:
        if not line.next_batch:
            del self._lines[group]


def measure(size_fn: BatchSizeFn, calls: Iterable[WaitingCall]) -> float:
    """The size of ``calls`` together; raises what the function raises, and ValueError for what is no size."""
    size = size_fn([call.item for call in calls])
    try:
        number = float(size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"batch_size_fn returned {size!r}, which is not a number") from error
    if not number >= 0:
        raise ValueError(f"batch_size_fn returned {size!r}; a size must be 0 or more")
    return number
