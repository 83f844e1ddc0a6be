"""`muster build`, `config`, `start`, `shutdown`, and the status in Ray Serve's form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from muster.cli.background import (
    DEFAULT_HTTP_HOST,
    DEFAULT_HTTP_PORT,
    find_running,
    move_when_empty,
    start_stack,
)
from muster.cli.changes import ChangeRequest, change_command
from muster.cli.output import print_error, print_json, print_line
from muster.cli.queries import (
    HttpHostOption,
    HttpPortOption,
    ReadRequest,
    ShowEnvOption,
    query_command,
    stack_command,
)
from muster.cli.serve_options import AddressOption, AppDirOption, note_address
from muster.cli.session import Session, StackChoice, get_session
from muster.client.admin import AdminClient
from serve_common.api.commands import Shutdown
from serve_common.api.queries import GetAllApplications
from serve_common.api.views import ApplicationView
from serve_common.errors import BadField

if TYPE_CHECKING:
    from muster.sdk.states import ServeStatus

_ANSI: Final = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")


def dump_yaml(value: Any) -> str:
    """YAML as Ray Serve writes it: fields in their order, texts of several lines as blocks, without colours."""
    # Only here: few commands write YAML.
    import yaml  # noqa: PLC0415 - as above

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as blocks."""

        def represent_text(self, text: str) -> yaml.ScalarNode:
            """The node of a text."""
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump(_plain(value), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=80))


