"""The PromQL that loads are read with.

Why counters of seconds: the rate of the integral of a number of requests is its mean over the window, whatever happened
between two scrapes; a sampled gauge shows only moments.
"""

from __future__ import annotations

import re
from typing import Final

from serve_common.autoscaling import AggregationFunction
from serve_common.metrics_catalogue.hosts import HOST_INFO
from serve_common.metrics_catalogue.proxies import PROXY_INFO, QUEUED_SECONDS
from serve_common.metrics_catalogue.replicas import ONGOING_SECONDS, REPLICA_CONNECTED
from serve_common.names import BackendTag

ONGOING: Final = ONGOING_SECONDS.name
QUEUED: Final = QUEUED_SECONDS.name
PROXY: Final = PROXY_INFO.name
HOST: Final = HOST_INFO.name
CONNECTED: Final = REPLICA_CONNECTED.name

_PLACEHOLDER: Final = re.compile(r"\$(backend_tag|look_back|deployment)\b")


def sum_of(gauge: str, matchers: str) -> str:
    """Of each backend, by ``backend_tag``: the present value of ``gauge``."""
    return f"sum by (backend_tag) ({gauge}{{{matchers}}})"


def duration(seconds: float) -> str:
    """As PromQL writes it, rounded to milliseconds; at least one."""
    milliseconds = max(round(seconds * 1000), 1)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


def mean_of(counter: str, matchers: str, window_s: float) -> str:
    """Of each backend, by ``backend_tag``: the mean number of requests over the window that ``counter`` counts."""
    return f"sum by (backend_tag) (rate({counter}{{{matchers}}}[{duration(window_s)}]))"


def extreme_of(
    function: AggregationFunction, matchers: str, *, window_s: float, inner_s: float, step_s: float
) -> str:
    """Of each backend: the largest or smallest mean over ``inner_s`` of all its requests, within the window."""
    parts = " or ".join(
        f'label_replace({mean_of(counter, matchers, inner_s)}, "part", "{counter}", "", "")'
        for counter in (ONGOING, QUEUED)
    )
    return f"{function.value}_over_time((sum by (backend_tag) ({parts}))[{duration(window_s)}:{duration(step_s)}])"


def samples_of(info: str, matchers: str, window_s: float) -> str:
    """Every sample of the metric that says who was scraped."""
    return f"{info}{{{matchers}}}[{duration(window_s)}]"


def count_of(info: str, matchers: str, window_s: float) -> str:
    """How many such samples there are of each process."""
    return f"count_over_time({info}{{{matchers}}}[{duration(window_s)}])"


def with_placeholders(promql: str, backend_tag: BackendTag, look_back_s: float) -> str:
    """A user's expression with its placeholders replaced, fit for strings in double and single quotes."""
    values = {
        "backend_tag": _escaped(backend_tag),
        "deployment": _escaped(backend_tag.rpartition("/")[2]),
        "look_back": duration(look_back_s),
    }
    return _PLACEHOLDER.sub(lambda found: values[found[1]], promql)


def _escaped(text: str) -> str:
    for special in ("\\", '"', "'"):
        text = text.replace(special, f"\\{special}")
    return text.replace("\n", "\\n")
