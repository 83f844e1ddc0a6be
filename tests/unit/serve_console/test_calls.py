"""Calls by hand: what is sent, what is shown of responses, and the same call as commands."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from typing import Any

import pytest

from muster.client.requests import AdminReply
from serve_common.errors import BadField
from serve_console.core.call_requests import (
    BODY_BYTES_MAX,
    CallRequest,
    MultipartField,
    SentFile,
    build_free_request,
    check_request,
    encode_multipart,
    parse_timeout,
)
from serve_console.core.call_results import describe_reply
from serve_console.core.call_snippets import CallPlace, build_curl, build_nats, build_python, build_snippets

PLACE = CallPlace(
    url="http://h:8000/a", nats_url="nats://h:4222", subject="serve.call.default.a", timeout_s=30
)
HOSTILE = "it's $(touch /tmp/x) `id` \\ \"; !! @/etc/passwd\n-rf {{.Count}} ü '''"


def test_a_request_by_hand_is_encoded_and_typed_by_its_body() -> None:
    values = {
        "method": "PUT", "path": "/ü b/%20", "query": "?q=a b&c=[1]#x", "headers": "A: 1\n\n b : 2 ", "body": "[1]",
    }  # fmt: skip
    request = build_free_request(values, None)
    assert request.target == "/%C3%BC%20b/%20?q=a%20b&c=%5B1%5D%23x"
    assert request.headers == (("A", "1"), ("b", "2"), ("Content-Type", "application/json"))
    assert build_free_request({"body": "hi"}, None).headers[0][1].startswith("text/plain")
    own = build_free_request({"body": "[1]", "headers": "content-type: a/b"}, None)
    assert own.headers == (("content-type", "a/b"),)
    file = SentFile("a.png", "image/png", b"\x89")
    assert build_free_request({}, file).headers == (("Content-Type", "image/png"),)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"method": "TRACE"}, "method"),
        ({"path": "x"}, "path"),
        ({"path": "/?a=1", "query": "b=2"}, "query"),
        ({"headers": "no colon"}, "headers"),
        ({"headers": "a b: 1"}, "headers"),
        ({"headers": "A: ü"}, "headers"),
        ({"headers": "A: 1\x00"}, "headers"),
        ({"headers": "x-serve-path: /admin"}, "headers"),
        ({"headers": "\n".join(["A: 1"] * 41)}, "headers"),
        ({"content_type": "text/evil"}, "content_type"),
    ],
)
def test_what_cannot_be_sent_is_an_error_that_names_the_field(values: dict[str, str], field: str) -> None:
    with pytest.raises(BadField) as caught:
        build_free_request(values, None)
    assert caught.value.field == field


def test_a_body_or_path_that_is_too_large_is_refused() -> None:
    with pytest.raises(BadField, match="curl"):
        check_request(CallRequest(method="POST", path="/", body=b"x" * (BODY_BYTES_MAX + 1)))
    with pytest.raises(BadField, match="path"):
        check_request(CallRequest(method="POST", path="/" * 9000))
    assert parse_timeout("") == 30
    for text in ("0", "121", "1e9", "-1", "9" * 100):
        with pytest.raises(BadField, match="timeout"):
            parse_timeout(text)


def reply(body: bytes, content_type: str = "application/json", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = AdminReply(body=body, headers={"Content-Type": content_type, **named})
    return describe_reply(answer, elapsed_s=0.01, trace_id="t")


def test_json_is_shown_with_its_numbers_as_they_are() -> None:
    shown = reply(b'{"a":[1.10,123456789012345678901234567890]}', X_Serve_Status="201")
    assert (shown.status, shown.reason, shown.tone, shown.kind) == (201, "Created", "good", "json")
    assert "1.10,\n    123456789012345678901234567890" in shown.text
    assert shown.headers == (("Content-Type", "application/json"),)


def test_a_body_is_never_more_than_can_be_shown() -> None:
    deep = b"[" * 500 + b"1," * 100_000 + b"1" + b"]" * 500
    assert reply(deep).kind == "text"
    shown = reply(b"[" + b"1," * 60_000 + b"1]")
    assert len(shown.text) == 200_000
    assert "first" in shown.note


def test_html_and_escapes_are_shown_as_text() -> None:
    shown = reply(b"<script>\x1b[31m\xe2\x80\xae</script>", "text/html")
    assert (shown.kind, shown.text) == ("text", "<script>\\x1b[31m\\u202e</script>")
    assert shown.note == "HTML is shown as its text."


def test_images_are_known_by_their_bytes_alone() -> None:
    assert reply(b"\x89PNG\r\n\x1a\nx", "text/plain").image.startswith("data:image/png;base64,")
    assert reply(b"<svg onload='x'/>", "image/svg+xml").kind == "text"
    assert reply(b"\x00\x01\xff", "image/png").kind == "bytes"
    assert reply(b"\x89PNG\r\n\x1a\n" + b"x" * 600_000, "image/png").kind == "bytes"


def test_an_error_of_the_proxy_is_said_in_words_and_one_of_the_application_is_its_body() -> None:
    problem = json.dumps(
        {"type": "urn:muster:problem:x", "error": {"code": "deadline_exceeded", "message": "too slow"}}
    )
    shown = reply(problem.encode(), Nats_Service_Error="too slow", Nats_Service_Error_Code="504")
    assert (shown.status, shown.tone) == (504, "bad")
    assert shown.failure is not None
    assert shown.failure.text == "too slow"
    assert "longer timeout" in shown.failure.hint
    own = reply(b'{"detail":"no"}', Nats_Service_Error="status 404", Nats_Service_Error_Code="404")
    assert (own.status, own.tone, own.failure) == (404, "warn", None)


def run_shell(text: str, command: str) -> list[str]:
    """The arguments that a shell gives to the command."""
    script = f"{command}() {{ printf '%s\\0' \"$@\"; }}; cd /; {text}"
    shell = shutil.which("bash") or "sh"
    done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def hostile_request() -> CallRequest:
    return CallRequest(
        method="PUT", path="/a'b", query="q='$(id)'", headers=(("X-A", "'; id; '"), ("X-B", "")), body=HOSTILE.encode()
    )  # fmt: skip


def test_a_shell_passes_on_what_was_written() -> None:
    curl = run_shell(build_curl(hostile_request(), PLACE).text, "curl")
    assert curl[curl.index("--data-raw") + 1] == HOSTILE
    assert curl[-1] == "http://h:8000/a/a'b?q='$(id)'"
    assert [curl[at + 1] for at, word in enumerate(curl) if word == "-H"] == [
        "X-A: '; id; '", "X-B;", "Content-Type:",
    ]  # fmt: skip
    snippet = build_nats(hostile_request(), PLACE)
    nats = run_shell(snippet.text, "nats")
    assert (nats[-1], nats[nats.index("request") + 1]) == (HOSTILE, PLACE.subject)
    assert "X-Serve-Path: /a'b" in nats
    assert "templates" in snippet.note
    dashed = build_nats(CallRequest(method="POST", path="/", body=b"-1"), PLACE)
    assert run_shell(dashed.text, "nats")[-2:] == ["--", "-1"]


def test_files_are_named_in_commands_without_their_folders() -> None:
    file = SentFile('../a"b;c.png', "image/png", b"x")
    fields = (MultipartField("t", "@x;type=y"), MultipartField("f", "", file))
    request = CallRequest(
        method="POST", path="/", fields=fields, body=encode_multipart(fields, "bb"),
        headers=(("Content-Type", "multipart/form-data; boundary=bb"),),
    )  # fmt: skip
    curl = run_shell(build_curl(request, PLACE).text, "curl")
    assert curl[curl.index("--form-string") + 1] == "t=@x;type=y"
    assert curl[curl.index("-F") + 1] == 'f=@"a\\"b;c.png"'
    assert "-H" not in curl
    ast.parse(build_python(request, PLACE).text)


def test_python_builds_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Stop(Exception):
        pass

    def urlopen(request: Any, timeout: float) -> None:
        sent.append((request, timeout))
        raise Stop

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(Stop):
        exec(build_python(hostile_request(), PLACE).text, {})
    request, timeout = sent[0]
    assert (request.method, request.full_url, timeout) == ("PUT", "http://h:8000/a/a'b?q='$(id)'", 30)
    assert (request.data, request.headers["X-a"]) == (HOSTILE.encode(), "'; id; '")


def test_an_endpoint_without_a_route_is_called_over_nats_alone() -> None:
    headless = CallPlace(url="", nats_url="nats://h", subject="serve.call.a", timeout_s=5)
    request = CallRequest(method="POST", path="/", body=b"\x00\xff")
    assert [snippet.title for snippet in build_snippets(request, headless)] == ["NATS"]
    assert build_snippets(request, headless)[0].text.endswith("< body.bin")
    assert "body.bin" in build_curl(request, PLACE).text
