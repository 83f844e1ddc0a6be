"""`muster backup`, `muster restore`, `muster secrets`: files from which a stack is rebuilt."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer

from muster import secrets as stack_secrets
from muster.cli.changes import confirm, show_progress
from muster.cli.output import Progress, print_error, print_json, print_line
from muster.cli.ports import AdminPort
from muster.cli.queries import (
    STACK_OPTIONS,
    JsonOption,
    NoWaitOption,
    ReadRequest,
    TimeoutOption,
    build_command,
    parameter,
    pop_stack_choice,
    query_command,
)
from muster.cli.session import ExitCode, Session, get_session
from muster.client.address import StackAddress
from serve_common.api.commands import RestoreReply
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.names import GoalId

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
_TIMEOUT_S: Final = 600.0
Reply = TypeVar("Reply")


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `muster backup`."""

    file: str
    size_bytes: int


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `muster restore`, as far as the command waited for it."""

    backup: str
    goal_ids: list[GoalId]
    failed: dict[GoalId, str] = {}
    """Goals that did not succeed, and why."""
    pending: list[GoalId] = []


@query_command
def backup(
    session: Session,
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, readable by its owner only.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> ReadRequest[Written]:
    """Write everything that is deployed into a file.

    Example:
      muster backup monday.muster

    Contains applications, deployments, backends, endpoints with their
    traffic, revisions for rollback, and the HTTP options, all at one moment
    while the stack runs. It holds no password of the stack; values given to
    deployments (runtime_env, init_args) are included. Models' files, the
    audit log, finished goals and drained hosts are not.
    """
    path = session.directory / file
    if path.exists() and not force:
        raise BadField("FILE", f"{file} is there already; --force replaces it")

    async def ask(admin: AdminPort) -> Written:
        data = await admin.fetch_backup()
        _write(path, data)
        return Written(file=str(file), size_bytes=len(data))

    return ReadRequest(ask, lambda done: print_line(f"{done.file} is written ({done.size_bytes} bytes)"))


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or none of it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadField("FILE", f"cannot be written: {error}") from error


def _restore(
    session: Session,
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that 'muster backup' wrote.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Restore everything that is deployed from a backup.

    Example:
      muster restore monday.muster

    The file is checked before anything is changed. The restore is one change:
    what the backup lacks is deleted, what is the same is left alone, and what
    serves goes on until its replacement serves. A stack that lost everything
    must be started first. Asks for confirmation.
    """


