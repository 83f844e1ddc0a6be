"""Private names of aiohttp, nats-py and cloudpickle that we use: all are in this table, and in what is installed.

The packages' dependencies bound the libraries to the tested minor versions. Read these places when a bound is raised.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pickle
import re
import textwrap
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import cloudpickle
import pytest
from aiohttp import web
from aiohttp.http_writer import StreamWriter
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.micro.service import Endpoint, Service

from tests.support.paths import ROOT

BOUNDED: Final = {"aiohttp": "aiohttp", "nats": "nats-py"}
"""Package → distribution."""

USED: Final[dict[type, str]] = {
    Client: "_closed_cb _disconnected_cb _flusher_task _ping_interval_task _process_err _process_op_err _reading_task "
    "_reconnection_task _send_ping _send_unsubscribe _subs _transport _user_jwt_cb",
    TcpTransport: "_io_writer",
    Subscription: "_id _pending_queue _wait_for_msgs_task",
    Service: "_endpoints",
    Endpoint: "_subscription",
    web.RequestHandler: "_buffer_paused _close _drain_helper _force_close _keepalive_handle _keepalive_timeout _loop "
    "_max_msg_queue_size _message_tail _messages _next_keepalive_close_time _parser _pause_reading_for_buffer "
    "_pause_transport_reading _paused _payload_parser _process_keepalive _read_bufsize _reading_paused _request_count "
    "_request_in_progress _resume_transport_reading _upgraded _waiter",
    web.Server: "_loop",
    web.BaseRequest: "_headers _message _prepare_hook _version",
    web.StreamResponse: "_body_length _eof_sent _keep_alive _payload_writer _prepare_headers _send_headers_immediately "
    "_write_headers",
    web.WebSocketResponse: "_close_transport _handle_ping_pong_exception _parser _post_start _reader _req",
    StreamWriter: "_headers_buf",
}
"""Library class → the private names that our code reads, sets or overrides there."""
OTHERS: Final = {"_client", "_replace", "_stream_task"}
"""Attributes of ours and of named tuples that look like theirs."""


def product_files() -> list[Path]:
    """Every file that imports one of the libraries."""
    imports = re.compile(rf"^\s*(import|from) ({'|'.join(BOUNDED)})\b", re.MULTILINE)
    files = [file for folder in ("libs", "services") for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if imports.search(file.read_text())]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def library_names(cls: type) -> frozenset[str]:
    """The private names that ``cls`` and its bases in the libraries define or set."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in {*BOUNDED, "asyncio"}:
            continue
        names |= set(vars(base)) | set(getattr(base, "__slots__", ()))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return frozenset(filter(is_private, names))


def names_used(file: Path) -> set[str]:
    """Private names of the libraries in ``file``: inherited ones, and others', which the linter marks."""
    text = file.read_text()
    marked = [line.partition("#")[0] for line in text.splitlines() if "noqa: SLF001" in line]
    found = {name for line in marked for name in re.findall(r"\._[a-z]\w*", line)}
    found = {name[1:] for name in found} | set(re.findall(r'(?<=")_[a-z]\w*_(?:task|writer)(?=")', text))
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts[2:]))
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] in BOUNDED]
        if not bases:
            continue
        inherited = library_names(bases[0])
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            name = getattr(node, "attr", None) or getattr(node, "name", None) or getattr(node, "id", None)
            if isinstance(name, str) and name in inherited:
                found.add(name)
    return found


CODE_PICKLER: Final = "libs/muster/muster/sdk/code.py"
PICKLING: Final = {
    "_Reducers": (cloudpickle.Pickler, "_dynamic_function_reduce _function_getnewargs _function_reduce"),
    "reducers": (
        cloudpickle.cloudpickle,
        (
            "_DYNAMIC_CLASS_TRACKER_BY_CLASS _DYNAMIC_CLASS_TRACKER_BY_ID _DYNAMIC_CLASS_TRACKER_LOCK _class_reduce "
            "_extract_code_globals _make_skeleton_class _make_skeleton_enum"
        ),
    ),
    "pickle": (pickle, "_Pickler"),
}
"""By the name that the pickler of code gives them: cloudpickle's and the standard library's private parts."""


@pytest.mark.parametrize("prefix", PICKLING)
def test_the_pickler_of_code_uses_these_private_names_and_they_are_there(prefix: str) -> None:
    owner, names = PICKLING[prefix]
    used = set(re.findall(rf"\b{prefix}\.(_\w+)", (ROOT / CODE_PICKLER).read_text()))
    assert used == set(names.split())
    assert {name for name in used if not hasattr(owner, name)} == set()
    base = pickle._Pickler  # type: ignore[attr-defined]
    for name in ("dispatch", "framer", "memoize", "save", "save_reduce", "save_tuple"):
        assert hasattr(base(io.BytesIO()), name), name


@pytest.mark.parametrize("cls", USED, ids=lambda cls: cls.__name__)
def test_every_private_name_that_is_used_is_still_there(cls: type) -> None:
    gone = set(USED[cls].split()) - library_names(cls)
    assert not gone, f"{cls.__module__}.{cls.__name__} has no {', '.join(sorted(gone))} any more"


def test_the_table_has_every_private_name_that_is_used_and_no_other() -> None:
    used = set[str]().union(*(names_used(file) for file in product_files())) - OTHERS
    assert used == {name for names in USED.values() for name in names.split()}


@pytest.mark.parametrize(("package", "distribution"), [*BOUNDED.items(), ("cloudpickle", "cloudpickle")])
def test_each_package_that_imports_a_library_bounds_it_to_the_tested_minor_version(
    package: str, distribution: str
) -> None:
    major, minor = version(distribution).split(".")[:2]
    bound = f"{distribution}>={major}.{minor},<{major}.{int(minor) + 1}"
    imports = re.compile(rf"^\s*(import|from) {package}\b", re.MULTILINE)
    files = [file for folder in ("libs", "services") for file in sorted((ROOT / folder).rglob("*.py"))]
    users = {file.relative_to(ROOT).parts[:2] for file in files if imports.search(file.read_text())}
    assert users
    for project in [ROOT, *(ROOT.joinpath(*parts) for parts in users)]:
        needs = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
        assert [need for need in needs if re.match(rf"{distribution}\b", need)] == [bound], project
