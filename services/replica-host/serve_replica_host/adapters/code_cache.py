"""Fetches uploaded code from the bucket before a replica starts, and keeps it on disk.

Why the host and not the replica: one copy serves all of its replicas, and user code needs no right to read the code of
others. What is not what its digest names starts nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import structlog
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js.errors import APIError, NotFoundError

from serve_common.errors import BusUnavailable, ServeError
from serve_common.names import ReplicaTag
from serve_common.protocol.code import CODE_BYTES_MAX, CodeCorrupt, compare_digests
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_replica_host.adapters.control_bus import ControlBus
from serve_replica_host.adapters.ray_process import IdentifiedReplicas
from serve_replica_host.core.events import ProcessEnded, ReplicaEvent, ReplicaStartFailed, Waits

_log = structlog.get_logger(__name__)

CACHE_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest size of the cache; beyond it, code that was used longest ago and runs nowhere is deleted."""
RETRY_S: Final = 0.5
"""Seconds between attempts while the bucket lacks the code; the controller refills it when a report says so."""
PATIENCE_S: Final = 2.0
"""Seconds of waiting after which a replica's message says what it waits for."""
_PARTIAL: Final = "fetch-"


@final
class CodeCache:
    """Code on this machine's disk, by digest."""

    def __init__(self, directory: Path, bus: ControlBus) -> None:
        """``directory`` exists; replicas can read it."""
        self._directory = directory
        self._bus = bus
        self._fetches: dict[str, asyncio.Lock] = {}
        self.missing: set[str] = set()
        """Digests of code that is waited for and that the bucket lacks."""

    def path(self, digest: str) -> Path:
        """Where the code is, once it was fetched."""
        return self._directory / digest

    async def fetch(self, digest: str) -> None:
        """Return once the code is here; waits as long as the bucket lacks it. Raises `CodeCorrupt`, OSError."""
        lock = self._fetches.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                is_here = await self._has(digest)
                while not is_here:
                    is_here = await self._try_fetch(digest)
        finally:
            self.missing.discard(digest)
            if not lock.locked():  # a waiter that is yet to run fetches by itself, which does no harm
                self._fetches.pop(digest, None)

    async def _try_fetch(self, digest: str) -> bool:
        """Whether the code is here now; after a failure that may pass, it has waited before the next attempt."""
        try:
            await self._download(digest)
            return True
        except (NotFoundError, NoRespondersError):  # the page, or the whole bucket
            self.missing.add(digest)
        except (NatsError, APIError, OSError, TimeoutError, BusUnavailable) as error:
            if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
                raise  # of the disk
            _log.warning("code_not_fetched", digest=digest, error=repr(error))
        await asyncio.sleep(RETRY_S)
        return False

    async def _has(self, digest: str) -> bool:
        path = self.path(digest)
        if not path.exists():
            return False
        if await asyncio.to_thread(_hash_file, path) == digest:
            os.utime(path)
            return True
        _log.error("cached_code_was_changed", digest=digest)
        path.unlink()
        return False

    async def _download(self, digest: str) -> None:
        part = await asyncio.to_thread(_PartialFile, self._directory)
        try:
            page, pages = 0, 1
            while page < pages:
                data, pages = await self._bus.read_code_page(digest, page)
                part.add(data)
                page += 1
            await asyncio.to_thread(part.finish, digest, self.path(digest))
        finally:
            part.discard()

    def trim(self, used: set[str]) -> None:
        """Delete the code used longest ago until the cache fits its size; ``used`` code stays."""
        files = sorted(
            (entry.stat().st_mtime, entry.stat().st_size, entry)
            for entry in self._directory.iterdir()
            if not entry.name.startswith(_PARTIAL)
        )
        total = sum(size for _, size, _ in files)
        for _, size, entry in files:
            if total <= CACHE_BYTES_MAX:
                return
            if entry.name not in used:
                entry.unlink(missing_ok=True)
                total -= size

    def clean(self) -> None:
        """Delete what an interrupted fetch of a former process left."""
        for entry in self._directory.glob(f"{_PARTIAL}*"):
            entry.unlink(missing_ok=True)


