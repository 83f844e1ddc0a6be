"""One run of the program: finds the stack, runs a command, turns errors into lines and an exit code."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
import typer

from muster.cli.output import Progress, configure_logs, print_error, print_json
from muster.client.admin import Stack, connect_stack
from muster.client.contexts import Context, choose_context
from muster.client.requests import (
    DEFAULT_URL,
    DEFAULT_USER,
    Feed,
    Listen,
    StackAddress,
    UnknownError,
    listen_to_stack,
    parse_urls,
)
from muster.embedded.options import DEFAULT_STATE_DIR, RUN_STATE_DIR
from muster.embedded.run_record import RunRecord, describe_full_disk, running_stack
from muster.secrets import Secrets
from serve_common.api.views import ErrorView
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    CommandRefused,
    DeadlineExceeded,
    NotFound,
    PermanentError,
    ServeError,
    TransientError,
)
from serve_common.identities.roles import Role
from serve_common.runtime.settings import Environment

if TYPE_CHECKING:
    from muster.embedded.options import StackOptions
    from muster.embedded.process import OnEvent

SECRETS_DIRECTORY: Final = "secrets"
_STORED_USERS: Final = frozenset({DEFAULT_USER, "client"})
"""Users whose credentials are stored with a stack: people, and deployment handles outside of replicas."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "[::]"})  # noqa: S104 - compared with, not bound


class StackChoice(msgspec.Struct, frozen=True):
    """Stack options of the command line; None for an option that is not given."""

    nats: str | None = None
    creds: Path | None = None
    user: str | None = None
    password_file: Path | None = None
    context: str | None = None

    def over(self, other: StackChoice) -> StackChoice:
        """These options, and those of ``other`` where these are not given."""
        return StackChoice(
            nats=self.nats or other.nats,
            creds=self.creds or other.creds,
            user=self.user or other.user,
            password_file=self.password_file or other.password_file,
            context=self.context or other.context,
        )


def find_stack(options: StackChoice, variables: Mapping[str, str], directory: Path) -> StackAddress:
    """Resolve the address of a stack from options, environment, contexts, and the stacks around ``directory``.

    In this order: the address that is given (``--nats``, or the context of ``--context``); MUSTER_NATS_URL; the context
    of MUSTER_CONTEXT; the context in use; the embedded stack that runs from ``.muster`` in ``directory`` or a
    parent; the stack of compose whose ``secrets`` directory is in ``directory`` or a parent. Credentials that are not
    given are those stored with the stack or context that the address belongs to, and are never used with another
    machine.

    Raises `BusUnavailable` when none is given and none is found, `BadField` for invalid values, and `SecretUnusable`
    for a password file of a found stack that cannot be read.
    """
    if options.nats and options.context:
        raise BadField("--context", "and --nats must not both be given")
    context = None if options.nats else choose_context(options.context, variables)
    if context is not None:
        return _address_of_context(context, options, directory)
    environment = Environment(variables)
    field = "--nats" if options.nats else "MUSTER_NATS_URL"
    url = options.nats or environment.optional("MUSTER_NATS_URL")
    embedded = running_embedded(variables, directory)
    if url is None and embedded is not None:
        url = embedded.nats_url
    password = _find_password(options, environment)
    credentials = _find_credentials(options, environment, directory)
    composed = _secrets_of_compose(directory)
    if url is None and composed is not None:
        url, field = _published_nats(variables, composed.parent), "MUSTER_NATS_PORT"
    if url is None and (password is not None or credentials is not None):
        url = DEFAULT_URL
    if url is None:
        raise BusUnavailable(
            "no stack was found to connect to; start one with 'muster up', or say where one is with --nats or "
            "MUSTER_NATS_URL ('muster context' names stacks; MUSTER_STATE_DIR finds that of 'muster up --state-dir')"
        )
    parsed = parse_urls(url, field)
    user = options.user or parsed.user or environment.text("MUSTER_NATS_USER", DEFAULT_USER)
    if options.password_file is None and parsed.password is not None:
        password = parsed.password
        credentials = None if options.creds is None else credentials
    is_embedded = embedded is not None and parsed.urls == parse_urls(embedded.nats_url, "run.json").urls
    is_composed = composed is not None and not is_embedded and _hosts(parsed.urls) <= _LOOPBACK
    if password is None and credentials is None and user in _STORED_USERS:
        if is_embedded and embedded is not None:
            credentials, password = _stored_credentials(user, Path(embedded.secrets))
        elif is_composed and composed is not None:
            credentials, password = _stored_credentials(user, composed)
    return StackAddress(
        urls=parsed.urls,
        credentials_file=credentials,
        user=user,
        password=password,
        subject_prefix=environment.text("MUSTER_SUBJECT_PREFIX", "serve"),
        tls_ca_file=_readable(environment.optional("MUSTER_NATS_TLS_CA_FILE"), "MUSTER_NATS_TLS_CA_FILE"),
        http_url=_published_http(variables, composed.parent) if is_composed and composed is not None else "",
    )


