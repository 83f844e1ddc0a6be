"""Configuration of external gates: what else than a rollout's own requests decides whether a step passes."""

from __future__ import annotations

import math
import re
from typing import Final
from urllib.parse import urlsplit

import msgspec

from serve_common.errors import BadField
from serve_common.values import check_between

RESERVED_NAMES: Final = frozenset({"errors", "client_errors", "latency_p50", "latency_p99", "differences"})
GATES_MAX: Final = 10
"""Most external gates of one rollout."""
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,38}[a-z0-9])?")
_TEXT_LENGTH_MAX: Final = 4096
_INTERVAL_MIN_S: Final = 0.5


class ExternalGate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question to something outside, repeated while a step lasts: PromQL, a webhook, or a NATS subject.

    Exactly one of ``promql``, ``webhook`` and ``responder`` is set. A step passes only once the last answer in it was
    good; bad ones in a row abort the rollout; without an answer it stays where it is.
    """

    name: str
    """Lower-case letters, digits, ``-`` and ``_``; at most 40. Unique in the rollout."""
    promql: str = ""
    """A query that gives one number. ``$backend_tag`` is replaced by the tag of the backend that runs the new version,
    ``$look_back`` by a duration: how long the step has lasted, at least ``every_s`` and at most 5 minutes. For
    ``min_ratio`` and ``max_ratio`` it is evaluated with the baseline's tag too."""
    webhook: str = ""
    """``http://`` or ``https://`` URL. It gets a POST with JSON (`serve_common.protocol.gates.GateRequest`), and must
    answer with status 200 and JSON (`GateResponse` there)."""
    responder: str = ""
    """Whoever answers requests on the NATS subject ``serve.gate.<responder>``: with the same JSON."""
    at_least: float | None = None
    """The number must not be lower."""
    at_most: float | None = None
    """The number must not be higher."""
    min_ratio: float | None = None
    """The number must not be lower than this many times that of the baseline."""
    max_ratio: float | None = None
    """The number must not be higher than this many times that of the baseline."""
    every_s: float = 10.0
    """Seconds between two questions, and from the beginning of a step to the first."""
    max_failures: int = 2
    """So many bad answers in a row change nothing; one more aborts the rollout."""

    @property
    def has_ratio(self) -> bool:
        """Whether the number is compared with that of the baseline."""
        return self.min_ratio is not None or self.max_ratio is not None

    @property
    def has_limits(self) -> bool:
        """Whether a number is needed."""
        return self.has_ratio or self.at_least is not None or self.at_most is not None


def check_external_gates(gates: tuple[ExternalGate, ...], field: str) -> None:
    """Raise `BadField` with the path of the first field that is out of its limits."""
    if len(gates) > GATES_MAX:
        raise BadField(field, f"has {len(gates)} gates; at most {GATES_MAX} are allowed")
    names: set[str] = set()
    for at, gate in enumerate(gates):
        check_external_gate(gate, f"{field}[{at}]")
        if gate.name in names:
            raise BadField(f"{field}[{at}].name", f"{gate.name!r} is there twice")
        names.add(gate.name)


def check_external_gate(gate: ExternalGate, field: str) -> None:
    """Raise `BadField` with the path of the first field that is out of its limits."""
    if _NAME.fullmatch(gate.name) is None:
        raise BadField(
            f"{field}.name", f"{gate.name[:60]!r} must be 1 to 40 lower-case letters, digits, '-' and '_'"
        )
    if gate.name in RESERVED_NAMES:
        raise BadField(f"{field}.name", f"{gate.name!r} is the name of a gate that every rollout has")
    sources = {"promql": gate.promql, "webhook": gate.webhook, "responder": gate.responder}
    used = [name for name, text in sources.items() if text]
    if len(used) != 1:
        raise BadField(field, f"needs exactly one of promql, webhook and responder; it has {len(used)}")
    name, text = used[0], sources[used[0]]
    if len(text) > _TEXT_LENGTH_MAX:
        raise BadField(
            f"{field}.{name}", f"has {len(text)} characters; at most {_TEXT_LENGTH_MAX} are allowed"
        )
    if gate.webhook:
        _check_url(gate.webhook, f"{field}.webhook")
    if gate.responder and _NAME.fullmatch(gate.responder) is None:
        raise BadField(f"{field}.responder", "must be 1 to 40 lower-case letters, digits, '-' and '_'")
    if gate.promql and not gate.has_limits:
        raise BadField(field, "needs at least one of at_least, at_most, min_ratio and max_ratio")
    for limit in ("at_least", "at_most", "min_ratio", "max_ratio"):
        value = getattr(gate, limit)
        if value is not None and not math.isfinite(value):
            raise BadField(f"{field}.{limit}", "must be a finite number")
    check_between(gate.every_s, _INTERVAL_MIN_S, 86_400, f"{field}.every_s")
    check_between(gate.max_failures, 0, 1000, f"{field}.max_failures")


def _check_url(url: str, field: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise BadField(field, "must be a URL that begins with http:// or https://")