@final
class _PartialFile:
    """Code that arrives page by page."""

    def __init__(self, directory: Path) -> None:
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=_PARTIAL)
        self._file = os.fdopen(descriptor, "wb")
        self._path = Path(name)
        self._hash = hashlib.sha256()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Append a page. Raises `CodeCorrupt` when there is more than code may have."""
        self._size += len(data)
        if self._size > CODE_BYTES_MAX:
            raise CodeCorrupt(f"the bucket has code of more than {CODE_BYTES_MAX:,} bytes")
        self._hash.update(data)
        self._file.write(data)

    def finish(self, digest: str, path: Path) -> None:
        """Move it to ``path``, for everyone to read, if it is what ``digest`` names. Raises `CodeCorrupt`."""
        compare_digests(self._hash.hexdigest(), digest)
        self._file.flush()
        os.fchmod(self._file.fileno(), 0o444)
        self._path.rename(path)

    def discard(self) -> None:
        """Close it; what was not finished is deleted."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@final
class ReplicasWithCode:
    """A `ports.ReplicaRuntime` in front of another: a replica with uploaded code starts once the code is here."""

    def __init__(
        self, runtime: IdentifiedReplicas, cache: CodeCache, on_event: Callable[[ReplicaEvent], None]
    ) -> None:
        """``on_event`` receives the events of starts that never reached ``runtime``."""
        self._runtime = runtime
        self._cache = cache
        self._on_event = on_event
        self._tasks = TaskOwner("code")
        self._fetching: dict[ReplicaTag, OwnedTask] = {}
        self._used: dict[ReplicaTag, str] = {}
        """Code of replicas that exist."""
        self.reconfigure: Final = runtime.reconfigure
        self.check_health: Final = runtime.check_health
        self.drain: Final = runtime.drain
        self.kill_by_force: Final = runtime.kill_by_force

    @property
    def resources(self) -> dict[str, float]:
        """Total resources by Ray's names."""
        return self._runtime.resources

    def start(self, goal: ReplicaGoal) -> None:
        """Start the replica, once its code is here."""
        digest = goal.replica_config.code
        if not digest:
            self._runtime.start(goal)
            return
        tag = goal.replica_tag
        self._used[tag] = digest
        self._fetching[tag] = self._tasks.start(self._fetch_and_start(goal, digest), f"fetch {tag}")

    def kill(self, replica_tag: ReplicaTag) -> None:
        """Kill the replica's process, or end the wait for its code."""
        fetching = self._fetching.pop(replica_tag, None)
        if fetching is None:
            self._runtime.kill(replica_tag)
        else:
            fetching.cancel()
            self._end(replica_tag, "it was not wanted any more before its code was here")

    def take_event(self, event: ReplicaEvent) -> None:
        """Forget replicas that have ended."""
        if isinstance(event, ProcessEnded):
            self._used.pop(event.replica_tag, None)

    async def close(self, timeout_s: float) -> None:
        """Cancel the fetches."""
        await self._tasks.close(timeout_s)

    async def _fetch_and_start(self, goal: ReplicaGoal, digest: str) -> None:
        tag = goal.replica_tag
        waits = Waits(tag, f"waits for its code {digest} to arrive", is_process_starting=False)
        notice = asyncio.get_running_loop().call_later(PATIENCE_S, self._on_event, waits)
        try:
            await self._cache.fetch(digest)
            self._cache.trim(set(self._used.values()))
        except (ServeError, OSError) as error:
            self._fetching.pop(tag, None)
            self._on_event(ReplicaStartFailed(tag, f"its code cannot be used: {error}"))
            self._end(tag, str(error))
            return
        finally:
            notice.cancel()
        if self._fetching.pop(tag, None) is not None:
            self._runtime.start(goal)

    def _end(self, tag: ReplicaTag, reason: str) -> None:
        self._used.pop(tag, None)
        self._on_event(ProcessEnded(tag, reason))