def _address_of_context(context: Context, options: StackChoice, directory: Path) -> StackAddress:
    parsed = parse_urls(context.nats, "nats of the context")
    has_other_user = (
        options.user is not None or options.password_file is not None or options.creds is not None
    )
    creds = None if has_other_user else context.creds
    password_file = None if has_other_user or creds else context.password_file
    if options.creds is not None:
        creds = str(directory / options.creds)
    if options.password_file is not None:
        password_file = str(directory / options.password_file)
    return StackAddress(
        urls=parsed.urls,
        credentials_file=_readable(creds, "--creds"),
        user=options.user or context.user or DEFAULT_USER,
        password=None if password_file is None else _read_password(password_file, "--password-file"),
        subject_prefix=context.subject_prefix,
        tls_ca_file=_readable(context.tls_ca_file, "--tls-ca-file"),
        http_url=context.http,
    )


def _published_nats(variables: Mapping[str, str], checkout: Path) -> str:
    """The address at which compose publishes NATS."""
    published = _compose_variable("MUSTER_NATS_PORT", variables, checkout) or "4222"
    if published.rpartition(":")[2] == "0":
        raise BadField(
            "MUSTER_NATS_PORT",
            f"is {published}, so Docker chose the port; give --nats with what 'docker compose port nats 4222' prints",
        )
    return f"nats://{_as_address(published)}"


def _published_http(variables: Mapping[str, str], checkout: Path) -> str:
    """The URL at which compose publishes HTTP; empty where Docker chose the port."""
    published = _compose_variable("MUSTER_HTTP_PORT", variables, checkout) or "8000"
    scheme = "https" if _compose_variable("MUSTER_TLS", variables, checkout) else "http"
    return "" if published.rpartition(":")[2] == "0" else f"{scheme}://{_as_address(published)}"


def _as_address(published: str) -> str:
    """``port`` or ``address:port`` as compose takes it; all interfaces become this machine."""
    host, _, port = published.rpartition(":")
    return f"{'127.0.0.1' if host in _EVERYWHERE else host}:{port}"


def _compose_variable(name: str, variables: Mapping[str, str], checkout: Path) -> str | None:
    """A variable as compose reads it: from the environment, or else from ``.env`` beside compose.yaml."""
    if variables.get(name):
        return variables[name]
    try:
        lines = (checkout / ".env").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in reversed(lines):
        key, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and key.strip() == name:
            return value.strip().strip("\"'") or None
    return None


def _find_credentials(options: StackChoice, environment: Environment, directory: Path) -> str | None:
    """The file of credentials; a user or password on the command line overrides that of the environment."""
    if options.creds is not None:
        return _readable(str(directory / options.creds), "--creds")
    if options.password_file is not None or options.user is not None:
        return None
    named = environment.optional("MUSTER_NATS_CREDS_FILE")
    return None if named is None else _readable(str(directory / named), "MUSTER_NATS_CREDS_FILE")


def _find_password(options: StackChoice, environment: Environment) -> str | None:
    if options.password_file is not None:
        return _read_password(str(options.password_file), "--password-file")
    if environment.optional("MUSTER_NATS_PASSWORD") or environment.optional("MUSTER_NATS_PASSWORD_FILE"):
        return environment.secret("MUSTER_NATS_PASSWORD")
    return None


def _read_password(file: str, field: str) -> str:
    try:
        return Environment({"given_FILE": file}).secret("given")
    except BadField as error:
        raise BadField(field, error.reason) from error


def _stored_credentials(user: str, directory: Path) -> tuple[str | None, str | None]:
    """The file of credentials, or else the password, that is stored with the stack."""
    secrets = Secrets(directory)
    file = secrets.credentials_file(Role(user))
    return (str(file), None) if file.is_file() else (None, secrets.read(f"nats_{user}"))


def _hosts(urls: tuple[str, ...]) -> set[str]:
    return {url.partition("://")[2].rpartition(":")[0].strip("[]") for url in urls}


