"""Hearing which backends are waited for, whoever else speaks there.

Why guarded: all replicas and programs with handles may publish here, and a leader that reads fifty thousand messages a
second does nothing else. So beyond a limit it stops to listen to everybody, and for a while hears only what can be
meant: one subject for each backend that was scaled to zero. Then who floods one of them holds up that one alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, final

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from serve_common.errors import BadField
from serve_common.names import BackendTag
from serve_common.refused_messages import RefusedMessages
from serve_common.subjects import Subjects
from serve_common.tasks import TaskOwner
from serve_common.wires.unreadable import UNREADABLE
from serve_common.wires.wake import Wake

_log = structlog.get_logger()

WAKES_MAX: Final = 1_000
"""Of all backends within a second: a router says so once a second for each that it waits for."""
WAKES_OF_ONE_MAX: Final = 100
NARROW_S: Final = 10.0
"""How long only what can be meant is heard."""
SLEEPING_MAX: Final = 1_000
"""Backends that are heard then; others wait until all are heard again."""
_LOOK_EVERY_S: Final = 1.0


@final
class WakeHearing:
    """Subscribed for as long as it is open."""

    def __init__(
        self,
        client: Client,
        subjects: Subjects,
        refused: RefusedMessages,
        on_wake: Callable[[Wake], None],
        sleeping: Callable[[], Iterable[BackendTag]],
    ) -> None:
        """``sleeping``: backends that were scaled to zero, as far as this controller has a say in it."""
        self._client = client
        self._subjects = subjects
        self._refused = refused
        self._on_wake = on_wake
        self._sleeping = sleeping
        self._held: dict[str, Subscription] = {}
        """By subject."""
        self._counts: Counter[str] = Counter()
        """Of messages since the last look, by the subject that is subscribed."""
        self._narrow_until: float | None = None
        """None while all are heard."""
        self._tasks = TaskOwner("wakes")

    async def open(self) -> None:
        """Raises what the client's ``subscribe`` raises."""
        await self._subscribe(self._subjects.wakes)
        self._tasks.start(self._look_again_and_again(), "look")

    async def close(self) -> None:
        """Hear no more."""
        await self._tasks.close(_LOOK_EVERY_S)
        await self._keep(())

    async def _subscribe(self, subject: str) -> None:
        limit = WAKES_MAX if subject == self._subjects.wakes else WAKES_OF_ONE_MAX

        async def hear(message: Msg) -> None:
            if subject not in self._held:
                return  # it came before that was over
            self._counts[subject] += 1
            if self._counts[subject] > limit:
                await self._hear_less(subject, message.subject)
            else:
                self._take(message)

        self._held[subject] = await self._client.subscribe(subject, cb=hear)

    def _take(self, message: Msg) -> None:
        try:
            wake = msgspec.json.decode(message.data, type=Wake)
            _check_woken(wake, self._subjects.backend_of_wake(message.subject))
        except (*UNREADABLE, BadField) as error:
            self._refused.refuse("wake", message.subject, error)
            return
        self._on_wake(wake)

    async def _hear_less(self, subject: str, last: str) -> None:
        self._refused.refuse("wake", last, BadField("wake", "more than are listened to came within a second"))
        if subject == self._subjects.wakes:
            self._narrow_until = asyncio.get_running_loop().time() + NARROW_S
            _log.warning("wakes_narrowed", last_heard=repr(last[:200]), seconds=NARROW_S)
        await self._end(subject)

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._look()
            except (NatsError, OSError) as error:
                _log.warning("wakes_not_subscribed", error=repr(error))

    async def _look(self) -> None:
        self._counts.clear()
        if self._narrow_until is None:
            return
        if asyncio.get_running_loop().time() >= self._narrow_until:
            self._narrow_until = None
            wanted = [self._subjects.wakes]
        else:
            tags = sorted(self._sleeping())[:SLEEPING_MAX]
            wanted = [self._subjects.wake(tag) for tag in tags]
        await self._keep(wanted)
        for subject in wanted:
            if subject not in self._held:
                await self._subscribe(subject)

    async def _keep(self, wanted: Iterable[str]) -> None:
        for subject in set(self._held).difference(wanted):
            await self._end(subject)

    async def _end(self, subject: str) -> None:
        subscription = self._held.pop(subject, None)
        if subscription is not None:
            try:
                await subscription.unsubscribe()
            except (NatsError, OSError) as error:  # with its connection it is gone anyway
                _log.debug("wakes_not_unsubscribed", error=repr(error))


def _check_woken(wake: Wake, backend_tag: str) -> None:
    if wake.backend_tag != backend_tag:
        raise BadField(
            "backend_tag", f"{wake.backend_tag[:130]!r} is woken on the subject of {backend_tag[:130]!r}"
        )
