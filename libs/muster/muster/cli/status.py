"""`muster status`, `list`, `info`, `host …`, `proxy …`, `autoscaling …`: the state of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import msgspec
import typer

from muster.cli.changes import ChangeRequest, change_command
from muster.cli.completion import complete_deployment, complete_host
from muster.cli.help import Commands
from muster.cli.output import (
    Cell,
    Table,
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
    shorten,
    style_state,
    table,
)
from muster.cli.queries import NAME_HELP, DeploymentName, ReadRequest, ShowEnvOption, query_command
from muster.cli.serve import read_serve_status
from muster.cli.serve_options import AddressOption, note_address
from muster.cli.session import Session
from muster.client.admin import AdminClient
from serve_common.api.commands import DrainHost, PauseAutoscaling, ResumeAutoscaling, UndrainHost
from serve_common.api.queries import (
    GetAutoscaling,
    GetDeploymentInfo,
    GetHosts,
    GetHttpProxies,
    ListDeployments,
)
from serve_common.api.views import (
    AutoscalingView,
    DeploymentStatus,
    DeploymentView,
    HostView,
    ProxyView,
    StatusView,
)
from serve_common.errors import BadField
from serve_common.names import check_name, deployment_tag, short_name

autoscaling_app = Commands(help="Show and pause the autoscaling of deployments: list, pause, resume.")


@query_command
def list_autoscaling() -> ReadRequest[list[AutoscalingView]]:
    """List autoscaled deployments with their load, the last decision and its reason."""
    return ReadRequest(GetAutoscaling(), show_autoscaling)


@change_command()
def pause(*, name: DeploymentName) -> ChangeRequest:
    """Pause the autoscaling of a deployment.

    Example:
      muster autoscaling pause digits

    The number of replicas stays as it is, across deploys too, until 'muster autoscaling resume'.
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
def resume(*, name: DeploymentName) -> ChangeRequest:
    """Resume the autoscaling of a deployment.

    Example:
      muster autoscaling resume digits

    The number of replicas follows the load again, from what it is now.
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
            Cell(short_name(view.backend_tag)),
            Cell(str(view.num_replicas)),
            Cell(f"{view.min_replicas}-{view.max_replicas}"),
            Cell("-" if view.seen is None else f"{view.seen:.1f}"),
            Cell("-" if view.wanted is None else f"{view.wanted:.1f}"),
            Cell("paused" if view.paused else view.verdict or "-", style="yellow" if _is_odd(view) else ""),
            Cell(view.why),
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
    print_line(
        f"controller {view.controller_id} leads in term {view.epoch}, routing revision {view.snapshot_id}"
    )
    for deployment in view.deployments:
        if deployment.message and deployment.status is DeploymentStatus.UNHEALTHY:
            print_line(f"'muster status {short_name(deployment.name)}' shows the whole message")
            break


def show_deployments(views: Sequence[DeploymentView]) -> None:
    """Print a table with one row per deployment."""
    rows = table(
        "name", "status", "version", "route", "replicas", "import path", "created", "deleted", "message"
    )
    for view in views:
        rows.add_row(
            Cell(short_name(view.name)),
            style_state(view.status.value),
            Cell(view.version or "-"),
            Cell(view.route_prefix or "-"),
            Cell(counts(view.replicas, view.backend_config)),
            Cell(view.replica_config.import_path),
            Cell(format_time(view.started_at or None)),
            Cell(format_time(view.ended_at)),
            Cell(shorten(view.message)),
        )
    print_table("Deployments", rows)


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
            "version": view.version or "(none)",
            "route": view.route_prefix or "none; called over NATS only",
            "methods": format_methods(view.methods),
            "replicas": counts(view.replicas, view.backend_config),
            "created": format_time(view.started_at) if view.started_at else "",
            "deleted": "" if view.ended_at is None else format_time(view.ended_at),
            **config,
            "last change": f"{view.goal_id} {view.goal_status.value}",
        }
    )
    print_replicas([*view.replicas, *view.rollout_replicas])
    if view.message:
        print_line(view.message)


def _deployments(views: Sequence[DeploymentView]) -> Table:
    rows = table("name", "status", "version", "route", "replicas", "message")
    for view in views:
        rows.add_row(
            Cell(short_name(view.name)),
            style_state(view.status.value),
            Cell(view.version or "-"),
            Cell(view.route_prefix or "-"),
            Cell(counts(view.replicas, view.backend_config)),
            Cell(shorten(view.message)),
        )
    return rows


def show_hosts(views: Sequence[HostView]) -> None:
    """Print a table with one row per host."""
    rows = table("host", "status", "replicas", "resources", "last report")
    for view in views:
        resources = ", ".join(_amount(name, amount) for name, amount in sorted(view.resources.items()))
        status = Cell(f"{view.status}, drained", "yellow") if view.draining else style_state(view.status)
        rows.add_row(
            Cell(view.host_id),
            status,
            Cell(str(view.num_replicas)),
            Cell(resources),
            Cell(f"{view.report_age_s:.1f} s ago"),
        )
    print_table("Hosts", rows)


def _amount(name: str, amount: float) -> str:
    # Ray's unit of memory is the byte; other resources are plain counts.
    return f"{amount / 2**30:.1f} GiB {name}" if name == "memory" else f"{amount:g} {name}"


def show_proxies(views: Sequence[ProxyView]) -> None:
    """Print a table with one row per proxy; those behind the highest snapshot show it."""
    print_table("Proxies", _proxies(views, max((view.applied_snapshot_id for view in views), default=0)))


def _proxies(views: Sequence[ProxyView], snapshot_id: int) -> Table:
    rows = table("proxy", "status", "address", "revision", "last report")
    for view in views:
        behind = "" if view.applied_snapshot_id >= snapshot_id else f" of {snapshot_id}"
        rows.add_row(
            Cell(view.proxy_id),
            style_state(view.status),
            Cell(view.address or "-"),
            Cell(f"{view.applied_snapshot_id}{behind}"),
            Cell(f"{view.report_age_s:.1f} s ago"),
        )
    return rows


@query_command
def list_(
    *,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Include the 1000 deployments that were deleted last.")
    ] = False,
) -> ReadRequest[list[DeploymentView]]:
    """List deployments with their import paths, and when they were created and deleted.

    Example:
      muster list --deleted

    'muster status' shows hosts and proxies too.
    """
    query = ListDeployments(include_deleted=deleted)
    return ReadRequest(query, show_deployments)


@query_command
def info(*, name: DeploymentName, show_env: ShowEnvOption = False) -> ReadRequest[DeploymentView]:
    """Show one deployment in full: configuration, last change, replicas.

    Example:
      muster info digits

    'muster status digits' is the short form.
    """
    query = GetDeploymentInfo(name=deployment_tag(name))
    return ReadRequest(query, show_everything, shows_secrets=show_env)


class StatusFormat(Enum):
    """How `muster status` prints."""

    TABLE = "table"
    RAY = "ray"


@query_command
def status(
    session: Session,
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"{NAME_HELP} Default: all.",
            autocompletion=complete_deployment,
        ),
    ] = None,
    show_env: ShowEnvOption = False,
    app: Annotated[
        str | None,
        typer.Option(
            "--name", "-n", metavar="APP", help="Show this application, in Ray Serve's form. Default: all."
        ),
    ] = None,
    form: Annotated[
        StatusFormat | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="'table', or 'ray' for the YAML of Ray Serve's status. Default: a table on a terminal, and "
            "YAML in a pipe or a file.",
        ),
    ] = None,
    address: AddressOption = None,
) -> ReadRequest[Any]:
    """Show deployments, hosts and proxies, or one deployment with its replicas.

    Examples:
      muster status
      muster status digits --json
      muster status --name default --format ray

    'muster info' and 'muster events' show more about one deployment.
    """
    note_address(address)
    if app is not None or form is StatusFormat.RAY:
        if name is not None:
            raise BadField(
                "NAME", "is a deployment, and has no status in Ray Serve's form; --name names an application"
            )
        return read_serve_status(app)
    if name is not None:
        query = GetDeploymentInfo(name=deployment_tag(name))
        return ReadRequest(query, show_deployment, shows_secrets=show_env)
    if (full := session.full_disk()) is not None:
        print_error(full)

    def warned(show: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(view: Any) -> None:
            show(view)
            if session.has_plain_users:
                print_error(
                    "warning: NATS has plain users: replicas can read and answer each other's requests "
                    "(see SECURITY.md)"
                )

        return run

    serve_form = read_serve_status(None)
    piped = ReadRequest(serve_form.query, warned(serve_form.show)) if form is None else None
    return ReadRequest(AdminClient.fetch_status, warned(show_status), shows_secrets=show_env, piped=piped)


Host = Annotated[
    str,
    typer.Argument(
        metavar="HOST",
        help="Host id, as 'muster host list' shows it.",
        autocompletion=complete_host,
    ),
]

host_app = Commands(help="Show and drain the hosts that run replicas: list, drain, undrain.")


@query_command
def list_hosts() -> ReadRequest[list[HostView]]:
    """List hosts with their resources and number of replicas."""
    return ReadRequest(GetHosts(), show_hosts)


@change_command(timeout_s=600.0)
def drain(*, host_id: Host) -> ChangeRequest:
    """Move every replica off a host, and wait until it runs none.

    Example:
      muster host drain host-1

    New replicas serve elsewhere before the old ones stop. Nothing is placed on the host again until
    'muster host undrain'. When the other hosts have no room, the replicas stay, and the change waits for room.
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
def undrain(*, host_id: Host) -> ChangeRequest:
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


proxy_app = Commands(help="Show the proxies, which accept HTTP requests: list.")


@query_command
def list_proxies() -> ReadRequest[list[ProxyView]]:
    """List proxies with their addresses and the routing revision that each has applied."""
    return ReadRequest(GetHttpProxies(), show_proxies)


proxy_app.command("list")(list_proxies)
