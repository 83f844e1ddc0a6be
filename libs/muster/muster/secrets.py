"""The secrets of one stack: generated once, kept in files, never printed.

Why files: compose mounts them as secrets and the embedded stack names them in ``…_FILE`` variables, so no secret stands
in an environment that ``docker inspect`` or ``ps`` shows.

Modes. The directory is 0700. Its files are 0600, or 0644 with ``for_containers``: compose mounts each file by itself
and keeps its owner and mode, and the processes in the containers run as other users; on this machine the
directory's 0700 still keeps all other users out. Those of the replica host (`READ_AS_ROOT`) stay 0600: it reads them
as root before it becomes another user, because user code runs in its container. So do the operator's keys and the
password of the console's first person, which no container needs.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Final

import msgspec

from muster import identities
from serve_common.clock import SystemClock
from serve_common.errors import PermanentError
from serve_common.identities.roles import Role
from serve_common.names import check_name

NATS_ROLES: Final = tuple(role.value for role in Role)
"""The plain users of deploy/nats/plain.conf; the file ``nats_<role>`` holds the password of each."""
NATS_INCLUDE: Final = "nats_passwords.conf"
"""File made of the others, which plain.conf includes under the name ``passwords.conf``."""
PLAIN_NAMES: Final = tuple(f"nats_{role}" for role in NATS_ROLES)
"""Passwords that only a NATS with plain users needs."""
NAMES: Final = ("postgres_password", "postgres_superuser_password", "grafana_admin_password")
"""Passwords that every stack needs."""
PEOPLE_FILE: Final = "console_users.json"
"""People who may sign in to the console, each with an identity that only their password opens."""
FIRST_PERSON: Final = "admin"
"""The person of the console that `generate` makes where no person is an admin."""
ADMIN_PASSWORD_FILE: Final = "console_admin_password"  # noqa: S105 - a file's name
"""Password of the first of them, until another is set; no container needs it."""
FILES: Final = (*NAMES, identities.OPERATOR_FILE, *identities.FILES, PEOPLE_FILE, ADMIN_PASSWORD_FILE)
"""All files that `generate` makes for a stack with identities."""

READ_AS_ROOT: Final = (identities.KEYS[Role.HOST][0], "nats_host", "nats_replica")
"""Files read by containers that start as root."""

_ENTROPY_BYTES: Final = 24
_SAFE: Final = re.compile(r"[A-Za-z0-9_-]{8,128}")
"""Passwords that need no quoting in nats.conf, a URL or SQL; generated ones always match."""


class SecretUnusable(PermanentError):
    """A secret's file cannot be read or written, or has invalid content."""

    error_code = "secret_unusable"


class Secrets(msgspec.Struct, frozen=True):
    """Paths of the secrets of one stack. Holds no value, so it can be shown and logged."""

    directory: Path

    def path(self, name: str) -> Path:
        """The path of a name in `FILES` or `PLAIN_NAMES`, or of `NATS_INCLUDE`; raises ValueError for others."""
        if name not in (*FILES, *PLAIN_NAMES, NATS_INCLUDE):
            raise ValueError(f"there is no secret named {name!r}")
        return self.directory / name

    def read(self, name: str) -> str:
        """The value of a password; raises `SecretUnusable` naming the file (never its content)."""
        return _read(self.path(name))

    def credentials_file(self, role: Role) -> Path:
        """The file with the identity of one of `identities.CREDENTIALS`."""
        return self.path(identities.CREDENTIALS[role])

    def keys_file(self, role: Role) -> Path:
        """The file with the signing keys of one of `identities.KEYS`."""
        return self.path(identities.KEYS[role][0])

    def nats_password_file(self, role: str) -> Path:
        """The file with the password of one of `NATS_ROLES`."""
        return self.path(f"nats_{role}")


def generate(
    directory: Path,
    *,
    for_containers: bool = False,
    plain: bool = False,
    subject_prefix: str = "serve",
    rotate: Role | None = None,
) -> Secrets:
    """Generate missing files in ``directory``, keep existing ones, and set the modes; idempotent.

    With ``plain``, passwords for NATS' own users are generated instead of identities. ``rotate`` replaces the keys of
    that role. Raises `BadField`, and `SecretUnusable` when a file cannot be read or written or has an invalid value.
    """
    # Only here: most commands read secrets and seal nothing.
    from muster import console_users  # noqa: PLC0415 - as above

    check_name(subject_prefix, "subject_prefix")
    mode = 0o644 if for_containers else 0o600
    made = Secrets(directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        for name in (*NAMES, *(PLAIN_NAMES if plain else ())):
            path = made.path(name)
            if not path.exists():
                write_secret(path, f"{secrets.token_hex(_ENTROPY_BYTES)}\n")
            path.chmod(0o600 if name in READ_AS_ROOT else mode)
        keys = None if plain else _operator(made, subject_prefix, rotate)
        if keys is None:
            _write_if_changed(made.path(NATS_INCLUDE), _nats_include(made), mode)
        else:
            for name, text in identities.derive_files(keys).items():
                _write_if_changed(made.path(name), text, 0o600 if name in READ_AS_ROOT else mode)
        console_users.ensure_admin(console_users.IdentitySource(made, keys), mode)
    except OSError as error:
        where = error.filename or directory
        raise SecretUnusable(f"{where} cannot be used for secrets: {error.strerror}") from error
    return made


def read_operator(made: Secrets) -> identities.OperatorKeys | None:
    """The operator's keys; None when there are none. Raises `SecretUnusable`."""
    path = made.path(identities.OPERATOR_FILE)
    try:
        return identities.decode_operator_keys(
            path.read_text(encoding="utf-8"), random_bytes=secrets.token_bytes
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SecretUnusable(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, identities.OperatorUnusable) as error:
        raise SecretUnusable(f"{path} {error}") from error


def _operator(made: Secrets, subject_prefix: str, rotate: Role | None) -> identities.OperatorKeys:
    path = made.path(identities.OPERATOR_FILE)
    keys = read_operator(made)
    if keys is None:
        keys = identities.make_operator(
            subject_prefix, now=SystemClock().now(), random_bytes=secrets.token_bytes
        )
    keys = msgspec.structs.replace(keys, subject_prefix=subject_prefix)
    if rotate is not None:
        keys = identities.rotate_role(keys, rotate, random_bytes=secrets.token_bytes)
    _write_if_changed(path, identities.encode_operator_keys(keys), 0o600)
    return keys


def _nats_include(made: Secrets) -> str:
    lines = (f'NATS_{role.upper()}_PASSWORD: "{made.read(f"nats_{role}")}"' for role in NATS_ROLES)
    return "\n".join(("# Made of the files beside it; change those and generate again.", *lines, ""))


def _write_if_changed(path: Path, text: str, mode: int) -> None:
    """Write the file unless it is unchanged: a container mounts the inode, not the name."""
    if not path.exists() or path.read_bytes() != text.encode():
        write_secret(path, text)
    path.chmod(mode)


def _read(path: Path) -> str:
    try:
        value = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SecretUnusable(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SecretUnusable(f"{path} is not text") from error
    if _SAFE.fullmatch(value) is None:
        raise SecretUnusable(f"{path} must hold 8 to 128 letters, digits, '-' or '_'")
    return value


def write_secret(path: Path, text: str) -> None:
    """Replace the file atomically; it is readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
