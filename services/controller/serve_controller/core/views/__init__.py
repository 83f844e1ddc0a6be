"""Views of the checkpoint and the observed state for callers. Pure functions that never wait.

Why one module for each kind of object: they share nothing but the paging of lists.
"""

from __future__ import annotations

from serve_controller.core.views.backends import (
    ReplicaCount,
    count_replicas,
    view_autoscaling,
    view_backend_config,
    view_backends,
    view_revisions,
)
from serve_controller.core.views.deployments import (
    view_applications,
    view_deployment,
    view_deployments,
    view_endpoints,
    view_http_config,
    view_snapshot,
)
from serve_controller.core.views.hosts import ALL, page_of, view_goal, view_hosts, view_proxies

__all__ = [
    "ALL",
    "ReplicaCount",
    "count_replicas",
    "page_of",
    "view_applications",
    "view_autoscaling",
    "view_backend_config",
    "view_backends",
    "view_deployment",
    "view_deployments",
    "view_endpoints",
    "view_goal",
    "view_hosts",
    "view_http_config",
    "view_proxies",
    "view_revisions",
    "view_snapshot",
]
