"""`muster deploy`: options in, a deployment that serves out."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from muster.cli import output, values_given
from muster.cli.connection import StackChoice
from muster.cli.deploying import DeployOutcome, DeployResult, describe, run_deploy
from muster.cli.exit_codes import ExitCode
from muster.cli.options import (
    JsonOption,
    NatsOption,
    NoWaitOption,
    PasswordFileOption,
    TimeoutOption,
    UserOption,
)
from muster.cli.session import Session, session_of
from serve_common.names import check_route, deployment_tag
from serve_common.values import (
    BackendConfig,
    RayActorOptions,
    ReplicaConfig,
    check_backend_config,
    check_replica_config,
)
from serve_common.wires.commands import Deploy

_CODE, _SIZE, _LIFE = "Code", "Size", "Life of a replica"


def _option(*names: str, help: str, panel: str | None = None, metavar: str | None = None) -> Any:  # noqa: A002 - as typer's
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


def deploy(
    context: typer.Context,
    *,
    import_path: Annotated[str, typer.Argument(help="module:attribute of a class or function.")],
    name: Annotated[str, _option("--name", help="Its name.")],
    app: Annotated[str | None, _option("--app", help="Its application; 'default' unless given.")] = None,
    route_prefix: Annotated[
        str | None, _option("--route-prefix", help="Where HTTP reaches it, such as /digits.")
    ] = None,
    methods: Annotated[
        str | None, _option("--methods", metavar="GET,POST", help="HTTP methods; GET,POST unless given.")
    ] = None,
    user_config: Annotated[
        str | None,
        _option("--user-config", metavar="JSON|@FILE", help="For reconfigure(); @file.json or @file.yaml."),
    ] = None,
    version: Annotated[
        str | None,
        _option("--version", help="Of the code. The same again keeps replicas; none given replaces them."),
    ] = None,
    app_dir: Annotated[
        str | None, _option("--app-dir", panel=_CODE, help="Directory where replicas find the module.")
    ] = None,
    init_args: Annotated[
        str | None, _option("--init-args", panel=_CODE, metavar="JSON", help="Array for the constructor.")
    ] = None,
    init_kwargs: Annotated[
        str | None, _option("--init-kwargs", panel=_CODE, metavar="JSON", help="Object for the constructor.")
    ] = None,
    num_replicas: Annotated[
        int | None, _option("--num-replicas", panel=_SIZE, help="1 unless given.")
    ] = None,
    num_cpus: Annotated[
        float | None, _option("--num-cpus", panel=_SIZE, help="CPUs that one replica reserves.")
    ] = None,
    num_gpus: Annotated[
        float | None, _option("--num-gpus", panel=_SIZE, help="GPUs that one replica reserves.")
    ] = None,
    ray_actor_options: Annotated[
        str | None,
        _option(
            "--ray-actor-options",
            panel=_SIZE,
            metavar="JSON",
            help="num_cpus, memory, resources, runtime_env.",
        ),
    ] = None,
    max_concurrent_queries: Annotated[
        int | None, _option("--max-concurrent-queries", panel=_SIZE, help="Requests at once in one replica.")
    ] = None,
    max_queued_requests: Annotated[
        int | None, _option("--max-queued-requests", panel=_SIZE, help="Requests that wait in one proxy.")
    ] = None,
    graceful_shutdown_timeout_s: Annotated[
        float | None,
        _option("--graceful-shutdown-timeout-s", panel=_LIFE, help="Time to finish what is in flight."),
    ] = None,
    start_timeout_s: Annotated[
        float | None, _option("--start-timeout-s", panel=_LIFE, help="Time for import and constructor.")
    ] = None,
    max_constructor_retry_count: Annotated[
        int | None,
        _option("--max-constructor-retry-count", panel=_LIFE, help="Failed starts before the deploy fails."),
    ] = None,
    timeout_s: TimeoutOption = 600.0,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Make a deployment be as given, and wait until it serves.

    Examples:
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits --num-replicas 3 --version 2 \\
        --user-config '{"threshold": 0.9}'

    What is not given gets its default again: a deploy says everything.
    When the new version cannot start, the one before it keeps serving.
    """
    session = session_of(context)
    with session.reporting(
        as_json=as_json, interrupted=f"stopped waiting; the change goes on: 'muster status {name}'"
    ):
        tag = deployment_tag(f"{app}/{name}" if app is not None else name, "--name")
        directory, note = values_given.place_app_dir(app_dir, session.directory)
        if note:
            output.complain(note)
        replica_config = ReplicaConfig(
            import_path=import_path,
            app_dir=directory,
            init_args=values_given.read_json(init_args, "--init-args", list[Any], "an array") or [],
            init_kwargs=values_given.read_json(init_kwargs, "--init-kwargs", dict[str, Any], "an object")
            or {},
            ray_actor_options=_actor_options(ray_actor_options, num_cpus, num_gpus),
        )
        backend_config = BackendConfig(
            **_given(
                num_replicas=num_replicas,
                max_concurrent_queries=max_concurrent_queries,
                max_queued_requests=max_queued_requests,
                user_config=values_given.read_user_config(user_config, session.directory),
                graceful_shutdown_timeout_s=graceful_shutdown_timeout_s,
                start_timeout_s=start_timeout_s,
                max_constructor_retry_count=max_constructor_retry_count,
            )
        )
        request = Deploy(
            name=tag,
            replica_config=check_replica_config(replica_config),
            backend_config=check_backend_config(backend_config),
            route_prefix=None if route_prefix is None else check_route(route_prefix, "--route-prefix"),
            version=version,
            **_given(methods=values_given.read_methods(methods)),
        )
        stack = StackChoice(nats=nats, user=user, password_file=password_file)
        outcome = asyncio.run(_deploy(session, stack, request, timeout_s=timeout_s, is_waiting=not no_wait))
        _show(outcome, request, as_json=as_json)
        if outcome.exit_code is not ExitCode.OK:
            raise typer.Exit(outcome.exit_code)


async def _deploy(
    session: Session, options: StackChoice, request: Deploy, *, timeout_s: float, is_waiting: bool
) -> DeployOutcome:
    address = session.find_stack(options)
    with output.Progress(output.short_name(request.name)) as progress:
        async with session.connect(address, progress) as stack:
            return await run_deploy(
                stack.admin,
                request,
                timeout_s=timeout_s,
                is_waiting=is_waiting,
                host=address.host,
                progress=progress,
            )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _actor_options(text: str | None, num_cpus: float | None, num_gpus: float | None) -> RayActorOptions:
    field = "--ray-actor-options"
    options = values_given.read_json(text, field, RayActorOptions, "an object") or RayActorOptions()
    return msgspec.structs.replace(options, **_given(num_cpus=num_cpus, num_gpus=num_gpus))


def _show(outcome: DeployOutcome, request: Deploy, *, as_json: bool) -> None:
    if as_json:
        output.print_json(outcome)
        if outcome.result is not DeployResult.FAILED:
            return
    tell = output.say if outcome.exit_code is ExitCode.OK else output.complain
    for line in describe(outcome, request):
        tell(line)
