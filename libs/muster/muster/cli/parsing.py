"""Parses command-line values into what the controller takes; wrong input is refused before anything is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from serve_common.errors import BadField
from serve_common.names import deployment_tag

T = TypeVar("T")
_FILE_BYTES_MAX = 4 * 1024 * 1024


def read_typed(text: str | None, directory: Path, field: str, expected: type[T], what: str) -> T | None:
    """Read a value of a type, as `read_user_config` does. Raises `BadField`: ``field`` must be ``what``."""
    if text is None:
        return None
    try:
        return msgspec.convert(_read_value(text, directory, field), expected)
    except msgspec.ValidationError as error:
        raise BadField(field, f"must be {what}: {error}") from error


def read_user_config(text: str | None, directory: Path) -> Any:
    """Read ``JSON``, ``@file.json`` or ``@file.yaml``; relative paths are resolved in ``directory``.

    YAML is limited to what JSON can represent. Raises `BadField`.
    """
    return None if text is None else _read_value(text, directory, "--user-config")


def read_object(text: str | None, directory: Path, field: str) -> dict[str, Any]:
    """Read an object as `read_user_config` does; empty when ``text`` is None. Raises `BadField`."""
    if text is None:
        return {}
    value = _read_value(text, directory, field)
    if not isinstance(value, dict):
        raise BadField(field, "must be an object")
    return value


def _read_value(text: str, directory: Path, field: str) -> Any:
    if not text.startswith("@"):
        return _json(text, field)
    path = directory / text[1:]
    content = read_text(path, field)
    named = f"{field} {text}"
    return yaml_value(content, named) if path.suffix.lower() in {".yaml", ".yml"} else _json(content, named)


def yaml_value(content: str, field: str) -> Any:
    """Parse YAML that JSON can represent. Raises `BadField`."""
    # Only here: few commands read a file.
    import yaml  # noqa: PLC0415 - as above

    try:
        return json.loads(json.dumps(yaml.safe_load(content), allow_nan=False))
    except yaml.YAMLError as error:
        raise BadField(field, f"is not YAML: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadField(field, f"has a value that JSON cannot say: {error}") from error


def read_group(text: str, field: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Read ``name=value,...`` or a JSON object: some fields of ``kind``. Raises `BadField` for an unknown field."""
    group = _json(text, field) if text.lstrip().startswith("{") else _named_values(text, field)
    known = kind.__struct_fields__
    for name in group:
        if name not in known:
            raise BadField(field, f"has no {name[:80]!r}; it has {', '.join(known)}")
    return dict(group)


def _named_values(text: str, field: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not name or not equals:
            raise BadField(field, f"{part[:80]!r} must read NAME=VALUE")
        if name in values:
            raise BadField(field, f"{name[:80]} is given twice")
        values[name] = _word_or_json(value, f"{field} {name[:80]}")
    return values


def _word_or_json(text: str, field: str) -> Any:
    is_word = text.isidentifier() and text not in ("true", "false", "null")
    return text if is_word or text.startswith("/") else _json(text, field)


def group_text(group: msgspec.Struct) -> str:
    """Format a group of fields; the inverse of `read_group`."""
    values = msgspec.structs.asdict(group).items()
    return ",".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in values)


def read_body(data: str | None, directory: Path, standard_input: bytes | None) -> bytes:
    """Read ``TEXT``, ``@file`` or ``-`` (``standard_input``) as bytes; None is empty. Raises `BadField`."""
    if data is None:
        return b""
    if data == "-":
        return standard_input or b""
    if data.startswith("@"):
        try:
            return (directory / data[1:]).read_bytes()
        except OSError as error:
            raise BadField("--data", f"{data[1:]} cannot be read: {error.strerror}") from error
    return data.encode()


def read_headers(lines: Sequence[str]) -> dict[str, str]:
    """Parse headers written as ``Name: value``. Raises `BadField`."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not line.isprintable() or not line.isascii():
            raise BadField("--header", f"{line[:80]!r} must read 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers


def parse_shares(shares: Sequence[str], field: str) -> dict[str, float]:
    """Parse ``BACKEND=WEIGHT`` into weights by tag; ``BACKEND`` alone has weight 1. Raises `BadField`.

    The controller checks the sum.
    """
    weights: dict[str, float] = {}
    for text in shares:
        name, equals, number = text.partition("=")
        try:
            weight = float(number) if equals else 1.0
        except ValueError as error:
            raise BadField(field, f"{text[:80]!r} must read BACKEND=WEIGHT, such as digits=0.9") from error
        tag = deployment_tag(name, field)
        if tag in weights:
            raise BadField(field, f"{name} is given twice")
        weights[tag] = parse_share(weight, f"{field} {name}")
    return weights


def parse_share(share: float, field: str) -> float:
    """Return ``share`` when it is between 0 and 1; otherwise raise `BadField`."""
    if not 0 <= share <= 1:  # False for NaN too
        raise BadField(field, f"is {share:g}; it must be between 0 and 1")
    return share


def read_methods(text: str | None) -> dict[str, Any]:
    """Parse ``GET,POST`` into the keyword argument ``methods``; empty for None, so that the default applies."""
    if text is None:
        return {}
    return {"methods": [method.strip().upper() for method in text.split(",") if method.strip()]}


def resolve_app_dir(app_dir: str | None, directory: Path, field: str = "--app-dir") -> tuple[str, str]:
    """Resolve ``--app-dir`` to the path on replica hosts; returns it with a note for the user, or an empty note.

    A directory that exists locally becomes its absolute path; any other absolute path is taken as the hosts see it.
    Raises `BadField` for a file and for a relative path that does not exist.
    """
    if app_dir is None:
        return "", ""
    here = directory / app_dir
    if here.is_dir():
        return os.path.abspath(here), ""  # noqa: PTH100 - resolve() would follow links, which hosts may see otherwise
    if here.exists():
        raise BadField(field, f"{app_dir} is not a directory")
    if not app_dir.startswith("/"):
        raise BadField(
            field,
            f"there is no directory {app_dir} here; a path in the hosts' containers begins with '/'",
        )
    return app_dir, f"note: {app_dir} does not exist here; it is taken as a path on the replica hosts"


def read_text(path: Path, field: str) -> str:
    """Read a text file of bounded size. Raises `BadField`."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise BadField(field, f"{path} is larger than {_FILE_BYTES_MAX} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadField(field, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadField(field, f"{path} is not text in UTF-8") from error


def _json(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(field, f"is not JSON: {error}") from error
