"""The catalogue of metrics: whole and consistent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from serve_common.telemetry.catalogue import CATALOGUE, OWN_PREFIX, get_spec
from serve_common.telemetry.catalogue.replicas import ONGOING_SECONDS
from serve_common.telemetry.catalogue.specs import LABELS, Exporter, MetricKind
from serve_replica_host.adapters.metrics_files import MetricsFiles
from tests.support.paths import ROOT

UNITS_OF_NAMES = {"seconds": ("seconds", "request-seconds"), "bytes": ("bytes",)}


def test_no_two_metrics_share_a_name_and_each_has_our_prefix() -> None:
    names = [name for spec in CATALOGUE for name in {spec.name, spec.family, *spec.series}]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(rf"{OWN_PREFIX}[a-z_]+", name) for name in names)


def test_names_tell_type_and_unit() -> None:
    for spec in CATALOGUE:
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER), spec.name
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name
        unit = spec.name.removesuffix("_total").rpartition("_")[2]
        if unit in UNITS_OF_NAMES:
            assert spec.unit in UNITS_OF_NAMES[unit], spec.name
        assert spec.unit
        assert spec.exporters
        assert spec.text.endswith(".")


def test_every_label_is_explained_and_none_names_a_replica() -> None:
    used = {label for spec in CATALOGUE for label in spec.labels}
    assert used == set(LABELS)
    assert not used & {"replica", "replica_tag", "pid", "request_id"}


def test_a_metric_is_found_by_the_name_of_its_samples() -> None:
    assert get_spec("serve_replica_ongoing_seconds_total") is ONGOING_SECONDS
    found = get_spec("serve_proxy_request_seconds_bucket")
    assert found is not None
    assert found.name == "serve_proxy_request_seconds"
    assert get_spec("serve_proxy_request_seconds_total") is None


def test_no_exporter_names_a_metric_by_itself() -> None:
    files = [*ROOT.glob("services/*/*/adapters/*metrics*.py"), *ROOT.glob("libs/*/*/adapters/*metrics*.py")]
    named = {name for file in files for name in re.findall(rf'"({OWN_PREFIX}[a-z_]+)"', file.read_text())}
    assert len(files) > 3
    assert named == set()


_REPLICA = """
import asyncio
from muster import batch, multiplexed
from serve_common.names import BackendTag, ReplicaTag
from serve_common.runtime.request_context import CurrentReplica, HandleQueue, set_replica_context
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.health import ThreadLoopLag
from serve_common.telemetry.metrics import process_metrics
from serve_common.telemetry.catalogue.replicas import REPLICA_LAG
from serve_common.telemetry.otlp import Counts
from serve_replica_host.adapters.replica_metrics import (
    PrometheusHandleMetrics, PrometheusSpanMetrics, make_replica_metrics
)
from serve_replica_host.ports import Occupancy

TAG = BackendTag("default/app")

@batch
async def upper(items): return [item.upper() for item in items]

@batch
async def broken(items): raise ValueError("no")

@multiplexed(max_num_models_per_replica=1)
async def load(model_id):
    if model_id == "bad": raise ValueError(model_id)
    return model_id

async def work():
    assert await asyncio.gather(upper("a"), upper("b")) == ["A", "B"]
    await asyncio.gather(broken("a"), return_exceptions=True)
    for model_id in ("m1", "bad", "m2"):
        await asyncio.gather(asyncio.create_task(load(model_id)), return_exceptions=True)
    lag = ThreadLoopLag(asyncio.get_running_loop(), process_metrics.distribution(REPLICA_LAG).observe)
    lag.measure()
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)

asyncio.run(work())
replica = make_replica_metrics(TAG)
replica.count_response(200, 0.1)
replica.count_response(12345, 0.1)
replica.count_refused("busy")
replica.turn()
replica.write(Occupancy(ongoing_s=1.0))
bus = BusSettings(servers=[], user="", password="", inbox_prefix="", subject_prefix="serve")
context = CurrentReplica(
    replica_tag=ReplicaTag("default/app#1"), backend_tag=TAG, bus=bus, code_version=1,
    peer_versions={BackendTag("default/other"): 1},
)
PrometheusHandleMetrics().write(context)
counts = Counts(waiting_max=1)
spans = PrometheusSpanMetrics(counts)
for _ in range(3):
    counts.may_wait()
    spans.write()
    spans.write()
"""


def test_a_replica_exports_all_that_the_catalogue_says_of_replicas(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", _REPLICA], env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}, check=True
    )
    samples = [sample for family in MetricsFiles(tmp_path).collect() for sample in family.samples]
    wanted = {name: spec for spec in CATALOGUE if Exporter.REPLICA in spec.exporters for name in spec.series}
    assert {sample.name for sample in samples} == set(wanted)
    for sample in samples:
        assert set(sample.labels) - {"le"} == set(wanted[sample.name].labels), sample
    values = {(s.name, *sorted(s.labels.values())): s.value for s in samples}
    assert values["serve_batch_size_sum", "default/app", "upper"] == 2.0
    assert values["serve_batch_seconds_count", "broken", "default/app"] == 1.0
    assert values["serve_multiplexed_loads_total", "default/app", "ok"] == 2.0
    assert values["serve_multiplexed_loads_total", "default/app", "error"] == 1.0
    assert values["serve_multiplexed_evictions_total", "default/app"] == 1.0
    assert values["serve_multiplexed_models", "default/app"] == 1.0
    assert values["serve_replica_requests_total", "default/app", "other"] == 1.0
    assert values["serve_trace_spans_dropped_total", "queue"] == 2.0
    assert values["serve_trace_spans_dropped_total", "receiver"] == 0.0