def running_embedded(variables: Mapping[str, str], directory: Path) -> RunRecord | None:
    """The stack that `muster up` or `muster run` runs from ``directory`` or a parent; None when there is none."""
    named = Environment(variables).optional("MUSTER_STATE_DIR")
    bases = (
        [directory / named] if named else [place / DEFAULT_STATE_DIR for place in _with_parents(directory)]
    )
    places = [place for base in bases for place in (base, base / RUN_STATE_DIR.name)]
    found = next(filter(None, map(running_stack, places)), None)
    if found is None and "ray" in sys.modules:
        # Only here, as few processes need it: in tasks and actors of a program with a stack within it. Their
        # environment may name a former one.
        from muster.embedded.options import find_in_ray  # noqa: PLC0415 - as above

        announced = find_in_ray()
        found = None if announced is None else running_stack(Path(announced))
    return found


def _secrets_of_compose(directory: Path) -> Path | None:
    for place in _with_parents(directory):
        candidate = place / SECRETS_DIRECTORY
        found = Secrets(candidate)
        if found.credentials_file(Role.ADMIN).is_file() or found.nats_password_file("admin").is_file():
            return candidate
    return None


def _with_parents(directory: Path) -> Iterator[Path]:
    yield directory
    yield from directory.parents


def _readable(path: str | None, field: str) -> str | None:
    if path is not None and not os.access(path, os.R_OK):
        raise BadField(field, f"{path} cannot be read")
    return path


class ExitCode(IntEnum):
    """Exit codes of the program; 0 is success. Scripts depend on them, so all commands use this one table."""

    OK = 0
    FAILED = 1
    """The goal failed, or was superseded, or the operation failed."""
    BAD_INPUT = 2
    """The request cannot be accepted; nothing was changed."""
    UNREACHABLE = 3
    """NATS, the controller or Postgres does not answer, or NATS refuses the user."""
    NOT_FOUND = 4
    TIMED_OUT = 5
    """The timeout passed; a started change goes on."""
    INTERRUPTED = 130
    """Ctrl-C while waiting; a started change goes on."""


EXIT_CODES_HELP = (
    "Exit codes: 0 done, or nothing to do; 1 the change or call failed; 2 bad input, nothing was changed; 3 the stack "
    "cannot be reached; 4 not found; 5 timed out, a change goes on; 130 Ctrl-C while waiting, a change goes on."
)


def get_exit_code(error: ServeError) -> ExitCode:
    """The exit code for an error that ends a command."""
    match error:
        case NotFound():
            return ExitCode.NOT_FOUND
        case CommandRefused():
            return ExitCode.BAD_INPUT
        case TransientError() | BusAuthorizationFailed():
            return ExitCode.UNREACHABLE
        case DeadlineExceeded():
            return ExitCode.TIMED_OUT
        case _:
            return ExitCode.FAILED


_CHANGE_RETRY_S = 30.0
"""Seconds to retry a change: a controller that died is back or replaced well within this."""


class Connect(Protocol):
    """Connects to a stack; `muster.client.connect_stack` implements it."""

    def __call__(
        self, address: StackAddress, *, retry_for_s: float, on_retry: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Stack]:
        """Raises `BusUnavailable` and `BusAuthorizationFailed` when entered."""
        ...


class EmbeddedPort(Protocol):
    """A stack that runs within an ``async with``; `muster.embedded.stack.EmbeddedStack` implements it."""

    async def __aenter__(self) -> object:
        """Returns when everything is ready."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Stops everything in order."""
        ...

    @property
    def record(self) -> RunRecord:
        """Processes, addresses and ports of the stack."""
        ...


class MakeEmbedded(Protocol):
    """Creates an embedded stack that is not started yet."""

    def __call__(
        self, state_dir: Path, options: StackOptions, *, on_event: OnEvent, on_notice: Callable[[str], None]
    ) -> EmbeddedPort:
        """Raises nothing; starting it does."""
        ...


Result = TypeVar("Result")