def _plain(value: Any) -> Any:
    """The value without enumerations and without sequences that colour text."""
    match value:
        case Enum():
            return value.value
        case str():
            return _ANSI.sub("", value)
        case dict():
            return {_plain(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value


def build(
    context: typer.Context,
    *,
    import_paths: Annotated[
        list[str], typer.Argument(metavar="IMPORT_PATH...", help="Applications, as module:attribute.")
    ],
    app_dir: AppDirOption = ".",
    output_path: Annotated[
        Path | None,
        typer.Option("--output-path", "-o", metavar="FILE", help="File to write. Default: standard output."),
    ] = None,
) -> None:
    """Write the configuration file of applications, for 'muster deploy' and 'muster run'.

    Example:
      muster build app:app -o app.yaml

    Has the options that the code of each deployment chooses; those of the file override them. One application is named
    default and has the route /; several are named app1, app2, ... with the routes /app1, /app2, ...
    """
    session = get_session(context)
    with session.reporting(as_json=False, is_rays=True):
        # Only here: these import Pydantic and what pickles code.
        from muster.cli.serve_config import BUILT_OPTIONS, check_config  # noqa: PLC0415 - as above
        from muster.cli.serve_deploy import import_places  # noqa: PLC0415 - as above
        from muster.cli.yaml_file import YamlFile  # noqa: PLC0415 - as above
        from muster.sdk.applications import (  # noqa: PLC0415 - as above
            BUILD_ERRORS,
            BuildFailed,
            describe_application,
        )

        places = import_places(session, app_dir)
        # As `deploy` and `run` name one; not app1, as Ray Serve, whose `status --name default` would not find it.
        named = (
            ["default"] if len(import_paths) == 1 else [f"app{n}" for n in range(1, len(import_paths) + 1)]
        )
        routes = ["/"] if len(import_paths) == 1 else [f"/{name}" for name in named]
        try:
            described = [
                describe_application(path, places, name=name, route=route)
                for path, name, route in zip(import_paths, named, routes, strict=True)
            ]
        except BUILD_ERRORS as error:
            raise BuildFailed(str(error)) from error
        parts = [{name: value} for name, value in BUILT_OPTIONS.items()] + [{"applications": described}]
        text = "\n".join((_HEADER, *map(dump_yaml, parts)))
        check_config(YamlFile(text, "the file"), session.directory)
        if output_path is None:
            print_line(text.rstrip("\n"))
            return
        try:
            (session.directory / output_path).write_text(text)
        except OSError as error:
            raise BadField("--output-path", f"{output_path} cannot be written: {error.strerror}") from error
        print_error(f"{output_path} is written; names and routes of the applications may be changed in it")


_HEADER: Final = """\
# This file was generated using the `muster build` command, in Ray Serve's form (ServeDeploySchema).
# Deploy it with `muster deploy`; what is deployed, `muster config` shows.
# Options of a deployment that are not here are those of its code.
"""


@query_command
def config(
    *,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", metavar="APP", help="Show only this application. Default: all."),
    ] = None,
    show_env: ShowEnvOption = False,
    address: AddressOption = None,
) -> ReadRequest[list[ApplicationView]]:
    """Show the configuration of the applications that were deployed from files.

    Example:
      muster config --name default

    Prints each application's part of the file as it was deployed, without values of environment variables that look
    like secrets. Applications that a program deployed have none.
    """

    note_address(address)

    def show(views: Sequence[ApplicationView]) -> None:
        # Only here: no other command needs it.
        from muster.sdk.states import by_deploy  # noqa: PLC0415 - as above

        configs = {view.name: view.app_config for view in by_deploy(views) if view.app_config is not None}
        if name is not None and name not in configs:
            print_line(f'No config has been deployed for application "{name}".')
        elif not configs:
            print_line("No configuration was found.")
        else:
            chosen = list(configs.values()) if name is None else [configs[name]]
            print_line("\n---\n\n".join(map(dump_yaml, chosen)).rstrip("\n"))

    return ReadRequest(GetAllApplications(), show, shows_secrets=show_env)


def read_serve_status(name: str | None) -> ReadRequest[Any]:
    """The status in Ray Serve's form: of everything, or of one application, which may be unknown (None)."""

    async def read(admin: AdminClient) -> Any:
        # Only here: no other command needs it.
        from muster.sdk.states import view_status  # noqa: PLC0415 - as above

        status: ServeStatus = view_status(await admin.fetch_status(), await admin.call(GetAllApplications()))
        if name is None:
            return _plain(asdict(status))
        return _plain(asdict(status.applications[name])) if name in status.applications else None

    def show(status: Any) -> None:
        if status is None:  # as in Ray Serve no failure: scripts poll for it
            print_error(f'Application "{name}" does not exist.')
        else:
            print_line(dump_yaml(status).rstrip("\n"))

    return ReadRequest(read, show)


@change_command(timeout_s=600.0)
def shutdown(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    address: AddressOption = None,
) -> ChangeRequest:
    """Delete everything that is deployed; the stack stays up.

    Example:
      muster shutdown -y

    The same as 'muster delete-all', under Ray Serve's name. The HTTP port is closed until the next deploy, except in
    compose.
    """
    note_address(address)
    return ChangeRequest(
        command=Shutdown(confirm="everything"),
        # In Ray Serve's words, which scripts look for.
        what="Sent shutdown request; applications will be deleted asynchronously. Everything",
        done="is deleted",
        already="is deleted; there is nothing",
        question="" if yes else _SHUTDOWN_QUESTION,
        without_stack="Unable to shutdown",  # as in Ray Serve, whose scripts begin with it
    )


_SHUTDOWN_QUESTION: Final = (
    'This will shut down Serve on the cluster at address "{address}" and delete all applications there. Do you want to '
    "continue?"
)
"""Ray Serve's words."""


class _ProxyLocation(Enum):
    """`muster.config.ProxyLocation`, which imports Pydantic."""

    DISABLED = "Disabled"
    HEAD_ONLY = "HeadOnly"
    EVERY_NODE = "EveryNode"


@stack_command
def start(
    session: Session,
    choice: StackChoice,
    *,
    http_host: HttpHostOption = "127.0.0.1",
    http_port: HttpPortOption = DEFAULT_HTTP_PORT,
    proxy_location: Annotated[
        _ProxyLocation | None,
        typer.Option(
            "--proxy-location",
            metavar="PLACE",
            help="With Disabled, a stack that is started has no proxy, and no HTTP; other places change nothing.",
        ),
    ] = None,
    address: AddressOption = None,
    as_json: bool = False,
) -> None:
    """Start a whole stack in the background, unless one is found, and return when it is ready.

    Example:
      muster start --http-port 8001

    It is the stack that 'muster up' runs in the foreground, with its state in .muster of this directory. It goes on
    after the command, until the process is ended whose id it prints. One that 'muster start' has started at the default
    port, and that serves nothing, starts anew for another --http-port.
    """
    with session.reporting(as_json=as_json, interrupted="interrupted; the start goes on"):
        note_address(address)
        started = find_running(session, choice)
        if started is not None:
            chosen_host = None if http_host == DEFAULT_HTTP_HOST else http_host
            started = move_when_empty(session, choice, http_port, chosen_host) or started
        if started is None:
            has_proxy = proxy_location is not _ProxyLocation.DISABLED
            started = start_stack(session, http_host, http_port, has_proxy=has_proxy)
        elif proxy_location is not None:
            print_error("note: without effect on a stack that runs: --proxy-location")
        if as_json:
            print_json(started)
        elif started.pid is None:
            print_line(f"a stack runs already, at {started.http_url or started.nats_url}")
        else:
            where = f"at {started.http_url}" if started.http_url else "without HTTP"
            print_line(f"the stack runs in the background, {where}; 'kill {started.pid}' stops it")
