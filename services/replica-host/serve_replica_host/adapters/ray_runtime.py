"""Replicas as Ray actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, final

import msgspec
import ray
import structlog
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group

from serve_common.config.replica import RayActorOptions
from serve_common.identities.credentials import UserIdentity
from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.local_process import LocalProcess
from serve_replica_host.adapters.metrics_files import RemoteFiles
from serve_replica_host.adapters.ray_options import (
    RayResources,
    absolute_app_dir,
    actor_options,
    describe_end,
    describe_needs,
    fits_spare,
)
from serve_replica_host.adapters.ray_protocol import RaySettings, RayUnavailable
from serve_replica_host.adapters.ray_session import host_place, open_ray
from serve_replica_host.adapters.ray_thread import RayThread, SpareActor, SparePool, Urgency
from serve_replica_host.adapters.remote_replicas import RemoteReplicas
from serve_replica_host.core.events import (
    Constructed,
    Drained,
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
from serve_replica_host.replica.process import StartReplicaRequest, decode_outcome, encode
from serve_replica_host.replica.telemetry.remote import decode_hello, encode_place

_log = structlog.get_logger(__name__)


@final
class HostLoop:
    """The loop that called `open`; the other methods may be called on any thread after that."""

    def __init__(self, thread: RayThread) -> None:
        self._thread = thread
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Take the running loop."""
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
        except RuntimeError as error:  # the loop is closed: the host ends
            _log.debug("event_after_the_end", error=str(error))


PLACED_WITHIN_S: Final = 2.0
"""A process starts in well under a second; after this the report says what is waited for."""
SPARE_AGAIN_S: Final = 5.0
"""After one that waited has ended; it may be for a reason that stays."""
_SHUTDOWN_TIMEOUT_S: Final = 10.0


