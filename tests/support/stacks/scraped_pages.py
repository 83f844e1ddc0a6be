"""Holds pages of metrics, as they were scraped, against the catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serve_common.telemetry.catalogue import CATALOGUE, OWN_PREFIX, get_spec
from serve_common.telemetry.catalogue.specs import Exporter, MetricSpec

ON_PAGE = {
    "proxy": {Exporter.PROXY},
    "controller": {Exporter.CONTROLLER},
    "console": {Exporter.CONSOLE},
    "replica-host": {Exporter.HOST, Exporter.REPLICA},
}
"""Whose metrics are on the page of which service."""
_ADDED = {"le", "process"}


def scraped_names(page: str) -> set[str]:
    """The names of the samples."""
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def contradictions(pages: Mapping[str, str]) -> list[str]:
    """Where ``pages``, by the names of their services, say something else than the catalogue."""
    found: list[str] = []
    for service, page in pages.items():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.startswith(OWN_PREFIX):
                    spec = get_spec(sample.name)
                    found += [f"{service}: {text}" for text in _compared(service, family, sample, spec)]
    return sorted(set(found))


def missing(pages: Mapping[str, str]) -> list[str]:
    """What should be on a page under any circumstances, and is not."""
    return [
        f"{service}: {spec.name}"
        for service, page in pages.items()
        for names in [scraped_names(page)]
        for spec in CATALOGUE
        if not spec.when and set(spec.exporters) & ON_PAGE[service] and not set(spec.series) <= names
    ]


def _compared(service: str, family: Metric, sample: Sample, spec: MetricSpec | None) -> list[str]:
    name, labels = sample.name, set(sample.labels) - _ADDED
    if spec is None:
        return [f"{name} is not in the catalogue"]
    found = []
    if labels != set(spec.labels):
        found.append(f"{name} has the labels {sorted(labels)}, not {sorted(spec.labels)}")
    if family.type != spec.kind.value:
        found.append(f"{name} is a {family.type}, not a {spec.kind.value}")
    if not set(spec.exporters) & ON_PAGE[service]:
        found.append(f"{name} is of {[exporter.value for exporter in spec.exporters]}")
    if not family.documentation:
        found.append(f"{name} has no help")
    return found
