"""What people, applications and addresses may send: it is refused or shown harmlessly, and costs little."""

from __future__ import annotations

import io
import json
import time
import zipfile
from typing import Any

import pytest

from serve_common.errors import BadField
from serve_console.core import config_diff, events_page
from serve_console.core.call_requests import parse_timeout
from serve_console.core.change_kinds import CHANGES
from serve_console.core.deploy_form import parse_deploy
from serve_console.core.form_values import FieldsWrong, FormValues
from serve_console.core.openapi_forms import parse_api_schema
from serve_console.core.plain_text import strip_escapes
from serve_console.core.uploaded_archives import repack
from serve_console.web.shared import encode_event
from tests.support.console_world import ConsoleWorld
from tests.unit.serve_console.test_pages import signed_in

HOSTILE = "\x1b[31m<script>\r\n\r\x00\x9b1m\u202egpj.exe\u2066'\""


def test_text_cannot_end_an_event_or_begin_another() -> None:
    event = encode_event("row\r\nevent: banner", "a\rdata: b\r\n\r\nevent: banner\rc")
    assert b"\r" not in event
    lines = event.decode().rstrip("\n").split("\n")
    assert [line.partition(":")[0] for line in lines] == ["event", *["data"] * (len(lines) - 1)]


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "x"])
async def test_numbers_in_addresses_that_are_none_are_no_failures(number: str) -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    await world.hub.close()  # so that streams end at once
    async with browser:
        for path in ("/live/now", "/live/events", "/live/hosts", "/live/rollouts"):
            assert (await browser.get(path, params={"seen": number})).status_code == 200
        page = await browser.get("/events", params={"tab": "history", "before": number})
        assert page.status_code in {200, 400}


@pytest.mark.parametrize("timeout", ["0000012000", "000001" + "9" * 5000, "121", "0", "²"])
def test_a_timeout_beyond_the_longest_is_refused_however_it_is_written(timeout: str) -> None:
    with pytest.raises(BadField):
        parse_timeout(timeout)


def test_a_revision_with_thousands_of_digits_is_left_to_the_controller_as_text() -> None:
    assert CHANGES["rollback"].parse(FormValues({"name": "a", "to": "1" * 5000})).to == "1" * 5000  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "typed",
    [
        {"replica_config": '{"ray_actor_options": 3}', "num_cpus": "1"},
        {"replica_config": '{"ray_actor_options": {"runtime_env": 3}}', "env": "A=b"},
        {"backend_config": '{"autoscaling_config": [1]}', "min_replicas": "1"},
    ],
)
def test_json_of_the_wrong_shape_is_named_at_its_field(typed: dict[str, str]) -> None:
    with pytest.raises(FieldsWrong) as caught:
        parse_deploy(FormValues({"name": "a", "import_path": "a:B", **typed}))
    assert set(caught.value.errors) <= {"replica_config", "backend_config"}


@pytest.mark.parametrize("origin", ["http://[", "null", "http://evil.example"])
async def test_a_form_with_an_origin_that_is_none_is_refused(origin: str) -> None:
    world = ConsoleWorld()
    browser, session = await signed_in(world)
    async with browser:
        reply = await browser.post("/sign-out", data={"csrf": session.csrf}, headers={"Origin": origin})
    assert reply.status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example:8080",
        "localhost.evil.example",
        "[::1",
        "a@evil.example",
        "",
        "127.1.x",
    ],
)
async def test_a_name_of_another_site_that_leads_here_gets_nothing(host: str) -> None:
    world = ConsoleWorld(ALLOWED_HOSTS="console.example")
    browser, _ = await signed_in(world)
    async with browser:
        for path in ("/", "/sign-in", "/live/now", "/nowhere"):
            reply = await browser.get(path, headers={"Host": host})
            assert (reply.status_code, reply.headers["Cache-Control"]) == (421, "no-store")
            assert "MUSTER_CONSOLE_ALLOWED_HOSTS" in reply.text
            assert "<" not in reply.text


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8080",
        "console.localhost",
        "192.0.2.1",
        "192.0.2.1:8080",
        "[::1]:8080",
        "Console.Example",
        "b:443",
    ],
)
async def test_it_is_reached_by_addresses_and_by_names_that_it_was_given(host: str) -> None:
    world = ConsoleWorld(ALLOWED_HOSTS="console.example, B")
    browser, _ = await signed_in(world)
    async with browser:
        assert (await browser.get("/", headers={"Host": host})).status_code == 200


def _schema(type_: Any, operations: int) -> bytes:
    body = {"content": {"application/json": {"schema": {"$ref": "#/x/B"}}}}
    fields = {f"f{number}": {"$ref": "#/x/T"} for number in range(60)}
    paths = {f"/p{number}": {"post": {"requestBody": body}} for number in range(operations)}
    return json.dumps(
        {"openapi": "3", "x": {"B": {"properties": fields}, "T": type_}, "paths": paths}
    ).encode()


