"""The operations of an OpenAPI schema as forms. Schemas come from applications: they may be wrong, large or hostile."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import msgspec

from serve_console.core.call_requests import METHOD_CHOICES

SCHEMA_BYTES_MAX: Final = 1024 * 1024
OPERATIONS_MAX: Final = 200
FIELDS_MAX: Final = 60
"""Fields of one operation."""
_OPTIONS_MAX: Final = 200
_VALUE_COST: Final = 16
"""Bytes that each value counts besides its own, as many small ones take time too."""
_PARAMETERS_MAX: Final = 120
_REQUIRED_MAX: Final = 500
_TYPES_MAX: Final = 20
_REFERENCES_MAX: Final = 16
_SAMPLE_DEPTH_MAX: Final = 4
_SAMPLE_FIELDS_MAX: Final = 20
_SAMPLES_MAX: Final = 300
"""Values within the samples of one operation: shapes that refer to each other would grow without end."""
_KEYS_MAX: Final = 64
"""Keywords of one schema; one with more is taken for empty, as each field copies them."""
_ENCODED_BYTES_MAX: Final = 4 * 1024 * 1024
"""Values within all forms of a schema: many fields may refer to the same large default."""
_NAME_MAX: Final = 200
_TEXT_MAX: Final = 400
_VALUE_MAX: Final = 20_000
_BODY_TYPES: Final = {
    "application/json": "json",
    "multipart/form-data": "multipart",
    "application/x-www-form-urlencoded": "form",
}
_LIMITS: Final = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_SHOWN_NUMBER_MAX: Final = 10**15
_METHODS_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})

Json: TypeAlias = Mapping[str, Any]
Kind: TypeAlias = Literal["string", "integer", "number", "boolean", "enum", "list", "json", "file", "files"]
Place: TypeAlias = Literal["path", "query", "header", "body"]


class ApiField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a form."""

    key: str
    """Name within the form; the schema has no say in it."""
    name: str
    place: Place
    kind: Kind
    """``list``: one text on each line; ``json``: any JSON value."""
    is_required: bool = False
    is_nullable: bool = False
    options: tuple[tuple[str, str], ...] = ()
    """Values of an enum: as JSON, and as they are shown."""
    value: str = ""
    """What the form begins with."""
    hint: str = ""
    is_long: bool = False
    """Whether the text may have lines."""


