"""A call as commands and code, to be copied. What they quote comes from people and applications: it may be hostile."""

from __future__ import annotations

import shlex
from typing import Final

import msgspec

from serve_console.core.call_requests import CallRequest

_INLINE_BYTES_MAX: Final = 8 * 1024
"""Longer bodies are files in the commands."""
_NEXT_LINE: Final = " \\\n  "


class CallPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where an endpoint is called."""

    url: str
    """Base URL with the route; empty: it has no route."""
    nats_url: str
    subject: str
    timeout_s: int


class CallSnippet(msgspec.Struct, frozen=True):
    """A call in one language."""

    title: str
    language: str
    text: str
    note: str = ""


def build_snippets(request: CallRequest, place: CallPlace) -> list[CallSnippet]:
    """The same call in each language that can make it."""
    found = []
    if place.url:
        found = [build_curl(request, place), build_python(request, place)]
    return [*found, build_nats(request, place)]


def get_url(request: CallRequest, place: CallPlace) -> str:
    """The URL of the request; the path ``/`` of an endpoint is its route."""
    path = "" if request.path == "/" else request.path
    return f"{place.url.rstrip('/')}{path}" + (f"?{request.query}" if request.query else "")


def build_curl(request: CallRequest, place: CallPlace) -> CallSnippet:
    """The call for a POSIX shell with curl."""
    parts = ["curl -sS --globoff --path-as-is"]
    parts[0] += f" --max-time {place.timeout_s}"
    if request.method == "HEAD":
        parts[0] += " --head"
    elif request.method != ("POST" if request.body else "GET"):
        parts[0] += f" -X {request.method}"
    for name, value in request.headers:
        if not (request.fields and name.lower() == "content-type"):
            parts.append(f"-H {shlex.quote(f'{name}: {value}' if value else f'{name};')}")
    if request.fields:
        for field in request.fields:
            if field.file is None:
                parts.append(f"--form-string {shlex.quote(f'{field.name}={field.text}')}")
            else:
                name = _escape_curl(field.file.name)
                parts.append("-F " + shlex.quote(f'{field.name}=@"{name}"'))
    elif request.body:
        if not any(name.lower() == "content-type" for name, _ in request.headers):
            parts.append("-H 'Content-Type:'")
        text = get_inline_body(request)
        if text is None:
            parts.append(f"--data-binary {shlex.quote(f'@{get_file_name(request)}')}")
        else:
            parts.append(f"--data-raw {shlex.quote(text)}")
    parts.append(shlex.quote(get_url(request, place)))
    return CallSnippet("curl", "shell", _NEXT_LINE.join(parts), _describe_file(request))


def build_python(request: CallRequest, place: CallPlace) -> CallSnippet:
    """The call with Python's standard library."""
    lines = [
        "import urllib.request",
        "",
        "request = urllib.request.Request(",
        f"    {get_url(request, place)!r},",
    ]
    if request.fields:
        lines[0:2] = ["import urllib.request", "", *_build_python_parts(request), ""]
        lines.append("    data=body,")
    elif request.body:
        text = get_inline_body(request)
        source = f"open({get_file_name(request)!r}, 'rb').read()" if text is None else f"{text!r}.encode()"
        lines.append(f"    data={source},")
    if request.headers:
        lines += [
            "    headers={",
            *(f"        {name!r}: {value!r}," for name, value in request.headers),
            "    },",
        ]
    lines += [
        f"    method={request.method!r},", ")",
        f"with urllib.request.urlopen(request, timeout={place.timeout_s}) as response:",
        "    print(response.status, response.headers.get('Content-Type'))", "    print(response.read())", "",
    ]  # fmt: skip
    return CallSnippet("Python", "python", "\n".join(lines).strip("\n"), _describe_file(request))


def _build_python_parts(request: CallRequest) -> list[str]:
    """Code that joins a form with files as a body, as `encode_multipart` does."""
    boundary = _get_boundary(request)
    lines = ["body = b''.join(["]
    for field in request.fields:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_escape_name(field.name)}"'
        if field.file is None:
            whole = f"{head}\r\n\r\n{field.text}\r\n"
            lines.append(f"    {whole!r}.encode(),")
        else:
            head += f'; filename="{_escape_name(field.file.name)}"\r\nContent-Type: application/octet-stream\r\n\r\n'
            lines.append(f"    {head!r}.encode(), open({field.file.name!r}, 'rb').read(), b'\\r\\n',")
    end = f"--{boundary}--\r\n"
    return [*lines, f"    {end!r}.encode(),", "])"]


def build_nats(request: CallRequest, place: CallPlace) -> CallSnippet:
    """The call with the command line of NATS; needs no route."""
    parts = [
        f"nats --server {shlex.quote(place.nats_url)} --timeout {place.timeout_s}s",
        "--creds secrets/caller.creds --inbox-prefix _INBOX_caller",
        f"request {shlex.quote(place.subject)}",
    ]
    own = [
        ("X-Serve-Method", request.method),
        ("X-Serve-Path", request.path),
        ("X-Serve-Query", request.query),
    ]
    defaults = {"X-Serve-Method": "POST", "X-Serve-Path": "/", "X-Serve-Query": ""}
    for name, value in [*((name, value) for name, value in own if value != defaults[name]), *request.headers]:
        parts.append(f"--header {shlex.quote(f'{name}: {value}')}")
    text = None if request.fields else get_inline_body(request)
    note = _describe_file(request)
    if text is None:
        parts.append(f"< {shlex.quote('body.bin' if request.fields else get_file_name(request))}")
        if request.fields:
            note = "body.bin is the encoded form; build it as the Python code does."
    else:
        # A dash would begin an option, and the command would take braces for a template of its own.
        parts.append(f"-- {shlex.quote(text)}" if text.startswith("-") else shlex.quote(text))
        if "{{" in text:
            note = "The nats command takes {{…}} in a body for its own templates: put the body into a file."
    return CallSnippet("NATS", "shell", _NEXT_LINE.join(parts), note)


def get_inline_body(request: CallRequest) -> str | None:
    """The body as text that a command can hold; None where it must be a file."""
    if request.file_name or len(request.body) > _INLINE_BYTES_MAX:
        return None
    try:
        text = request.body.decode()
    except UnicodeDecodeError:
        return None
    return None if any(not char.isprintable() and char not in "\n\t\r" for char in text) else text


def get_file_name(request: CallRequest) -> str:
    """The file that holds the body, in commands."""
    return clean_file_name(request.file_name) or "body.bin"


def clean_file_name(name: str) -> str:
    """The last part of a name, without what no command should show."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(char for char in last if char.isprintable()).strip()[:100].lstrip("-")


def _describe_file(request: CallRequest) -> str:
    if request.fields or get_inline_body(request) is not None or request.file_name:
        return ""
    return "The body is too long or too binary for a command: save it as body.bin."


def _get_boundary(request: CallRequest) -> str:
    content_type = next((value for name, value in request.headers if name.lower() == "content-type"), "")
    return content_type.rpartition("boundary=")[2]


def _escape_curl(name: str) -> str:
    return clean_file_name(name).replace("\\", "\\\\").replace('"', '\\"')


def _escape_name(text: str) -> str:
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
