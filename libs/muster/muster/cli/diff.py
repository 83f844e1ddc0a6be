"""`muster diff`: what a file would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
import typer

from muster.cli.apps import read_application
from muster.cli.changes import show_plan
from muster.cli.output import format_value, mask_variable, print_error, print_json, print_line
from muster.cli.queries import stack_command
from muster.cli.session import ExitCode, Session, StackChoice, get_exit_code
from muster.client.admin import AdminClient
from serve_common.api.commands import DeployApplication, DeploymentSpec
from serve_common.api.queries import GetAllApplications, ListDeployments, Plan
from serve_common.api.views import ApplicationView, DeploymentView, PlanView
from serve_common.config.backend import BackendConfig, EndpointOptions, ReplicaConfig
from serve_common.errors import ServeError

DIFFERENT: Final = 1
"""Exit code when something would change."""


class FieldChange(msgspec.Struct, frozen=True, kw_only=True):
    """One field that differs; None where one side does not have it."""

    field: str
    before: Any
    after: Any


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What a file would change; printed with ``--json``."""

    application: str
    changes: list[FieldChange]
    plan: PlanView


@stack_command
def diff(
    session: Session,
    choice: StackChoice,
    *,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="File of an application, as of 'muster app deploy'; '-' reads it."
        ),
    ],
    as_json: bool = False,
) -> None:
    """Show what a file would change and which replicas would restart; change nothing.

    Example:
      muster diff shop.yaml

    The exit code is 0 when nothing would change, 1 when something would, and 2 or more for an error. Values of
    environment variables that look like secrets are masked. A deployment whose version the file leaves out is always
    replaced.
    """
    with session.reporting(as_json=as_json):
        try:
            request, notes = read_application(file, session.directory)
            found = session.run(
                session.find_stack(choice),
                "diff",
                lambda stack, _progress: compare(stack.admin, request),
            )
        except ServeError as error:
            if get_exit_code(error) is not ExitCode.FAILED:
                raise
            print_error(f"error: {error}")  # 1 says that something would change
            raise typer.Exit(ExitCode.BAD_INPUT) from error
        for note in notes:
            print_error(note)
        if as_json:
            print_json(found)
        else:
            _show(found)
        if found.plan.updating:
            raise typer.Exit(DIFFERENT)


async def compare(admin: AdminClient, request: DeployApplication) -> Difference:
    """Compare an application's file with what is deployed. Raises what the controller raises."""
    plan = await admin.call(Plan.for_command(request))
    there = [each for each in await admin.call(GetAllApplications()) if each.name == request.name]
    deployments = [each for each in await admin.call(ListDeployments()) if each.application == request.name]
    before = _flatten(_describe_deployed(there[0], deployments)) if there else {}
    after = _flatten(_describe_file(request))
    for each in deployments:
        if each.backend_config.autoscaling_config is not None:
            # The load decides it.
            before.pop(f"{_local_name(each.name)}.backend_config.num_replicas", None)
            after.pop(f"{_local_name(each.name)}.backend_config.num_replicas", None)
    changes = [
        FieldChange(field=field, before=before.get(field), after=after.get(field))
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field)
        and not _is_default(field, before.get(field), after.get(field))
    ]
    return Difference(application=request.name, changes=[_masked(each) for each in changes], plan=plan)


def _describe_file(request: DeployApplication) -> dict[str, Any]:
    return {
        "route_prefix": request.route_prefix,
        "methods": sorted(request.methods),
        "ingress": request.ingress,
        **{spec.name: _describe(spec) for spec in request.deployments},
    }


def _describe_deployed(application: ApplicationView, deployments: list[DeploymentView]) -> dict[str, Any]:
    ingress = next((each for each in deployments if each.is_ingress), None)
    return {
        "route_prefix": application.route_prefix,
        "methods": [] if ingress is None else sorted(ingress.methods),
        "ingress": _local_name(application.ingress),
        **{_local_name(each.name): _describe(each) for each in deployments},
    }


def _describe(spec: DeploymentSpec | DeploymentView) -> dict[str, Any]:
    return {
        "version": spec.version,
        "replica_config": msgspec.to_builtins(spec.replica_config),
        "backend_config": msgspec.to_builtins(spec.backend_config),
        "endpoint_options": msgspec.to_builtins(spec.endpoint_options),
    }


def _is_default(field: str, before: Any, after: Any) -> bool:
    """Whether a field of a deployment that comes or goes as a whole has its default value."""
    default = _DEFAULTS.get(field.partition(".")[2])
    return default is not None and default in (before, after) and None in (before, after)


def _local_name(tag: str) -> str:
    """A deployment's name within its application."""
    return tag.rpartition("/")[2]


def _flatten(value: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    return dict(_leaves(value, at))


def _leaves(value: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        path = f"{at}.{key}" if at else key
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, path)
        elif inner not in (None, {}, [], ""):
            yield path, inner


def _masked(change: FieldChange) -> FieldChange:
    """Without the value of a variable that looks like a secret; that it changes is still told."""
    marker, _, variable = change.field.rpartition(".env_vars.")
    if not marker:
        return change
    return msgspec.structs.replace(
        change, before=_mask(variable, change.before), after=_mask(variable, change.after)
    )


def _mask(variable: str, value: Any) -> Any:
    return None if value is None else mask_variable(variable, value)


def _show(found: Difference) -> None:
    for change in found.changes:
        if change.before is None:
            print_line(f"+ {change.field}: {format_value(change.after)}")
        elif change.after is None:
            print_line(f"- {change.field}: {format_value(change.before)}")
        else:
            print_line(f"~ {change.field}: {format_value(change.before)} -> {format_value(change.after)}")
    show_plan(found.plan, f"application {found.application}", "is already as in the file")


_DEFAULTS: Final = _flatten(
    {
        "replica_config": msgspec.to_builtins(ReplicaConfig(import_path="")),
        "backend_config": msgspec.to_builtins(BackendConfig()),
        "endpoint_options": msgspec.to_builtins(EndpointOptions()),
    }
)
