"""Acquires, renews and releases leadership, and tracks whether the bus responds to this controller."""

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
PING_TIMEOUT_S: Final = 2.0
"""Seconds after which a round trip without a response means that the bus is unavailable."""


@final
class BusLiveness:
    """Tracks from round trips whether the bus is available.

    The client's own state is not enough: a NATS server that hangs resets no connection, and the client notices that
    only after ten seconds or more. A host or proxy that is silent meanwhile is not to blame.
    """

    def __init__(self, now: float) -> None:
        self.is_away = False
        self._responded_at = now
        """When the newest response arrived or the connection was made."""

    def went(self) -> None:
        """The connection was lost."""
        self.is_away = True

    def came(self, now: float) -> None:
        """The connection was restored."""
        self.is_away = False
        self._responded_at = now

    def unanswered(self, started_at: float) -> bool:
        """The round trip begun at ``started_at`` timed out; True if that made the bus unavailable."""
        if self.is_away or started_at < self._responded_at:
            return False  # it was lost with a former connection
        self.is_away = True
        return True

    def record_response(self, now: float) -> bool:
        """The bus responded; True when it was unavailable until now.

        A gap without responses counts too: this process may have been suspended, and what others sent meanwhile may not
        have been read yet.
        """
        was_away = self.is_away or now - self._responded_at > PING_EVERY_S + PING_TIMEOUT_S
        self.came(now)
        return was_away


_log = structlog.get_logger()

LEASE_TTL_S: Final = 5.0
RENEW_EVERY_S: Final = LEASE_TTL_S / 3
STANDBY_POLL_S: Final = 0.25
STORE_RETRY_S: Final = 0.5
HEARTBEAT_S: Final = 0.5
STORE_SLOW_S: Final = 2.0
"""Seconds without a response from the store after which a leader is not ready, before the attempt has failed."""

Lead = Callable[[int, Checkpoint], Awaitable[None]]
"""Leads with an epoch from a checkpoint until cancelled, or raises `FencedOut`."""


class Leadership:
    """Leads whenever it holds the lease in the store, until cancelled.

    The database decides because only it can also refuse a stale leader's writes. A controller that cannot renew its
    lease does not know whether it still leads: it continues to answer queries, and the fence refuses each of its writes
    if another one has taken over. One that was suspended for as long as its lease must ask the store first (`is_sure`).
    """

    def __init__(self, controller_id: ControllerId, store: Store, lead: Lead) -> None:
        self._controller_id = controller_id
        self._store = store
        self._lead = lead
        self.epoch: int | None = None
        """The epoch while this controller leads."""
        self.is_store_unavailable = False
        """Whether the last request to the store failed: nothing can be recorded, and no controller can take over."""
        self.is_store_slow = False
        """Whether a leader's renewal has been waiting for `STORE_SLOW_S`."""
        self._lease = asyncio.Lock()
        self._heartbeat_at = float("-inf")
        """When the lease was last known to be ours or, failing that, when the last request to the store failed."""
        self._is_in_doubt = False
        self._requested_at: float | None = None
        """When the pending renewal was sent; None while none is pending."""

    @property
    def is_sure(self) -> bool:
        """False after this process was suspended for so long that another one may lead, until the store has confirmed.

        A store that does not respond is no reason to doubt: then no controller can take over.
        """
        return not self._is_in_doubt and not self._was_suspended()

    async def run(self) -> None:
        """Become leader, lead, and start over when leadership is lost."""
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
        """Begin a new epoch, higher than ``above``, within the term; writes of the former one are fenced from then on.

        Raises `FencedOut` when another controller took over, `StoreUnavailable` when the store is unavailable.
        """
        async with self._lease:
            epoch = await self._acquire(above)
            if epoch is None:
                raise FencedOut("another controller leads")
            self.epoch = epoch
            return epoch

    async def _acquire(self, above: int = 0) -> int | None:
        started_at = asyncio.get_running_loop().time()
        epoch = await self._store.acquire_leadership(self._controller_id, LEASE_TTL_S, above)
        if epoch is not None:
            self._confirm_lease(started_at)
        return epoch

    async def _gain(self) -> tuple[int, Checkpoint]:
        failures = 0
        is_migrated = has_stood_by = False
        while True:
            raise_if_cancelled()
            try:
                if not is_migrated:
                    await self._store.migrate()
                    # Once: a standby must put next to no load on the database, and hold no lock in it.
                    is_migrated = True
                epoch = await self._acquire()
                self.is_store_unavailable = False
                if epoch is not None:
                    return epoch, await self._load(epoch, has_stood_by=has_stood_by)
                if not has_stood_by:
                    _log.info("standing_by")
                failures, has_stood_by = 0, True
                await asyncio.sleep(STANDBY_POLL_S)
            except StoreUnavailable as error:
                is_migrated = False
                self.is_store_unavailable = True
                failures += 1
                if failures in (1, 20):
                    _log.warning("store_unavailable", error=str(error), failures=failures)
                await asyncio.sleep(STORE_RETRY_S)

    async def _load(self, epoch: int, *, has_stood_by: bool) -> Checkpoint:
        try:
            if has_stood_by:
                # A newer controller may have led meanwhile: check that its schema can still be written.
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
            # Errors are kept from the task group: one that ends with an error swallows a cancellation from outside.
            try:
                await part()
            except FencedOut as error:
                lost.append(error)
                for other in parts:
                    other.cancel()

        try:
            async with asyncio.TaskGroup() as tasks:
                parts.append(tasks.create_task(until_lost(self._renew), name="renew_leadership"))
                parts.append(tasks.create_task(until_lost(self._heartbeat_periodically), name="keep_beating"))
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
            due_in_s = self._heartbeat_at + RENEW_EVERY_S - asyncio.get_running_loop().time()
            await asyncio.sleep(due_in_s if self.is_sure else min(due_in_s, STORE_RETRY_S))
            async with self._lease:
                assert self.epoch is not None
                self._heartbeat()
                started_at = self._requested_at = self._heartbeat_at
                try:
                    await self._store.renew_leadership(self._controller_id, self.epoch, LEASE_TTL_S)
                except StoreUnavailable as error:
                    self._heartbeat()
                    self.is_store_unavailable = True
                    _log.warning("leadership_not_renewed", epoch=self.epoch, error=str(error))
                else:
                    self.is_store_unavailable = False
                    self._confirm_lease(started_at)
                finally:
                    self._requested_at, self.is_store_slow = None, False

    async def _heartbeat_periodically(self) -> None:
        """Beat beside `_renew`: a hanging store may block it for longer than the lease, which is no suspension."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(HEARTBEAT_S)
            self._heartbeat()
            requested_at = self._requested_at
            self.is_store_slow = (
                requested_at is not None and self._heartbeat_at - requested_at >= STORE_SLOW_S
            )

    def _confirm_lease(self, started_at: float) -> None:
        """The store confirmed the lease; the request was sent at ``started_at``."""
        self._heartbeat_at = started_at
        self._is_in_doubt = False

    def _heartbeat(self) -> None:
        self._is_in_doubt = self._is_in_doubt or self._was_suspended()
        self._heartbeat_at = asyncio.get_running_loop().time()

    def _was_suspended(self) -> bool:
        return asyncio.get_running_loop().time() - self._heartbeat_at >= LEASE_TTL_S

    async def _release(self, epoch: int) -> None:
        """Release the lease on an ordered stop, so that the next controller need not wait for its end."""
        try:
            async with asyncio.timeout(2.0):
                await self._store.release_leadership(self._controller_id, epoch)
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("leadership_not_released", epoch=epoch, error=repr(error))
