"""The Ray actor of one replica: its control methods, called by the host. No request passes here.

Why so thin: a call through Ray costs about a millisecond, and an exception that passes through Ray loses the user's
own traceback. So methods take and return plain bytes and strings, and the work is in `ReplicaProcess`.

Why everything is imported before `start`: actors are also started ahead, to wait for a replica that needs one.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Final, final

from serve_common.names import BackendTag
from serve_common.telemetry.otlp import import_ahead
from serve_common.telemetry.tracer import read_tracing_settings
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.process import (
    ControlOutcome,
    ReplicaProcess,
    decode_goal,
    decode_identity,
    decode_order,
    encode,
)
from serve_replica_host.replica.telemetry.logs import ReplicaLogs
from serve_replica_host.replica.telemetry.remote import (
    Hello,
    HostLocation,
    RemoteSide,
    decode_place,
    encode_fetched,
)

CONTROL_THREADS: Final = 8
"""One waits for ever, one may hang in a health check, one in a reconfigure; the rest must still answer.

Of fetches there is never more than one.
"""


@final
class ReplicaActor:
    """What Ray runs; `adapters.ray_runtime` makes an actor class of it."""

    def __init__(self, place_bytes: bytes) -> None:
        """``place_bytes`` are a `HostLocation`."""
        place = decode_place(place_bytes)
        self._hello, self._far = _find_out_where(place)
        self._make_metrics = _import_metrics(
            place.metrics_dir if self._far is None else self._far.metrics_dir
        )
        import_ahead(read_tracing_settings(os.environ))
        self._process: ReplicaProcess | None = None
        self._never = threading.Event()
        # What is here now stays. A collection, also the one at the end of a drain, need not look at it: with Ray's
        # modules that is 60,000 objects and some 40 ms.
        gc.freeze()

    def hello(self) -> bytes:
        """A `Hello`; an answer means that Ray has placed the actor."""
        return encode_fetched(self._hello)

    def start(self, order_bytes: bytes) -> bytes:
        """Construct and serve what the `StartReplicaRequest` says; a `ControlOutcome`."""
        order = decode_order(order_bytes)
        goal, way = order.goal, None
        if self._far is not None:
            way = self._far.keep_lines(goal.replica_tag, goal.backend_tag)
        logs = ReplicaLogs(goal.replica_tag, goal.backend_tag, way)
        self._process = ReplicaProcess(order, self._make_metrics(goal.backend_tag), logs)
        error = self._process.start()
        if error is None or self._far is None:
            return encode(ControlOutcome(error=error))
        logs.end()  # the host ends this process as soon as it hears of it
        return encode(ControlOutcome(error=error, fetched=self._far.fetch(with_lines=True)))

    def reconfigure(self, goal_bytes: bytes) -> bytes:
        """Apply a `ReplicaGoal`'s configuration; a `ControlOutcome`."""
        goal = decode_goal(goal_bytes)
        return encode(ControlOutcome(error=self._started().reconfigure(goal)))

    def renew(self, identity_bytes: bytes) -> None:
        """Log in with that `UserIdentity` from now on."""
        self._started().renew(decode_identity(identity_bytes))

    def check_health(self) -> bytes:
        """A `ControlOutcome`; does not return while the user's code blocks its loop."""
        return encode(ControlOutcome(error=self._started().check_health()))

    def in_flight(self) -> int:
        """Requests that hold a slot; for people with a debugger."""
        return self._started().in_flight

    def drain(self) -> bytes:
        """Returns when nothing is in flight and nothing can come any more; a `ControlOutcome`, empty for none."""
        if self._process is not None:
            self._process.drain()
        return b"" if self._far is None else encode(ControlOutcome(fetched=self._far.leave()))

    def fetch(self, with_lines: bool) -> bytes:  # noqa: FBT001 - called through Ray
        """A `RemoteTelemetry`, with or without log lines: for the host of a replica on another machine."""
        assert self._far is not None, "the host reads what is on its own machine"
        return encode_fetched(self._far.fetch(with_lines=with_lines))

    def wait_for_exit(self) -> None:
        """Never returns: that the call fails is how the host learns of the process' end."""
        self._never.wait()

    def _started(self) -> ReplicaProcess:
        if self._process is None:
            raise RuntimeError("the replica was not started")
        return self._process


def _find_out_where(place: HostLocation) -> tuple[Hello, RemoteSide | None]:
    """Who this process is; and, where it is not on its host's machine, what it keeps for its host."""
    if not place.node_id:
        return Hello(os.getpid()), None
    from serve_replica_host.adapters.ray_session import own_address, own_node_id  # noqa: PLC0415 - most have no use of it

    node_id = own_node_id()
    is_shared = place.is_shared_by(node_id)
    place.enter(is_shared=is_shared)
    if is_shared:
        return Hello(os.getpid()), None
    return Hello(os.getpid(), node_id, own_address()), RemoteSide(has_metrics=bool(place.metrics_dir))


def _import_metrics(metrics_dir: str) -> Callable[[BackendTag], RequestMetrics]:
    """Metrics in that directory, or, where it is empty, in this process only."""
    if metrics_dir:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics_dir
    else:
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    # prometheus_client looks at the variable once, when it is imported.
    from serve_replica_host.adapters.replica_metrics import make_replica_metrics  # noqa: PLC0415

    return make_replica_metrics
