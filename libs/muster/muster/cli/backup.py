"""`muster backup`, `muster restore`, `muster secrets`: files from which a stack is rebuilt."""

from __future__ import annotations

import asyncio
import gzip
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import typer

from muster import secrets as stack_secrets
from muster.cli.changes import confirm, show_plan, show_progress
from muster.cli.output import Progress, print_error, print_json, print_line
from muster.cli.queries import (
    DryRunOption,
    JsonOption,
    NoWaitOption,
    ReadRequest,
    TimeoutOption,
    query_command,
    stack_command,
)
from muster.cli.session import ExitCode, Session, StackChoice, get_session
from muster.client.admin import AdminClient
from muster.console_users import IdentitySource, find_outdated
from muster.secrets import read_operator
from serve_common.api.commands import RestoreReply
from serve_common.api.views import GoalStatus
from serve_common.config.backend import ReplicaConfig
from serve_common.errors import BadField, NotFound, PermanentError, TransientError
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.protocol.code import check_size as check_code_size
from serve_common.values import check_digest

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
_TIMEOUT_S: Final = 600.0
_ENTRY: Final = "backup"
_CODE: Final = "code/"
"""A backup with code is a zip: the backup itself, and an entry for each digest."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `muster backup`."""

    file: str
    size_bytes: int
    missing_code: list[str] = []
    """Digests of code that is named but not stored, such as after a restore without it."""


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
    no_code: Annotated[bool, typer.Option("--no-code", help="Leave out uploaded code.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> ReadRequest[Written]:
    """Write everything that is deployed into a file.

    Example:
      muster backup monday.muster

    Contains applications, deployments, backends, endpoints with their traffic, revisions for rollback, the HTTP
    options, all at one moment while the stack runs, and the uploaded code that they name. Not included: code and model
    files of the hosts, the history, finished changes, which hosts are drained, and passwords of the stack. The file may
    hold secrets that deployments were given in runtime_env, init_args, init_kwargs, user_config or code: keep it safe.
    """
    path = session.directory / file
    if path.exists() and not force:
        raise BadField("FILE", f"{file} is there already; --force replaces it")

    async def write(admin: AdminClient) -> Written:
        data = await admin.fetch_backup()
        missing: list[str] = []
        with _new_file(path) as target:
            digests = [] if no_code else sorted(named_code(data))
            if digests:
                with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr(_ENTRY, data)
                    missing = [digest for digest in digests if not await _add_code(admin, digest, archive)]
            else:
                target.write(data)
            size = target.tell()
        return Written(file=str(file), size_bytes=size, missing_code=missing)

    return ReadRequest(write, _show_written)


def _show_written(done: Written) -> None:
    print_line(f"{done.file} is written ({done.size_bytes} bytes)")
    if done.missing_code:
        print_error(f"without code that is not stored any more: {', '.join(done.missing_code)}")


def named_code(backup: bytes) -> set[str]:
    """Digests of the uploaded code that a backup's file names: all that its versions and revisions name."""
    found: set[str] = set()
    pending: list[Any] = [msgspec.json.decode(line) for line in gzip.decompress(backup).splitlines()]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [inner for name, inner in value.items() if name != "replica_config"]
            if isinstance(value.get("replica_config"), dict):
                found |= _read_uploads(value["replica_config"])
            scaling = value.get("autoscaling_config")
            if isinstance(scaling, dict) and (policy_code := scaling.get("policy", {}).get("code")):
                found.add(policy_code)
        elif isinstance(value, list):
            pending += value
    return found


def _read_uploads(config: dict[str, Any]) -> set[str]:
    try:
        return set(msgspec.convert(config, ReplicaConfig).uploads.values())
    except msgspec.ValidationError as error:
        raise PermanentError(
            f"the controller is of another version ({error}); --no-code leaves code out"
        ) from error


async def _add_code(admin: AdminClient, digest: str, archive: zipfile.ZipFile) -> bool:
    """Whether the code was there."""
    try:
        if not await admin.has_code(digest):
            return False
        with archive.open(f"{_CODE}{digest}", "w", force_zip64=True) as entry:
            async for page in admin.fetch_code(digest):
                entry.write(page)
    except NotFound:
        raise TransientError(f"the code {digest} was deleted meanwhile; try again") from None
    return True


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Write the whole file or none of it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadField("FILE", f"cannot be written: {error}") from error


@stack_command
def restore(
    session: Session,
    choice: StackChoice,
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that 'muster backup' wrote.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    timeout_s: TimeoutOption = _TIMEOUT_S,
    no_wait: NoWaitOption = False,
    dry_run: DryRunOption = False,
    as_json: bool = False,
) -> None:
    """Make the stack equal to a backup: what is not in it is deleted.

    Examples:
      muster restore monday.muster --dry-run
      muster restore monday.muster

    The file is checked before anything is changed. The restore is one change: unchanged deployments are not touched,
    and changed ones serve until their replacements do. To restore onto a new machine, start an empty stack first
    ('muster up'). Asks for confirmation; without a terminal it needs --yes.
    """
    with session.reporting(as_json=as_json):
        data = _read(session.directory / file)
        address = session.find_stack(choice)
        checked = session.run(
            address, "restore", lambda stack, _progress: stack.admin.send_backup(data, confirm=False)
        )
        if dry_run:
            _show_dry_run(checked, file, as_json=as_json)
            return
        if not yes:
            print_error(f"{file}: {checked.summary}")
            confirm("Make this, and nothing else, be deployed?")
    with session.reporting(
        as_json=as_json, interrupted="stopped waiting; the restore goes on: 'muster status'"
    ):
        wait_s = 0.0 if no_wait else timeout_s
        restored = session.run(
            address,
            "restore",
            lambda stack, progress: _send(stack.admin, session.directory / file, data, wait_s, progress),
        )
        _show(restored, file, as_json=as_json, is_waiting=not no_wait)


def _show_dry_run(checked: RestoreReply, file: Path, *, as_json: bool) -> None:
    plan = checked.plan
    if plan is None:
        raise PermanentError("the controller is of a version that cannot plan a restore; nothing was changed")
    if as_json:
        print_json(plan)
        return
    print_line(f"{file}: {checked.summary}")
    show_plan(plan, "everything", "is as in the backup already")


def _read(path: Path) -> bytes:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive, archive.open(_ENTRY) as entry:
                data = entry.read(FILE_BYTES_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise BadField("FILE", f"cannot be read: {error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise BadField("FILE", f"is larger than {FILE_BYTES_MAX} bytes: no backup of Muster's")
    return data


async def _upload_code(admin: AdminClient, path: Path, progress: Progress) -> None:
    """Upload the code in a backup that the stack lacks: a deployment must not wait for it."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            digest = entry.filename.removeprefix(_CODE)
            if entry.filename == _ENTRY or await admin.has_code(check_digest(digest, "FILE")):
                continue
            check_code_size(entry.file_size, f"FILE: {digest}")
            progress.show(f"uploading the code {digest[:12]}")
            await admin.upload_code(digest, archive.read(entry))


async def _send(admin: AdminClient, path: Path, data: bytes, wait_s: float, progress: Progress) -> Restored:
    await _upload_code(admin, path, progress)
    reply = await admin.send_backup(data, confirm=True)
    failed: dict[GoalId, str] = {}
    pending: list[GoalId] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    for goal_id in reply.goal_ids if wait_s else ():
        view = await admin.wait_for_goal(
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
            help="Replace the keys of this role: controller, host, admin, proxy, replica, client, caller, view, "
            "operate, or system (the servers' own state, for operators).",
        ),
    ] = None,
    subject_prefix: Annotated[
        str,
        typer.Option(
            "--subject-prefix",
            metavar="NAME",
            help="First token of all NATS subjects of this stack, for several stacks on one NATS; all its processes "
            "and commands then need MUSTER_SUBJECT_PREFIX.",
        ),
    ] = "serve",
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Generate passwords, for a NATS whose users have passwords, instead of NATS identities.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate the NATS identities and passwords of a stack in containers.

    Example:
      muster secrets --directory secrets

    Then start the stack with 'docker compose up -d --build --wait'. Existing files are kept, and secrets are never
    printed. When nats_identities.conf has changed, restart NATS; after --rotate, restart the processes of that role
    too, and set new passwords for people of that role ('muster console user'), whom it names.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        if rotate is not None and plain:
            raise BadField("--rotate", "plain users have passwords: remove their files and generate again")
        place = session.directory / directory
        before = _files(place)
        made_secrets = stack_secrets.generate(
            place, for_containers=True, plain=plain, subject_prefix=subject_prefix, rotate=rotate
        )
        after = _files(place)
        made = sorted(after.keys() - before.keys())
        changed = sorted(name for name in after.keys() & before.keys() if after[name] != before[name])
        retained = sorted(name for name in after.keys() & before.keys() if after[name] == before[name])
        outdated = find_outdated(IdentitySource(made_secrets, None if plain else read_operator(made_secrets)))
        if as_json:
            report = {"directory": str(place), "made": made, "changed": changed, "kept": retained}
            print_json({**report, "need_password": outdated})
            return
        for word, names in (("made", made), ("changed", changed)):
            for name in names:
                print_line(f"{word} {directory / name}")
        if not made and not changed:
            print_line(f"nothing to do: {directory} has all {len(retained)} files")
        elif retained:
            print_line(f"kept {len(retained)} others")
        for name in outdated:
            print_line(
                f"{name} needs a new password, as the key of their role was rotated: "
                f"'muster console user set-password {name} --directory {directory}'"
            )


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
