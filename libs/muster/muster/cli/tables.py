"""What a stack looks like to a person. Pure rendering; what is shown comes from the controller."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from muster.cli import output
from serve_common.wires.views import DeploymentStatus, DeploymentView, HostView, ProxyView, StatusView

_STYLES = {
    "healthy": "green",
    "live": "green",
    "running": "green",
    "updating": "yellow",
    "starting": "yellow",
    "should_start": "yellow",
    "suspect": "yellow",
    "leaving": "yellow",
    "unhealthy": "red",
    "lost": "red",
}


def show_status(view: StatusView) -> None:
    """The whole system."""
    if not view.store_available:
        output.complain("warning: Postgres does not answer; what runs goes on, changes are refused")
    if view.deployments:
        _print("Deployments", _deployments(view.deployments))
    else:
        output.say("no deployments yet; 'muster deploy --help' shows how to make one")
    _print("Hosts", _hosts(view.hosts))
    _print("Proxies", _proxies(view.proxies, view.snapshot_id))
    output.say(f"controller {view.controller_id} leads in term {view.epoch}, snapshot {view.snapshot_id}")
    for deployment in view.deployments:
        if deployment.message and deployment.status is DeploymentStatus.UNHEALTHY:
            output.say(f"'muster status {output.short_name(deployment.name)}' shows the whole message")
            break


def show_deployment(view: DeploymentView) -> None:
    """One deployment with its replicas."""
    config, code = view.backend_config, view.replica_config
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "deployment": output.short_name(view.name),
        "status": view.status.value,
        "version": f"{view.version or '(none)'}, code version {view.code_version}",
        "route": view.route_prefix or "none; called over NATS only",
        "methods": ", ".join(view.methods),
        "replicas": _counts(view),
        "import path": code.import_path,
        "app dir": code.app_dir,
        "user config": "" if config.user_config is None else msgspec.json.encode(config.user_config).decode(),
        "reserves": msgspec.json.encode(msgspec.structs.asdict(code.ray_actor_options)).decode(),
        "goal": f"{view.goal_id} {view.goal_status.value}",
    }
    for title, value in rows.items():
        if value:
            table.add_row(Text(title, style="bold"), _styled(value))
    output.console().print(table)
    replicas = _table("replica", "state", "host", "version", "message")
    for replica in view.replicas:
        replicas.add_row(
            Text(output.short_name(replica.replica_tag)),
            _styled(replica.state),
            Text(replica.host_id or "-"),
            Text(replica.version or "-"),
            Text(output.brief(replica.message)),
        )
    _print("Replicas", replicas)
    if view.message:
        output.say(view.message)


def _deployments(views: Sequence[DeploymentView]) -> Table:
    table = _table("name", "status", "version", "route", "replicas", "message")
    for view in views:
        table.add_row(
            Text(output.short_name(view.name)),
            _styled(view.status.value),
            Text(view.version or "-"),
            Text(view.route_prefix or "-"),
            Text(_counts(view)),
            Text(output.brief(view.message)),
        )
    return table


def _counts(view: DeploymentView) -> str:
    running = sum(replica.state in {"running", "updating"} for replica in view.replicas)
    return f"{running}/{view.backend_config.num_replicas}"


def _hosts(views: Sequence[HostView]) -> Table:
    table = _table("host", "status", "replicas", "resources", "heard")
    for view in views:
        resources = ", ".join(_amount(name, amount) for name, amount in sorted(view.resources.items()))
        table.add_row(
            Text(view.host_id),
            _styled(view.status),
            Text(str(view.num_replicas)),
            Text(resources),
            Text(f"{view.report_age_s:.1f} s ago"),
        )
    return table


def _amount(name: str, amount: float) -> str:
    # Ray counts memory in bytes, and everything else in pieces.
    return f"{amount / 2**30:.1f} GiB {name}" if name == "memory" else f"{amount:g} {name}"


def _proxies(views: Sequence[ProxyView], snapshot_id: int) -> Table:
    table = _table("proxy", "status", "address", "snapshot", "heard")
    for view in views:
        behind = "" if view.applied_snapshot_id >= snapshot_id else f" of {snapshot_id}"
        table.add_row(
            Text(view.proxy_id),
            _styled(view.status),
            Text(view.address or "-"),
            Text(f"{view.applied_snapshot_id}{behind}"),
            Text(f"{view.report_age_s:.1f} s ago"),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _styled(value: str) -> Text:
    return Text(value, style=_STYLES.get(value, ""))


def _print(title: str, table: Table) -> None:
    console = output.console()
    if table.row_count:
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()
    else:
        console.print(Text(f"{title}: none", style="bold"))
