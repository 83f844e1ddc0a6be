"""The form of the code: no import cycles, one class of a name, files that are chapters."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.stats import LINES_MAX, PRODUCT, SourceFile, source_files


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return list(source_files(*PRODUCT))


def imported_at_once(file: SourceFile, modules: set[str]) -> set[str]:
    """What importing ``file`` imports of the product before its own first line runs."""
    found = set[str]()
    for node in file.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules - {file.module}


def test_no_modules_import_each_other_in_a_cycle(files: list[SourceFile]) -> None:
    modules = {file.module for file in files}
    imports = {file.module: imported_at_once(file, modules) for file in files}
    assert sum(len(found) for found in imports.values()) > len(files)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


NAMESAKES = re.compile(r"muster\.(config|schema|sdk\.(deployments|states))")
"""Modules whose classes have the names that Ray Serve gave them: programs import them by these."""


def test_no_public_class_has_the_name_of_another(files: list[SourceFile]) -> None:
    homes = defaultdict[str, list[str]](list)
    for file in files:
        for node in file.tree.body:
            if NAMESAKES.fullmatch(file.module):
                continue
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file.module)
    assert len(homes) > 500
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_file_is_longer_than_a_chapter(files: list[SourceFile]) -> None:
    long = {file.module: file.lines for file in files if file.lines > LINES_MAX}
    assert long == {}


def test_no_docstring_leaves_out_its_subject_or_speaks_of_people(files: list[SourceFile]) -> None:
    banned = re.compile(r"(Of|See) |.*\b(whoever|somebody)\b", re.DOTALL)
    found = [
        f"{file.module}:{node.lineno}: {node.value.value.strip()[:60]}"
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and banned.match(node.value.value.lstrip())
    ]
    assert found == []


DOCUMENTED = re.compile(
    r"serve_common\.(config|api)(\.|$)|serve_common\.runtime\.settings|serve_(controller|proxy|replica_host)\.settings"
    r"|muster\.(context|(handles|embedded)\.options|batching\.queue)"
)
"""Modules whose public classes users read: configuration, admin API, settings, options."""


def test_every_public_field_says_what_it_means(files: list[SourceFile]) -> None:
    fields = [
        (f"{file.module}.{node.name}.{ast.unparse(field.target)}", following)
        for file in files
        if DOCUMENTED.match(file.module)
        for node in file.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for field, following in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation)
    ]
    assert len(fields) > 250
    undocumented = [
        name
        for name, following in fields
        if not (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
    ]
    assert not undocumented, "write a string under: " + ", ".join(undocumented)


BANNED = {
    "answer": "response, reply",
    "answered": "responded",
    "answers": "responses",
    "aside": "quarantine",
    "ask": "request, query",
    "asked": "requested",
    "asking": "query",
    "asks": "requests",
    "asleep": "scaled_to_zero",
    "attending": "dirty_set",
    "attention": "dirty_set",
    "began": "started",
    "begin": "start",
    "begins": "starts",
    "begun": "started",
    "chance": "rand",
    "changing": "mutate",
    "charge": "supervised_process",
    "companion": "peer_version",
    "companions": "peer_versions",
    "departures": "disconnect_propagation",
    "desk": "replica_io",
    "disowned": "request_unknown",
    "door": "syn_filter, drop_new_connections",
    "draw": "rng",
    "far": "remote",
    "fast": "fast_path",
    "fetched": "remote_telemetry",
    "follower": "observer",
    "following": "observer",
    "given": "overrides",
    "happening": "event",
    "hear": "on_…",
    "heard": "received, reported",
    "hearing": "observations",
    "hears": "receives",
    "held": "active, current",
    "intent": "change_request",
    "keeper": "(what it keeps)",
    "kept": "retained",
    "lend": "detach_reader",
    "look": "check, poll",
    "looked": "checked",
    "looking": "inspect",
    "looks": "checks",
    "losses": "lost_requests",
    "measures": "metrics",
    "nobody": "(leave it out)",
    "orders": "start_requests",
    "outcomes": "events",
    "outlet": "sink",
    "parked": "pending_reconnect",
    "parking": "pending_reconnect",
    "patient": "may_queue",
    "performing": "executor",
    "reading": "sample",
    "readings": "samples",
    "recall": "replay_recent",
    "relay": "forwarder",
    "room": "capacity",
    "said": "sent",
    "say": "print",
    "settled": "stabilized, done",
    "shelf": "model_cache",
    "somebody": "(leave it out)",
    "suspicions": "failure_detector",
    "tallies": "stats",
    "tally": "request_stats",
    "tell": "notify, publish",
    "telling": "event_log",
    "tells": "notifies",
    "tidy": "gc",
    "told": "notified",
    "verdict": "decision_kind",
    "visit": "request_state",
    "who": "actor, principal",
    "whoever": "(leave it out)",
    "wish": "affinity",
    "wishes": "affinities",
    "wording": "text",
    "words": "text",
}
"""Words that no identifier contains, with the field's word for each."""

BANNED_PHRASES = {
    "bus_side": "replica_protocol",
    "give_up_at": "deadline",
    "host_place": "host_location",
    "is_spare": "is_shadow",
    "own_paths": "internal_routes",
    "passed_on": "downstream_errors",
    "put_aside": "quarantine",
    "quiet_log": "rate_limited_logger",
    "start_order": "start_request",
    "to_bus": "io_queue",
    "to_user": "user_queue",
    "user_side": "user_executor",
    "why_not_ready": "readiness_error",
}

ALLOWED = {
    "look_back_period_s": "Ray Serve's name of an option",
    "look_back_s": "as look_back_period_s",
    "READINGS": "a metric's name",
    "verdict": "a field of the reply to get_autoscaling",
    "VERDICT": "a metric's name",
    "HELD": "a verdict's value on the wire",
    "become_nobody_in_namespace": "the Unix user nobody",
    "become_nobody_with_capability": "the Unix user nobody",
    "nobody": "the Unix user nobody",
    "_start_reading": "as in asyncio's transports",
    "_stop_reading": "as in asyncio's transports",
    "_reading_paused": "as in asyncio's transports",
    "pause_reading": "as in asyncio's transports",
    "_TRACEBACK_BEGINS": "the text that a traceback begins with",
    "are_ahead_of": "a predicate, no accessor",
}
"""Identifiers that keep a banned word, each with its reason."""


def defined_names(file: SourceFile) -> tuple[set[str], set[str]]:
    """All names that a file defines (its module's, classes, arguments, attributes, variables), and its functions'."""
    functions, others = set[str](), set(file.module.split("."))
    for node in ast.walk(file.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                functions.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                others.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                others.add(name)
            case _:
                pass
    return functions | others, functions


def better_word(name: str, *, is_function: bool) -> str | None:
    """The field's word for the banned part of a name; None where there is none."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")
    if is_function and plain.endswith("_of"):
        return "get_…, parse_…, build_…"
    phrases = (better for phrase, better in BANNED_PHRASES.items() if f"_{phrase}_" in f"_{plain}_")
    words = (BANNED[word] for word in plain.replace("fast_path", "").split("_") if word in BANNED)
    return next(phrases, None) or next(words, None)


def test_names_use_the_words_of_the_field(files: list[SourceFile]) -> None:
    banned, allowed = [], set()
    for file in files:
        names, functions = defined_names(file)
        for name in sorted(names):
            better = better_word(name, is_function=name in functions)
            if better is not None and name in ALLOWED:
                allowed.add(name)
            elif better is not None:
                banned.append(f"{file.module}: {name} → {better}")
    assert not banned, "\n".join(banned)
    assert allowed == ALLOWED.keys()
