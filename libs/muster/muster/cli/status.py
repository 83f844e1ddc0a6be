"""`muster status`, `list`, `info`, `snapshot`, `host …`, `proxy …`, `autoscaling …`: the state of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from muster.cli.changes import ChangeRequest, change_command
from muster.cli.output import (
    counts,
    format_methods,
    format_time,
    format_value,
    get_config_facts,
    get_facts,
    print_error,
    print_facts,
    print_line,
    print_replicas,
    print_table,
    short_name,
    shorten,
    style_state,
    table,
)
from muster.cli.ports import AdminPort
from muster.cli.queries import ReadRequest, group, query_command
from muster.cli.session import Session
from serve_common.api.commands import DrainHost, PauseAutoscaling, ResumeAutoscaling, UndrainHost
from serve_common.api.queries import GetDeploymentInfo, GetStatus, ListDeployments
from serve_common.api.views import (
    AutoscalingView,
    DeploymentStatus,
    DeploymentView,
    HostView,
    ProxyView,
    SnapshotView,
    StatusView,
)
from serve_common.errors import LimitReached
from serve_common.names import check_name, deployment_tag

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the deployment, as deployment or app/deployment.")
]

autoscaling_app = group("Autoscaling of deployments: list, pause, resume.")


@query_command
def list_autoscaling(session: Session) -> ReadRequest[list[AutoscalingView]]:  # noqa: ARG001 - every command gets it
    """List load, decision and reason of every autoscaled backend."""
    return ReadRequest(lambda admin: admin.get_autoscaling(), show_autoscaling)


@change_command()
def pause(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> ChangeRequest:
    """Pause the autoscaling of a deployment.

    Example:
      muster autoscaling pause digits

    It stays paused across deploys, until 'muster autoscaling resume'.
    """
    tag = deployment_tag(name)
    return ChangeRequest(
        command=PauseAutoscaling(backend_tag=tag),
        what=short_name(tag),
        done="keeps its number of replicas",
        already="keeps its number of replicas already",
        progress_command="muster autoscaling list",
    )


@change_command()
def resume(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> ChangeRequest:
    """Resume the autoscaling of a deployment.

    Example:
      muster autoscaling resume digits
    """
    tag = deployment_tag(name)
    return ChangeRequest(
        command=ResumeAutoscaling(backend_tag=tag),
        what=short_name(tag),
        done="follows its load again",
        already="follows its load already",
        progress_command="muster autoscaling list",
    )


def show_autoscaling(views: Sequence[AutoscalingView]) -> None:
    """Print a table with one row per autoscaled backend."""
    rows = table("name", "replicas", "limits", "load", "wanted", "verdict", "why")
    for view in views:
        rows.add_row(
            Text(short_name(view.backend_tag)),
            Text(str(view.num_replicas)),
            Text(f"{view.min_replicas}-{view.max_replicas}"),
            Text("-" if view.seen is None else f"{view.seen:.1f}"),
            Text("-" if view.wanted is None else f"{view.wanted:.1f}"),
            Text("paused" if view.paused else view.verdict or "-", style="yellow" if _is_odd(view) else ""),
            Text(view.why),
        )
    print_table("Autoscaling", rows)


def _is_odd(view: AutoscalingView) -> bool:
    return bool(view.paused) or view.verdict == "held"


autoscaling_app.command("list")(list_autoscaling)
autoscaling_app.command("pause")(pause)
autoscaling_app.command("resume")(resume)


def show_status(view: StatusView) -> None:
    """Print the status of the whole system."""
    if not view.store_available:
        print_error("warning: Postgres does not answer; what runs goes on, changes are refused")
    if view.store_restored_at is not None:
        when = format_time(view.store_restored_at)
        print_line(
            f"Postgres was found restored to an earlier state at {when}: what had been decided since is lost"
        )
    if view.deployments:
        print_table("Deployments", _deployments(view.deployments))
    else:
        print_line("no deployments yet; 'muster deploy --help' shows how to make one")
    show_hosts(view.hosts)
    print_table("Proxies", _proxies(view.proxies, view.snapshot_id))
    if view.autoscaling:
        show_autoscaling(view.autoscaling)
    print_line(f"controller {view.controller_id} leads in term {view.epoch}, snapshot {view.snapshot_id}")
    for deployment in view.deployments:
        if deployment.message and deployment.status is DeploymentStatus.UNHEALTHY:
            print_line(f"'muster status {short_name(deployment.name)}' shows the whole message")
            break


def show_deployments(views: Sequence[DeploymentView]) -> None:
    """Print a table with one row per deployment."""
    print_table("Deployments", _deployments(views))


def show_deployment(view: DeploymentView) -> None:
    """Print one deployment with its replicas."""
    config, code = view.backend_config, view.replica_config
    _show(
        view,
        {
            "import path": code.import_path,
            "app dir": code.app_dir,
            "user config": "" if config.user_config is None else format_value(config.user_config),
            "reserves": format_value(msgspec.structs.asdict(code.ray_actor_options)),
        },
    )


def show_everything(view: DeploymentView) -> None:
    """Print one deployment with its whole configuration and its replicas."""
    reached = {} if view.ended_at is not None else get_facts(view.endpoint_options)
    _show(view, {**reached, **get_config_facts(view.backend_config, view.replica_config)})


def _show(view: DeploymentView, config: dict[str, str]) -> None:
    print_facts(
        {
            "deployment": short_name(view.name),
            "status": view.status.value,
            "application": f"{view.application}{' (its ingress)' if view.is_ingress else ''}",
            "version": f"{view.version or '(none)'}, code version {view.code_version}",
            "route": view.route_prefix or "none; called over NATS only",
            "methods": format_methods(view.methods),
            "replicas": counts(view.replicas, view.backend_config),
            "since": format_time(view.started_at) if view.started_at else "",
            "until": "" if view.ended_at is None else format_time(view.ended_at),
            **config,
            "goal": f"{view.goal_id} {view.goal_status.value}",
        }
    )
    print_replicas(view.replicas)
    if view.message:
        print_line(view.message)


def _deployments(views: Sequence[DeploymentView]) -> Table:
    rows = table("name", "status", "version", "route", "replicas", "message")
    for view in views:
        rows.add_row(
            Text(short_name(view.name)),
            style_state(view.status.value),
            Text(view.version or "-"),
            Text(view.route_prefix or "-"),
            Text(counts(view.replicas, view.backend_config)),
            Text(shorten(view.message)),
        )
    return rows


def show_hosts(views: Sequence[HostView]) -> None:
    """Print a table with one row per host."""
    rows = table("host", "status", "replicas", "resources", "last report")
    for view in views:
        resources = ", ".join(_amount(name, amount) for name, amount in sorted(view.resources.items()))
        status = style_state(view.status)
        if view.draining:
            status.append(", drained", style="yellow")
        rows.add_row(
            Text(view.host_id),
            status,
            Text(str(view.num_replicas)),
            Text(resources),
            Text(f"{view.report_age_s:.1f} s ago"),
        )
    print_table("Hosts", rows)


def _amount(name: str, amount: float) -> str:
    # Ray's unit of memory is the byte; other resources are plain counts.
    return f"{amount / 2**30:.1f} GiB {name}" if name == "memory" else f"{amount:g} {name}"


def show_proxies(views: Sequence[ProxyView]) -> None:
    """Print a table with one row per proxy; those behind the highest snapshot show it."""
    print_table("Proxies", _proxies(views, max((view.applied_snapshot_id for view in views), default=0)))


def _proxies(views: Sequence[ProxyView], snapshot_id: int) -> Table:
    rows = table("proxy", "status", "address", "snapshot", "last report")
    for view in views:
        behind = "" if view.applied_snapshot_id >= snapshot_id else f" of {snapshot_id}"
        rows.add_row(
            Text(view.proxy_id),
            style_state(view.status),
            Text(view.address or "-"),
            Text(f"{view.applied_snapshot_id}{behind}"),
            Text(f"{view.report_age_s:.1f} s ago"),
        )
    return rows


@query_command
def list_(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Include deleted deployments that are still retained.")
    ] = False,
) -> ReadRequest[list[DeploymentView]]:
    """List deployments.

    Example:
      muster list --deleted

    'muster status' shows hosts and proxies too.
    """
    query = ListDeployments(include_deleted=deleted)
    return ReadRequest(lambda admin: admin.list_deployments(query), show_deployments)


@query_command
def info(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> ReadRequest[DeploymentView]:
    """Show one deployment in full: configuration, goal, replicas.

    Example:
      muster info digits

    'muster status digits' is the short form.
    """
    query = GetDeploymentInfo(name=deployment_tag(name))
    return ReadRequest(lambda admin: admin.get_deployment_info(query), show_everything)


@query_command
def snapshot(session: Session) -> ReadRequest[list[SnapshotView]]:  # noqa: ARG001 - every command gets it
    """List every deployment with its class and its start and end.

    Example:
      muster snapshot --json

    Deleted deployments are included while they are retained.
    """
    return ReadRequest(lambda admin: admin.get_snapshot(), _show_snapshot)


def _show_snapshot(views: Sequence[SnapshotView]) -> None:
    rows = table("name", "class", "version", "route", "status", "start", "end")
    for view in views:
        rows.add_row(
            Text(short_name(view.name)),
            Text(view.class_name),
            Text(view.version),
            Text(view.route or "-"),
            style_state(view.status.value),
            Text(format_time(view.start_time)),
            Text(format_time(view.end_time)),
        )
    print_table("Deployments", rows)


@query_command
def status(
    session: Session,
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of the deployment, as deployment or app/deployment. Default: all."
        ),
    ] = None,
) -> ReadRequest[Any]:
    """Show deployments, hosts and proxies, or one deployment with its replicas.

    Examples:
      muster status
      muster status digits --json

    'muster info' and 'muster events' show more about one deployment.
    """
    if name is not None:
        query = GetDeploymentInfo(name=deployment_tag(name))
        return ReadRequest(lambda admin: admin.get_deployment_info(query), show_deployment)
    if (full := session.full_disk()) is not None:
        print_error(full)
    whole = _StatusPages(session)
    return ReadRequest(whole.ask, whole.show)


class _StatusPages:
    """The status of the whole system, with deployments fetched in pages when they exceed one message."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def ask(self, admin: AdminPort) -> StatusView:
        try:
            return await admin.get_status(GetStatus())
        except LimitReached:
            view = await admin.get_status(GetStatus(deployments=False))
        return msgspec.structs.replace(view, deployments=await admin.list_deployments(ListDeployments()))

    def show(self, view: StatusView) -> None:
        show_status(view)
        if self._session.has_plain_users:
            print_error(
                "warning: NATS has plain users: replicas can read and answer each other's requests (see SECURITY.md)"
            )