def _run(context: typer.Context, values: dict[str, Any]) -> None:
    session = get_session(context)
    as_json, timeout_s, no_wait = values.pop("as_json"), values.pop("timeout_s"), values.pop("no_wait")
    choice = pop_stack_choice(values)
    file, yes = values["file"], values["yes"]
    with session.reporting(as_json=as_json):
        data = _read(session.directory / file)
        address = session.find_stack(choice)
        checked = _query(session, address, lambda admin: admin.send_backup(data, confirm=False))
        if not yes:
            print_error(f"{file}: {checked.summary}")
            confirm("Make this, and nothing else, be deployed?")
    with session.reporting(
        as_json=as_json, interrupted="stopped waiting; the restore goes on: 'muster status'"
    ):
        reply = _query(session, address, lambda admin: admin.send_backup(data, confirm=True))
        wait_s = 0.0 if no_wait else timeout_s
        restored = asyncio.run(_wait(session, address, reply, wait_s))
        _show(restored, file, as_json=as_json, is_waiting=not no_wait)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadField("FILE", f"cannot be read: {error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise BadField("FILE", f"is larger than {FILE_BYTES_MAX} bytes: no backup of Muster's")
    return data


def _query(session: Session, address: StackAddress, ask: Callable[[AdminPort], Awaitable[Reply]]) -> Reply:
    async def run() -> Reply:
        with Progress("restore") as progress:
            async with session.connect(address, progress) as stack:
                return await ask(stack.admin)

    return asyncio.run(run())


async def _wait(session: Session, address: StackAddress, reply: RestoreReply, wait_s: float) -> Restored:
    failed: dict[GoalId, str] = {}
    pending: list[GoalId] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    with Progress("restore") as progress:
        async with session.connect(address, progress) as stack:
            for goal_id in reply.goal_ids if wait_s else ():
                view = await stack.admin.wait_for_goal(
                    goal_id,
                    deadline_s=max(0.0, deadline - loop.time()),
                    on_progress=lambda goal: show_progress(goal, progress),
                )
                if view.status is GoalStatus.PENDING:
                    pending.append(goal_id)
                elif view.status is not GoalStatus.SUCCEEDED:
                    failed[goal_id] = view.error or view.status.value
    return Restored(backup=reply.summary, goal_ids=reply.goal_ids, failed=failed, pending=pending)


def _show(restored: Restored, file: Path, *, as_json: bool, is_waiting: bool) -> None:
    if as_json:
        print_json(restored)
    elif not restored.failed and not restored.pending:
        print_line(f"{file} is {'restored' if is_waiting else 'accepted'}: {restored.backup}")
    for goal_id, why in restored.failed.items():
        print_error(f"{goal_id} failed: {why}")
    if restored.pending:
        print_error(f"{len(restored.pending)} goals are still pending: 'muster status'")
    if restored.failed:
        raise typer.Exit(ExitCode.FAILED)
    if restored.pending:
        raise typer.Exit(ExitCode.TIMED_OUT)


_restore.__name__ = "restore"
restore = build_command(
    _restore,
    _run,
    (
        parameter("timeout_s", TimeoutOption, _TIMEOUT_S),
        parameter("no_wait", NoWaitOption, default=False),
        *STACK_OPTIONS,
    ),
)


def secrets(
    context: typer.Context,
    *,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Directory of the files; created if missing.")
    ] = Path("secrets"),
    rotate: Annotated[
        Role | None,
        typer.Option(
            "--rotate",
            metavar="ROLE",
            help="Replace the keys of this role: controller, host, admin, proxy, replica, client or system.",
        ),
    ] = None,
    subject_prefix: Annotated[
        str,
        typer.Option(
            "--subject-prefix", metavar="NAME", help="First token of all NATS subjects of this instance."
        ),
    ] = "serve",
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Generate passwords for a NATS with plain users instead of identities."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate the NATS identities and passwords of a stack in containers.

    Example:
      muster secrets --directory secrets

    Existing files are kept. Secrets are never printed. When
    nats_identities.conf has changed, restart NATS; after --rotate, restart the
    processes of that role too.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        if rotate is not None and plain:
            raise BadField("--rotate", "plain users have passwords: remove their files and generate again")
        place = session.directory / directory
        before = _files(place)
        stack_secrets.generate(
            place, for_containers=True, plain=plain, subject_prefix=subject_prefix, rotate=rotate
        )
        after = _files(place)
        made = sorted(after.keys() - before.keys())
        changed = sorted(name for name in after.keys() & before.keys() if after[name] != before[name])
        retained = sorted(name for name in after.keys() & before.keys() if after[name] == before[name])
        if as_json:
            print_json({"directory": str(place), "made": made, "changed": changed, "kept": retained})
            return
        for word, names in (("made", made), ("changed", changed)):
            for name in names:
                print_line(f"{word} {directory / name}")
        if not made and not changed:
            print_line(f"nothing to do: {directory} has all {len(retained)} files")
        elif retained:
            print_line(f"kept {len(retained)} others")


def _files(place: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of each file, to detect which files were written."""
    expected = {*stack_secrets.FILES, *stack_secrets.PLAIN_NAMES, stack_secrets.NATS_INCLUDE}
    found = {}
    for name in expected:
        path = place / name
        if path.exists():
            stat = path.stat()
            found[name] = stat.st_ino, stat.st_mtime_ns
    return found
