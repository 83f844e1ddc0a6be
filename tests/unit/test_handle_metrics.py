"""What a replica's process tells of the queues of its own handles."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from serve_common.names import BackendTag, ReplicaTag
from serve_common.runtime.request_context import CurrentReplica, HandleQueue
from serve_common.runtime.settings import BusSettings
from serve_replica_host.replica.telemetry import handle_metrics
from serve_replica_host.replica.telemetry.handle_metrics import PrometheusHandleMetrics

A, B, C = BackendTag("default/a"), BackendTag("default/b"), BackendTag("other/c")


class Case:
    """A replica whose application has `A` and `B` beside it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PrometheusHandleMetrics(self.registry)
        bus = BusSettings(servers=[], user="", password="", inbox_prefix="", subject_prefix="serve")
        self.replica = CurrentReplica(
            replica_tag=ReplicaTag("default/top#0"),
            backend_tag=BackendTag("default/top"),
            bus=bus,
            code_version=1,
            companions={A: 1, B: 1},
        )

    def write(self, **queues: tuple[float, int]) -> None:
        tags = {"a": A, "b": B, "c": C}
        told = {tags[name]: HandleQueue(*queue) for name, queue in queues.items()}
        self.replica.handle_queues = lambda: told
        self.metrics.write(self.replica)

    def seconds(self, tag: BackendTag) -> float | None:
        return self._value("serve_router_queued_seconds_total", tag)

    def depth(self, tag: BackendTag) -> float | None:
        return self._value("serve_handle_queue_depth", tag)

    def _value(self, name: str, tag: BackendTag) -> float | None:
        return self.registry.get_sample_value(name, {"backend_tag": tag})


def test_the_series_of_its_application_are_there_before_anything_is_called() -> None:
    case = Case()
    case.metrics.write(case.replica)
    assert (case.seconds(A), case.depth(A), case.seconds(B)) == (0, 0, 0)
    assert case.seconds(C) is None
    case.write(c=(0.0, 0))
    assert (case.seconds(C), case.depth(C)) == (0, 0)


def test_what_waits_is_added_up_also_over_a_new_connection_of_the_handles() -> None:
    case = Case()
    case.write(a=(1.5, 3))
    case.write(a=(4.0, 2), c=(0.25, 1))
    assert (case.seconds(A), case.depth(A), case.seconds(C)) == (4.0, 2, 0.25)
    case.write(a=(0.5, 0), c=(0.5, 1))  # it counts from 0 again
    assert (case.seconds(A), case.depth(A), case.seconds(C)) == (4.5, 0, 0.5)
    case.write(a=(0.5, 0))  # C was deleted
    assert case.depth(C) == 0


def test_a_moment_less_than_before_is_no_new_beginning() -> None:
    case = Case()
    for seconds in (100.0, 99.99, 100.5):
        case.write(a=(seconds, 1))
    assert case.seconds(A) == 100.5


def test_a_process_that_calls_ever_new_backends_does_not_write_ever_more_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle_metrics, "BACKENDS_MAX", 2)
    case = Case()
    case.write(a=(1.0, 1), c=(1.0, 1))
    assert (case.seconds(A), case.seconds(C)) == (1.0, None)
