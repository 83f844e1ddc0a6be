"""What several dashboards share: what can be chosen, what is marked, and how they are reached."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards.model import Annotation, Link, Query, Step, Variable
from deploy.grafana.boards.promql import OF_BACKEND, WINDOW, quantile

OVERVIEW: Final = "muster-overview"
BACKEND: Final = "muster-backend"
AUTOSCALING: Final = "muster-autoscaling"
ROLLOUTS: Final = "muster-rollouts"
CONTROL_PLANE: Final = "muster-control-plane"
BUS_AND_HOSTS: Final = "muster-bus-and-hosts"

ENDPOINTS: Final = Variable(
    name="endpoint", title="Endpoint", series="serve_proxy_request_seconds_count", label="endpoint_tag"
)
BACKENDS: Final = Variable(
    name="backend", title="Backend", series="serve_proxy_in_flight_requests", label="backend_tag"
)
INSTANCES: Final = Variable(name="instance", title="Process", series="up", label="instance")

DEPLOYS: Final = Annotation(
    name="Change",
    expr=f"sum(increase(serve_controller_goals_ended_total{WINDOW})) > 0",
    text="A goal ended: a deployment, its traffic or its number of replicas was changed",
    color="blue",
)
LEADER_CHANGES: Final = Annotation(
    name="Change of leader",
    expr=f"sum(changes(serve_controller_leader{WINDOW})) > 0",
    text="Another controller leads, or this one began anew",
    color="purple",
)

RED_FROM_ONE: Final = (Step(value=None, color="green"), Step(value=1, color="red"))
RED_BELOW_ONE: Final = (Step(value=None, color="red"), Step(value=1, color="green"))
NO_OR_YES: Final = (("0", "no"), ("1", "yes"))

TO_BACKEND: Final = Link(title="This backend", uid=BACKEND, variable="backend", label="backend_tag")
TO_BACKEND_OF_ENDPOINT: Final = Link(
    title="The backend of this name", uid=BACKEND, variable="backend", label="endpoint_tag"
)
TO_AUTOSCALING: Final = Link(
    title="Autoscaling of this backend", uid=AUTOSCALING, variable="backend", label="backend_tag"
)
TO_PROCESS: Final = Link(title="This process", uid=BUS_AND_HOSTS, variable="instance", label="instance")


def scalings(*filters: str) -> Annotation:
    """Marks where another number of replicas was decided, by whomever."""
    of = f"{{{', '.join(filters)}}}" if filters else ""
    return Annotation(
        name="Scaling",
        expr=f"sum by (backend_tag) (changes(serve_controller_replicas_wanted{of}{WINDOW})) > 0",
        text="Another number of replicas was decided",
        color="orange",
        labels=("backend_tag",),
    )


SCALINGS_OF_BACKEND: Final = scalings(OF_BACKEND)


def quantiles(
    histogram: str, *filters: str, by: str = "", shares: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """One line for each share, by the labels in ``by``."""
    names = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
    return tuple(
        Query(
            expr=quantile(share, histogram, *filters, by=by), legend=f"{names} p{round(share * 100)}".lstrip()
        )
        for share in shares
    )
