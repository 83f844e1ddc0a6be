"""Queries: what callers see of the checkpoint and of what was heard. Pure, and never wait for anything.

Why one module for each kind of object: they have nothing in common but the pages that lists come in.
"""

from __future__ import annotations

from serve_controller.core.views.applications import view_applications
from serve_controller.core.views.autoscaling import view_autoscaling
from serve_controller.core.views.backends import view_backend_config, view_backends
from serve_controller.core.views.counts import ReplicaCount, count_replicas
from serve_controller.core.views.deployments import view_deployment, view_deployments, view_snapshot
from serve_controller.core.views.endpoints import view_endpoints, view_http_config
from serve_controller.core.views.goals import view_goal
from serve_controller.core.views.hosts import view_hosts, view_proxies
from serve_controller.core.views.paging import ALL, page_of
from serve_controller.core.views.revisions import view_revisions

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
