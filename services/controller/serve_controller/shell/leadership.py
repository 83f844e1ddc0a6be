"""Gaining, keeping and losing leadership.

Why the database judges: only it can also refuse a stale leader's writes. A controller that cannot renew its lease does
not know whether it still leads; it goes on answering queries, and every write it tries is refused by the fence if
another one has taken over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from serve_common.errors import FencedOut, StoreUnavailable
from serve_common.names import ControllerId
from serve_common.tasks import raise_if_cancelled
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.ports import Store

_log = structlog.get_logger()

LEASE_TTL_S: Final = 5.0
RENEW_EVERY_S: Final = LEASE_TTL_S / 3
STANDBY_POLL_S: Final = 0.5
STORE_RETRY_S: Final = 0.5

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
        self._lease = asyncio.Lock()

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

    async def regain(self) -> int:
        """Begin a new epoch within the term, so that a write of unknown fate can no longer be made.

        Raises `FencedOut` when another controller took over, `StoreUnavailable` when the store is away.
        """
        async with self._lease:
            epoch = await self._store.acquire_leadership(self._controller_id, LEASE_TTL_S)
            if epoch is None:
                raise FencedOut("another controller leads")
            self.epoch = epoch
            return epoch

    async def _gain(self) -> tuple[int, Checkpoint]:
        failures = 0
        while True:
            try:
                await self._store.migrate()
                epoch = await self._store.acquire_leadership(self._controller_id, LEASE_TTL_S)
                if epoch is not None:
                    return epoch, await self._store.load()
                failures = 0
                await asyncio.sleep(STANDBY_POLL_S)
            except StoreUnavailable as error:
                failures += 1
                if failures in (1, 20):
                    _log.warning("store_unavailable", error=str(error), failures=failures)
                await asyncio.sleep(STORE_RETRY_S)

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
                parts.append(
                    tasks.create_task(until_lost(lambda: self._lead(epoch, checkpoint)), name="lead")
                )
        except asyncio.CancelledError:
            await self._release()
            raise
        if lost:
            raise lost[0]

    async def _renew(self) -> None:
        while True:
            raise_if_cancelled()
            await asyncio.sleep(RENEW_EVERY_S)
            async with self._lease:
                assert self.epoch is not None
                try:
                    await self._store.renew_leadership(self._controller_id, self.epoch, LEASE_TTL_S)
                except StoreUnavailable as error:
                    _log.warning("leadership_not_renewed", epoch=self.epoch, error=str(error))

    async def _release(self) -> None:
        """On an ordered stop the next controller need not wait for the lease to end."""
        epoch = self.epoch
        assert epoch is not None
        try:
            async with asyncio.timeout(2.0):
                await self._store.release_leadership(self._controller_id, epoch)
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("leadership_not_released", epoch=epoch, error=repr(error))