class Session:
    """Context of one run of the program: environment, directory, and how to reach a stack."""

    def __init__(
        self,
        *,
        connect: Connect = connect_stack,
        listen: Listen = listen_to_stack,
        make_embedded: MakeEmbedded | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Arguments are for tests; the defaults are those of the process."""
        self._connect = connect
        self._listen = listen
        self._make_embedded = make_embedded
        self.environment = os.environ if environment is None else environment
        self.directory = Path.cwd() if directory is None else directory
        self.has_plain_users = False
        """Whether the last stack that was connected to has NATS' plain users."""
        self.options = StackChoice()
        """Stack options given before the command's name."""

    def find_stack(self, options: StackChoice) -> StackAddress:
        """The address of the stack that ``options`` choose, or that the module's `find_stack` finds."""
        return find_stack(options.over(self.options), self.environment, self.directory)

    def listen(self, address: StackAddress, subjects: Sequence[str]) -> AbstractAsyncContextManager[Feed]:
        """Subscribe to what a stack publishes, as `listen_to_stack` does."""
        configure_logs()
        return self._listen(address, subjects)

    def full_disk(self) -> str | None:
        """A warning when the disk of a stack that runs from here is full; None when it is not, or none runs here."""
        found = running_embedded(self.environment, self.directory)
        return None if found is None else describe_full_disk(Path(found.state_dir))

    def connect(
        self, address: StackAddress, progress: Progress, *, retry_for_s: float = _CHANGE_RETRY_S
    ) -> AbstractAsyncContextManager[Stack]:
        """Connect to a stack; transient errors are shown as progress."""
        self.has_plain_users = address.is_plain
        return self._connect(
            address, retry_for_s=retry_for_s, on_retry=lambda why: progress.show(f"{why} (trying again)")
        )

    async def with_stack(
        self,
        address: StackAddress,
        title: str,
        work: Callable[[Stack, Progress], Awaitable[Result]],
        *,
        retry_for_s: float = _CHANGE_RETRY_S,
    ) -> Result:
        """Connect to a stack, do ``work`` with progress shown under ``title``, and return its result."""
        with Progress(title) as progress:
            async with self.connect(address, progress, retry_for_s=retry_for_s) as stack:
                return await work(stack, progress)

    def run(
        self,
        address: StackAddress,
        title: str,
        work: Callable[[Stack, Progress], Awaitable[Result]],
        *,
        retry_for_s: float = _CHANGE_RETRY_S,
    ) -> Result:
        """`with_stack` in an event loop of its own."""
        return asyncio.run(self.with_stack(address, title, work, retry_for_s=retry_for_s))

    def make_embedded(
        self, state_dir: Path, options: StackOptions, *, on_event: OnEvent, on_notice: Callable[[str], None]
    ) -> EmbeddedPort:
        """Create a stack for this process to run. Raises `PermanentError` when its packages are not installed."""
        make = self._make_embedded or _embedded_stack()
        return make(state_dir, options, on_event=on_event, on_notice=on_notice)

    @contextmanager
    def reporting(
        self, *, as_json: bool, interrupted: str = "interrupted", is_rays: bool = False
    ) -> Iterator[None]:
        """Print an error raised within the block in a few lines, and exit with its exit code.

        Of a command that has Ray Serve's exit codes (``is_rays``) a bad value or file is 1.

        This is the one place where errors become lines and exit codes.
        """
        try:
            yield
        except ServeError as error:
            _report(error, as_json=as_json)
            if isinstance(error, TransientError) and (full := self.full_disk()) is not None:
                print_error(full)
            code = get_exit_code(error)
            raise typer.Exit(ExitCode.FAILED if is_rays and code is ExitCode.BAD_INPUT else code) from error
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt as error:
            print_error(interrupted)
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except Exception as error:
            if self.environment.get("MUSTER_DEBUG"):
                print_error(traceback.format_exc())
            unexpected = ServeError(
                f"{type(error).__name__}: {error} (unexpected; MUSTER_DEBUG=1 shows where)"
            )
            _report(unexpected, as_json=as_json)
            raise typer.Exit(ExitCode.FAILED) from error


def _embedded_stack() -> MakeEmbedded:
    try:
        # Only here: the other commands also work where the servers are not installed.
        from muster.embedded.stack import EmbeddedStack  # noqa: PLC0415 - as above

        configure_logs()
    except ImportError as error:
        raise PermanentError(
            f"the embedded stack is not installed ({error}); install muster[embedded]"
        ) from error
    return EmbeddedStack


def get_session(context: typer.Context) -> Session:
    """The session that the root command stored in the context."""
    session = context.obj
    assert isinstance(session, Session)
    return session


def _report(error: ServeError, *, as_json: bool) -> None:
    print_error(f"error: {error}")
    if isinstance(error, BusAuthorizationFailed):
        print_error(
            "Give credentials with --creds or MUSTER_NATS_CREDS_FILE; for a NATS with plain users, the user with "
            "--user and the password with --password-file, MUSTER_NATS_PASSWORD_FILE or MUSTER_NATS_PASSWORD."
        )
    if as_json:
        field = error.field if isinstance(error, BadField) else ""
        code = error.code if isinstance(error, UnknownError) else error.error_code
        view = ErrorView(code=code, message=str(error), field=field)
        print_json({"error": msgspec.to_builtins(view)})
