"""Metrics of users' own code: Ray Serve's ways of writing them, and clear words for what cannot be."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import muster as serve
from muster import metrics
from muster import metrics as kinds
from muster.metrics import BOUNDARIES_MAX
from serve_common.telemetry.metrics import ProcessMetrics, process_metrics


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessMetrics]:
    """Measures of a process in which nothing was made yet."""
    own = ProcessMetrics()
    monkeypatch.setattr(kinds, "process_metrics", own)
    monkeypatch.setattr(kinds, "_made", set())
    yield own
    assert not any(name.startswith("user_") for name in process_metrics._metrics)


def test_they_count_in_memory_where_there_is_no_replica() -> None:
    counter = metrics.Counter("user_hits", "Hits.", tag_keys=("model",)).set_default_tags({"model": "small"})
    counter.inc()
    counter.inc(2, tags={"model": "large"})
    counter.record(0.5)
    assert counter._measure.drain() == {("small",): 1.5, ("large",): 2.0}
    gauge = serve.metrics.Gauge("user_size", tag_keys=("a", "b"))
    gauge.set(3, {"b": "2", "a": "1"})
    assert gauge._measure.drain() == {("1", "2"): 3.0}
    histogram = metrics.Histogram("user_tokens", "Tokens.", boundaries=[10, 100])
    histogram.observe(50)
    assert histogram._measure.drain()[()].counts == [0, 1, 0]


def test_a_counter_without_tags_exists_from_its_making(fresh: ProcessMetrics) -> None:
    counter = metrics.Counter("user_errors")
    assert counter.info["name"] == "user_errors", "as it was given"
    assert counter._measure.drain() == {(): 0.0}
    assert len(fresh) == 1


def test_made_again_it_is_the_same() -> None:
    first = metrics.Counter("user_hits", tag_keys=("model",))
    second = metrics.Counter("user_hits_total", tag_keys=("model",))
    first.inc(tags={"model": "a"})
    second.inc(tags={"model": "a"})
    assert second._measure.drain() == {("a",): 2.0}
    with pytest.raises(ValueError, match="exists already, with the labels"):
        metrics.Counter("user_hits", tag_keys=("other",))
    with pytest.raises(ValueError, match="has it"):
        metrics.Gauge("user_hits")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("serve_mine", "serve_… are Muster's own"),
        ("process_mine", "its client library's"),
        ("__mine", "Prometheus' own"),
        ("9lives", "must have letters"),
        ("a-b", "must have letters"),
        ("a:b", "must have letters"),
        ("", "must have letters"),
        ("x" * 129, "at most 128 characters"),
    ],
)
def test_names_that_cannot_be_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(metrics.MetricRefused, match=why):
        metrics.Counter(name)


@pytest.mark.parametrize("key", ["backend_tag", "le", "pid", "process", "a-b", "__a", ""])
def test_tags_that_cannot_be_are_refused(key: str) -> None:
    with pytest.raises(metrics.MetricRefused, match="tag"):
        metrics.Gauge("user_size", tag_keys=(key,))


def test_what_is_of_a_wrong_type_is_a_type_error() -> None:
    for keys in ("model", ["model"]):
        with pytest.raises(TypeError, match="tag_keys should be a tuple type, got"):
            metrics.Counter("user_a", tag_keys=keys)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name of a metric must be a text"):
        metrics.Counter(7)  # type: ignore[arg-type]
    counter = metrics.Counter("user_b", tag_keys=("model",))
    with pytest.raises(TypeError, match="tag 'model': Tag values must be str"):
        counter.inc(tags={"model": 3})  # type: ignore[dict-item]


def test_values_that_cannot_be_are_refused() -> None:
    counter = metrics.Counter("user_a", tag_keys=("model",))
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="value must be >0"):
            counter.inc(value, {"model": "a"})
    with pytest.raises(ValueError, match=r"Missing value for tag key\(s\): model\."):
        counter.inc()
    with pytest.raises(ValueError, match=r"Unrecognized tag key modle\. It has \['model'\]"):
        counter.inc(tags={"model": "a", "modle": "b"})
    with pytest.raises(ValueError, match=r"Unrecognized tag key kind\."):
        counter.set_default_tags({"kind": "x"})
    with pytest.raises(ValueError, match="cannot be observed"):
        metrics.Histogram("user_h").observe(float("nan"))


@pytest.mark.parametrize("boundaries", [[], [2, 1], [1, 1], [float("nan")], list(range(BOUNDARIES_MAX + 1))])
def test_boundaries_rise(boundaries: list[float]) -> None:
    with pytest.raises(metrics.MetricRefused, match="boundaries must be rising"):
        metrics.Histogram("user_h", boundaries=boundaries)


@pytest.mark.parametrize("value", ["1", None, [1]])
def test_what_is_no_number_is_a_type_error_as_in_ray_serve(value: Any) -> None:
    for change in (
        metrics.Counter("typed_calls").inc,
        metrics.Gauge("typed_size").set,
        metrics.Histogram("typed_seconds").observe,
    ):
        with pytest.raises(TypeError, match="value must be int or float, got"):
            change(value)


def test_a_gauge_says_what_becomes_of_several_replicas() -> None:
    metrics.Gauge("user_size", aggregate="max")
    with pytest.raises(
        ValueError, match="aggregate must be one of 'sum', 'max', 'min', 'latest', not 'mean'"
    ):
        metrics.Gauge("user_load", aggregate="mean")


def test_a_process_has_a_limit_of_metrics() -> None:
    for number in range(metrics.METRICS_MAX):
        metrics.Counter(f"user_{number}")
    metrics.Counter("user_0")
    with pytest.raises(metrics.MetricRefused, match="at most 200 metrics"):
        metrics.Counter("user_more")


def test_a_pickled_metric_is_the_same_metric_where_it_arrives() -> None:
    made = [
        metrics.Counter("user_a", "A.", ("t",)).set_default_tags({"t": "1"}),
        metrics.Gauge("user_b", aggregate="min"),
        metrics.Histogram("user_c", "C.", [1.0, 2.0], ("t",)),
    ]
    for metric in made:
        again = pickle.loads(pickle.dumps(metric))
        assert again.info == metric.info
        assert again.info.get("boundaries") == getattr(metric, "boundaries", None)
        assert again._measure is metric._measure


def test_a_replica_fills_the_tags_of_its_own_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = SimpleNamespace(backend_tag="shop/Model", replica_tag="shop/Model#3")
    counter = metrics.Counter("user_calls", tag_keys=("application", "deployment", "replica", "kind"))
    with pytest.raises(ValueError, match=r"Missing value for tag key\(s\): application\."):
        counter.inc(tags={"kind": "a"})
    monkeypatch.setattr(kinds, "current_replica", lambda: replica)
    counter.inc(tags={"kind": "a"})
    with monkeypatch.context() as program:
        program.setattr(kinds, "is_program_replica", lambda: True)
        with pytest.raises(ValueError, match="'replica' tag is reserved for Ray Serve metrics"):
            metrics.Counter("reserved_calls", tag_keys=("replica",))
        with pytest.raises(ValueError, match="'deployment' tag is reserved"):
            counter.set_default_tags({"deployment": "mine"})
        for _ in range(2):
            counter.inc(tags={"kind": "c", "unknown": "x"})
    assert [record.getMessage() for record in caplog.records] == [
        "metric 'user_calls_total': not counted by tags that it does not have: ['unknown']"
    ]
    counter.inc(tags={"kind": "b", "replica": "mine"})
    assert counter._measure.drain() == {
        ("shop", "Model", "shop/Model#3", "a"): 1.0,
        ("shop", "Model", "mine", "b"): 1.0,
        ("shop", "Model", "shop/Model#3", "c"): 2.0,
    }