class ApiOperation(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a path."""

    key: str
    method: str
    path: str
    """With ``{name}`` for parameters."""
    summary: str = ""
    description: str = ""
    fields: tuple[ApiField, ...] = ()
    body: Literal["", "json", "json_whole", "multipart", "form", "raw"] = ""
    """How the body is made: of fields, of the field ``json_whole``, or written by hand."""
    left_out: int = 0
    """Fields beyond the most that a form has."""


class ApiSchema(msgspec.Struct, frozen=True):
    """What an application serves."""

    title: str
    operations: tuple[ApiOperation, ...]
    left_out: int = 0
    """Operations beyond the most that are offered."""

    def find(self, key: str) -> ApiOperation | None:
        """The operation of a key."""
        return next((operation for operation in self.operations if operation.key == key), None)


def parse_api_schema(body: bytes) -> ApiSchema | None:
    """The operations of an OpenAPI schema in JSON; None where it is none, or is too large."""
    if len(body) > SCHEMA_BYTES_MAX:
        return None
    try:
        root = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(root, dict) or not isinstance(root.get("openapi"), str):
        return None
    found: list[ApiOperation] = []
    left_out = 0
    budget = _Budget()
    for path, item in _mapping(root.get("paths")).items():
        for name, operation in _mapping(item).items():
            method = name.upper()
            if method not in METHOD_CHOICES or not isinstance(operation, dict) or not path.startswith("/"):
                continue
            if len(found) >= OPERATIONS_MAX or len(path) > _NAME_MAX:
                left_out += 1
                continue
            found.append(_Reader(root, budget).read_operation(method, path, operation, _mapping(item)))
    return ApiSchema(_text(_mapping(root.get("info")).get("title")), tuple(found), left_out)


class _Budget:
    """How much of a schema's values may still be encoded."""

    def __init__(self) -> None:
        self._bytes_left = _ENCODED_BYTES_MAX

    def encode(self, value: Any, *, is_pretty: bool = False) -> str:
        """The value as JSON; empty when it cannot be, or when too much was encoded before."""
        if self._bytes_left <= 0:
            return ""
        try:
            encoded = msgspec.json.encode(value)
        except (OverflowError, RecursionError):  # a number of more than 64 bits, or nested too deeply
            self._bytes_left -= _VALUE_MAX
            return ""
        self._bytes_left -= len(encoded) + _VALUE_COST
        if len(encoded) > _VALUE_MAX:
            return ""
        return (msgspec.json.format(encoded, indent=2) if is_pretty else encoded).decode()[:_VALUE_MAX]

    def get_text(self, value: Any) -> str:
        """A text as it is, all else as JSON."""
        return value[:_VALUE_MAX] if isinstance(value, str) else self.encode(value)


class _Reader:
    """Reads one operation."""

    def __init__(self, root: Json, budget: _Budget) -> None:
        self._root = root
        self._budget = budget
        self._samples_left = _SAMPLES_MAX
        self._fields: list[ApiField] = []
        self._left_out = 0

    def read_operation(self, method: str, path: str, operation: Json, item: Json) -> ApiOperation:
        """The operation's form."""
        parameters: dict[tuple[str, str], Json] = {}
        written = [item.get("parameters"), operation.get("parameters")]
        for each in (each for part in written for each in _sequence(part)[:_PARAMETERS_MAX]):
            parameter = self._resolve(each)
            name, place = parameter.get("name"), parameter.get("in")
            if isinstance(name, str) and isinstance(place, str) and len(name) <= _NAME_MAX:
                parameters[place, name] = parameter
        order: tuple[Place, ...] = ("path", "query", "header")
        for wanted in order:
            for (place, name), parameter in parameters.items():
                if place == wanted:
                    is_required = parameter.get("required") is True or place == "path"
                    hint = _text(parameter.get("description"))
                    self._add(
                        name,
                        wanted,
                        self._resolve(parameter.get("schema")),
                        is_required=is_required,
                        hint=hint,
                    )
        body = self._read_body(self._resolve(operation.get("requestBody")), method)
        return ApiOperation(
            key=f"{method} {path}",
            method=method,
            path=path,
            summary=_text(operation.get("summary")),
            description=_text(operation.get("description")),
            fields=tuple(self._fields),
            body=body,
            left_out=self._left_out,
        )

    def _read_body(
        self, body: Json, method: str
    ) -> Literal["", "json", "json_whole", "multipart", "form", "raw"]:
        content = _mapping(body.get("content"))
        if not content:
            return "raw" if method in _METHODS_WITH_BODY else ""
        found = next((name for name in _BODY_TYPES if name in content), None)
        if found is None:
            return "raw"
        schema = self._resolve(_mapping(content[found]).get("schema"))
        schema, _ = self._strip_null(schema)
        properties = _mapping(schema.get("properties"))
        if found == "application/json" and (not properties or len(properties) > FIELDS_MAX):
            self._add_whole(schema, is_required=body.get("required") is True)
            return "json_whole"
        required = _sequence(schema.get("required"))[:_REQUIRED_MAX]
        wanted = {name for name in required if isinstance(name, str)}
        self._left_out += max(0, len(properties) - FIELDS_MAX)
        for name, each in islice(properties.items(), FIELDS_MAX):
            if len(name) <= _NAME_MAX:
                self._add(name, "body", self._resolve(each), is_required=name in wanted)
        kinds: dict[str, Literal["json", "multipart", "form"]] = {
            "application/json": "json", "multipart/form-data": "multipart",
        }  # fmt: skip
        return kinds.get(found, "form")

    def _add_whole(self, schema: Json, *, is_required: bool) -> None:
        value = schema.get("example", schema.get("default", self._sample(schema, 0)))
        self._append(
            ApiField(
                key="p0",
                name="Body",
                place="body",
                kind="json",
                is_required=is_required,
                value=self._budget.encode(value, is_pretty=True),
                hint=_text(schema.get("description")) or "A JSON value.",
            )
        )

    def _add(self, name: str, place: Place, schema: Json, *, is_required: bool, hint: str = "") -> None:
        described = _text(schema.get("description"))
        schema, is_nullable = self._strip_null(schema)
        kind, options = self._get_kind(schema, place)
        default = schema.get("default")
        hints = [hint or described or _text(schema.get("description")), _describe_limits(schema, kind)]
        self._append(
            ApiField(
                key="",
                name=name,
                place=place,
                kind=kind,
                is_required=is_required,
                is_nullable=is_nullable,
                options=options,
                value=self._get_value(schema, kind, default, is_required=is_required),
                hint=_join_sentences(hints),
                is_long=kind == "string" and _is_above(schema.get("maxLength"), 200),
            )
        )

    def _append(self, field: ApiField) -> None:
        if len(self._fields) >= FIELDS_MAX:
            self._left_out += 1
        else:
            self._fields.append(msgspec.structs.replace(field, key=f"p{len(self._fields)}"))

    def _get_kind(self, schema: Json, place: Place) -> tuple[Kind, tuple[tuple[str, str], ...]]:
        values = [schema["const"]] if "const" in schema else _sequence(schema.get("enum"))[:_OPTIONS_MAX]
        if values and all(value is None or isinstance(value, str | int | float) for value in values):
            return "enum", tuple(
                (self._budget.encode(value), self._budget.get_text(value)[:_NAME_MAX])
                for value in values
                if value is not None
            )
        kind = schema.get("type")
        if _is_binary(schema):
            return "file", ()
        if kind in ("string", "integer", "number", "boolean"):
            return kind, ()
        if kind == "array":
            items, _ = self._strip_null(self._resolve(schema.get("items")))
            if _is_binary(items):
                return "files", ()
            return ("json", ()) if place == "body" else ("list", ())
        return ("json", ()) if place == "body" else ("string", ())

    def _get_value(self, schema: Json, kind: Kind, default: Any, *, is_required: bool) -> str:
        if default is None and kind == "json" and is_required:
            return self._budget.encode(self._sample(schema, 0), is_pretty=True)
        if default is None:
            examples = schema.get("examples")
            example = examples[0] if isinstance(examples, list) and examples else schema.get("example")
            default = example if is_required and kind not in ("file", "files", "list") else None
        if default is None:
            return ""
        if kind == "list":
            return "\n".join(self._budget.get_text(value) for value in _sequence(default)[:_OPTIONS_MAX])[
                :_VALUE_MAX
            ]
        if kind in ("enum", "json", "boolean"):
            return self._budget.encode(default, is_pretty=kind == "json")
        return self._budget.get_text(default)[:_VALUE_MAX]

    def _resolve(self, value: Any) -> Json:
        """What a local reference points at, or an empty schema."""
        for _ in range(_REFERENCES_MAX):
            schema = _schema(value)
            reference = schema.get("$ref")
            if reference is None:
                parts = _sequence(schema.get("allOf"))
                if len(parts) != 1:
                    return schema
                outer = {key: each for key, each in schema.items() if key != "allOf"}
                return {**self._follow(_schema(parts[0])), **outer}
            outer = {key: each for key, each in schema.items() if key != "$ref"}
            value = {**self._follow(schema), **outer}
        return {}

    def _follow(self, schema: Json) -> Json:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#/"):
            return {}
        found: Any = self._root
        for part in reference[2:].split("/", 8)[:8]:
            found = _mapping(found).get(part.replace("~1", "/").replace("~0", "~"))
        return _schema(found)

    def _strip_null(self, schema: Json) -> tuple[Json, bool]:
        """The schema without ``null`` as an alternative, and whether that was one."""
        kinds = schema.get("type")
        if isinstance(kinds, list):
            kinds = kinds[:_TYPES_MAX]
            others = [kind for kind in kinds if kind != "null"]
            return {**schema, "type": others[0] if len(others) == 1 else None}, "null" in kinds
        parts = [self._resolve(part) for part in _sequence(schema.get("anyOf") or schema.get("oneOf"))[:20]]
        others = [part for part in parts if part.get("type") != "null"]
        is_nullable = len(others) < len(parts)
        if len(others) != 1:
            return schema, is_nullable
        outer = {key: each for key, each in schema.items() if key not in ("anyOf", "oneOf", "title")}
        return {**others[0], **outer}, is_nullable

    def _sample(self, value: Any, depth: int) -> Any:
        """A value with the shape of a schema, to be changed by hand."""
        schema, _ = self._strip_null(self._resolve(value))
        for key in ("default", "example", "const"):
            if schema.get(key) is not None:
                return schema[key]
        values = _sequence(schema.get("examples")) or _sequence(schema.get("enum"))
        if values:
            return values[0]
        self._samples_left -= 1
        if depth >= _SAMPLE_DEPTH_MAX or self._samples_left < 0:
            return None
        properties = _mapping(schema.get("properties"))
        if schema.get("type") == "object" or properties:
            shown = islice(properties.items(), _SAMPLE_FIELDS_MAX)
            return {name: self._sample(each, depth + 1) for name, each in shown}
        if schema.get("type") == "array":
            return [self._sample(schema.get("items"), depth + 1)] if "items" in schema else []
        return {"string": "", "integer": 0, "number": 0.0, "boolean": False}.get(str(schema.get("type")))


def _is_binary(schema: Json) -> bool:
    return schema.get("type") == "string" and (
        schema.get("format") == "binary" or schema.get("contentMediaType") == "application/octet-stream"
    )


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int) and value > limit


def _describe_limits(schema: Json, kind: Kind) -> str:
    """The limits of a value in a sentence; empty where it has none."""
    limits = [
        f"{text} {_show_number(schema[key])}"
        for key, text in _LIMITS.items()
        if isinstance(schema.get(key), int | float) and abs(schema[key]) < _SHOWN_NUMBER_MAX
    ]
    if kind == "string":
        limits += [
            f"{text} {schema[key]} character{'' if schema[key] == 1 else 's'}"
            for key, text in (("minLength", "at least"), ("maxLength", "at most"))
            if isinstance(schema.get(key), int) and abs(schema[key]) < _SHOWN_NUMBER_MAX
        ]
        if isinstance(schema.get("format"), str):
            limits.append(f"format {schema['format'][:40]}")
    if kind == "list":
        limits.append("one on each line")
    text = ", ".join(limits)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _show_number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _join_sentences(texts: list[str]) -> str:
    return " ".join(text if text.endswith((".", "!", "?", ":")) else f"{text}." for text in texts if text)


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _schema(value: Any) -> Json:
    found = _mapping(value)
    return found if len(found) <= _KEYS_MAX else {}


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value[:_TEXT_MAX].strip() if isinstance(value, str) else ""
