"""Metrics of controllers. Most exist only while the controller leads: only the leader knows them."""

from __future__ import annotations

from typing import Final

from serve_common.telemetry.catalogue.specs import Exporter, MetricKind, MetricSpec

PLAN_SECONDS_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_HERE: Final = (Exporter.CONTROLLER,)
_LEADS: Final = "while it leads"
_AUTOSCALED: Final = "while it leads, for backends with `autoscaling_config`"


def _gauge(
    name: str, text: str, unit: str, labels: tuple[str, ...] = (), *, when: str = _LEADS
) -> MetricSpec:
    return MetricSpec(
        name=name, kind=MetricKind.GAUGE, text=text, unit=unit, labels=labels, when=when, exporters=_HERE
    )


def _counter(name: str, text: str, unit: str, labels: tuple[str, ...] = (), *, when: str = "") -> MetricSpec:
    return MetricSpec(
        name=name, kind=MetricKind.COUNTER, text=text, unit=unit, labels=labels, when=when, exporters=_HERE
    )


def _seconds(name: str, text: str) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=MetricKind.HISTOGRAM,
        text=text,
        unit="seconds",
        buckets=PLAN_SECONDS_BUCKETS,
        exporters=_HERE,
    )


LEADER: Final = _gauge("serve_controller_leader", "1 while this controller leads.", "1", when="")
EPOCH: Final = _gauge(
    "serve_controller_epoch", "Epoch of this leader; rises with every change of leader.", "epoch"
)
STORE_AVAILABLE: Final = _gauge("serve_controller_store_available", "1 while Postgres answers.", "1")
STORE_RESTORED: Final = _gauge(
    "serve_controller_store_restored_timestamp_seconds",
    "When a leader last found Postgres restored to an earlier state and raised all numbers above what is lost, since "
    "1970; 0 for never.",
    "seconds",
)
REPLICAS: Final = _gauge(
    "serve_controller_replicas", "Replicas by backend and state.", "replicas", ("backend_tag", "state")
)
REPLICAS_WANTED: Final = _gauge(
    "serve_controller_replicas_wanted",
    "Replicas that should run; 0 for a backend that is being deleted, or whose first version failed.",
    "replicas",
    ("backend_tag",),
)
GOALS: Final = _gauge("serve_controller_goals", "Goals that are remembered, by status.", "goals", ("status",))
GOALS_ENDED: Final = _counter(
    "serve_controller_goals_ended_total", "Goals that ended, by how.", "goals", ("status",)
)
OLDEST_PENDING_GOAL: Final = _gauge(
    "serve_controller_oldest_pending_goal_seconds",
    "Age of the goal that has been pending for longest; 0 when none is.",
    "seconds",
)
HOSTS: Final = _gauge(
    "serve_controller_hosts", "Replica hosts, by how they are treated.", "hosts", ("status",)
)
PROXIES: Final = _gauge(
    "serve_controller_proxies",
    "Proxies: live ones, for which goals wait, leaving ones, and lost ones.",
    "proxies",
    ("status",),
)
SNAPSHOT_ID: Final = _gauge(
    "serve_controller_snapshot_id",
    "The newest snapshot that was decided; proxies tell how far they are by serve_proxy_applied_snapshot_id.",
    "snapshot id",
)
EFFECTS: Final = _counter(
    "serve_controller_effects_total",
    "Effects performed, by kind and outcome.",
    "effects",
    ("effect", "outcome"),
    when="once one was performed",
)
RECONCILE_SECONDS: Final = _seconds("serve_controller_reconcile_seconds", "Time to make one plan.")
CHECKPOINT_SECONDS: Final = _seconds(
    "serve_controller_checkpoint_seconds", "Time to record one change in Postgres."
)
CONTROLLER_RECONNECTS: Final = _counter(
    "serve_controller_nats_reconnects_total", "Reconnects to NATS.", "reconnects"
)
DROPPED_CALLS: Final = _counter(
    "serve_controller_dropped_calls_total",
    "Admin calls, and questions of NATS' service protocol, that were dropped because the subject to answer on is no "
    "inbox.",
    "calls",
)

CONTROLLER_METRICS: Final = (
    LEADER,
    EPOCH,
    STORE_AVAILABLE,
    STORE_RESTORED,
    REPLICAS,
    REPLICAS_WANTED,
    GOALS,
    GOALS_ENDED,
    OLDEST_PENDING_GOAL,
    HOSTS,
    PROXIES,
    SNAPSHOT_ID,
    EFFECTS,
    RECONCILE_SECONDS,
    CHECKPOINT_SECONDS,
    CONTROLLER_RECONNECTS,
    DROPPED_CALLS,
)

SEEN_REQUESTS: Final = _gauge(
    "serve_autoscaler_seen_requests",
    "Requests worked on and waiting over the look-back period, or what the backend's query gave, as the last decision "
    "saw them; absent while they are not known.",
    "requests",
    ("backend_tag",),
    when=_AUTOSCALED,
)
WANTED_REPLICAS: Final = _gauge(
    "serve_autoscaler_wanted_replicas",
    "Replicas that the load comes to, before limits and delays.",
    "replicas",
    ("backend_tag",),
    when=_AUTOSCALED,
)
TARGET_REPLICAS: Final = _gauge(
    "serve_autoscaler_target_replicas",
    "Replicas that were decided.",
    "replicas",
    ("backend_tag",),
    when=_AUTOSCALED,
)
MIN_REPLICAS: Final = _gauge(
    "serve_autoscaler_min_replicas",
    "The configured minimum.",
    "replicas",
    ("backend_tag",),
    when=_AUTOSCALED,
)
MAX_REPLICAS: Final = _gauge(
    "serve_autoscaler_max_replicas",
    "The configured maximum.",
    "replicas",
    ("backend_tag",),
    when=_AUTOSCALED,
)
VERDICT: Final = _gauge(
    "serve_autoscaler_verdict",
    "1 for what the last look at the load came to, 0 for the others.",
    "1",
    ("backend_tag", "verdict"),
    when=_AUTOSCALED,
)
PAUSED: Final = _gauge(
    "serve_autoscaler_paused",
    "1 while a user has paused autoscaling of this backend.",
    "1",
    ("backend_tag",),
    when=_AUTOSCALED,
)
DATA_AGE: Final = _gauge(
    "serve_autoscaler_data_age_seconds",
    "Age of the newest reading that could be used.",
    "seconds",
    ("backend_tag",),
    when=_AUTOSCALED,
)
DECISIONS: Final = _counter(
    "serve_autoscaler_decisions_total",
    "Looks at the load, by what they came to.",
    "decisions",
    ("backend_tag", "verdict"),
    when=_AUTOSCALED,
)
READINGS: Final = _counter(
    "serve_autoscaler_readings_total",
    "Readings of the load, by where they were asked for and what came of it.",
    "readings",
    ("source", "outcome"),
    when=_AUTOSCALED,
)
WAKEUPS: Final = _counter(
    "serve_autoscaler_wakeups_total",
    "Times that a waiting request woke a backend without replicas.",
    "wake-ups",
    ("backend_tag",),
    when=_AUTOSCALED,
)

AUTOSCALER_METRICS: Final = (
    SEEN_REQUESTS,
    WANTED_REPLICAS,
    TARGET_REPLICAS,
    MIN_REPLICAS,
    MAX_REPLICAS,
    VERDICT,
    DECISIONS,
    PAUSED,
    DATA_AGE,
    READINGS,
    WAKEUPS,
)
