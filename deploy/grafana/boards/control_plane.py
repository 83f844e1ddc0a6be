"""Whether what was ordered is being done: who leads, what is pending, how long a decision takes, and who follows."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Board, Kind, Panel, Query, Row, Step
from deploy.grafana.boards.promql import OF_BACKEND, increase, rate, total

_LAG_STEPS: Final = (Step(value=None, color="green"), Step(value=0.25, color="red"))

_LEADERSHIP: Final = Row(
    title="Who decides",
    panels=(
        Panel(
            title="Leaders",
            description="1 is right. 0: nothing is repaired and commands are refused.",
            unit="none",
            kind=Kind.NUMBER,
            width=4,
            height=5,
            steps=(*common.RED_BELOW_ONE, Step(value=2, color="red")),
            queries=(Query(expr=total("serve_controller_leader"), legend="leaders"),),
        ),
        Panel(
            title="Postgres",
            description="Whether it answers the leader. Without it commands are refused; traffic goes on.",
            unit="none",
            kind=Kind.NUMBER,
            width=4,
            height=5,
            steps=common.RED_BELOW_ONE,
            texts=(("0", "away"), ("1", "there")),
            queries=(Query(expr="min(serve_controller_store_available)", legend="Postgres"),),
        ),
        Panel(
            title="Leader, by process",
            description="Which controller leads, and when that changed.",
            unit="none",
            kind=Kind.STATES,
            width=8,
            height=5,
            steps=(Step(value=None, color="gray"), Step(value=1, color="green")),
            texts=(("0", "stands by"), ("1", "leads")),
            link=common.TO_PROCESS,
            queries=(Query(expr="max by (instance) (serve_controller_leader)", legend="{{instance}}"),),
        ),
        Panel(
            title="Epoch",
            description="Rises with every change of leader. Every few minutes: controllers die, or lose Postgres.",
            unit="none",
            width=8,
            height=5,
            least=None,
            steps_between=True,
            queries=(Query(expr="max(serve_controller_epoch)", legend="epoch"),),
        ),
    ),
)

_GOALS: Final = Row(
    title="What was ordered",
    panels=(
        Panel(
            title="Goals by status",
            description="Accepted changes that are remembered. Rising `failed`: see `muster events`.",
            unit="none",
            stacked=True,
            steps_between=True,
            queries=(Query(expr=total("serve_controller_goals", by="status"), legend="{{status}}"),),
        ),
        Panel(
            title="Goals that ended",
            description="How many ended from point to point, by how. Failed ones: see `muster events`.",
            unit="none",
            stacked=True,
            steps_between=True,
            queries=(
                Query(
                    expr=increase("serve_controller_goals_ended_total", by="status"),
                    legend="{{status}}",
                ),
            ),
        ),
        Panel(
            title="Oldest pending goal",
            description="How long the oldest change has been waited for. Above ten minutes an alert fires.",
            unit="s",
            steps=(Step(value=None, color="green"), Step(value=600, color="red")),
            queries=(Query(expr="max(serve_controller_oldest_pending_goal_seconds)", legend="oldest"),),
        ),
        Panel(
            title="Replicas that are missing",
            description="Wanted and not serving, by backend.",
            unit="none",
            steps_between=True,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=total("serve_controller_replicas_wanted", OF_BACKEND, by="backend_tag")
                    + " - "
                    + total(
                        "serve_controller_replicas", OF_BACKEND, 'state=~"running|updating"', by="backend_tag"
                    ),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
    ),
)

_LOOP: Final = Row(
    title="How it is decided",
    panels=(
        Panel(
            title="Making a plan",
            description="Time of one `reconcile`.",
            unit="s",
            queries=common.quantiles("serve_controller_reconcile_seconds", shares=(0.5, 0.99)),
        ),
        Panel(
            title="Recording a change in Postgres",
            description="Time of one transaction; commands wait for it.",
            unit="s",
            queries=common.quantiles("serve_controller_checkpoint_seconds", shares=(0.5, 0.99)),
        ),
        Panel(
            title="Plans and records",
            description="How many in a second. Many without any change ordered: something goes up and down.",
            unit="ops",
            queries=(
                Query(expr=rate("serve_controller_reconcile_seconds_count"), legend="plans"),
                Query(expr=rate("serve_controller_checkpoint_seconds_count"), legend="records"),
            ),
        ),
        Panel(
            title="Effects",
            description="What the leader did outside of itself, by kind.",
            unit="ops",
            stacked=True,
            queries=(Query(expr=rate("serve_controller_effects_total", by="effect"), legend="{{effect}}"),),
        ),
        Panel(
            title="Effects that failed",
            description="By kind and by the type of error; each is tried again. Empty is good.",
            unit="ops",
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_controller_effects_total", 'outcome!="ok"', by="effect, outcome"),
                    legend="{{effect}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Lag of the controllers' loops",
            description="How late what is due is done. Above a quarter of a second: too little CPU, or a blocked "
            "loop.",
            unit="s",
            steps=_LAG_STEPS,
            link=common.TO_PROCESS,
            queries=common.quantiles(
                "serve_loop_lag_seconds", 'job="controller"', by="instance", shares=(0.99,)
            ),
        ),
    ),
)

_FOLLOWERS: Final = Row(
    title="Who follows",
    panels=(
        Panel(
            title="Proxies behind",
            description="How many snapshots each proxy is behind the controller. Goals wait for live proxies; "
            "above 0 for a minute an alert fires.",
            unit="none",
            steps_between=True,
            link=common.TO_PROCESS,
            queries=(
                Query(
                    expr="scalar(max(serve_controller_snapshot_id)) - serve_proxy_applied_snapshot_id",
                    legend="{{instance}}",
                ),
            ),
        ),
        Panel(
            title="Hosts by status",
            description="live: it reports. suspect: silent, nothing new is placed there. lost: replaced "
            "elsewhere.",
            unit="none",
            stacked=True,
            steps_between=True,
            queries=(Query(expr=total("serve_controller_hosts", by="status"), legend="{{status}}"),),
        ),
        Panel(
            title="Proxies by status",
            description="live: goals wait for it to apply what they changed.",
            unit="none",
            stacked=True,
            steps_between=True,
            queries=(Query(expr=total("serve_controller_proxies", by="status"), legend="{{status}}"),),
        ),
    ),
)

BOARD: Final = Board(
    uid=common.CONTROL_PLANE,
    title="Muster: Control plane",
    description="Goals, plans, records, leadership and who has applied what.",
    variables=(common.BACKENDS,),
    annotations=(common.DEPLOYS, common.SCALINGS_OF_BACKEND, common.LEADER_CHANGES),
    rows=(_LEADERSHIP, _GOALS, _LOOP, _FOLLOWERS),
)
