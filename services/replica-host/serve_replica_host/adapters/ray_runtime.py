"""Replicas as Ray actors: the only module that imports Ray.

Why the calls never wait: every call's answer comes as the future of its ObjectRef and becomes an event. A replica's
death is seen by a call that never returns, within milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, final

import msgspec
import ray
import structlog
from ray._private import worker as ray_worker
from ray.exceptions import RayActorError, RayError

from serve_common.errors import TransientError
from serve_common.names import ReplicaTag
from serve_common.settings import BusSettings
from serve_common.values import RayActorOptions
from serve_common.wires.host import ReplicaGoal
from serve_replica_host.adapters.ray_environment import remove_old_sessions
from serve_replica_host.adapters.ray_lean import lean_ray
from serve_replica_host.adapters.ray_options import (
    absolute_app_dir,
    actor_options,
    describe_end,
    describe_needs,
)
from serve_replica_host.adapters.ray_thread import RayThread
from serve_replica_host.core.events import (
    Constructed,
    Drained,
    HealthChecked,
    Placed,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
    StartFailed,
    Waits,
)
from serve_replica_host.replica.actor import CONTROL_THREADS, ReplicaActor
from serve_replica_host.replica.orders import StartOrder, decode_outcome, encode

_log = structlog.get_logger(__name__)

OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
"""Near Ray's minimum: no object passes through Ray here."""
PLACED_WITHIN_S: Final = 2.0
"""A process starts in well under a second; after this the report says what is waited for."""
_SHUTDOWN_TIMEOUT_S: Final = 10.0
_NOT_RESOURCES: Final = ("node:", "object_store_memory")


