"""Structs as reference pages show them: each field with its type, default, range and meaning."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from docs.generator.ranges import RANGES, SPECIAL, kinds_in

GENERATED: Final = "<!-- Written by `make docs` from the code; change the code, not this page. -->\n"


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a struct."""

    name: str
    type: Any
    meaning: str
    default: Any
    """`msgspec.NODEFAULT` for a required field."""
    range: str
    """Such as ``1 to 100``; empty for none."""


def fields_of(struct: type[msgspec.Struct]) -> list[Field]:
    """All fields, inherited ones included, in the order of their definition."""
    hints = get_type_hints(struct)
    meanings = field_docs(struct)
    return [
        Field(
            name=field.encode_name,
            type=hints[field.name],
            meaning=meanings.get(field.name, ""),
            default=_default(field),
            range=_range((struct.__name__, field.name)),
        )
        for field in msgspec.structs.fields(struct)
    ]


def _range(key: tuple[str, str]) -> str:
    limits = RANGES.get(key)
    return SPECIAL.get(key, "") if limits is None else f"{number(limits.low)} to {number(limits.high)}"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


@cache
def field_docs(struct: type) -> Mapping[str, str]:
    """The string under each field of a class, as one line of Markdown."""
    found: dict[str, str] = {}
    for parent in reversed(struct.__mro__):
        if parent.__module__.startswith(("builtins", "enum", "msgspec", "typing")):
            continue
        module = sys.modules[parent.__module__]
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        assert isinstance(node, ast.ClassDef)
        for field, following in zip(node.body, node.body[1:], strict=False):
            text = _string(following)
            match field:
                case ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]):
                    if text is not None:
                        found[name] = markdown(text, module)
                case _:
                    pass
    return found


def _string(node: ast.stmt) -> str | None:
    match node:
        case ast.Expr(ast.Constant(str(text))):
            return text
        case _:
            return None


def class_doc(kind: type) -> str:
    """The docstring of a class as Markdown, its paragraphs apart."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return "\n\n".join(markdown(text, sys.modules[kind.__module__]) for text in paragraphs)


def markdown(text: str, module: types.ModuleType) -> str:
    """A docstring's paragraph in one line and in the words of JSON; constants that it names become their values."""
    text = re.sub(r"\bNone\b", "`null`", " ".join(text.split()).replace("``", "`"))
    text = re.sub(r"\b(True|False)\b", lambda found: f"`{found[1].lower()}`", text)
    return re.sub(r"`([A-Z_]+_MAX|[A-Za-z]+\.[A-Z_]+)`", lambda found: _value(found[1], module), text)


def _value(name: str, module: types.ModuleType) -> str:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return f"`{name}`" if value is None else number(value)


def number(value: float) -> str:
    """A number for people, with commas between thousands."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,}"


def type_text(kind: Any, links: Mapping[str, str]) -> str:
    """A type in the words of JSON. ``links`` are the targets of structs that have a section of their own."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part, links) for part in arguments)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (list, tuple):
        return f"array of {type_text(arguments[0], links)}"
    if origin is dict:
        return "object" if arguments[1] is Any else f"object of {type_text(arguments[1], links)}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f'`"{member.value}"`' for member in kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return f"array of {', '.join(f'`{name}`' for name in kind.__annotations__)}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}]({links[kind.__name__]})" if kind.__name__ in links else kind.__name__
    named = getattr(kind, "__supertype__", kind)  # a NewType's
    return _TYPES[named]


_TYPES: Final[Mapping[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    bytes: "string (base64)",
    types.NoneType: "null",
    Any: "any JSON",
    msgspec.Raw: "object",
}


def default_text(field: Field) -> str:
    """The default as JSON; or that the field is required."""
    default = field.default
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, msgspec.Raw):
        return f"`{bytes(default).decode()}`"
    if isinstance(default, msgspec.Struct):
        return "its defaults"
    return f"`{msgspec.json.encode(default).decode()}`"


def field_table(struct: type[msgspec.Struct], links: Mapping[str, str], *, is_input: bool) -> str:
    """A table of the fields; with defaults and ranges when callers write them."""
    fields = fields_of(struct)
    if not is_input:
        rows = [(f"`{f.name}`", type_text(f.type, links), _with_members(f)) for f in fields]
        return table(("field", "type", "meaning"), rows)
    return table(
        ("field", "type", "default", "range", "meaning"),
        [
            (f"`{f.name}`", type_text(f.type, links), default_text(f), f.range, _with_members(f))
            for f in fields
        ],
    )


def _with_members(field: Field) -> str:
    """The meaning, followed by what each value of an enum means."""
    members = [
        f"`{member.value}`: {doc[0].lower() + doc[1:]}"
        for kind in kinds_in(field.type)
        if issubclass(kind, Enum)
        for member in kind
        if (doc := field_docs(kind).get(member.name))
    ]
    return " ".join([field.meaning, *members])


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown, without columns that are empty in every row."""
    rows = list(rows)
    used = [index for index in range(len(head)) if any(row[index] for row in rows)]
    lines = [[head[index] for index in used], ["---"] * len(used)]
    lines += [[row[index].replace("|", "\\|") for index in used] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def structs_within(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Every struct that a type is made of, each before those that its fields are made of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        hints = get_type_hints(kind)
        for name in kind.__struct_fields__:
            yield from structs_within(hints[name])
    for argument in get_args(kind):
        yield from structs_within(argument)
