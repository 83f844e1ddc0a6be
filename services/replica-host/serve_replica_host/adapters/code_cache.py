"""Fetches uploaded code from the bucket before a replica starts, keeps it on disk, and unpacks archives.

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
from serve_replica_host.replica.archives import PARTIAL, remove_tree, unpack, unpacked_path

_log = structlog.get_logger(__name__)

CACHE_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Largest size of the cache; beyond it, code that was used longest ago and runs nowhere is deleted."""
RETRY_S: Final = 0.5
"""Seconds between attempts while the bucket lacks the code; the controller refills it when a report says so."""
PATIENCE_S: Final = 2.0
"""Seconds of waiting after which a replica's message says what it waits for."""


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

    async def fetch(self, digest: str, *, is_archive: bool = False) -> None:
        """Return once the code is here, and an archive unpacked; waits as long as the bucket lacks it.

        Raises `CodeCorrupt`, OSError.
        """
        lock = self._fetches.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                is_here = await self._has(digest)
                while not is_here:
                    is_here = await self._try_fetch(digest)
                if is_archive:
                    await asyncio.to_thread(unpack, self.path(digest))
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

    async def trim(self, used: set[str]) -> None:
        """Delete the code used longest ago until the cache fits its size; ``used`` code stays."""
        # Moved at once, so that no fetch finds what is about to go.
        doomed = [path.rename(path.with_name(f"{PARTIAL}{path.name}")) for path in self._find_excess(used)]
        for path in doomed:
            await asyncio.to_thread(_delete, path)

    def _find_excess(self, used: set[str]) -> list[Path]:
        files = sorted(
            (entry.stat().st_mtime, entry.stat().st_size * (2 if unpacked_path(entry).exists() else 1), entry)
            for entry in self._directory.iterdir()
            if entry.is_file() and not entry.name.startswith(PARTIAL)
        )
        total, excess = sum(size for _, size, _ in files), []
        for _, size, entry in files:
            if total > CACHE_BYTES_MAX and entry.name not in used:
                excess += [path for path in (entry, unpacked_path(entry)) if path.exists()]
                total -= size
        return excess

    def clean(self) -> None:
        """Delete what an interrupted fetch of a former process left."""
        for entry in self._directory.glob(f"{PARTIAL}*"):
            _delete(entry)


@final
class _PartialFile:
    """Code that arrives page by page."""

    def __init__(self, directory: Path) -> None:
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=PARTIAL)
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


def _delete(path: Path) -> None:
    if path.is_dir():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


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
        self._used: dict[ReplicaTag, set[str]] = {}
        """Code and archives of replicas that exist."""
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
        digests = set(goal.replica_config.uploads.values())
        if not digests:
            self._runtime.start(goal)
            return
        tag = goal.replica_tag
        self._used[tag] = digests
        self._fetching[tag] = self._tasks.start(self._fetch_and_start(goal, sorted(digests)), f"fetch {tag}")

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

    async def _fetch_and_start(self, goal: ReplicaGoal, digests: list[str]) -> None:
        tag, archives = goal.replica_tag, goal.replica_config.archives
        text = f"waits for its code {' and '.join(digests)} to arrive"
        waits = Waits(tag, text, is_process_starting=False)
        notice = asyncio.get_running_loop().call_later(PATIENCE_S, self._on_event, waits)
        try:
            for digest in digests:
                await self._cache.fetch(digest, is_archive=digest in archives)
            await self._cache.trim(set().union(*self._used.values()))
        except (ServeError, OSError) as error:
            self._fetching.pop(tag, None)
            is_unusable = isinstance(error, CodeCorrupt)
            self._on_event(ReplicaStartFailed(tag, f"its code cannot be used: {error}", is_unusable))
            self._end(tag, str(error))
            return
        finally:
            notice.cancel()
        if self._fetching.pop(tag, None) is not None:
            self._runtime.start(goal)

    def _end(self, tag: ReplicaTag, reason: str) -> None:
        self._used.pop(tag, None)
        self._on_event(ProcessEnded(tag, reason))
