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
from pathlib import Path
from typing import Final, final

from serve_common.adapters.otlp import import_ahead
from serve_common.names import BackendTag
from serve_common.tracing.settings import read_tracing_settings
from serve_replica_host.ports import RequestMetrics
from serve_replica_host.replica.logs import ReplicaLogs
from serve_replica_host.replica.orders import (
    ControlOutcome,
    decode_goal,
    decode_order,
    encode,
)
from serve_replica_host.replica.process import ReplicaProcess

CONTROL_THREADS: Final = 8
"""One waits for ever, one may hang in a health check, one in a reconfigure; the rest must still answer."""


@final
class ReplicaActor:
    """What Ray runs; `adapters.ray_runtime` makes an actor class of it."""

    def __init__(self, metrics_dir: str) -> None:
        """``metrics_dir`` is prometheus_client's multiprocess directory; empty for none."""
        self._make_metrics = _import_metrics(metrics_dir)
        import_ahead(read_tracing_settings(os.environ))
        self._process: ReplicaProcess | None = None
        self._never = threading.Event()
        # What is here now stays. A collection, also the one at the end of a drain, need not look at it: with Ray's
        # modules that is 60,000 objects and some 40 ms.
        gc.freeze()

    def hello(self) -> int:
        """The process' id; an answer means that Ray has placed the actor."""
        return os.getpid()

    def start(self, order_bytes: bytes) -> bytes:
        """Construct and serve what the `StartOrder` says; a `ControlOutcome`."""
        order = decode_order(order_bytes)
        logs = ReplicaLogs(order.goal.replica_tag, order.goal.backend_tag)
        self._process = ReplicaProcess(order, self._make_metrics(order.goal.backend_tag), logs)
        return encode(ControlOutcome(error=self._process.start()))

    def reconfigure(self, goal_bytes: bytes) -> bytes:
        """Apply a `ReplicaGoal`'s configuration; a `ControlOutcome`."""
        goal = decode_goal(goal_bytes)
        return encode(ControlOutcome(error=self._started().reconfigure(goal)))

    def check_health(self) -> bytes:
        """A `ControlOutcome`; does not return while the user's code blocks its loop."""
        return encode(ControlOutcome(error=self._started().check_health()))

    def in_flight(self) -> int:
        """Requests that hold a slot; for people with a debugger."""
        return self._started().in_flight

    def drain(self) -> None:
        """Returns when nothing is in flight and nothing can come any more."""
        if self._process is not None:
            self._process.drain()

    def wait_for_exit(self) -> None:
        """Never returns: that the call fails is how the host learns of the process' end."""
        self._never.wait()

    def _started(self) -> ReplicaProcess:
        if self._process is None:
            raise RuntimeError("the replica was not started")
        return self._process


def _import_metrics(metrics_dir: str) -> Callable[[BackendTag], RequestMetrics]:
    """Metrics in the host's directory, or, on a machine that has no such directory, in this process only."""
    if metrics_dir and Path(metrics_dir).is_dir():
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics_dir
    else:
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    # prometheus_client looks at the variable once, when it is imported.
    from serve_replica_host.adapters.replica_metrics import make_replica_metrics  # noqa: PLC0415

    return make_replica_metrics
