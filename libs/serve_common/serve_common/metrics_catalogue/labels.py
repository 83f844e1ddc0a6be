"""What each label of a metric stands for, and what keeps its values few.

Why the bound is written down: each further value is a further series in every Prometheus for weeks, and a label
without a bound is how a monitored system brings its monitoring down.
"""

from __future__ import annotations

from typing import Final

import msgspec


class LabelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One label."""

    meaning: str
    bound: str
    """What limits the number of its values."""


LABELS: Final = {
    "backend_tag": LabelSpec(
        meaning="The backend; of a deployment, `application/deployment`.",
        bound="The backends that are deployed; on a host also those it has run replicas of, the last 500 at most.",
    ),
    "endpoint_tag": LabelSpec(
        meaning="The endpoint; empty for requests that no route was found for.",
        bound="The endpoints that are deployed.",
    ),
    "method": LabelSpec(
        meaning="The HTTP method.",
        bound="The seven usual methods; any other one is `other`.",
    ),
    "code": LabelSpec(
        meaning="The HTTP status; 499 when the client went away before its answer, 101 for a WebSocket.",
        bound="Three digits; any other number is `other`.",
    ),
    "outcome": LabelSpec(
        meaning="What became of it: of a shadow's copy `answered`, `error`, `failed` or `skipped`; of an effect and "
        "of a load `ok` or what went wrong; of a reading whether it is whole.",
        bound="Words of the code.",
    ),
    "reason": LabelSpec(
        meaning="Why a request was refused: by proxies `queue`, `circuit`, `retry_budget`, `stopped` or "
        "`deaths`; by replicas `busy`, "
        "`draining` or `reply_subject` (to be answered where nobody's inbox is). "
        "How a replica failed: `start`, `death` or `health`. Why a span was dropped: `queue` (too many "
        "waited to be sent) or `receiver` (it was away, or did not take them). Why a log line was dropped: "
        "`disk_full`, `not_written` (it failed for another reason) or `too_many` (they came faster than they could be "
        "written).",
        bound="Words of the code.",
    ),
    "message": LabelSpec(
        meaning="The kind of a message between services: `host_report`, `proxy_report`, `leader_notice`, `wake`, "
        "`host_goal` or `snapshot`.",
        bound="Words of the code.",
    ),
    "status": LabelSpec(
        meaning="Of a replica on its host, a goal, a host or a proxy, as `muster status` shows it.",
        bound="Words of the code.",
    ),
    "state": LabelSpec(
        meaning="What was decided about a replica, from `should_start` to `stopping`.",
        bound="Words of the code.",
    ),
    "function": LabelSpec(
        meaning="The batched function's name, with its class.",
        bound="The code of the deployment; the first 100 in a replica, any other one is `other`.",
    ),
    "kind": LabelSpec(
        meaning="`spare`: the replica's process had been started ahead; `cold`: not.", bound="These two."
    ),
    "connection": LabelSpec(
        meaning="`data`: requests; `control`: reports, snapshots and commands.", bound="These two."
    ),
    "effect": LabelSpec(
        meaning="What the controller did to the outside, such as `record_plan` or `publish_snapshot`.",
        bound="Words of the code.",
    ),
    "verdict": LabelSpec(
        meaning="Why the autoscaler moved or held, such as `up`, `waits_down` or `held` (no whole reading).",
        bound="Words of the code.",
    ),
    "source": LabelSpec(meaning="Where the load was read: `prometheus` or `scrape`.", bound="These two."),
    "server": LabelSpec(
        meaning="The NATS server: host and port of its address in `SERVE_NATS_MONITOR_URL`.",
        bound="Those that are named there, 16 at most.",
    ),
    "proxy_id": LabelSpec(
        meaning="The proxy, as `muster status` names it.", bound="One for each proxy process."
    ),
    "host_id": LabelSpec(meaning="The replica host, as `muster hosts` names it.", bound="One for each host."),
}
