"""`muster apply`: backends, endpoints with their traffic, and HTTP options, from a file."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from muster.cli import parsing
from muster.cli.apps import check_code, check_unique, read_file
from muster.cli.change_sets import ChangeSet, run_changes
from muster.cli.changes import ChangeOptions, ChangeRequest, ChangeRun, change_command
from muster.cli.output import print_error
from muster.cli.session import ExitCode, Session, StackChoice
from muster.cli.yaml_file import YamlFile, parse_path
from muster.client.admin import AdminClient
from serve_common.api.commands import (
    CreateBackend,
    CreateEndpoint,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.api.queries import GetAllBackends, GetAllEndpoints, Plan
from serve_common.api.views import EndpointView, PlanView
from serve_common.config.backend import (
    BackendConfig,
    EndpointOptions,
    HttpOptions,
    ReplicaConfig,
    check_backend_config,
    check_endpoint_options,
    check_http_options,
    merged,
)
from serve_common.errors import BadField
from serve_common.names import check_route, deployment_tag, short_name


class _Backend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    replica_config: ReplicaConfig
    backend_config: BackendConfig = BackendConfig()


class _Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    traffic: dict[str, float]
    shadows: dict[str, float] = {}
    route_prefix: str | None = None
    methods: list[str] | None = None
    options: EndpointOptions = EndpointOptions()


class _Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says. Its names are those of the commands' fields."""

    backends: list[_Backend] = []
    endpoints: list[_Endpoint] = []
    http_options: dict[str, Any] = {}


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A checked file: names are tags, directories are as hosts see them."""

    source: YamlFile
    traffic: _Traffic


@change_command(timeout_s=600.0)
def apply(
    session: Session,
    *,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="File in YAML or JSON; '-' reads standard input.")
    ],
) -> ChangeRun:
    """Create or change backends, endpoints with their traffic, and HTTP options from a file.

    Example:
      muster apply traffic.yaml

    where traffic.yaml reads:
      backends:
        - name: digits-new
          replica_config: {import_path: "digits:Digits", app_dir: new/digits}
          backend_config: {num_replicas: 2}
      endpoints:
        - name: trial
          route_prefix: /trial
          traffic: {digits: 0.9, digits-new: 0.1}
          shadows: {digits-new: 0.5}
          options: {shard_key_header: X-User}
      http_options: {request_timeout_s: 30}

    Everything is checked first. Then each entry is one change, in this order, and the first that fails ends the
    command: run it again to go on. Of what is named, fields that are left out get their defaults, but for route_prefix,
    methods and http_options, which stay as they are. What is not named stays.
    """
    wanted, notes = _read(file, session.directory)
    for note in notes:
        print_error(note)

    def run(session: Session, choice: StackChoice, options: ChangeOptions) -> None:
        run_changes(
            session,
            choice,
            options,
            wanted.source.name,
            plan=lambda stack: _plan(stack.admin, wanted),
            work=lambda changes: _apply(changes, wanted),
        )

    return run


def _read(file: str, directory: Path) -> tuple[_Wanted, list[str]]:
    found = read_file(file, directory, "FILE")
    source, base = YamlFile(found.text, found.named), found.directory
    if not isinstance(source.value, dict) or not source.value:
        raise source.build_error((), "must have at least one of backends, endpoints, http_options")
    traffic = source.convert(_Traffic)
    notes: list[str] = []
    try:
        backends = [
            _check_backend(each, f"backends[{at}]", base, notes) for at, each in enumerate(traffic.backends)
        ]
        endpoints = [_check_endpoint(each, f"endpoints[{at}]") for at, each in enumerate(traffic.endpoints)]
        check_unique([short_name(each.name) for each in backends], "backends")
        check_unique([short_name(each.name) for each in endpoints], "endpoints")
        check_http_options(merged(HttpOptions(), traffic.http_options, "http_options"), "http_options")
    except BadField as error:
        raise source.build_error(parse_path(error.field), error.reason) from error
    traffic = _Traffic(backends=backends, endpoints=endpoints, http_options=traffic.http_options)
    return _Wanted(source=source, traffic=traffic), notes


def _check_backend(backend: _Backend, at: str, base: Path, notes: list[str]) -> _Backend:
    check_backend_config(backend.backend_config, f"{at}.backend_config")
    return msgspec.structs.replace(
        backend,
        name=deployment_tag(backend.name, f"{at}.name"),
        replica_config=check_code(backend.replica_config, f"{at}.replica_config", base, notes),
    )


def _check_endpoint(endpoint: _Endpoint, at: str) -> _Endpoint:
    if endpoint.route_prefix is not None:
        check_route(endpoint.route_prefix, f"{at}.route_prefix")
    check_endpoint_options(endpoint.options, f"{at}.options")
    for name, share in endpoint.shadows.items():
        parsing.parse_share(share, f"{at}.shadows.{name}")
    return msgspec.structs.replace(
        endpoint,
        name=deployment_tag(endpoint.name, f"{at}.name"),
        traffic={deployment_tag(name, f"{at}.traffic"): share for name, share in endpoint.traffic.items()},
        shadows={deployment_tag(name, f"{at}.shadows"): share for name, share in endpoint.shadows.items()},
    )


def _find_changes(
    wanted: _Wanted, endpoints: Mapping[str, EndpointView], backends: set[str]
) -> list[ChangeRequest]:
    """The changes of what there is, in order. Raises `BadField` for what no change can bring about."""
    traffic = wanted.traffic
    known = backends | {each.name for each in traffic.backends}
    changes = [
        ChangeRequest(
            command=CreateBackend(
                backend_tag=each.name, replica_config=each.replica_config, backend_config=each.backend_config
            ),
            what=f"backend {short_name(each.name)}",
            done="is as in the file",
        )
        for each in traffic.backends
    ]
    for at, each in enumerate(traffic.endpoints):
        try:
            _check_backends(each, known, f"endpoints[{at}]")
            changes += _change_endpoint(each, endpoints.get(each.name), f"endpoints[{at}]")
        except BadField as error:
            raise wanted.source.build_error(parse_path(error.field), error.reason) from error
    if traffic.http_options:
        changes.append(
            ChangeRequest(
                command=SetHttpOptions(options=traffic.http_options),
                what="HTTP options",
                done="are as in the file",
            )
        )
    return changes


def _check_backends(wanted: _Endpoint, known: set[str], at: str) -> None:
    for field, shares in (("traffic", wanted.traffic), ("shadows", wanted.shadows)):
        for name in shares.keys() - known:
            raise BadField(
                f"{at}.{field}.{short_name(name)}", "there is no such backend, here or in the file"
            )


def _change_endpoint(wanted: _Endpoint, present: EndpointView | None, at: str) -> Iterator[ChangeRequest]:
    name = short_name(wanted.name)
    if present is None:
        methods = {} if wanted.methods is None else {"methods": wanted.methods}
        yield ChangeRequest(
            command=CreateEndpoint(
                endpoint=wanted.name,
                traffic=wanted.traffic,
                route=wanted.route_prefix,
                options=wanted.options,
                **methods,
            ),
            what=f"endpoint {name}",
            done="is created",
        )
    else:
        if wanted.route_prefix not in (None, present.route):
            raise BadField(f"{at}.route_prefix", f"{name} has {present.route}, and a route cannot be changed")
        if wanted.methods is not None and set(wanted.methods) != set(present.methods):
            raise BadField(
                f"{at}.methods", f"{name} has {', '.join(present.methods)}, which cannot be changed"
            )
        yield ChangeRequest(
            command=SetTraffic(endpoint=wanted.name, weights=wanted.traffic),
            what=f"traffic of {name}",
            done="is as in the file",
        )
        if wanted.options != present.options:
            yield ChangeRequest(
                command=SetEndpointOptions(endpoint=wanted.name, options=msgspec.to_builtins(wanted.options)),
                what=f"options of {name}",
                done="are as in the file",
            )
    shadows = {} if present is None else present.shadows
    for backend in sorted(shadows.keys() | wanted.shadows.keys()):
        share = wanted.shadows.get(backend, 0.0)
        if shadows.get(backend, 0.0) != share:
            yield ChangeRequest(
                command=ShadowTraffic(endpoint=wanted.name, backend_tag=backend, proportion=share),
                what=f"shadow traffic of {name} to {short_name(backend)}",
                done="is set" if share else "is ended",
            )


async def _plan(admin: AdminClient, wanted: _Wanted) -> list[tuple[ChangeRequest, PlanView]]:
    """The changes, and what each would do. Raises what the controller refuses."""
    endpoints = {view.endpoint_tag: view for view in await admin.call(GetAllEndpoints())}
    backends = {view.backend_tag for view in await admin.call(GetAllBackends())}
    made = {each.name for each in wanted.traffic.backends} - backends
    plans = []
    for change in _find_changes(wanted, endpoints, backends):
        needed = _find_needed(change, made, endpoints)
        if needed is None:
            plan = await admin.call(Plan.for_command(change.command))
        else:
            plan = PlanView(updating=True, replicas=[], notes=[f"happens once {needed} is there"])
        plans.append((change, plan))
    return plans


def _find_needed(change: ChangeRequest, backends: set[str], endpoints: Container[str]) -> str | None:
    """What the file makes before this change, so that the change cannot be planned yet; None for nothing."""
    match change.command:
        case CreateEndpoint(traffic=shares) | SetTraffic(weights=shares):
            missing = backends & shares.keys()
        case ShadowTraffic(endpoint=endpoint, backend_tag=backend):
            if endpoint not in endpoints:
                return short_name(endpoint)
            missing = backends & {backend}
        case _:
            return None
    return short_name(min(missing)) if missing else None


async def _apply(changes: ChangeSet, wanted: _Wanted) -> None:
    # What can be refused is, before anything is changed.
    found = [change for change, _ in await _plan(changes.stack.admin, wanted)]
    for number, change in enumerate(found, start=1):
        await changes.run(change, is_needed=number < len(found))
        if changes.exit_code is not ExitCode.OK:
            return
