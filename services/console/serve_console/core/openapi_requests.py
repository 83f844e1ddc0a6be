"""What was written into the form of an operation as a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final
from urllib.parse import quote, urlencode

import msgspec

from serve_common.errors import BadField
from serve_console.core.call_requests import (
    CallRequest,
    MultipartField,
    SentFile,
    build_raw_body,
    check_header,
    encode_multipart,
    parse_headers,
)
from serve_console.core.openapi_forms import ApiField, ApiOperation

_INTEGER_DIGITS_MAX: Final = 18


@final
class OperationValues:
    """Values and files of a form by the keys of its fields."""

    def __init__(self, values: Mapping[str, str], files: Mapping[str, Sequence[SentFile]]) -> None:
        self.values = values
        self.files = files

    def get_file(self, key: str) -> SentFile | None:
        """The first file of a field."""
        return next(iter(self.files.get(key, ())), None)

    def get_text(self, field: ApiField) -> str:
        """What was written, without blanks around it unless it is plain text."""
        text = self.values.get(field.key, "")
        return text if field.kind in ("string", "list") else text.strip()


def build_operation_request(
    operation: ApiOperation, form: OperationValues, boundary: str
) -> tuple[CallRequest | None, dict[str, str]]:
    """The request, or what is wrong with the values by the keys of the fields."""
    errors: dict[str, str] = {}
    found: dict[str, list[tuple[ApiField, Any]]] = {"path": [], "query": [], "header": [], "body": []}
    for field in operation.fields:
        if field.kind in ("file", "files"):
            if field.is_required and not form.files.get(field.key):
                errors[field.key] = "choose a file"
            continue
        try:
            value = _parse_value(field, form.get_text(field))
        except BadField as error:
            errors[error.field] = error.reason
            continue
        if value is not msgspec.UNSET:
            found[field.place].append((field, value))
    try:
        headers = [check_header(field.name, _to_text(value), field.key) for field, value in found["header"]]
        headers += parse_headers(form.values.get("headers", ""))
        if operation.body == "raw":
            body, headers, file_name = build_raw_body(form.values, form.get_file("file"), headers)
            fields: tuple[MultipartField, ...] = ()
        else:
            body, fields, content_type = _build_body(operation, found["body"], form, boundary)
            file_name = ""
            if content_type:
                headers.append(("Content-Type", content_type))
    except BadField as error:
        errors[error.field] = error.reason
    if errors:
        return None, errors
    path = operation.path
    for field, value in found["path"]:
        path = path.replace(f"{{{field.name}}}", quote(_to_text(value), safe=""))
    query = [
        (field.name, _to_text(each))
        for field, value in found["query"]
        for each in (value if isinstance(value, list) else [value])
    ]
    return CallRequest(
        method=operation.method,
        path=quote(path, safe="/%:@!$&'()*+,;=~"),
        query=urlencode(query, quote_via=quote),
        headers=tuple(headers),
        body=body,
        file_name=file_name,
        fields=fields,
    ), {}


def _build_body(
    operation: ApiOperation, found: Sequence[tuple[ApiField, Any]], form: OperationValues, boundary: str
) -> tuple[bytes, tuple[MultipartField, ...], str]:
    if operation.body == "json":
        return _encode({field.name: value for field, value in found}), (), "application/json"
    if operation.body == "json_whole":
        return (_encode(found[0][1]), (), "application/json") if found else (b"", (), "")
    if operation.body == "form":
        pairs = [(field.name, _to_text(value)) for field, value in found]
        return urlencode(pairs).encode(), (), "application/x-www-form-urlencoded"
    if operation.body == "multipart":
        fields = [MultipartField(field.name, _to_text(value)) for field, value in found]
        for field in operation.fields:
            fields += [MultipartField(field.name, "", file) for file in form.files.get(field.key, ())]
        return encode_multipart(fields, boundary), tuple(fields), f"multipart/form-data; boundary={boundary}"
    return b"", (), ""


def _parse_value(field: ApiField, text: str) -> Any:
    """The value as it is sent, or `msgspec.UNSET` where it is left out. Raises `BadField` naming the field's key."""
    if not text:
        return _parse_empty(field)
    if field.kind in ("integer", "number"):
        return _parse_number(field, text)
    if field.kind == "list":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if field.kind == "boolean" and text not in ("true", "false"):
        raise BadField(field.key, "must be true or false")
    if field.kind == "enum" and text not in [value for value, _ in field.options]:
        raise BadField(field.key, "is not one of the list")
    if field.kind == "string":
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(field.key, f"is not JSON: {str(error)[:200]}") from error
    # As it was written: decoding would round numbers of more than 64 bits.
    return msgspec.Raw(text.encode()) if field.kind == "json" else value


def _parse_empty(field: ApiField) -> Any:
    if not field.is_required:
        return msgspec.UNSET
    if field.is_nullable and field.place == "body":
        return None
    if field.kind == "string" and field.place != "path":
        return ""
    raise BadField(field.key, "is required")


def _parse_number(field: ApiField, text: str) -> Any:
    if field.kind == "integer":
        digits = text.removeprefix("-")
        if not digits.isdecimal() or not digits.isascii() or len(digits) > _INTEGER_DIGITS_MAX:
            raise BadField(field.key, f"must be a whole number of at most {_INTEGER_DIGITS_MAX} digits")
        return int(text)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(field.key, "must be a number") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(field.key, "must be a number")
    return value


def _encode(value: Any) -> bytes:
    """JSON without blanks, also where values were written with lines."""
    return msgspec.json.format(msgspec.json.encode(value), indent=-1)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
