"""A stack and its deployments as a person sees them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from muster.cli import output
from muster.cli.autoscaling import show_autoscaling
from muster.cli.tables import (
    config_facts,
    counts,
    facts_of,
    methods_text,
    moment,
    print_facts,
    print_replicas,
    print_table,
    styled,
    table,
    value_text,
)
from serve_common.wires.views import DeploymentStatus, DeploymentView, HostView, ProxyView, StatusView


def show_status(view: StatusView) -> None:
    """The whole system."""
    if not view.store_available:
        output.complain("warning: Postgres does not answer; what runs goes on, changes are refused")
    if view.store_restored_at is not None:
        when = moment(view.store_restored_at)
        output.say(
            f"Postgres was found restored to an earlier state at {when}: what had been decided since is lost"
        )
    if view.deployments:
        print_table("Deployments", _deployments(view.deployments))
    else:
        output.say("no deployments yet; 'muster deploy --help' shows how to make one")
    show_hosts(view.hosts)
    print_table("Proxies", _proxies(view.proxies, view.snapshot_id))
    if view.autoscaling:
        show_autoscaling(view.autoscaling)
    output.say(f"controller {view.controller_id} leads in term {view.epoch}, snapshot {view.snapshot_id}")
    for deployment in view.deployments:
        if deployment.message and deployment.status is DeploymentStatus.UNHEALTHY:
            output.say(f"'muster status {output.short_name(deployment.name)}' shows the whole message")
            break


def show_deployments(views: Sequence[DeploymentView]) -> None:
    """Many deployments, a row each."""
    print_table("Deployments", _deployments(views))


def show_deployment(view: DeploymentView) -> None:
    """One deployment with its replicas."""
    config, code = view.backend_config, view.replica_config
    _show(
        view,
        {
            "import path": code.import_path,
            "app dir": code.app_dir,
            "user config": "" if config.user_config is None else value_text(config.user_config),
            "reserves": value_text(msgspec.structs.asdict(code.ray_actor_options)),
        },
    )


def show_everything(view: DeploymentView) -> None:
    """One deployment with its whole configuration and its replicas."""
    reached = {} if view.ended_at is not None else facts_of(view.endpoint_options)
    _show(view, {**reached, **config_facts(view.backend_config, view.replica_config)})


def _show(view: DeploymentView, config: dict[str, str]) -> None:
    print_facts(
        {
            "deployment": output.short_name(view.name),
            "status": view.status.value,
            "application": f"{view.application}{' (its ingress)' if view.is_ingress else ''}",
            "version": f"{view.version or '(none)'}, code version {view.code_version}",
            "route": view.route_prefix or "none; called over NATS only",
            "methods": methods_text(view.methods),
            "replicas": counts(view.replicas, view.backend_config),
            "since": moment(view.started_at) if view.started_at else "",
            "until": "" if view.ended_at is None else moment(view.ended_at),
            **config,
            "goal": f"{view.goal_id} {view.goal_status.value}",
        }
    )
    print_replicas(view.replicas)
    if view.message:
        output.say(view.message)


def _deployments(views: Sequence[DeploymentView]) -> Table:
    rows = table("name", "status", "version", "route", "replicas", "message")
    for view in views:
        rows.add_row(
            Text(output.short_name(view.name)),
            styled(view.status.value),
            Text(view.version or "-"),
            Text(view.route_prefix or "-"),
            Text(counts(view.replicas, view.backend_config)),
            Text(output.brief(view.message)),
        )
    return rows


def show_hosts(views: Sequence[HostView]) -> None:
    """Each host in a row."""
    rows = table("host", "status", "replicas", "resources", "heard")
    for view in views:
        resources = ", ".join(_amount(name, amount) for name, amount in sorted(view.resources.items()))
        status = styled(view.status)
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
    # Ray counts memory in bytes, and everything else in pieces.
    return f"{amount / 2**30:.1f} GiB {name}" if name == "memory" else f"{amount:g} {name}"


def show_proxies(views: Sequence[ProxyView]) -> None:
    """Each proxy in a row; those behind the furthest one show it."""
    print_table("Proxies", _proxies(views, max((view.applied_snapshot_id for view in views), default=0)))


def _proxies(views: Sequence[ProxyView], snapshot_id: int) -> Table:
    rows = table("proxy", "status", "address", "snapshot", "heard")
    for view in views:
        behind = "" if view.applied_snapshot_id >= snapshot_id else f" of {snapshot_id}"
        rows.add_row(
            Text(view.proxy_id),
            styled(view.status),
            Text(view.address or "-"),
            Text(f"{view.applied_snapshot_id}{behind}"),
            Text(f"{view.report_age_s:.1f} s ago"),
        )
    return rows
