"""One run of the program: what commands share, and the one place where errors become lines and exit codes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import msgspec
import typer

from muster.cli import output
from muster.cli.connection import StackChoice, find_stack, running_embedded
from muster.cli.exit_codes import ExitCode, exit_code_of
from muster.cli.ports import Connect, EmbeddedPort, MakeEmbedded, StackPort
from muster.client.address import StackAddress
from muster.client.connect import connect_stack
from muster.client.feed import Listen, listen_to_stack
from muster.client.replies import UnknownError
from muster.embedded.disk_room import disk_is_full
from muster.embedded.options import StackOptions
from muster.embedded.process import OnEvent
from serve_common.errors import BadField, BusAuthorizationFailed, PermanentError, ServeError, TransientError
from serve_common.wires.admin import ErrorView

_CHANGE_RETRY_S = 30.0
"""A controller that died is back or replaced well within this."""


class Session:
    """What a run of the program knows from outside: environment, directory, and how to reach a stack."""

    def __init__(
        self,
        *,
        connect: Connect = connect_stack,
        listen: Listen = listen_to_stack,
        make_embedded: MakeEmbedded | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Tests give these; otherwise they are the process' own."""
        self._connect = connect
        self.listen = listen
        """Hears what is published; see `listen_to_stack`."""
        self._make_embedded = make_embedded
        self.environment = os.environ if environment is None else environment
        self.directory = Path.cwd() if directory is None else directory
        self.has_plain_users = False
        """Whether the stack that was reached last has NATS' plain users."""
        self.options = StackChoice()
        """Those given before the command's name."""

    def find_stack(self, options: StackChoice) -> StackAddress:
        """The stack that is meant; see `connection.find_stack`."""
        return find_stack(options.over(self.options), self.environment, self.directory)

    def full_disk(self) -> str | None:
        """In words, when the disk of the stack that runs from here is full; None when not, or when it is elsewhere."""
        found = running_embedded(self.environment, self.directory)
        return None if found is None else disk_is_full(Path(found.state_dir))

    def connect(
        self, address: StackAddress, progress: output.Progress, *, retry_for_s: float = _CHANGE_RETRY_S
    ) -> AbstractAsyncContextManager[StackPort]:
        """Reach a stack; troubles that may pass are shown as progress."""
        self.has_plain_users = address.credentials_file is None
        return self._connect(
            address, retry_for_s=retry_for_s, on_retry=lambda why: progress.say(f"{why} (trying again)")
        )

    def make_embedded(
        self, state_dir: Path, options: StackOptions, *, on_event: OnEvent, on_notice: Callable[[str], None]
    ) -> EmbeddedPort:
        """A stack to be run by this process. Raises `PermanentError` when its parts are not installed."""
        make = self._make_embedded or _embedded_stack()
        return make(state_dir, options, on_event=on_event, on_notice=on_notice)

    @contextmanager
    def reporting(self, *, as_json: bool, interrupted: str = "interrupted") -> Iterator[None]:
        """Whatever goes wrong within is told in a few lines and ends the program with its exit code."""
        try:
            yield
        except ServeError as error:
            _report(error, as_json=as_json)
            if isinstance(error, TransientError) and (full := self.full_disk()) is not None:
                output.complain(full)
            raise typer.Exit(exit_code_of(error)) from error
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as error:
            output.complain(interrupted)
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except Exception as error:
            if self.environment.get("MUSTER_DEBUG"):
                output.complain(traceback.format_exc())
            unexpected = ServeError(
                f"{type(error).__name__}: {error} (unexpected; MUSTER_DEBUG=1 shows where)"
            )
            _report(unexpected, as_json=as_json)
            raise typer.Exit(ExitCode.FAILED) from error


def _embedded_stack() -> MakeEmbedded:
    try:
        # Only here: the other commands also work where the servers are not installed.
        from muster.embedded.stack import EmbeddedStack  # noqa: PLC0415 - as above
    except ImportError as error:
        raise PermanentError(
            f"the embedded stack is not installed ({error}); install muster[embedded]"
        ) from error
    return EmbeddedStack


def session_of(context: typer.Context) -> Session:
    """The session that the program's root put into the context."""
    session = context.obj
    assert isinstance(session, Session)
    return session


def _report(error: ServeError, *, as_json: bool) -> None:
    output.complain(f"error: {error}")
    if isinstance(error, BusAuthorizationFailed):
        output.complain(
            "Give credentials with --creds or MUSTER_NATS_CREDS; for a NATS with plain users, the user with --user and "
            "the password with --password-file, MUSTER_NATS_PASSWORD_FILE or MUSTER_NATS_PASSWORD."
        )
    if as_json:
        field = error.field if isinstance(error, BadField) else ""
        code = error.code if isinstance(error, UnknownError) else error.error_code
        view = ErrorView(code=code, message=str(error), field=field)
        output.print_json({"error": msgspec.to_builtins(view)})
