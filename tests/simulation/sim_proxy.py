"""A proxy as the control plane sees it: the real table of snapshots, filled from the bucket, and its reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from serve_common.config.backend import HttpOptions
from serve_common.names import BackendTag, EndpointTag, ProxyId, ReplicaTag
from serve_common.protocol.reports import ProxyReport
from serve_common.protocol.snapshots import BackendSnapshot, EndpointSnapshot, Snapshot
from serve_common.protocol.subjects import HTTP_KEY
from serve_common.routing.request_counts import RequestCounter, renewed_counter
from serve_common.routing.route_table import HttpChange, SnapshotTable
from tests.simulation.rollout_wishes import BAD

if TYPE_CHECKING:
    from tests.simulation.world import World

REPORT_INTERVAL_S: Final = 1.0
COALESCE_S: Final = 0.01
JUDGED_INTERVAL_S: Final = 0.5
REQUESTS: Final = 400
"""Of each endpoint through each proxy between two reports."""
MISSING_MIDDLEWARE: Final = "missing:middleware"
"""No proxy can import it."""


class SimProxy:
    """One proxy; each start of it is a new life that knows nothing."""

    def __init__(self, world: World, proxy_id: str) -> None:
        self.world, self.proxy_id = world, ProxyId(proxy_id)
        self.is_up = False
        self.lives = 0
        self.start()

    def start(self) -> None:
        """A new process: it reads the whole bucket before it serves."""
        self.lives += 1
        self.is_up = True
        self.is_leaving = False
        self.born_at = self.world.time
        self.sequence = 0
        self.table = SnapshotTable()
        self.backends: dict[BackendTag, BackendSnapshot] = {}
        self.endpoints: dict[EndpointTag, EndpointSnapshot] = {}
        self.options: HttpOptions | None = None
        self.ids: dict[str, int] = {}
        """The newest snapshot of each key that it took."""
        self.http_error, self.http_error_id = "", 0
        self._newest_id = 0
        self._is_open = False
        """The first options that were found are in force, or there were none."""
        self._is_report_due = False
        self.counts: dict[BackendTag, RequestCounter] = {}
        """What became of the requests of backends that take part in rollouts, in this life."""
        self.world.bus.open_watch(self)
        self._tick(self.lives)

    def stop(self) -> None:
        """The process is killed."""
        self.is_up = False

    def leave(self) -> None:
        """SIGTERM: it says so, and ends."""
        if self.is_up:
            self.is_leaving = True
            self.report()
            life = self.lives
            self.world.after(1.5, lambda: self.stop() if self.lives == life else None)

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.is_up and not self.is_leaving and self.table.is_filled and self._is_open

    @property
    def applied(self) -> int:
        """What it says it applied."""
        return self.table.applied_snapshot_id

    def _tick(self, life: int) -> None:
        if self.is_up and self.lives == life:
            self._serve_judged()
            self.report()
            interval_s = JUDGED_INTERVAL_S if self.counts else REPORT_INTERVAL_S
            self.world.after(interval_s, lambda: self._tick(life))

    def _serve_judged(self) -> None:
        """Requests since the last tick, of the backends that take part in rollouts."""
        judged = {tag for tag, backend in self.backends.items() if backend.is_judged}
        renewed = {
            tag: renewed_counter(self.counts.get(tag), self.backends[tag].rollout_id)
            for tag in sorted(judged)
        }
        self.counts = {tag: counter for tag, counter in renewed.items() if counter is not None}
        if not self.serves:
            return
        for endpoint in self.endpoints.values():
            for tag in judged & endpoint.traffic.keys():
                backend = self.world.store.checkpoint.backends.get(tag)
                version = "" if backend is None else backend.target.version or ""
                number = round(REQUESTS * endpoint.traffic[tag])
                for n in range(number):
                    status = 500 if version.startswith(BAD) and n % 2 else 200
                    self.counts[tag].add(status, 0.02 if n % 3 else 0.05)
                self.world.requests[tag] += number

    def hear(self, entries: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """The bucket's content came, in the order of its changes."""
        if not self.is_up:
            return
        before = self.applied
        changes = self.table.update(entries, whole=whole)
        self.world.check(not changes.ignored, f"{self.proxy_id} cannot understand {changes.ignored}")
        for tag, backend in changes.backends.items():
            _put(self.backends, tag, backend)
        for endpoint_tag, endpoint in changes.endpoints.items():
            _put(self.endpoints, endpoint_tag, endpoint)
        for key, snapshot in entries.items():
            if snapshot is not None:
                self.ids[key] = max(snapshot.snapshot_id, self.ids.get(key, 0))
            if key != HTTP_KEY:
                self.table.confirm(key)
        if changes.http is not None:
            self._take_options(changes.http)
        elif self.table.is_filled and self._newest_id == 0:
            self._is_open = True
        if self.applied != before or whole:
            self._report_soon()
        self.world.checks.on_proxy(self)

    def _take_options(self, change: HttpChange) -> None:
        if 0 < change.snapshot_id <= self._newest_id:
            return  # told again
        self._newest_id = max(self._newest_id, change.snapshot_id)
        if change.options is None or not change.options.middlewares:
            self._settle(change, "")
            return
        error = "ModuleNotFoundError: missing" if MISSING_MIDDLEWARE in change.options.middlewares else ""
        life = self.lives
        self.world.after(self.world.dice.uniform(0.01, 0.5), lambda: self._settle(change, error, life))

    def _settle(self, change: HttpChange, error: str, life: int | None = None) -> None:
        if not self.is_up or life not in (None, self.lives) or change.snapshot_id < self._newest_id:
            return
        if error:
            self.http_error, self.http_error_id = error, change.snapshot_id
        else:
            self.options, self.http_error, self.http_error_id = change.options, "", 0
            self._is_open = True
        self.table.confirm(HTTP_KEY, change.snapshot_id)
        self._report_soon()

    def _report_soon(self) -> None:
        if self._is_report_due:
            return
        self._is_report_due, life = True, self.lives

        def report() -> None:
            if self.lives == life and self.is_up:
                self._is_report_due = False
                self.report()

        self.world.after(COALESCE_S, report)

    def report(self) -> None:
        """Tell the controllers what is applied."""
        self.sequence += 1
        self.world.tell_controllers(
            ProxyReport(
                proxy_id=self.proxy_id,
                incarnation=str(self.lives),
                sequence=self.sequence,
                started_at=self.born_at,
                applied_snapshot_id=self.applied,
                http_error=self.http_error,
                http_error_snapshot_id=self.http_error_id,
                leaving=self.is_leaving,
                request_counts={tag: counts.report() for tag, counts in self.counts.items()},
            )
        )

    def routed(self, tag: BackendTag) -> set[ReplicaTag]:
        """The replicas of a backend that it sends new requests to, provided that an endpoint leads there."""
        backend = self.backends.get(tag)
        if backend is None or not any(tag in e.traffic or tag in e.shadows for e in self.endpoints.values()):
            return set()
        return set(backend.replicas)


def _put(table: dict, key: str, value: object | None) -> None:  # type: ignore[type-arg]  # of any two types
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
