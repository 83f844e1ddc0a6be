"""Gaining, keeping and losing leadership, and whether the bus answers this controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, final

import structlog

from serve_common.errors import FencedOut, PermanentError, StoreUnavailable
from serve_common.names import ControllerId
from serve_common.runtime.tasks import raise_if_cancelled
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.ports import Store

PING_EVERY_S: Final = 1.0
ANSWER_WITHIN_S: Final = 2.0
"""A round trip that takes longer says that the bus is away."""


@final
class BusLiveness:
    """Takes in round trips, and says when the bus went and came."""

    def __init__(self, now: float) -> None:
        self.is_away = False
        self._answered_at = now
        """When the newest answer came, or the connection."""

    def went(self) -> None:
        """The connection is lost."""
        self.is_away = True

    def came(self, now: float) -> None:
        """The connection is there again."""
        self.is_away = False
        self._answered_at = now

    def unanswered(self, begun_at: float) -> bool:
        """What was asked at ``begun_at`` was not answered within `ANSWER_WITHIN_S`; True when the bus went by that."""
        if self.is_away or begun_at < self._answered_at:
            return False  # it was lost with a connection that has been made anew since
        self.is_away = True
        return True

    def answered(self, now: float) -> bool:
        """The bus answered; True when it was away until now.

        It counts as away also while nobody noticed: this process may have stood still itself, and what others said
        meanwhile may not have been read yet.
        """
        was_away = self.is_away or now - self._answered_at > PING_EVERY_S + ANSWER_WITHIN_S
        self.came(now)
        return was_away


_log = structlog.get_logger()

LEASE_TTL_S: Final = 5.0
RENEW_EVERY_S: Final = LEASE_TTL_S / 3
STANDBY_POLL_S: Final = 0.25
STORE_RETRY_S: Final = 0.5
BEAT_S: Final = 0.5
STORE_SLOW_S: Final = 2.0
"""A leader whose store has not answered for so long is not ready, before the attempt has failed."""

Lead = Callable[[int, Checkpoint], Awaitable[None]]
"""Leads with an epoch from a checkpoint until cancelled, or raises `FencedOut`."""


class Leadership:
    """Leads whenever the store says so; for ever, until cancelled."""

    def __init__(self, controller_id: ControllerId, store: Store, lead: Lead) -> None:
        self._controller_id = controller_id
        self._store = store
        self._lead = lead
        self.epoch: int | None = None
        """The epoch while this controller leads."""
        self.is_store_away = False
        """Whether the store was asked in vain last: nothing could be recorded, and nobody could take over."""
        self.is_store_slow = False
        """Whether it has not answered a renewal for `STORE_SLOW_S`; a leader's only."""
        self._lease = asyncio.Lock()
        self._beat_at = float("-inf")
        """When the lease was last known to be ours or, failing that, when the store was last asked in vain."""
        self._is_in_doubt = False
        self._asked_at: float | None = None
        """Since when the store has not answered a renewal; None while it is not asked."""

    @property
    def is_sure(self) -> bool:
        """False after this process stood still for so long that another one may lead, until the store was asked.

        A store that does not answer is no reason to doubt: then nobody can take over.
        """
        return not self._is_in_doubt and not self._has_stood_still()

    async def run(self) -> None:
        """Become leader, lead, and begin again when leadership is lost."""
        while True:
            epoch, checkpoint = await self._gain()
            _log.info("leadership_gained", epoch=epoch)
            self.epoch = epoch
            try:
                await self._lead_while_renewed(epoch, checkpoint)
            except FencedOut as lost:
                _log.warning("leadership_lost", epoch=self.epoch, reason=str(lost))
            finally:
                self.epoch = None

    async def regain(self, above: int = 0) -> int:
        """Begin a new epoch, higher than ``above``, within the term: no write of unknown fate can be made any more.

        Raises `FencedOut` when another controller took over, `StoreUnavailable` when the store is away.
        """
        async with self._lease:
            epoch = await self._acquire(above)
            if epoch is None:
                raise FencedOut("another controller leads")
            self.epoch = epoch
            return epoch

    async def _acquire(self, above: int = 0) -> int | None:
        begun = asyncio.get_running_loop().time()
        epoch = await self._store.acquire_leadership(self._controller_id, LEASE_TTL_S, above)
        if epoch is not None:
            self._know_from(begun)
        return epoch

    async def _gain(self) -> tuple[int, Checkpoint]:
        failures = 0
        is_migrated = has_stood_by = False
        while True:
            raise_if_cancelled()
            try:
                if not is_migrated:
                    await self._store.migrate()
                    # Once: standing by must cost the database next to nothing, and hold no lock in it.
                    is_migrated = True
                epoch = await self._acquire()
                self.is_store_away = False
                if epoch is not None:
                    return epoch, await self._load(epoch, has_stood_by=has_stood_by)
                if not has_stood_by:
                    _log.info("standing_by")
                failures, has_stood_by = 0, True
                await asyncio.sleep(STANDBY_POLL_S)
            except StoreUnavailable as error:
                is_migrated = False
                self.is_store_away = True
                failures += 1
                if failures in (1, 20):
                    _log.warning("store_unavailable", error=str(error), failures=failures)
                await asyncio.sleep(STORE_RETRY_S)

    async def _load(self, epoch: int, *, has_stood_by: bool) -> Checkpoint:
        try:
            if has_stood_by:
                # A newer controller may have been here; its schema is not ours to write.
                await self._store.migrate()
            checkpoint = await self._store.load()
        except PermanentError:
            await self._release(epoch)
            raise
        if not self.is_sure:
            raise StoreUnavailable("loading the checkpoint took longer than the lease")
        return checkpoint

    async def _lead_while_renewed(self, epoch: int, checkpoint: Checkpoint) -> None:
        lost: list[FencedOut] = []
        parts: list[asyncio.Task[None]] = []

        async def until_lost(part: Callable[[], Awaitable[None]]) -> None:
            # No error to the task group: one that ends with an error keeps a cancellation from outside to itself.
            try:
                await part()
            except FencedOut as error:
                lost.append(error)
                for other in parts:
                    other.cancel()

        try:
            async with asyncio.TaskGroup() as tasks:
                parts.append(tasks.create_task(until_lost(self._renew), name="renew_leadership"))
                parts.append(tasks.create_task(until_lost(self._keep_beating), name="keep_beating"))
                parts.append(
                    tasks.create_task(until_lost(lambda: self._lead(epoch, checkpoint)), name="lead")
                )
        except asyncio.CancelledError:
            assert self.epoch is not None
            await self._release(self.epoch)
            raise
        if lost:
            raise lost[0]

    async def _renew(self) -> None:
        while True:
            raise_if_cancelled()
            due_in_s = self._beat_at + RENEW_EVERY_S - asyncio.get_running_loop().time()
            await asyncio.sleep(due_in_s if self.is_sure else min(due_in_s, STORE_RETRY_S))
            async with self._lease:
                assert self.epoch is not None
                self._beat()
                begun = self._asked_at = self._beat_at
                try:
                    await self._store.renew_leadership(self._controller_id, self.epoch, LEASE_TTL_S)
                except StoreUnavailable as error:
                    self._beat()
                    self.is_store_away = True
                    _log.warning("leadership_not_renewed", epoch=self.epoch, error=str(error))
                else:
                    self.is_store_away = False
                    self._know_from(begun)
                finally:
                    self._asked_at, self.is_store_slow = None, False

    async def _keep_beating(self) -> None:
        """A store that hangs holds up whoever asks it, for longer than the lease; that is no standing still."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(BEAT_S)
            self._beat()
            asked_at = self._asked_at
            self.is_store_slow = asked_at is not None and self._beat_at - asked_at >= STORE_SLOW_S

    def _know_from(self, begun: float) -> None:
        """The store has said that the lease is ours; it was asked at ``begun``."""
        self._beat_at = begun
        self._is_in_doubt = False

    def _beat(self) -> None:
        self._is_in_doubt = self._is_in_doubt or self._has_stood_still()
        self._beat_at = asyncio.get_running_loop().time()

    def _has_stood_still(self) -> bool:
        return asyncio.get_running_loop().time() - self._beat_at >= LEASE_TTL_S

    async def _release(self, epoch: int) -> None:
        """On an ordered stop the next controller need not wait for the lease to end."""
        try:
            async with asyncio.timeout(2.0):
                await self._store.release_leadership(self._controller_id, epoch)
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("leadership_not_released", epoch=epoch, error=repr(error))
