"""Forms from OpenAPI schemas, of real FastAPI applications and of hostile ones."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from fastapi import FastAPI, Form, Header, Query, UploadFile
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from serve_console.core.call_requests import CallRequest, SentFile
from serve_console.core.openapi_forms import (
    FIELDS_MAX,
    OPERATIONS_MAX,
    SCHEMA_BYTES_MAX,
    ApiOperation,
    parse_api_schema,
)
from serve_console.core.openapi_requests import OperationValues, build_operation_request

api = FastAPI(title="Shop")


class Address(BaseModel):
    street: str
    city: str = "Berlin"


class Order(BaseModel):
    item: str = Field(min_length=1, description="Name of the item", examples=["tea"])
    count: int = Field(default=1, ge=1, le=100)
    price: float
    express: bool = False
    size: Literal["s", "m"] = "m"
    note: str | None = None
    old: str | None
    address: Address
    tags: list[str] = []


@api.get("/items/{item_id}")
def read_item(
    item_id: str,
    q: Annotated[list[str] | None, Query()] = None,
    limit: int = 10,
    x_token: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    return {"id": item_id, "q": q, "limit": limit, "token": x_token}


@api.post("/orders")
def order(order: Order) -> Order:
    return order


@api.post("/many")
def many(orders: list[Order]) -> int:
    return len(orders)


@api.post("/files")
async def files(file: UploadFile, title: Annotated[str, Form()], more: list[UploadFile]) -> dict[str, Any]:
    return {"size": len(await file.read()), "type": file.content_type, "title": title, "more": len(more)}


@api.post("/login")
def login(user: Annotated[str, Form()], days: Annotated[int, Form()] = 3) -> dict[str, Any]:
    return {"user": user, "days": days}


def find(key: str) -> ApiOperation:
    schema = parse_api_schema(json.dumps(api.openapi()).encode())
    assert schema is not None
    operation = schema.find(key)
    assert operation is not None
    return operation


def fill(operation: ApiOperation, **values: str) -> dict[str, str]:
    """What the form holds, with some fields written by name."""
    names = {field.name: field.key for field in operation.fields}
    shown = {field.key: field.value for field in operation.fields}
    return shown | {names.get(name, name): text for name, text in values.items()}


def send(
    operation: ApiOperation, values: dict[str, str], files: dict[str, list[SentFile]] | None = None
) -> Any:
    request, errors = build_operation_request(operation, OperationValues(values, files or {}), "a-boundary")
    assert errors == {}
    assert isinstance(request, CallRequest)
    reply = TestClient(api).request(
        request.method, request.target, headers=dict(request.headers), content=request.body
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_body_has_a_field_for_each_property() -> None:
    fields = {field.name: field for field in find("POST /orders").fields}
    assert [fields[name].kind for name in ("item", "count", "price", "express", "size", "note", "tags")] == [
        "string", "integer", "number", "boolean", "enum", "string", "json",
    ]  # fmt: skip
    assert (fields["item"].value, fields["item"].hint) == ("tea", "Name of the item. At least 1 character.")
    assert fields["count"].hint == "At least 1, at most 100."
    assert fields["size"].options == (('"s"', "s"), ('"m"', "m"))
    assert json.loads(fields["address"].value) == {"street": "", "city": "Berlin"}
    assert [name for name, field in fields.items() if field.is_required] == [
        "item",
        "price",
        "old",
        "address",
    ]


def test_what_is_filled_in_arrives_at_the_application() -> None:
    operation = find("POST /orders")
    reply = send(operation, fill(operation, price="2.50", size='"s"', address='{"street": "Ä"}'))
    assert reply == {
        "item": "tea", "count": 1, "price": 2.5, "express": False, "size": "s", "note": None, "old": None,
        "address": {"street": "Ä", "city": "Berlin"}, "tags": [],
    }  # fmt: skip


def test_path_query_and_headers_are_encoded() -> None:
    operation = find("GET /items/{item_id}")
    values = fill(operation, item_id="a?b {c} ü", q="x&y\nz=1", **{"x-token": "secret"})
    assert send(operation, values) == {"id": "a?b {c} ü", "q": ["x&y", "z=1"], "limit": 10, "token": "secret"}


def test_a_list_as_the_body_is_written_as_a_whole() -> None:
    operation = find("POST /many")
    assert operation.body == "json_whole"
    assert json.loads(operation.fields[0].value)[0]["item"] == "tea"
    assert send(operation, {"p0": "[]"}) == 0


def test_files_are_sent_as_a_form() -> None:
    operation = find("POST /files")
    keys = {field.name: field.key for field in operation.fields}
    assert {field.name: field.kind for field in operation.fields} == {
        "file": "file", "title": "string", "more": "files",
    }  # fmt: skip
    png = SentFile('a"b.png', "image/png", b"\x89PNG\r\n\x00")
    reply = send(operation, fill(operation, title="Ü"), {keys["file"]: [png], keys["more"]: [png, png]})
    assert reply == {"size": 7, "type": "image/png", "title": "Ü", "more": 2}
    _, errors = build_operation_request(operation, OperationValues(fill(operation), {}), "b")
    assert errors == {keys["file"]: "choose a file", keys["more"]: "choose a file"}


def test_a_plain_form_is_sent_as_one() -> None:
    operation = find("POST /login")
    assert send(operation, fill(operation, user="a b&c")) == {"user": "a b&c", "days": 3}


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("count", "1.5", "must be a whole number of at most 18 digits"),
        ("count", "9" * 5000, "must be a whole number of at most 18 digits"),
        ("price", "", "is required"),
        ("price", "NaN", "must be a number"),
        ("price", "true", "must be a number"),
        ("express", "maybe", "must be true or false"),
        ("size", '"xl"', "is not one of the list"),
        ("address", "{", "is not JSON: Input data was truncated"),
        (
            "address",
            "[" * 100_000,
            "is not JSON: maximum recursion depth exceeded while deserializing an object",
        ),
    ],
)
def test_a_wrong_value_is_said_at_its_field(name: str, text: str, error: str) -> None:
    operation = find("POST /orders")
    values = fill(operation, **{"price": "1", name: text})
    request, errors = build_operation_request(operation, OperationValues(values, {}), "b")
    key = next(field.key for field in operation.fields if field.name == name)
    assert request is None
    assert errors == {key: error}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"null", b'{"openapi": 3}', b"[" * 100_000, b"\xff", b"<html>"]
)
def test_what_is_no_schema_is_none(body: bytes) -> None:
    assert parse_api_schema(body) is None


def test_a_schema_that_is_too_large_is_none() -> None:
    assert parse_api_schema(b'{"openapi": "3.1.0"}' + b" " * SCHEMA_BYTES_MAX) is None


def schema(paths: Any, **more: Any) -> bytes:
    return json.dumps({"openapi": "3.1.0", "paths": paths, **more}).encode()


def test_operations_and_fields_beyond_the_most_are_counted() -> None:
    parameters = [{"name": f"q{number}", "in": "query"} for number in range(FIELDS_MAX + 3)]
    paths = {f"/{number}": {"get": {"parameters": parameters}} for number in range(OPERATIONS_MAX + 2)}
    found = parse_api_schema(schema(paths))
    assert found is not None
    assert (len(found.operations), found.left_out) == (OPERATIONS_MAX, 2)
    assert (len(found.operations[0].fields), found.operations[0].left_out) == (FIELDS_MAX, 3)


def test_references_in_circles_and_to_elsewhere_are_harmless() -> None:
    loop = {"$ref": "#/components/schemas/A"}
    tree = {"type": "object", "properties": {f"c{n}": {"$ref": "#/components/schemas/T"} for n in range(20)}}
    body = {"content": {"application/json": {"schema": {"type": "object", "required": ["a", "t"], "properties": {
        "a": loop, "t": {"$ref": "#/components/schemas/T"}, "u": {"$ref": "http://169.254.169.254/"},
        "all": {"allOf": [loop]}, "n": {"type": "number", "minimum": 10**400, "default": 10**400},
    }}}}}  # fmt: skip
    found = parse_api_schema(
        schema({"/": {"post": {"requestBody": body}}}, components={"schemas": {"A": loop, "T": tree}})
    )
    assert found is not None
    assert [field.kind for field in found.operations[0].fields] == ["json", "json", "json", "json", "number"]
    assert all(len(field.value) <= 20_000 for field in found.operations[0].fields)


@pytest.mark.parametrize(
    "wrong", [None, 1, "x", [], [1], {"a": 1}, {"type": []}, {"$ref": 1}, {"enum": [{}]}]
)
def test_parts_of_the_wrong_type_are_left_out(wrong: Any) -> None:
    body = {"content": {"application/json": {"schema": {"properties": {"a": wrong}, "required": wrong}}}}
    operation = {"parameters": [wrong, {"name": "q", "in": "query", "schema": wrong}], "requestBody": body}
    for paths in (wrong, {"/": wrong}, {"/": {"get": wrong}}, {"/": {"get": {"parameters": wrong}}},
                  {"/": {"get": {"requestBody": wrong}}}, {"/": {"post": operation}}):  # fmt: skip
        assert parse_api_schema(schema(paths, info=wrong)) is not None


def test_parameters_cannot_set_the_headers_of_the_call_itself() -> None:
    parameters = [{"name": "X-Serve-Path", "in": "header", "schema": {"type": "string", "default": "/"}}]
    found = parse_api_schema(schema({"/": {"get": {"parameters": parameters}}}))
    assert found is not None
    operation = found.operations[0]
    _, errors = build_operation_request(operation, OperationValues({"p0": "/admin"}, {}), "b")
    assert errors == {"p0": "X-Serve-Path is set by the console"}
