"""The admin API as one table: every verb with its request and its reply.

Why a table: the controller offers exactly these, the client and the CLI are tested against it, and a verb cannot be
added in one place only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from serve_common.api import commands as c
from serve_common.api import queries as q
from serve_common.api import views as v
from serve_common.config.endpoint import HttpOptions

COMMANDS: Final[Mapping[str, tuple[type[c.Command], Any]]] = {
    "deploy": (c.Deploy, c.ChangeReply),
    "delete_deployment": (c.DeleteDeployment, c.ChangeReply),
    "deploy_application": (c.DeployApplication, c.ChangeReply),
    "delete_application": (c.DeleteApplication, c.ChangeReply),
    "create_backend": (c.CreateBackend, c.ChangeReply),
    "delete_backend": (c.DeleteBackend, c.ChangeReply),
    "update_backend_config": (c.UpdateBackendConfig, c.ChangeReply),
    "scale": (c.Scale, c.ChangeReply),
    "pause_autoscaling": (c.PauseAutoscaling, c.ChangeReply),
    "resume_autoscaling": (c.ResumeAutoscaling, c.ChangeReply),
    "create_endpoint": (c.CreateEndpoint, c.ChangeReply),
    "delete_endpoint": (c.DeleteEndpoint, c.ChangeReply),
    "set_traffic": (c.SetTraffic, c.ChangeReply),
    "shadow_traffic": (c.ShadowTraffic, c.ChangeReply),
    "set_endpoint_options": (c.SetEndpointOptions, c.ChangeReply),
    "rollback": (c.Rollback, c.ChangeReply),
    "set_http_options": (c.SetHttpOptions, c.ChangeReply),
    "drain_host": (c.DrainHost, c.ChangeReply),
    "undrain_host": (c.UndrainHost, c.ChangeReply),
    "shutdown": (c.Shutdown, c.ShutdownReply),
    "restore": (c.Restore, c.RestoreReply),
}
"""Every verb that changes state."""

QUERIES: Final[Mapping[str, tuple[type[q.Query], Any]]] = {
    "get_deployment_info": (q.GetDeploymentInfo, v.DeploymentView),
    "list_deployments": (q.ListDeployments, list[v.DeploymentView]),
    "get_all_applications": (q.GetAllApplications, list[v.ApplicationView]),
    "get_all_backends": (q.GetAllBackends, list[v.BackendView]),
    "get_backend_config": (q.GetBackendConfig, v.BackendConfigView),
    "get_all_endpoints": (q.GetAllEndpoints, list[v.EndpointView]),
    "get_http_config": (q.GetHttpConfig, HttpOptions),
    "get_http_proxies": (q.GetHttpProxies, list[v.ProxyView]),
    "get_hosts": (q.GetHosts, list[v.HostView]),
    "get_status": (q.GetStatus, v.StatusView),
    "get_autoscaling": (q.GetAutoscaling, list[v.AutoscalingView]),
    "get_load": (q.GetLoad, v.LoadView),
    "get_snapshot": (q.GetSnapshot, list[v.SnapshotView]),
    "get_events": (q.GetEvents, list[v.EventView]),
    "get_history": (q.GetHistory, list[v.HistoryView]),
    "get_revisions": (q.GetRevisions, list[v.RevisionView]),
    "get_backup": (q.GetBackup, v.BackupPage),
    "wait_for_goal": (q.WaitForGoal, v.GoalView),
    "plan": (q.Plan, v.PlanView),
}
"""Every verb that changes nothing."""

VERBS: Final[Mapping[str, tuple[type[c.Request], Any]]] = {**COMMANDS, **QUERIES}

WHO_HEADER: Final = "Muster-Who"
"""NATS header with the client's name for the audit log: an unverified claim."""
WHO_LENGTH_MAX: Final = 200


def sanitize_principal(claimed: str) -> str:
    """``claimed`` as it is stored and shown: one line of printable characters, at most `WHO_LENGTH_MAX`."""
    return " ".join("".join(c if c.isprintable() else " " for c in claimed).split())[:WHO_LENGTH_MAX]


class ErrorView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an error reply; the headers ``Nats-Service-Error`` and ``…-Code`` summarize it."""

    code: str
    message: str
    field: str = ""
    """Path of the bad field, such as ``backend_config.num_replicas``."""