def _chained() -> bytes:
    extra = {f"k{number}": 1 for number in range(50)}
    chain = {f"c{at}": {"$ref": f"#/x/c{at + 1}", **extra} for at in range(14)}
    item = {
        "parameters": [{"$ref": "#/x/c0"}] * 20_000,
        **{name: {} for name in ("get", "put", "post", "patch")},
    }
    return json.dumps({"openapi": "3", "x": chain, "paths": {"/a": item}}).encode()


@pytest.mark.parametrize(
    "schema",
    [
        _schema({"type": ["a"] * 150_000}, 50),
        _schema({"enum": [1] * 150_000}, 50),
        _schema({"default": [*[0] * 200, *[[]] * 60_000]}, 50),
        _chained(),
    ],
    ids=["types", "enum", "default", "references"],
)
def test_a_hostile_schema_costs_little(schema: bytes) -> None:
    started_at = time.process_time()
    assert parse_api_schema(schema) is not None
    assert time.process_time() - started_at < 2


def test_a_difference_of_many_scattered_changes_costs_little() -> None:
    old = list(range(20_000))
    new = [number if number % 2 else -number - 1 for number in old]
    started_at = time.process_time()
    lines = events_page.build_diff(old, new)
    more = config_diff.build_diff({f"{at:06}": at for at in old}, {f"{at:06}": new[at] for at in old})
    assert time.process_time() - started_at < 2
    assert any(line.startswith("-") for line in lines)
    assert any(line.startswith("+") for line in more)


def test_a_difference_at_the_end_of_something_long_is_found() -> None:
    old = list(range(20_000))
    assert [line for line in events_page.build_diff(old, [*old, 1]) if line.startswith(("+", "-"))] == [
        "-  19999", "+  19999,", "+  1",
    ]  # fmt: skip


def _zip(compression: int, files: int = 1) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression=compression) as archive:
        archive.writestr("m.py", "x = 1\n" * 50)
        for number in range(files - 1):
            archive.writestr(f"{number}.py", "")
    return stream.getvalue()


def test_an_archive_that_is_damaged_or_packed_unusually_is_refused_and_no_failure() -> None:
    whole = _zip(zipfile.ZIP_DEFLATED)
    directory = whole.index(b"PK\x01\x02")
    damaged = [
        whole[:-6] + b"\xff\xff\xff\x7f\0\0",  # its directory begins before the file
        whole[: directory + 28] + b"\0\0" + whole[directory + 30 :],  # a file without a name
        whole[: directory - 3],
        _zip(zipfile.ZIP_LZMA),
        _zip(zipfile.ZIP_BZIP2),
    ]
    for data in damaged:
        with pytest.raises(BadField):
            repack(data, "m:X")


def test_an_archive_of_very_many_entries_is_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = _zip(zipfile.ZIP_STORED) + b"PK\x01\x02" * 200_000
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it was read"))
    with pytest.raises(BadField, match="files"):
        repack(data, "m:X")


def test_control_characters_and_turned_text_are_shown_harmlessly_whatever_the_template() -> None:
    renderer = ConsoleWorld().shared.renderer
    for shown in (
        renderer.part("macros.html", "badge", "healthy", HOSTILE),
        renderer.part(
            "macros.html", "timeline", [{"at": 1.0, "title": HOSTILE, "text": HOSTILE, "tone": ""}]
        ),
        renderer.part("macros.html", "code", HOSTILE),
        renderer.part("macros.html", "link_button", HOSTILE, HOSTILE),
        strip_escapes(HOSTILE),
    ):
        assert not set("\x1b\r\x00\x9b\u202e\u2066") & set(shown)
    assert "<script>" not in renderer.part("macros.html", "badge", "healthy", HOSTILE)


def test_what_forms_send_back_is_not_altered() -> None:
    part = ConsoleWorld().shared.renderer.part
    value = "a\u202eb"
    assert value in part("macros.html", "hidden", {"was": value})
    assert value in part("macros.html", "field", "f", "F", value=value)
    assert value in part("macros.html", "field", "f", "F", value=value, type="textarea")
    assert f'value="{value}"' in part(
        "macros.html", "field", "f", "F", type="select", options=[(value, "shown")]
    )


async def test_an_address_alone_claims_no_change_that_was_not_made() -> None:
    world = ConsoleWorld()
    browser, _ = await signed_in(world)
    async with browser:
        page = await browser.get("/do/delete_deployment/done?name=default%2Fdigits&changed=true")
    assert page.status_code == 404
    assert "It is recorded" not in page.text