class RayUnavailable(TransientError):
    """Ray could not be started or reached."""

    error_code = "ray_unavailable"


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime and its replicas need to know."""

    temp_dir: str
    address: str | None
    num_cpus: int | None
    replica_bus: BusSettings
    app_root: str
    metrics_dir: str


class _Held(msgspec.Struct):
    """An actor, and the answers that are awaited: a future lives as long as somebody holds it."""

    actor: Any
    pid: int = 0
    futures: list[Future[Any]] = []


@final
class RayRuntime:
    """`ports.ReplicaRuntime` by Ray; events arrive on the loop that called `open`."""

    def __init__(self, settings: RaySettings, on_event: Callable[[ReplicaEvent], None]) -> None:
        self._settings = settings
        self._on_event = on_event
        self._thread = RayThread()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resources: dict[str, float] = {}
        # The Ray thread's:
        self._held: dict[ReplicaTag, _Held] = {}
        self._actor_class: Any = None

    @property
    def resources(self) -> dict[str, float]:
        """As `ports.ReplicaRuntime`."""
        return self._resources

    async def open(self) -> None:
        """Start Ray, or connect to the existing cluster; takes seconds. Raises `RayUnavailable`."""
        self._loop = asyncio.get_running_loop()
        try:
            self._resources = await asyncio.wrap_future(self._thread.submit(self._open))
        except Exception as error:
            raise RayUnavailable(f"Ray did not start: {error}") from error
        _log.info("ray_ready", resources=self._resources)

    async def close(self) -> None:
        """Shut Ray down; a local runtime's processes end."""
        try:
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await asyncio.wrap_future(self._thread.submit(ray.shutdown))
        except TimeoutError:
            _log.error("ray_shutdown_hangs", timeout_s=_SHUTDOWN_TIMEOUT_S)

    def start(self, goal: ReplicaGoal) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._start, goal)

    def reconfigure(self, goal: ReplicaGoal) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._reconfigure, goal)

    def check_health(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._check_health, replica_tag)

    def drain(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._drain, replica_tag)

    def kill(self, replica_tag: ReplicaTag) -> None:
        """As `ports.ReplicaRuntime`."""
        self._thread.post(self._kill, replica_tag)

    # -- on the Ray thread ----------------------------------------------------------------------------------------

    def _open(self) -> dict[str, float]:
        settings = self._settings
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if settings.address is not None:
            options["address"] = settings.address
        else:
            remove_old_sessions(Path(settings.temp_dir))
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "num_cpus": settings.num_cpus,
                "_temp_dir": settings.temp_dir,
            }
        untyped: Any = ray_worker
        untyped.print_to_stdstream = _log_what_ray_prints
        with nullcontext() if settings.address is not None else lean_ray():
            ray.init(**options)
        self._actor_class = ray.remote(ReplicaActor)
        return {
            name: float(amount)
            for name, amount in ray.cluster_resources().items()
            if not name.startswith(_NOT_RESOURCES)
        }

    def _start(self, goal: ReplicaGoal) -> None:
        tag = goal.replica_tag
        options = goal.replica_config.ray_actor_options
        order = StartOrder(
            goal=goal,
            bus=self._settings.replica_bus,
            app_dir=absolute_app_dir(goal.replica_config.app_dir, self._settings.app_root),
            metrics_dir=self._settings.metrics_dir,
        )
        try:
            actor = self._actor_class.options(
                name=tag,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CONTROL_THREADS,
                **actor_options(options),
            ).remote()
        except (ValueError, TypeError, RayError) as error:
            self._emit(StartFailed(tag, f"Ray refused the replica: {error}"))
            self._emit(ProcessEnded(tag, f"Ray refused the replica: {error}"))
            return
        held = _Held(actor, futures=[])
        self._held[tag] = held
        # The first call, so that nothing that happens to the process can be missed.
        self._watch(held, actor.wait_for_exit.remote(), lambda ended: self._on_end(held, tag, ended))
        self._watch(held, actor.hello.remote(), lambda placed: self._on_placed(held, tag, placed))
        self._watch(
            held,
            actor.start.remote(encode(order)),
            lambda started: self._on_started(tag, goal.config_version, started),
        )
        self._call_later(PLACED_WITHIN_S, self._tell_waiting, tag, options)

    def _reconfigure(self, goal: ReplicaGoal) -> None:
        tag, version = goal.replica_tag, goal.config_version
        held = self._held.get(tag)
        if held is not None:
            reference = held.actor.reconfigure.remote(encode(goal))
            self._watch(
                held, reference, lambda done: self._on_outcome(done, lambda e: Reconfigured(tag, version, e))
            )

    def _check_health(self, tag: ReplicaTag) -> None:
        held = self._held.get(tag)
        if held is not None:
            reference = held.actor.check_health.remote()
            self._watch(held, reference, lambda done: self._on_outcome(done, lambda e: HealthChecked(tag, e)))

    def _drain(self, tag: ReplicaTag) -> None:
        held = self._held.get(tag)
        if held is not None:
            self._watch(held, held.actor.drain.remote(), lambda done: self._on_drained(tag, done))

    def _kill(self, tag: ReplicaTag) -> None:
        held = self._held.get(tag)
        if held is not None:
            ray.kill(held.actor, no_restart=True)

    def _tell_waiting(self, tag: ReplicaTag, options: RayActorOptions) -> None:
        held = self._held.get(tag)
        if held is not None and not held.pid:
            self._emit(Waits(tag, f"waits for Ray to place it: it needs {describe_needs(options)}"))

    def _forget(self, tag: ReplicaTag) -> None:
        self._held.pop(tag, None)

    def _watch(self, held: _Held, reference: Any, on_done: Callable[[Future[Any]], None]) -> None:
        future: Future[Any] = reference.future()
        held.futures = [known for known in held.futures if not known.done()]
        held.futures.append(future)
        future.add_done_callback(on_done)

    # -- on Ray's own threads -------------------------------------------------------------------------------------

    def _on_placed(self, held: _Held, tag: ReplicaTag, placed: Future[Any]) -> None:
        if placed.exception() is None:
            held.pid = placed.result()
            self._emit(Placed(tag, held.pid))

    def _on_started(self, tag: ReplicaTag, config_version: int, started: Future[Any]) -> None:
        error = started.exception()
        if error is not None:
            if not isinstance(error, RayActorError):  # the end of the process is told by itself
                self._emit(StartFailed(tag, f"the replica could not start: {error}"))
            return
        outcome = decode_outcome(started.result())
        if outcome.error is None:
            self._emit(Constructed(tag, config_version))
        else:
            self._emit(StartFailed(tag, outcome.error))

    def _on_outcome(self, done: Future[Any], make: Callable[[str | None], ReplicaEvent]) -> None:
        error = done.exception()
        if error is None:
            self._emit(make(decode_outcome(done.result()).error))
        elif not isinstance(error, RayActorError):
            self._emit(make(str(error)))

    def _on_drained(self, tag: ReplicaTag, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, RayActorError):
            _log.error("drain_failed", replica_tag=tag, error=str(error))
        self._emit(Drained(tag))

    def _on_end(self, held: _Held, tag: ReplicaTag, ended: Future[Any]) -> None:
        self._emit(ProcessEnded(tag, describe_end(held.pid, ended.exception())))
        self._thread.post(self._forget, tag)

    # -- to the loop ----------------------------------------------------------------------------------------------

    def _emit(self, event: ReplicaEvent) -> None:
        self._call_on_loop(lambda loop: loop.call_soon_threadsafe(self._on_event, event))

    def _call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        def later(loop: asyncio.AbstractEventLoop) -> None:
            loop.call_soon_threadsafe(loop.call_later, delay_s, self._thread.post, call, *arguments)

        self._call_on_loop(later)

    def _call_on_loop(self, call: Callable[[asyncio.AbstractEventLoop], Any]) -> None:
        assert self._loop is not None, "open comes first"
        try:
            call(self._loop)
        except RuntimeError as error:  # the loop is closed: the host ends, and nobody listens any more
            _log.debug("event_after_the_end", error=str(error))


def _log_what_ray_prints(printed: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001, FBT001 - Ray's call
    """In place of Ray's own function, which prints coloured prose between our JSON lines."""
    _log.warning("ray_says", lines=[str(line)[:1000] for line in printed.get("lines", [])])
