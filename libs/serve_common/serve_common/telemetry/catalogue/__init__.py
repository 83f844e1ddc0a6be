"""Every metric that a process of Muster exports: the one place for its name, type, labels, unit and meaning.

Why one place: exporters, the page docs/reference/metrics.md, dashboards and alert rules all refer to the same metrics,
and tests check each of them against this.
"""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.consoles import CONSOLE_METRICS
from serve_common.telemetry.catalogue.controllers import AUTOSCALER_METRICS, CONTROLLER_METRICS
from serve_common.telemetry.catalogue.nats_servers import NATS_METRICS
from serve_common.telemetry.catalogue.proxies import PROXY_METRICS
from serve_common.telemetry.catalogue.replicas import REPLICA_METRICS
from serve_common.telemetry.catalogue.rollouts import ROLLOUT_METRICS
from serve_common.telemetry.catalogue.services import EVERYWHERE_METRICS, HOST_METRICS
from serve_common.telemetry.catalogue.specs import MetricSpec

OWN_PREFIX: Final = "serve_"
"""Prefix that users' own metrics must not have."""

CATALOGUE: Final[tuple[MetricSpec, ...]] = (
    *PROXY_METRICS,
    *REPLICA_METRICS,
    *HOST_METRICS,
    *CONTROLLER_METRICS,
    *AUTOSCALER_METRICS,
    *ROLLOUT_METRICS,
    *NATS_METRICS,
    *CONSOLE_METRICS,
    *EVERYWHERE_METRICS,
)

_BY_NAME: Final = {spec.name: spec for spec in CATALOGUE}
_BY_SERIES: Final = {series: spec for spec in CATALOGUE for series in spec.series}


def get_spec(name: str) -> MetricSpec | None:
    """The metric of that name, or with a sample of that name (``…_bucket``); None when there is none."""
    return _BY_NAME.get(name) or _BY_SERIES.get(name)
