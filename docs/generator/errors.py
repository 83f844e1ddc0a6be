"""The page of errors: every code that can leave a process, with its HTTP status and whether to try again."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from typing import Final

from docs.generator.structs import GENERATED, class_doc, table
from muster.context import NotInReplica
from muster.handles.options import CallNotAllowed, RequestCancelledError
from muster.sdk.absent import NotInMuster
from serve_common.dispatch.errors import BackendStopped, LostTwice
from serve_common.errors import (
    CommandRefused,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    PermanentError,
    ReplicaDied,
    RequestFailed,
    ServeError,
    StoreUnavailable,
    TransientError,
    UserCodeRaised,
)
from serve_common.nats.options import PayloadTooLarge
from serve_proxy.core.problems import BodyTooSlow, HeadTooSlow
from tests.stats import PRODUCT, source_files

_HEAD: Final = f"""\
# Errors

{GENERATED}
Every error has a stable code, which scripts may compare, and a text for people, which may change.

- **HTTP**: the body is problem details (RFC 9457, `application/problem+json`) with the code in `code`, the text in
  `detail` and the request's id in `request_id`. `Retry-After` says when to try again, where that may soon
  help.
- **Admin API and `serve.call` over NATS**: the header `Nats-Service-Error` has the text, `Nats-Service-Error-Code`
  the status; the body has the code.
- **Python**: each code is a class below `ServeError`, whose `error_code` and `status_hint` are these.
- **`muster`**: exit code 1 failed, 2 bad input, 3 the stack cannot be reached, 4 not found, 5 timed out; `--json`
  prints the code.

*Idempotent* means that running the request twice does no harm. A failed request may have run, unless the table says
otherwise.
"""

_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Everywhere": ("serve_common.errors",),
    "Requests": ("serve_common.dispatch", "serve_proxy"),
    "Calls by handle": ("muster.handles", "muster.batching"),
    "Applications in Python, and their code": ("muster.sdk", "serve_common.protocol"),
    "The program `muster`": ("muster.",),
    "Connections and identities": ("serve_common.nats", "serve_common.identities"),
    "Inside the services, in logs and messages": ("serve_controller", "serve_replica_host"),
}
"""Sections by the first part of a module's name; the first that fits."""

_RETRY: Final[Mapping[type[ServeError], str]] = {
    BackendStopped: "Once it has replicas again.",
    NoReplicaAvailable: "Yes, after `Retry-After`: it has not run.",
    LostTwice: "No: it is likely the cause.",
    ReplicaDied: "If it is idempotent.",
    BodyTooSlow: "Yes, over a faster connection.",
    HeadTooSlow: "Yes, over a faster connection.",
    DeadlineExceeded: "If it is idempotent.",
    UserCodeRaised: "As the application says.",
    RequestCancelledError: "As the caller likes.",
    RequestFailed: "If it is idempotent.",
    LimitReached: "Not until it fits the limit.",
    CommandRefused: "No: change the request.",
    StoreUnavailable: "Yes: commands are idempotent.",
    TransientError: "Yes, after a moment.",
    PayloadTooLarge: "No: send less.",
    CallNotAllowed: "No: allow it in `may_call`.",
    NotInMuster: "No: use the substitute that it names.",
    NotInReplica: "No: call it in a replica.",
    PermanentError: "No: an operator must act.",
    ServeError: "If it is idempotent.",
}
"""Whether to try again, by class; the first of a class's bases in its own order that is listed counts."""

_PROBLEMS: Final[Mapping[str, tuple[str, str]]] = {
    "unauthorized": ("The API key is missing or not known.", "No: send a key."),
    "cors_refused": ("The page's origin, method or headers are not allowed.", "No."),
    "rate_limited": ("The caller has sent more requests than it may.", "Yes, after `Retry-After`."),
    "middleware_failed": ("A middleware raised an exception.", "If it is idempotent."),
}
"""Codes of the proxy that have no class: their meaning, and whether to try again."""


def page() -> str:
    """The page."""
    rows: dict[str, list[tuple[str, ...]]] = {title: [] for title in _SECTIONS}
    for kind in sorted(_error_classes(), key=lambda kind: kind.error_code):
        rows[_section(kind.__module__)].append(
            (
                f"`{kind.error_code}`",
                str(kind.status_hint),
                class_doc(kind),
                f"`{kind.__name__}`",
                _retry(kind),
            )
        )
    for code, status in _problem_codes():
        meaning, retry = _PROBLEMS[code]
        rows["Requests"].append((f"`{code}`", status, meaning, "", retry))
    head = ("code", "status", "meaning", "class", "try again?")
    return "\n".join(
        [_HEAD, *(f"## {title}\n\n{table(head, sorted(lines))}" for title, lines in rows.items())]
    )


def _section(module: str) -> str:
    return next(title for title, starts in _SECTIONS.items() if module.startswith(starts))


def _retry(kind: type[ServeError]) -> str:
    return next(_RETRY[base] for base in kind.__mro__ if base in _RETRY)


def _error_classes() -> Iterator[type[ServeError]]:
    """Every class with an error code of its own."""
    for file in source_files(*PRODUCT):
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and any(_sets_code(statement) for statement in node.body):
                kind = getattr(importlib.import_module(file.module), node.name)
                if issubclass(kind, ServeError):
                    yield kind


def _sets_code(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name("error_code")]):
            return True
        case ast.AnnAssign(target=ast.Name("error_code"), value=ast.Constant()):
            return True
        case _:
            return False


def _problem_codes() -> Iterator[tuple[str, str]]:
    """Code and status of problems that a proxy makes without an error class."""
    known = {kind.error_code for kind in _error_classes()}
    found: dict[str, str] = {}
    for file in source_files("services"):
        for node in ast.walk(file.tree):
            match node:
                case ast.Call(func=ast.Name("Problem"), keywords=keywords):
                    given = {keyword.arg: keyword.value for keyword in keywords}
                    match given.get("code"), given.get("status"):
                        case ast.Constant(str(code)), ast.Constant(int(status)) if code not in known:
                            found[code] = str(status)
                        case _:
                            pass
                case _:
                    pass
    yield from sorted(found.items())
