"""The whole stack at a moment, as all pages show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from muster.client.rates import LoadRates
from serve_common.api.rollout_views import RolloutView
from serve_common.api.views import (
    ApplicationView,
    AutoscalingView,
    DeploymentView,
    EndpointView,
    StatusView,
)


class Trouble(msgspec.Struct, frozen=True):
    """Why what is shown may be old."""

    kind: Literal["bus", "leader", "store", "refused"]
    """What is away: NATS, the leading controller, or Postgres; ``refused``: NATS refuses everyone who is signed in."""
    text: str
    hint: str
    """What still works."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was read last."""

    version: int
    """Number of this value; later ones are higher."""
    read_at: float
    """When the status was read, in seconds since 1970; 0: never."""
    status: StatusView | None
    """None: it was never read."""
    applications: Mapping[str, ApplicationView]
    """By name."""
    endpoints: Mapping[str, EndpointView]
    """By tag."""
    rollouts: Mapping[str, RolloutView]
    """The last one of each deployment, by its tag."""
    rates: Mapping[str, LoadRates]
    """Load by endpoint's or deployment's tag; empty until there are two samples."""
    unreachable: tuple[str, ...]
    """Services that are missing in ``rates``, as they did not answer in time."""
    trouble: Trouble | None

    @property
    def deployments(self) -> list[DeploymentView]:
        """All deployments, sorted by name."""
        return [] if self.status is None else self.status.deployments

    @property
    def autoscaling(self) -> dict[str, AutoscalingView]:
        """By tag of the deployment."""
        return {} if self.status is None else {view.backend_tag: view for view in self.status.autoscaling}

    def find_deployment(self, name: str) -> DeploymentView | None:
        """The deployment of that full name."""
        return next((view for view in self.deployments if view.name == name), None)


NOTHING_READ = System(
    version=0,
    read_at=0.0,
    status=None,
    applications={},
    endpoints={},
    rollouts={},
    rates={},
    unreachable=(),
    trouble=None,
)


class RatesPoint(msgspec.Struct, frozen=True):
    """The load of one name at a moment, for charts."""

    at: float
    """In seconds since 1970."""
    rates: LoadRates
