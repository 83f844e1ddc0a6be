"""What replica processes count in memory: exact, drained once, and bounded."""

from __future__ import annotations

import threading

import pytest

from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec
from serve_common.telemetry.metrics import OTHER, Aggregate, MetricConflict, ProcessMetrics


def spec(
    name: str = "things_total", kind: MetricKind = MetricKind.COUNTER, labels: tuple[str, ...] = ("model",)
) -> MetricSpec:
    buckets = (1.0, 2.0) if kind is MetricKind.HISTOGRAM else ()
    return MetricSpec(
        name=name,
        kind=kind,
        text="Things.",
        unit="things",
        labels=labels,
        buckets=buckets,
        exporters=(Exporter.REPLICA,),
    )


def test_what_is_drained_is_handed_over_once() -> None:
    total = ProcessMetrics().total(spec())
    total.add(1.0, ("a",))
    total.add(2.5, ("a",))
    total.add(0.0, ("b",))
    assert total.drain() == {("a",): 3.5, ("b",): 0.0}
    assert total.drain() == {}


def test_a_level_hands_over_only_what_was_set_since() -> None:
    level = ProcessMetrics().level(spec("size", MetricKind.GAUGE))
    level.set(3.0, ("a",))
    level.set(4.0, ("b",))
    assert level.drain() == {("a",): 3.0, ("b",): 4.0}
    level.set(3.5, ("b",))
    assert level.drain() == {("b",): 3.5}


def test_a_distribution_counts_by_upper_bounds() -> None:
    distribution = ProcessMetrics().distribution(spec("sizes", MetricKind.HISTOGRAM, ()))
    for value in (0.5, 1.0, 1.5, 99.0):
        distribution.observe(value)
    observed = distribution.drain()[()]
    assert observed.counts == [2, 1, 1]
    assert observed.total == 102.0


def test_label_values_beyond_the_limit_are_counted_together() -> None:
    total = ProcessMetrics().total(spec(labels=("model", "kind")), series_max=2)
    for number in range(5):
        total.add(1.0, (f"m{number}", "x"))
    total.add(1.0, ("m0", "x"))
    assert total.drain() == {("m0", "x"): 2.0, ("m1", "x"): 1.0, (OTHER, OTHER): 3.0}


def test_a_name_means_one_thing() -> None:
    measures = ProcessMetrics()
    total = measures.total(spec())
    assert measures.total(spec()) is total
    with pytest.raises(MetricConflict, match=r"'things_total' exists already, with the labels \['model'\]"):
        measures.total(spec(labels=("other",)))
    with pytest.raises(MetricConflict, match="would have the name 'things', as 'things_total' has it"):
        measures.level(spec("things", MetricKind.GAUGE))
    with pytest.raises(MetricConflict, match="exists already, as a counter"):
        measures.level(spec())
    measures.level(spec("size", MetricKind.GAUGE), aggregate=Aggregate.MAX)
    with pytest.raises(MetricConflict, match="aggregate='max'"):
        measures.level(spec("size", MetricKind.GAUGE))
    measures.distribution(spec("sizes", MetricKind.HISTOGRAM))
    with pytest.raises(MetricConflict, match="would have the name 'sizes_count'"):
        measures.level(spec("sizes_count", MetricKind.GAUGE))


def test_nothing_is_lost_between_threads() -> None:
    total = ProcessMetrics().total(spec(labels=()))
    drained: list[float] = []

    def add() -> None:
        for _ in range(5_000):
            total.add(1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained.append(total.drain().get((), 0.0))
    for thread in threads:
        thread.join()
    drained.append(total.drain().get((), 0.0))
    assert sum(drained) == 20_000


def test_only_what_has_something_to_say_is_written_out() -> None:
    measures = ProcessMetrics()
    total, _quiet = measures.total(spec()), measures.level(spec("size", MetricKind.GAUGE))
    total.add(1.0, ("a",))
    assert list(measures.pending()) == [total]


def test_a_forked_child_may_count_while_a_thread_of_its_parent_does() -> None:
    measures = ProcessMetrics()
    total = measures.total(spec(labels=()))
    total.lock.acquire()
    measures.renew_locks()  # as `os.fork` has it called in the child
    total.add(1.0)
    assert total.drain() == {(): 1.0}
