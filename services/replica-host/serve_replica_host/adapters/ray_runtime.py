"""Runs replicas as Ray actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, final

import msgspec
import ray
import structlog
from msgspec.msgpack import decode, encode
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group

from serve_common.config.backend import RayActorOptions
from serve_common.config.runtime_env import setup_seconds
from serve_common.identities.credentials import UserIdentity
from serve_common.names import ReplicaTag
from serve_common.protocol.evaluation import RESULT_BYTES_MAX
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.local_process import LocalProcess
from serve_replica_host.adapters.metrics_files import RemoteFiles
from serve_replica_host.adapters.ray_protocol import RaySettings, RayUnavailable
from serve_replica_host.adapters.ray_session import (
    RayResources,
    absolute_app_dir,
    actor_options,
    describe_end,
    describe_needs,
    fits_spare,
    host_location,
    open_ray,
)
from serve_replica_host.adapters.ray_thread import RayActorHandle, RayThread, SparePool, Urgency
from serve_replica_host.adapters.remote_replicas import RemoteReplicas
from serve_replica_host.core.events import (
    Constructed,
    Drained,
    Evaluated,
    HealthChecked,
    HealthCheckSent,
    Placed,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
    ReplicaStartFailed,
    Waits,
)
from serve_replica_host.replica.actor import CONTROL_THREADS, ReplicaActor
from serve_replica_host.replica.process import ControlOutcome, StartReplicaRequest
from serve_replica_host.replica.telemetry.remote import Hello

_log = structlog.get_logger(__name__)


@final
class HostLoop:
    """Schedules calls on the loop that called `open`; the other methods may be called on any thread after that.

    Ray's threads may outlast the loop; their calls are then dropped.
    """

    def __init__(self, thread: RayThread) -> None:
        self._thread = thread
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Use the running loop."""
        self._loop = asyncio.get_running_loop()

    def call(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run ``call`` on the loop."""
        self._on_loop(lambda loop: loop.call_soon_threadsafe(call, *arguments))

    def call_ray_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run ``call`` on the Ray thread, after ``delay_s``."""

        def later(loop: asyncio.AbstractEventLoop) -> None:
            loop.call_soon_threadsafe(loop.call_later, delay_s, self._thread.post, call, *arguments)

        self._on_loop(later)

    def _on_loop(self, call: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
        assert self._loop is not None, "open comes first"
        try:
            call(self._loop)
        except RuntimeError as error:  # the loop is closed: the host exits
            _log.debug("event_after_the_end", error=str(error))


PLACEMENT_REPORT_DELAY_S: Final = 2.0
"""Seconds after which the report names what a start waits for; a process usually starts in well under a second."""
SPARE_RESTART_DELAY_S: Final = 5.0
"""Seconds before an ended spare is replaced; the reason of its end may persist."""
_SHUTDOWN_TIMEOUT_S: Final = 10.0


@final
class RayRuntime:
    """A `ports.ReplicaRuntime` on Ray; events arrive on the loop that called `open`.

    Why no call to an actor is waited for: the result of each comes as the future of its ObjectRef, and becomes an
    event. The death of a replica is detected within milliseconds by a call that never returns (`wait_for_exit`).

    Why two ways to start: a spare, an actor that has started already, becomes a replica at once, but has no resources.
    So a placement group reserves the replica's CPUs as long as it lives, and Ray's accounting stays right. A replica
    that needs more than CPUs gets an actor of its own.
    """

    def __init__(
        self,
        settings: RaySettings,
        on_event: Callable[[ReplicaEvent], None],
        *,
        files: RemoteFiles,
        write_lines: Callable[[bytes], None],
    ) -> None:
        """``files`` and ``write_lines`` receive metrics and log lines of replicas on other machines."""
        self._settings = settings
        self._is_local = settings.address is None
        self._on_event = on_event
        self._thread = RayThread()
        self._loop = HostLoop(self._thread)
        self._processes: dict[ReplicaTag, LocalProcess] = {}
        # Added on the loop, removed on either thread, atomically:
        self._pending_starts: dict[ReplicaTag, tuple[ReplicaGoal, BusSettings]] = {}
        """Starts queued for the Ray thread."""
        self._pending_kills: set[ReplicaTag] = set()
        """Kills queued for the Ray thread."""
        # Used on the Ray thread only:
        self._actors: dict[ReplicaTag, RayActorHandle] = {}
        self._actor_class: Any = None
        self._location = b""
        self._resources = RayResources(self._loop.call_ray_later)
        self._remote = RemoteReplicas(
            files, write_lines, post=self._thread.post, call_later=self._loop.call_ray_later
        )
        self._spares = SparePool(
            self._create_spare,
            spares_max=settings.spare_replicas if self._is_local else 0,
            starts_max=os.cpu_count() or 1,
        )

    @property
    def resources(self) -> dict[str, float]:
        """Total resources by Ray's names."""
        return self._resources.whole

    async def open(self) -> None:
        """Start Ray, or connect to the existing cluster; takes seconds. Raises `RayUnavailable`."""
        self._loop.open()
        try:
            await asyncio.wrap_future(self._thread.submit(self._open))
        except Exception as error:
            raise RayUnavailable(f"Ray did not start: {error}") from error
        _log.info("ray_ready", resources=self.resources)

    async def close(self) -> None:
        """Shut Ray down; the processes of a local runtime end."""
        try:
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await asyncio.wrap_future(self._thread.submit(self._shut_down))
                await asyncio.to_thread(self._remote.close)
        except TimeoutError:
            _log.error("ray_shutdown_hangs", timeout_s=_SHUTDOWN_TIMEOUT_S)

    def start(self, goal: ReplicaGoal, bus: BusSettings) -> None:
        """Start a replica with ``bus``, its own settings; errors are reported as events."""
        self._pending_starts[goal.replica_tag] = goal, bus
        self._thread.post(self._start, goal.replica_tag, urgency=Urgency.START)

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """Apply the goal's configuration; the outcome is an event."""
        self._thread.post(self._reconfigure, goal)

    def renew(self, replica_tag: ReplicaTag, identity: UserIdentity) -> None:
        """Make the replica log in with ``identity`` from now on."""
        pending = self._pending_starts.get(replica_tag)
        if pending is not None:
            self._pending_starts[replica_tag] = (
                pending[0],
                msgspec.structs.replace(pending[1], credentials=identity),
            )
        self._thread.post(self._renew, replica_tag, identity)

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """Request a health check; the outcome is an event."""
        self._thread.post(self._check_health, replica_tag, urgency=Urgency.CHECK)

    def evaluate(self, replica_tag: ReplicaTag, request_id: str, body: bytes) -> None:
        """Pass ``body`` to the replica; the outcome is an event, which may be missing."""
        self._thread.post(self._evaluate, replica_tag, request_id, body, urgency=Urgency.CHECK)

    def drain(self, replica_tag: ReplicaTag) -> None:
        """Make the replica refuse new requests and finish those in flight."""
        self._thread.post(self._drain, replica_tag, urgency=Urgency.CHECK)

    def kill(self, replica_tag: ReplicaTag) -> None:
        """Kill the replica's process, or cancel its start; at most one kill is queued."""
        if self._pending_starts.pop(replica_tag, None) is not None:
            self._on_replica_event(
                ProcessEnded(replica_tag, "it was not wanted any more before its start began")
            )
        elif replica_tag not in self._pending_kills:
            self._pending_kills.add(replica_tag)
            self._thread.post(self._kill, replica_tag)

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """Kill the process by the kernel if it is on this machine, which also works while Ray hangs."""
        process = self._processes.get(replica_tag)
        if process is None:
            self.kill(replica_tag)
        elif not process.kill():
            self._on_replica_event(ProcessEnded(replica_tag, "its process is gone, though Ray did not tell"))

    # -- on the loop ----------------------------------------------------------------------------------------------

    def _on_replica_event(self, event: ReplicaEvent) -> None:
        if isinstance(event, Placed) and self._is_local:
            self._processes[event.replica_tag] = LocalProcess(event.pid)
        if isinstance(event, ProcessEnded) and event.replica_tag in self._processes:
            self._processes.pop(event.replica_tag).close()
        self._on_event(event)

    # -- on the Ray thread ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        open_ray(self._settings)
        self._actor_class = ray.remote(ReplicaActor)
        self._location = encode(host_location(self._settings))
        self._resources.open(is_cluster=not self._is_local, num_cpus=self._settings.num_cpus)
        self._spares.refill()

    def _shut_down(self) -> None:
        self._resources.close()
        for spare in self._actors.values():
            if spare.remote is not None:
                spare.remote.end()
        ray.shutdown()

    def _create_spare(self) -> RayActorHandle:
        return self._create(num_cpus=0)

    def _create(self, **options: Any) -> RayActorHandle:
        actor = self._actor_class.options(
            max_restarts=0, max_task_retries=0, max_concurrency=CONTROL_THREADS, **options
        ).remote(self._location)
        spare = RayActorHandle(actor, futures=[])
        # The first call, so that no end of the process is missed.
        spare.watch(actor.wait_for_exit.remote(), lambda ended: self._on_end(spare, ended))
        spare.watch(actor.hello.remote(), lambda future: self._on_hello(spare, future))
        return spare

    def _start(self, tag: ReplicaTag) -> None:
        pending = self._pending_starts.pop(tag, None)
        if pending is None:
            return  # killed meanwhile
        goal, bus = pending
        options = goal.replica_config.ray_actor_options
        reservation = None
        try:
            if self._is_local and fits_spare(options):
                if options.num_cpus:
                    reservation = placement_group([{"CPU": options.num_cpus}], name=tag)
                spare = self._spares.take()
            else:
                known = actor_options(options)
                if not self._is_local and self._settings.num_cpus is not None:
                    known["num_cpus"] = 0  # the controller alone counts them
                spare = self._create(name=tag, **known)
        except (ValueError, TypeError, RayError) as error:
            self._emit(ReplicaStartFailed(tag, f"Ray refused the replica: {error}"))
            self._emit(ProcessEnded(tag, f"Ray refused the replica: {error}"))
            if reservation is not None:
                remove_placement_group(reservation)
            return
        spare.goal, spare.reservation, spare.bus = goal, reservation, bus
        self._actors[tag] = spare
        if reservation is None:
            self._place(spare)
        else:
            spare.watch(reservation.ready(), lambda made: self._on_reserved(spare, tag, made))
        self._loop.call_ray_later(PLACEMENT_REPORT_DELAY_S, self._check_start, spare, options)

    def _identify(self, spare: RayActorHandle, hello: Hello) -> None:
        spare.remote = self._remote.meet(spare.actor, hello)
        spare.address = hello.address
        spare.pid = hello.pid
        self._spares.on_ready(spare)
        self._construct_if_ready(spare)

    def _place(self, spare: RayActorHandle) -> None:
        spare.is_placed = True
        self._construct_if_ready(spare)

    def _construct_if_ready(self, spare: RayActorHandle) -> None:
        """Construct its replica once its resources are reserved and its process is known.

        Why not as soon as it has resources: the host must know whose metrics to retire before there are any.
        """
        goal = spare.goal
        if goal is None or not (spare.is_placed and spare.pid):
            return
        tag = goal.replica_tag
        if self._actors.get(tag) is not spare:
            return  # killed meanwhile
        assert spare.bus is not None
        order = StartReplicaRequest(
            goal=goal,
            bus=spare.bus,
            app_dir=absolute_app_dir(goal.replica_config.app_dir, self._settings.app_root),
            code_dir=self._settings.code_dir,
            tracing=self._settings.tracing,
        )
        if spare.remote is not None:  # its machine does not see the host's disk
            directory = Path(self._settings.code_dir)
            uploads = {name: (directory / name).read_bytes() for name in goal.replica_config.uploads.values()}
            order = msgspec.structs.replace(order, uploads=uploads)
        process = "" if spare.remote is None else spare.remote.process
        self._emit(Placed(tag, spare.pid, spare.was_spare, process, spare.address))
        spare.watch(
            spare.actor.start.remote(encode(order)),
            lambda started: self._on_started(spare, tag, goal.config_version, started),
        )

    def _reconfigure(self, goal: ReplicaGoal) -> None:
        tag, version = goal.replica_tag, goal.config_version
        spare = self._actors.get(tag)
        if spare is not None:
            reference = spare.actor.reconfigure.remote(encode(goal))
            spare.watch(
                reference, lambda done: self._on_outcome(done, lambda e: Reconfigured(tag, version, e))
            )

    def _renew(self, tag: ReplicaTag, identity: UserIdentity) -> None:
        spare = self._actors.get(tag)
        if spare is None or spare.bus is None:
            return
        spare.bus = msgspec.structs.replace(spare.bus, credentials=identity)
        if spare.is_placed:
            spare.watch(spare.actor.renew.remote(encode(identity)), lambda done: self._on_renewed(tag, done))

    def _check_health(self, tag: ReplicaTag) -> None:
        spare = self._actors.get(tag)
        if spare is None:
            return
        try:
            reference = spare.actor.check_health.remote()
        except RayError as error:
            self._emit(HealthChecked(tag, f"Ray could not ask for its health: {error}"))
            return
        self._emit(HealthCheckSent(tag))  # before its result
        spare.watch(reference, lambda done: self._on_outcome(done, lambda e: HealthChecked(tag, e)))

    def _evaluate(self, tag: ReplicaTag, request_id: str, body: bytes) -> None:
        spare = self._actors.get(tag)
        if spare is None:
            return
        try:
            reference = spare.actor.evaluate.remote(body)
        except RayError as error:
            _log.debug("not_evaluated", replica_tag=tag, error=str(error))
            return
        spare.watch(reference, lambda done: self._on_evaluated(tag, request_id, done))

    def _drain(self, tag: ReplicaTag) -> None:
        spare = self._actors.get(tag)
        if spare is not None:
            spare.watch(spare.actor.drain.remote(), lambda done: self._on_drained(spare, tag, done))

    def _kill(self, tag: ReplicaTag) -> None:
        self._pending_kills.discard(tag)
        spare = self._actors.get(tag)
        if spare is not None:
            ray.kill(spare.actor, no_restart=True)

    def _check_start(self, spare: RayActorHandle, options: RayActorOptions) -> None:
        tag = spare.replica_tag
        if tag is not None and tag in self._actors and not (spare.pid and spare.is_placed):
            has_capacity = spare.is_placed and spare.reservation is not None
            needs = f"waits for Ray to place it: it needs {describe_needs(options)}"
            if setup_seconds(options.runtime_env):
                needs += ", and its packages to be installed"
            text = "waits for its process to start" if has_capacity else needs
            self._emit(Waits(tag, text, is_process_starting=has_capacity))
        self._spares.refill()  # its constructor may take long

    def _on_process_ended(self, spare: RayActorHandle, text: str) -> None:
        self._spares.on_ended(spare)
        if spare.remote is not None:
            spare.remote.end()
            self._resources.poll()  # its machine may be gone, and nothing should be placed there again
        if spare.reservation is not None:
            remove_placement_group(spare.reservation)
        if spare.replica_tag is not None:
            self._actors.pop(spare.replica_tag, None)
            self._emit(ProcessEnded(spare.replica_tag, text))
        elif self._is_local:
            _log.warning("spare_ended", pid=spare.pid, reason=text)
            self._loop.call_ray_later(SPARE_RESTART_DELAY_S, self._spares.refill)
        if spare.remote is not None:
            # Only the connection to it may have failed, while it still runs there.
            ray.kill(spare.actor, no_restart=True)

    # -- on Ray's own threads -------------------------------------------------------------------------------------

    def _on_hello(self, spare: RayActorHandle, future: Future[Any]) -> None:
        if future.exception() is None:
            self._thread.post(self._identify, spare, decode(future.result(), type=Hello))

    def _on_reserved(self, spare: RayActorHandle, tag: ReplicaTag, made: Future[Any]) -> None:
        error = made.exception()
        if error is None:
            self._thread.post(self._place, spare)
        else:  # also when it was removed, because the replica was killed; then the event is ignored
            self._emit(ReplicaStartFailed(tag, f"Ray could not reserve its resources: {error}"))

    def _on_started(
        self, spare: RayActorHandle, tag: ReplicaTag, config_version: int, started: Future[Any]
    ) -> None:
        self._thread.post(self._spares.refill, urgency=Urgency.START)
        error = started.exception()
        if error is not None:
            if not isinstance(error, RayActorError):  # the end of the process is reported separately
                self._emit(ReplicaStartFailed(tag, f"the replica could not start: {error}"))
            return
        outcome = decode(started.result(), type=ControlOutcome)
        if outcome.error is None:
            self._emit(Constructed(tag, config_version))
        else:
            failed = ReplicaStartFailed(tag, outcome.error, outcome.is_unusable)
            self._remote.store_final(spare.remote, outcome.telemetry, lambda: self._emit(failed))

    def _on_outcome(self, done: Future[Any], make: Callable[[str | None], ReplicaEvent]) -> None:
        error = done.exception()
        if error is None:
            self._emit(make(decode(done.result(), type=ControlOutcome).error))
        elif not isinstance(error, RayActorError):
            self._emit(make(str(error)))

    def _on_evaluated(self, tag: ReplicaTag, request_id: str, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:  # the controller does not wait for long
            _log.debug("not_evaluated", replica_tag=tag, error=str(error))
        elif isinstance(body := done.result(), bytes) and len(body) <= RESULT_BYTES_MAX:
            self._emit(Evaluated(tag, request_id, body))

    def _on_renewed(self, tag: ReplicaTag, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, RayActorError):
            _log.warning(
                "identity_not_renewed", replica_tag=tag, error=str(error)
            )  # it is renewed again before it expires

    def _on_drained(self, spare: RayActorHandle, tag: ReplicaTag, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, RayActorError):
            _log.error("drain_failed", replica_tag=tag, error=str(error))
        encoded = b"" if error is not None else done.result()
        last = decode(encoded, type=ControlOutcome).telemetry if encoded else None
        self._remote.store_final(spare.remote, last, lambda: self._emit(Drained(tag)))

    def _on_end(self, spare: RayActorHandle, ended: Future[Any]) -> None:
        self._thread.post(
            self._on_process_ended, spare, describe_end(spare.pid, ended.exception(), spare.address)
        )

    def _emit(self, event: ReplicaEvent) -> None:
        self._loop.call(self._on_replica_event, event)
