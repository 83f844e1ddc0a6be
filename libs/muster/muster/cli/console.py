"""`muster console user …`: the people who may sign in to the console."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from muster.cli.help import Commands
from muster.cli.output import Cell, print_json, print_line, print_table, table
from muster.cli.queries import JsonOption
from muster.cli.session import Session, get_session
from muster.console_users import (
    IdentitySource,
    add_person,
    find_outdated,
    find_source,
    read_people,
    remove_person,
    set_person_password,
)
from muster.secrets import Secrets
from serve_common.errors import BadField
from serve_common.identities.people import check_password
from serve_common.identities.roles import Role

_GENERATED_BYTES: Final = 18

app = Commands(help="Say who may sign in to the console (add, set-password, remove, list): user.")
users = Commands(
    help="""People who may sign in to the console: add, set-password, remove, list.

    A person views (sees everything but captured requests and backups), operates (also scales, sets traffic, rolls back,
    drains hosts and calls endpoints), or is an admin (may do everything). NATS itself enforces it: each person has an
    identity there, which only their password opens. 'muster secrets' makes the first person, 'admin', whose password is
    in the file console_admin_password.
    """
)
app.add_typer(users, name="user")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the person: letters, digits, '.', '_', '@' and '-'.")
]
DirectoryOption = Annotated[
    Path, typer.Option("--directory", metavar="DIR", help="Directory of the stack's secrets.")
]
PersonPasswordOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="File with the person's password. Default: it is prompted for.",
    ),
]
GenerateOption = Annotated[
    bool, typer.Option("--generate", help="Generate a password, and print it this once.")
]
_DIRECTORY: Final = Path("secrets")


class ListedPerson(msgspec.Struct, frozen=True, kw_only=True):
    """A person as `muster console user list` prints it."""

    name: str
    role: Role
    needs_password: bool
    """The key of the role was rotated since the password was set: the person cannot sign in."""
    nats_user: str
    """What NATS logs of the person."""


class SetPassword(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of `add` and `set-password`."""

    name: str
    role: Role
    password: str | None = None
    """Only when it was generated."""


@users.command()
def add(
    context: typer.Context,
    *,
    name: Name,
    role: Annotated[
        Role, typer.Option("--role", metavar="ROLE", help="What the person may do: view, operate, or admin.")
    ],
    password_file: PersonPasswordOption = None,
    generate: GenerateOption = False,
    directory: DirectoryOption = _DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Add a person, who may sign in at once.

    Examples:
      muster console user add ada@example.org --role operate
      muster console user add wall --role view --generate
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        source = _find_source(session, directory)
        password = _choose_password(session, password_file, generate=generate)
        add_person(source, name, role, password)
        done = SetPassword(name=name, role=role, password=password if generate else None)
        _show(done, f"{name} may sign in, with the role {role.value}", as_json=as_json)


@users.command("set-password")
def set_password(
    context: typer.Context,
    *,
    name: Name,
    password_file: PersonPasswordOption = None,
    generate: GenerateOption = False,
    directory: DirectoryOption = _DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Set a person's password, also after 'muster secrets --rotate' of their role.

    Example:
      muster console user set-password ada@example.org

    The password of 'admin' is then no longer in the file console_admin_password.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        source = _find_source(session, directory)
        password = _choose_password(session, password_file, generate=generate)
        person = set_person_password(source, name, password)
        done = SetPassword(name=name, role=person.role, password=password if generate else None)
        _show(done, f"{name} has another password", as_json=as_json)


@users.command()
def remove(
    context: typer.Context,
    *,
    name: Name,
    directory: DirectoryOption = _DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Remove a person, who cannot sign in any more.

    Example:
      muster console user remove ada@example.org

    Their identity stays valid in NATS, for a person who kept a copy of console_users.json, until
    'muster secrets --rotate' of their role.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        person = remove_person(_find_source(session, directory), name)
        if as_json:
            print_json({"removed": name, "role": person.role.value})
        else:
            print_line(
                f"{name} is removed; 'muster secrets --rotate {person.role.value}' ends copies of their identity"
            )


@users.command("list")
def list_(
    context: typer.Context, *, directory: DirectoryOption = _DIRECTORY, as_json: JsonOption = False
) -> None:
    """List the people who may sign in.

    With --json also the user of NATS that each is, which NATS' log shows.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        source = _find_source(session, directory)
        outdated = set(find_outdated(source))
        people = [
            ListedPerson(
                name=person.name,
                role=person.role,
                needs_password=person.name in outdated,
                nats_user=person.nats_user,
            )
            for person in read_people(source.secrets).values()
        ]
        if as_json:
            print_json(people)
            return
        rows = table("name", "role", "")
        for each in people:
            rows.add_row(
                Cell(each.name),
                Cell(each.role.value),
                Cell("needs a new password: the key of the role was rotated" if each.needs_password else ""),
            )
        print_table("People", rows)


def _find_source(session: Session, directory: Path) -> IdentitySource:
    return find_source(Secrets(session.directory / directory))


def _choose_password(session: Session, file: Path | None, *, generate: bool) -> str:
    """The person's new password. Raises `BadField`."""
    if generate:
        if file is not None:
            raise BadField("--generate", "takes no --password-file")
        return secrets.token_urlsafe(_GENERATED_BYTES)
    if file is None:
        try:
            prompted: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        except typer.Abort as error:
            raise BadField(
                "--password-file",
                "or --generate is needed when input is not interactive; nothing was changed",
            ) from error
        return check_password(prompted)
    try:
        text = (session.directory / file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadField("--password-file", f"{file} cannot be read: {reason}") from None
    return check_password(text.strip("\r\n"), "--password-file")


def _show(done: SetPassword, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    print_line(text)
    if done.password is not None:
        print_line(f"password: {done.password}")
