"""`muster diff`: what a file would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from muster.cli.apps import build_app_change, read_file
from muster.cli.changes import ChangeRequest, show_plan
from muster.cli.output import Progress, format_value, mask_variable, print_error, print_json, print_line
from muster.cli.queries import stack_command
from muster.cli.serve_options import AppDirOption
from muster.cli.session import ExitCode, Session, StackChoice, get_exit_code
from muster.client.admin import AdminClient, Stack
from serve_common.api.commands import DeleteApplication, DeployApplication, DeploymentSpec, SetHttpOptions
from serve_common.api.queries import GetAllApplications, GetHttpConfig, ListDeployments, Plan
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
    """What a file would change of one application, or of the HTTP options; printed with ``--json``."""

    what: str
    """Such as ``application shop``."""
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
            metavar="FILE", help="File as of 'muster deploy' or of 'muster app deploy'; '-' reads it."
        ),
    ],
    app_dir: AppDirOption = ".",
    as_json: bool = False,
) -> None:
    """Show what a file would change and which replicas would restart; change nothing.

    Examples:
      muster diff shop.yaml
      muster diff serve.yaml --json

    The file has one application in Muster's form, or several in that of Ray Serve, whose code is imported as 'muster
    deploy' does. The exit code is 0 when nothing would change, 1 when something would, and 2 or more for an error.
    Values of environment variables that look like secrets are masked. A deployment whose version a file in Muster's
    form leaves out is always replaced.
    """
    with session.reporting(as_json=as_json):
        try:
            # Only here: it imports Pydantic and what pickles code.
            from muster.cli import serve_deploy  # noqa: PLC0415 - as above

            text = read_file(file, session.directory, "FILE")
            prepared = serve_deploy.prepare_serve_file(session, text, app_dir)
            own = build_app_change(text) if prepared is None else None
            if prepared is not None and (ignored := prepared[1].note()) is not None:
                print_error(ignored)

            async def compare(stack: Stack, _progress: Progress) -> list[Difference]:
                if own is not None:
                    return await compare_plans(stack.admin, [(own, await _plan(stack.admin, own))])
                assert prepared is not None
                return await compare_plans(stack.admin, await serve_deploy.plan(stack, prepared[0]))

            found = session.run(session.find_stack(choice), "diff", compare)
        except ServeError as error:
            if get_exit_code(error) is not ExitCode.FAILED:
                raise
            print_error(f"error: {error}")  # 1 says that something would change
            raise typer.Exit(ExitCode.BAD_INPUT) from error
        if as_json:
            print_json(found)
        else:
            for each in found:
                _show(each)
        if any(each.plan.updating for each in found):
            raise typer.Exit(DIFFERENT)


async def _plan(admin: AdminClient, change: ChangeRequest) -> PlanView:
    return await admin.call(Plan.for_command(change.command))


async def compare_plans(
    admin: AdminClient, plans: Sequence[tuple[ChangeRequest, PlanView]]
) -> list[Difference]:
    """Compare changes of applications and HTTP options with what there is. Raises what the controller raises."""
    applications = {each.name: each for each in await admin.call(GetAllApplications())}
    deployments = await admin.call(ListDeployments())
    found = []
    for change, plan in plans:
        command, before, after = change.command, dict[str, Any](), dict[str, Any]()
        match command:
            case DeployApplication(name=name) | DeleteApplication(name=name):
                own = [each for each in deployments if each.application == name]
                if name in applications:
                    before = _flatten(_describe_deployed(applications[name], own))
                if isinstance(command, DeployApplication):
                    after = _flatten(_describe_file(command))
                    _leave_to_load(own, before, after)
            case SetHttpOptions(options=options):
                current = msgspec.to_builtins(await admin.call(GetHttpConfig()))
                before, after = {name: current[name] for name in options}, options
            case _:
                pass
        changes = [
            FieldChange(field=field, before=before.get(field), after=after.get(field))
            for field in sorted(before.keys() | after.keys())
            if before.get(field) != after.get(field)
            and not _is_default(field, before.get(field), after.get(field))
        ]
        found.append(Difference(what=change.what, changes=[_masked(each) for each in changes], plan=plan))
    return found


def _leave_to_load(
    deployments: Sequence[DeploymentView], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Take out the numbers of replicas that the load decides."""
    for each in deployments:
        if each.backend_config.autoscaling_config is not None:
            for side in (before, after):
                side.pop(f"{_local_name(each.name)}.backend_config.num_replicas", None)


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
    show_plan(found.plan, found.what, "is already as in the file")


_DEFAULTS: Final = _flatten(
    {
        "replica_config": msgspec.to_builtins(ReplicaConfig(import_path="")),
        "backend_config": msgspec.to_builtins(BackendConfig()),
        "endpoint_options": msgspec.to_builtins(EndpointOptions()),
    }
)
