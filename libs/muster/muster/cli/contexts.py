"""`muster context …`: named stacks of the user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from muster.cli.completion import complete_context
from muster.cli.help import Commands
from muster.cli.output import Cell, print_error, print_facts, print_json, print_line, print_table, table
from muster.cli.queries import (
    CredsOption,
    JsonOption,
    NatsOption,
    PasswordFileOption,
    UserOption,
)
from muster.cli.session import Session, get_session
from muster.client.contexts import LOCAL, Context, Contexts, get_context, read_contexts, write_contexts
from muster.client.requests import parse_urls
from serve_common.errors import BadField
from serve_common.names import check_name

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the context.",
        autocompletion=complete_context,
    ),
]

app = Commands(
    help="""Name stacks, and choose one: add, list, use, show, remove.

    A command reaches, in this order: the stack of --nats or --context; that of the variables MUSTER_NATS_URL or
    MUSTER_STATE_DIR; that of MUSTER_CONTEXT; the context in use; the stack that is found from this directory.
    """
)


@app.command()
def add(
    context: typer.Context,
    *,
    name: Name,
    nats: NatsOption = None,
    creds: CredsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    client_creds: Annotated[
        Path | None,
        typer.Option(
            "--client-creds",
            metavar="FILE",
            help="NATS credentials file of programs with deployment handles.",
        ),
    ] = None,
    tls_ca_file: Annotated[
        Path | None, typer.Option("--tls-ca-file", metavar="FILE", help="Authorities to trust for tls://.")
    ] = None,
    subject_prefix: Annotated[
        str,
        typer.Option("--subject-prefix", metavar="NAME", help="First token of all subjects of the stack."),
    ] = "serve",
    http: Annotated[
        str,
        typer.Option(
            "--http",
            metavar="URL",
            help="Base URL of HTTP, such as https://models.example.org, for what commands print.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Add a context, or replace the one of that name.

    Example:
      muster context add prod --nats nats://nats.example.org --creds prod.creds

    Contexts are in muster/contexts.json in your directory of configuration (~/.config). They name the files of
    credentials, and hold no password. Nothing is connected to.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        _check_new_name(name)
        nats = nats or session.options.nats
        if not nats:
            raise BadField("--nats", "is required")
        parsed = parse_urls(nats, "--nats")
        if parsed.password is not None:
            raise BadField("--nats", "must hold no password; put it into a file, and give --password-file")

        def place(path: Path | None, field: str) -> str | None:
            if path is None:
                return None
            absolute = os.path.abspath(session.directory / path)  # noqa: PTH100 - resolve() would follow links
            if not os.access(absolute, os.R_OK):
                raise BadField(field, f"{path} cannot be read")
            return absolute

        made = Context(
            nats=",".join(parsed.urls),
            creds=place(creds or session.options.creds, "--creds"),
            client_creds=place(client_creds, "--client-creds"),
            user=user or session.options.user or parsed.user,
            password_file=place(password_file or session.options.password_file, "--password-file"),
            tls_ca_file=place(tls_ca_file, "--tls-ca-file"),
            subject_prefix=check_name(subject_prefix, "--subject-prefix"),
            http=_check_http(http),
        )
        contexts = read_contexts(session.environment)
        _write(session, contexts, contexts.contexts | {name: made})
        if as_json:
            print_json(made)
        else:
            print_line(f"context {name} is stored; 'muster context use {name}' makes it the default")


def _check_new_name(name: str) -> None:
    check_name(name, "NAME")
    if name == LOCAL:
        raise BadField("NAME", "'local' stands for the stack that is found from the working directory")


def _check_http(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise BadField("--http", "must begin with http:// or https://")
    return url.rstrip("/")


def _write(session: Session, former: Contexts, contexts: dict[str, Context], **changes: Any) -> None:
    write_contexts(session.environment, msgspec.structs.replace(former, contexts=contexts, **changes))


@app.command("list")
def list_(context: typer.Context, *, as_json: JsonOption = False) -> None:
    """List the contexts, and which one is in use."""
    session = get_session(context)
    with session.reporting(as_json=as_json):
        contexts = read_contexts(session.environment)
        if as_json:
            print_json(contexts)
            return
        rows = table("", "name", "nats", "user", "credentials")
        for name, each in sorted(contexts.contexts.items()):
            rows.add_row(
                Cell("*" if name == contexts.current else ""),
                Cell(name),
                Cell(each.nats),
                Cell(each.user or "-"),
                Cell(each.creds or each.password_file or "-"),
            )
        print_table("Contexts", rows)


@app.command()
def use(
    context: typer.Context,
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the context; 'local' for none.",
            autocompletion=complete_context,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Use a context by default.

    Example:
      muster context use prod

    'muster context use local' goes back to the stack that is found from the working directory.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        contexts = read_contexts(session.environment)
        current = None if name == LOCAL else name
        if current is not None:
            get_context(contexts, current, "NAME")
        _write(session, contexts, contexts.contexts, current=current)
        if as_json:
            print_json({"current": current})
        elif current is None:
            print_line("commands use the stack that is found from the working directory")
        else:
            print_line(f"commands use context {name}, at {contexts.contexts[name].nats}")
            if session.environment.get("MUSTER_CONTEXT"):
                print_error("note: MUSTER_CONTEXT is set, and goes before it")


@app.command()
def show(
    context: typer.Context,
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the context. Default: the one in use.",
            autocompletion=complete_context,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one context."""
    session = get_session(context)
    with session.reporting(as_json=as_json):
        contexts = read_contexts(session.environment)
        name = name or contexts.current
        if name is None:
            raise BadField("NAME", "no context is in use; 'muster context list' lists all")
        found = get_context(contexts, name, "NAME")
        if as_json:
            print_json(found)
            return
        facts = msgspec.structs.asdict(found)
        print_facts({"context": name, **{key.replace("_", " "): value or "" for key, value in facts.items()}})


@app.command()
def remove(context: typer.Context, *, name: Name, as_json: JsonOption = False) -> None:
    """Remove a context; its files of credentials stay.

    Example:
      muster context remove prod
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        contexts = read_contexts(session.environment)
        get_context(contexts, name, "NAME")
        others = {key: value for key, value in contexts.contexts.items() if key != name}
        is_current = contexts.current == name
        _write(session, contexts, others, current=None if is_current else contexts.current)
        if as_json:
            print_json({"removed": name})
        else:
            print_line(f"context {name} is removed{'; none is in use now' if is_current else ''}")