@final
class RayRuntime:
    """`ports.ReplicaRuntime` by Ray; events arrive on the loop that called `open`."""

    def __init__(
        self,
        settings: RaySettings,
        on_event: Callable[[ReplicaEvent], None],
        *,
        files: RemoteFiles,
        write_lines: Callable[[bytes], None],
    ) -> None:
        """``files`` and ``write_lines`` take what replicas on other machines count and say."""
        self._settings = settings
        self._is_local = settings.address is None
        self._on_event = on_event
        self._thread = RayThread()
        self._loop = HostLoop(self._thread)
        self._processes: dict[ReplicaTag, LocalProcess] = {}
        # Put in on the loop, taken out on either thread, in one step each:
        self._unbegun: dict[ReplicaTag, tuple[ReplicaGoal, BusSettings]] = {}
        """Starts that wait for the Ray thread."""
        self._kills: set[ReplicaTag] = set()
        """Kills that do."""
        # The Ray thread's:
        self._held: dict[ReplicaTag, SpareActor] = {}
        self._actor_class: Any = None
        self._place = b""
        self._resources = RayResources(self._loop.call_ray_later)
        self._far = RemoteReplicas(
            files, write_lines, post=self._thread.post, call_later=self._loop.call_ray_later
        )
        self._spares = SparePool(
            self._create_spare,
            spares_max=settings.spare_replicas if self._is_local else 0,
            starts_max=os.cpu_count() or 1,
        )

    @property
    def resources(self) -> dict[str, float]:
        """As `ports.ReplicaRuntime`."""
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
        """Shut Ray down; a local runtime's processes end."""
        try:
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await asyncio.wrap_future(self._thread.submit(self._shut_down))
                await asyncio.to_thread(self._far.close)
        except TimeoutError:
            _log.error("ray_shutdown_hangs", timeout_s=_SHUTDOWN_TIMEOUT_S)

    def start(self, goal: ReplicaGoal, bus: BusSettings) -> None:
        """As `ports.ReplicaRuntime`, with ``bus``, which is the replica's own."""
        self._unbegun[goal.replica_tag] = goal, bus
        self._thread.post(self._start, goal.replica_tag, urgency=Urgency.START)

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._reconfigure, goal)

    def renew(self, replica_tag: ReplicaTag, identity: UserIdentity) -> None:
        """Have the replica log in with ``identity`` from now on."""
        unbegun = self._unbegun.get(replica_tag)
        if unbegun is not None:
            self._unbegun[replica_tag] = unbegun[0], msgspec.structs.replace(unbegun[1], credentials=identity)
        self._thread.post(self._renew, replica_tag, identity)

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._check_health, replica_tag, urgency=Urgency.CHECK)

    def drain(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._drain, replica_tag, urgency=Urgency.CHECK)

    def kill(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`; however often it is called, one of them waits."""
        if self._unbegun.pop(replica_tag, None) is not None:
            self._hear(ProcessEnded(replica_tag, "it was not wanted any more before its start began"))
        elif replica_tag not in self._kills:
            self._kills.add(replica_tag)
            self._thread.post(self._kill, replica_tag)

    def kill_by_force(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`; by the kernel where the process is of this machine, so also while Ray hangs."""
        process = self._processes.get(replica_tag)
        if process is None:
            self.kill(replica_tag)
        elif not process.kill():
            self._hear(ProcessEnded(replica_tag, "its process is gone, though Ray did not tell"))

    # -- on the loop ----------------------------------------------------------------------------------------------

    def _hear(self, event: ReplicaEvent) -> None:
        if isinstance(event, Placed) and self._is_local and event.replica_tag not in self._processes:
            self._processes[event.replica_tag] = LocalProcess(event.pid)
        if isinstance(event, ProcessEnded) and event.replica_tag in self._processes:
            self._processes.pop(event.replica_tag).close()
        self._on_event(event)

    # -- on the Ray thread ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        open_ray(self._settings)
        self._actor_class = ray.remote(ReplicaActor)
        self._place = encode_place(host_place(self._settings))
        self._resources.open(is_cluster=not self._is_local)
        self._spares.refill()

    def _shut_down(self) -> None:
        self._resources.close()
        for held in self._held.values():
            if held.far is not None:
                held.far.end()
        ray.shutdown()

    def _create_spare(self) -> SpareActor:
        return self._create(num_cpus=0)

    def _create(self, **options: Any) -> SpareActor:
        actor = self._actor_class.options(
            max_restarts=0, max_task_retries=0, max_concurrency=CONTROL_THREADS, **options
        ).remote(self._place)
        held = SpareActor(actor, futures=[])
        # The first call, so that nothing that happens to the process can be missed.
        held.watch(actor.wait_for_exit.remote(), lambda ended: self._on_end(held, ended))
        held.watch(actor.hello.remote(), lambda answered: self._on_hello(held, answered))
        return held

    def _start(self, tag: ReplicaTag) -> None:
        unbegun = self._unbegun.pop(tag, None)
        if unbegun is None:
            return  # killed meanwhile
        goal, bus = unbegun
        options = goal.replica_config.ray_actor_options
        reservation = None
        try:
            if self._is_local and fits_spare(options):
                if options.num_cpus:
                    reservation = placement_group([{"CPU": options.num_cpus}], name=tag)
                held = self._spares.take()
            else:
                held = self._create(name=tag, **actor_options(options))
        except (ValueError, TypeError, RayError) as error:
            self._emit(ReplicaStartFailed(tag, f"Ray refused the replica: {error}"))
            self._emit(ProcessEnded(tag, f"Ray refused the replica: {error}"))
            if reservation is not None:
                remove_placement_group(reservation)
            return
        held.replica_tag, held.reservation, held.bus = tag, reservation, bus
        self._held[tag] = held
        if reservation is None:
            self._begin(held, goal)
        else:
            held.watch(reservation.ready(), lambda made: self._on_reserved(held, goal, made))
        self._loop.call_ray_later(PLACED_WITHIN_S, self._look_at_start, held, options)

    def _begin(self, held: SpareActor, goal: ReplicaGoal) -> None:
        if self._held.get(goal.replica_tag) is not held:
            return  # killed meanwhile
        assert held.bus is not None
        order = StartReplicaRequest(
            goal=goal,
            bus=held.bus,
            app_dir=absolute_app_dir(goal.replica_config.app_dir, self._settings.app_root),
            tracing=self._settings.tracing,
        )
        held.is_placed = True
        self._tell_placed(held)
        held.watch(
            held.actor.start.remote(encode(order)),
            lambda started: self._on_started(held, goal.replica_tag, goal.config_version, started),
        )

    def _reconfigure(self, goal: ReplicaGoal) -> None:
        tag, version = goal.replica_tag, goal.config_version
        held = self._held.get(tag)
        if held is not None:
            reference = held.actor.reconfigure.remote(encode(goal))
            held.watch(
                reference, lambda done: self._on_outcome(done, lambda e: Reconfigured(tag, version, e))
            )

    def _renew(self, tag: ReplicaTag, identity: UserIdentity) -> None:
        held = self._held.get(tag)
        if held is None or held.bus is None:
            return
        held.bus = msgspec.structs.replace(held.bus, credentials=identity)
        if held.is_placed:
            held.watch(held.actor.renew.remote(encode(identity)), lambda done: self._on_renewed(tag, done))

    def _check_health(self, tag: ReplicaTag) -> None:
        held = self._held.get(tag)
        if held is None:
            return
        try:
            reference = held.actor.check_health.remote()
        except RayError as error:
            self._emit(HealthChecked(tag, f"Ray could not ask for its health: {error}"))
            return
        self._emit(HealthCheckSent(tag))  # before its answer can be
        held.watch(reference, lambda done: self._on_outcome(done, lambda e: HealthChecked(tag, e)))

    def _drain(self, tag: ReplicaTag) -> None:
        held = self._held.get(tag)
        if held is not None:
            held.watch(held.actor.drain.remote(), lambda done: self._on_drained(held, tag, done))

    def _kill(self, tag: ReplicaTag) -> None:
        self._kills.discard(tag)
        held = self._held.get(tag)
        if held is not None:
            ray.kill(held.actor, no_restart=True)

    def _look_at_start(self, held: SpareActor, options: RayActorOptions) -> None:
        tag = held.replica_tag
        if tag is not None and tag in self._held and not (held.pid and held.is_placed):
            has_room = held.is_placed and held.reservation is not None
            needs = f"waits for Ray to place it: it needs {describe_needs(options)}"
            told = "waits for its process to start" if has_room else needs
            self._emit(Waits(tag, told, is_process_starting=has_room))
        self._spares.refill()  # its constructor may take long

    def _ended(self, held: SpareActor, told: str) -> None:
        self._spares.hear_end(held)
        if held.far is not None:
            held.far.end()
            self._resources.look()  # its machine may be gone, and nobody should be placed there again
        if held.reservation is not None:
            remove_placement_group(held.reservation)
        if held.replica_tag is not None:
            self._held.pop(held.replica_tag, None)
            self._emit(ProcessEnded(held.replica_tag, told))
        elif self._is_local:
            _log.warning("spare_ended", pid=held.pid, reason=told)
            self._loop.call_ray_later(SPARE_AGAIN_S, self._spares.refill)
        if held.far is not None:
            # Only the connection to it may have ended, while it still runs there.
            ray.kill(held.actor, no_restart=True)

    # -- on Ray's own threads -------------------------------------------------------------------------------------

    def _on_hello(self, held: SpareActor, answered: Future[Any]) -> None:
        if answered.exception() is None:
            hello = decode_hello(answered.result())
            held.far = self._far.meet(held.actor, hello)
            held.address = hello.address
            held.pid = hello.pid
            self._tell_placed(held)
            self._thread.post(self._spares.hear_ready, held)

    def _on_reserved(self, held: SpareActor, goal: ReplicaGoal, made: Future[Any]) -> None:
        error = made.exception()
        if error is None:
            self._thread.post(self._begin, held, goal)
        else:  # also when it was given back, because the replica was killed; then nobody listens
            self._emit(ReplicaStartFailed(goal.replica_tag, f"Ray could not reserve its resources: {error}"))

    def _tell_placed(self, held: SpareActor) -> None:
        """From two threads, each after it has noted its own half; what is told twice does no harm."""
        if held.pid and held.is_placed and held.replica_tag is not None:
            process = "" if held.far is None else held.far.process
            self._emit(Placed(held.replica_tag, held.pid, held.was_spare, process, held.address))

    def _on_started(
        self, held: SpareActor, tag: ReplicaTag, config_version: int, started: Future[Any]
    ) -> None:
        self._thread.post(self._spares.refill, urgency=Urgency.START)
        error = started.exception()
        if error is not None:
            if not isinstance(error, RayActorError):  # the end of the process is told by itself
                self._emit(ReplicaStartFailed(tag, f"the replica could not start: {error}"))
            return
        outcome = decode_outcome(started.result())
        if outcome.error is None:
            self._emit(Constructed(tag, config_version))
        else:
            failed = ReplicaStartFailed(tag, outcome.error)
            self._far.take_last(held.far, outcome.fetched, lambda: self._emit(failed))

    def _on_outcome(self, done: Future[Any], make: Callable[[str | None], ReplicaEvent]) -> None:
        error = done.exception()
        if error is None:
            self._emit(make(decode_outcome(done.result()).error))
        elif not isinstance(error, RayActorError):
            self._emit(make(str(error)))

    def _on_renewed(self, tag: ReplicaTag, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, RayActorError):
            _log.warning(
                "identity_not_renewed", replica_tag=tag, error=str(error)
            )  # another one follows in time

    def _on_drained(self, held: SpareActor, tag: ReplicaTag, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, RayActorError):
            _log.error("drain_failed", replica_tag=tag, error=str(error))
        told = b"" if error is not None else done.result()
        last = decode_outcome(told).fetched if told else None
        self._far.take_last(held.far, last, lambda: self._emit(Drained(tag)))

    def _on_end(self, held: SpareActor, ended: Future[Any]) -> None:
        self._thread.post(self._ended, held, describe_end(held.pid, ended.exception(), held.address))

    def _emit(self, event: ReplicaEvent) -> None:
        self._loop.call(self._hear, event)