Host = Annotated[str, typer.Argument(metavar="HOST", help="Host id, as 'muster host list' shows it.")]

host_app = group("Hosts that run replicas: list, drain, undrain.")


@query_command
def list_hosts(session: Session) -> ReadRequest[list[HostView]]:  # noqa: ARG001 - every command gets it
    """List hosts with their resources and number of replicas."""
    return ReadRequest(lambda admin: admin.get_hosts(), show_hosts)


@change_command(timeout_s=600.0)
def drain(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    host_id: Host,
) -> ChangeRequest:
    """Move every replica off a host, and wait until it runs none.

    Example:
      muster host drain host-1

    New replicas serve elsewhere before the old ones stop. Nothing is
    placed there again until 'muster host undrain'.
    """
    command = DrainHost(host_id=check_name(host_id, "HOST"))
    return ChangeRequest(
        command=command,
        what=f"host {host_id}",
        done="is drained",
        already="is drained already",
        progress_command="muster host list",
    )


@change_command()
def undrain(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    host_id: Host,
) -> ChangeRequest:
    """Allow replicas on a host again.

    Example:
      muster host undrain host-1

    Replicas that run elsewhere by now stay there.
    """
    command = UndrainHost(host_id=check_name(host_id, "HOST"))
    return ChangeRequest(
        command=command,
        what=f"host {host_id}",
        done="takes replicas again",
        already="takes replicas already",
        progress_command="muster host list",
    )


host_app.command("list")(list_hosts)
host_app.command("drain")(drain)
host_app.command("undrain")(undrain)


proxy_app = group("Proxies that accept HTTP requests: list.")


@query_command
def list_proxies(session: Session) -> ReadRequest[list[ProxyView]]:  # noqa: ARG001 - every command gets it
    """List proxies with their addresses and applied snapshots."""
    return ReadRequest(lambda admin: admin.get_http_proxies(), show_proxies)


proxy_app.command("list")(list_proxies)
