"""The Ray actor of one replica: its control methods, called by the host. No request passes through it.

Why so thin: a call through Ray costs about a millisecond, and an exception that passes through Ray loses the user's
own traceback. So the work is in `ReplicaProcess`, and methods take and return bytes, values in MessagePack: Ray would
pickle them, and a process of another version must fail with a clear error, not at unpickling.

Why everything is imported before `start`: actors are also started as spares.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Final, final

from msgspec.msgpack import decode, encode

from serve_common.identities.credentials import UserIdentity
from serve_common.names import BackendTag
from serve_common.protocol.evaluation import Evaluation
from serve_common.protocol.reports import ReplicaGoal
from serve_common.telemetry.request_traces import import_ahead
from serve_common.telemetry.trace_context import read_tracing_settings
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.process import ControlOutcome, ReplicaProcess, StartReplicaRequest
from serve_replica_host.replica.telemetry.logs import ReplicaLogs
from serve_replica_host.replica.telemetry.remote import Hello, HostLocation, RemoteSide

CONTROL_THREADS: Final = 8
"""Maximum concurrent control calls: one waits forever, one may hang in a health check, one in a reconfigure, one in
``record_autoscaling_stats`` and one in a policy; at most one is a fetch.
"""


@final
class ReplicaActor:
    """The class of Ray actors; `adapters.ray_runtime` makes it remote."""

    def __init__(self, location_bytes: bytes) -> None:
        """``location_bytes`` is an encoded `HostLocation`."""
        location = decode(location_bytes, type=HostLocation)
        self._hello, self._remote_side = _identify_process(location)
        self._make_metrics = _import_metrics(
            location.metrics_dir if self._remote_side is None else self._remote_side.metrics_dir
        )
        import_ahead(read_tracing_settings(os.environ))
        self._process: ReplicaProcess | None = None
        self._never_set = threading.Event()
        # Objects that exist now stay alive. Exclude them from collections, also from the one at the end of a drain:
        # with Ray's modules that is 60,000 objects and some 40 ms.
        gc.freeze()

    def hello(self) -> bytes:
        """Return a `Hello`; the result means that Ray has placed the actor."""
        return encode(self._hello)

    def start(self, request_bytes: bytes) -> bytes:
        """Construct and serve the replica of a `StartReplicaRequest`; returns a `ControlOutcome`."""
        request = decode(request_bytes, type=StartReplicaRequest)
        goal, write_lines = request.goal, None
        if self._remote_side is not None:
            write_lines = self._remote_side.retain_lines(goal.replica_tag, goal.backend_tag)
        logs = ReplicaLogs(goal.replica_tag, goal.backend_tag, write_lines)
        self._process = ReplicaProcess(request, self._make_metrics(goal.backend_tag), logs)
        error = self._process.start()
        if error is None or self._remote_side is None:
            return encode(ControlOutcome(error=error, is_unusable=self._process.is_unusable))
        logs.end()  # the host kills this process as soon as it receives the outcome
        telemetry = self._remote_side.fetch(with_lines=True)
        return encode(ControlOutcome(error=error, is_unusable=self._process.is_unusable, telemetry=telemetry))

    def reconfigure(self, goal_bytes: bytes) -> bytes:
        """Apply a `ReplicaGoal`'s configuration; returns a `ControlOutcome`."""
        goal = decode(goal_bytes, type=ReplicaGoal)
        return encode(ControlOutcome(error=self._get_process().reconfigure(goal)))

    def renew(self, identity_bytes: bytes) -> None:
        """Log in with the encoded `UserIdentity` from now on."""
        self._get_process().renew(decode(identity_bytes, type=UserIdentity))

    def check_health(self) -> bytes:
        """Run the user's health check; returns a `ControlOutcome`. Blocks while the user's code blocks its loop."""
        return encode(ControlOutcome(error=self._get_process().check_health()))

    def evaluate(self, body: bytes) -> bytes:
        """Evaluate an encoded `Evaluation`; returns an encoded `EvaluationResult`."""
        return encode(self._get_process().evaluate(decode(body, type=Evaluation)))

    def drain(self) -> bytes:
        """Drain until nothing is in flight and nothing can arrive; returns a `ControlOutcome`, or empty bytes."""
        if self._process is not None:
            self._process.drain()
        return (
            b"" if self._remote_side is None else encode(ControlOutcome(telemetry=self._remote_side.leave()))
        )

    def fetch(self, with_lines: bool) -> bytes:  # noqa: FBT001 - called through Ray
        """Return a `RemoteTelemetry`, with or without log lines, to the host on another machine."""
        assert self._remote_side is not None, "the host reads what is on its own machine"
        return encode(self._remote_side.fetch(with_lines=with_lines))

    def wait_for_exit(self) -> None:
        """Never returns: the failure of this call notifies the host of the process' end."""
        self._never_set.wait()

    def _get_process(self) -> ReplicaProcess:
        if self._process is None:
            raise RuntimeError("the replica was not started")
        return self._process


def _identify_process(location: HostLocation) -> tuple[Hello, RemoteSide | None]:
    """Identify this process; if it is not on its host's machine, also create its `RemoteSide`."""
    if not location.node_id:
        return Hello(os.getpid()), None
    from serve_replica_host.adapters.ray_session import get_node_address, own_node_id  # noqa: PLC0415 - most do not need it

    node_id = own_node_id()
    is_shared = location.is_shared_by(node_id)
    location.enter(is_shared=is_shared)
    if is_shared:
        return Hello(os.getpid()), None
    return Hello(os.getpid(), node_id, get_node_address()), RemoteSide(has_metrics=bool(location.metrics_dir))


def _import_metrics(metrics_dir: str) -> Callable[[BackendTag], RequestMetrics]:
    """Import the metrics, stored in ``metrics_dir`` or, if that is empty, in this process only."""
    if metrics_dir:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics_dir
    else:
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    # prometheus_client reads the variable once, when it is imported.
    from serve_replica_host.adapters.replica_metrics import make_replica_metrics  # noqa: PLC0415

    return make_replica_metrics
