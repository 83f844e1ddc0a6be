"""Every NATS subject and bucket key, built and parsed here and nowhere else; and the limits of what arrives there.

Why: permissions, dashboards and foreign clients depend on these names. The prefix (``serve`` by default) is
configurable so that several instances can share one NATS. A tag ``app/deployment`` becomes two tokens
``app.deployment``; a replica's ordinal is always the last token, so every subject can be parsed back.

Why limits at decoding: a client that may publish on a subject may publish anything there, and a number that no process
means (an amount of 1e308, a count of a hundred digits) must be refused before anything is computed from it. The limits
are far above what a healthy process sends.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag, HostId, ProxyId, ReplicaTag, check_name

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A count, a sequence number or a numeric id; exact in every JSON reader."""
Amount = Annotated[float, Meta(ge=0, le=2.0**53)]
"""A non-negative quantity."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration in seconds: up to thirty years."""
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""A time in seconds since 1970, by any clock."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A fraction, from 0 to 1."""
Label = Annotated[str, Meta(max_length=256)]
"""A name, a tag or an id; longer than any valid one, for what is invalid has an error of its own."""
Address = Annotated[str, Meta(max_length=2_048)]
"""A URL or ``host:port``."""
Text = Annotated[str, Meta(max_length=64 * 1024)]
"""Text for people."""
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for a message that is not as it should be.

Input may be invalid UTF-8, or nested deeper than the decoder goes, and neither error is a `msgspec.DecodeError`.
Catching only some of these would let a sender end a task that should log the message and go on.
"""

ADMIN_SERVICE: Final = "serve-admin"
"""Name of the controller's commands as a service of `$SRV.PING|INFO|STATS`."""
MODEL_SERVICE: Final = "serve-models"
"""Name of the endpoints that can be called, as a service of `$SRV.PING|INFO`."""
GATEWAY_QUEUE: Final = "gateways"
"""Queue group of the proxies that serve ``serve.call.…``."""

ENDPOINTS: Final = "endpoints"
BACKENDS: Final = "backends"
HTTP: Final = "http"
RECALLED: Final = "recalled"
"""Replaces the kind of process in subjects of log lines that were requested."""
HTTP_KEY: Final = "http.options"
"""The bucket key of the options that all proxies apply to every request."""

INBOXES: Final = (b"_INBOX", b"_R_.")
"""Prefixes of valid reply subjects: the sender's inbox, or what a server replaces it by when the request comes from
another account."""


def is_inbox(reply: bytes) -> bool:
    """Whether ``reply``, chosen by the sender of a request, is a valid reply subject.

    Any other subject would make the responder publish for the requester where that one may not: reports, commands or
    requests to others. Every service checks this before it replies.
    """
    return reply.startswith(INBOXES)


def tokens(tag: str) -> str:
    """The tag of a replica, deployment or endpoint as tokens of a subject: ``shop/digits#3`` is ``shop.digits.3``."""
    return tag.replace("#", "/").replace("/", ".")


class Subjects:
    """The subjects of one instance."""

    def __init__(self, prefix: str = "serve") -> None:
        """``prefix`` is one name part; raises `BadField` otherwise."""
        self.prefix: Final = check_name(prefix, "subject_prefix")
        self.bucket: Final = f"{prefix}-snapshots"
        """Name of the key-value bucket that carries snapshots."""
        self.snapshots: Final = f"{prefix}.snapshot.>"
        """Where the bucket's stream republishes its changes, by key."""
        self.admin_group: Final = f"{prefix}.admin"
        self.event_stream: Final = f"{prefix}-events"
        """Name of the stream that keeps events for a while."""

    @property
    def capture_stream(self) -> str:
        """Name of the stream that retains captured requests."""
        return f"{self.prefix}-captures"

    def capture(self, endpoint_tag: EndpointTag) -> str:
        """Where proxies publish captured requests of an endpoint: ``serve.capture.default.hello``."""
        return f"{self.prefix}.capture.{tokens(endpoint_tag)}"

    @property
    def captures(self) -> str:
        """Captured requests of all endpoints."""
        return f"{self.prefix}.capture.>"

    def gate(self, responder: str) -> str:
        """Where a rollout's external gate with this ``responder`` is asked."""
        return f"{self.prefix}.gate.{responder}"

    @property
    def code_bucket(self) -> str:
        """Name of the stream that carries uploaded code to hosts."""
        return f"{self.prefix}-code"

    def code(self, digest: str, page: int | str) -> str:
        """Where that stream has a page of the code with this digest."""
        return f"{self.prefix}.code.{digest}.{page}"

    def admin(self, verb: str) -> str:
        """Where the command or query ``verb`` is sent."""
        return f"{self.admin_group}.{verb}"

    def call(self, endpoint_tag: EndpointTag) -> str:
        """Where any NATS client calls an endpoint by plain request/reply."""
        return f"{self.prefix}.call.{tokens(endpoint_tag)}"

    @property
    def calls(self) -> str:
        """All calls; for the gateways' subscription."""
        return f"{self.prefix}.call.>"

    def parse_call_endpoint(self, subject: str) -> EndpointTag:
        """The endpoint that a call's subject names; a single token means the application ``default``."""
        parts = subject.removeprefix(f"{self.prefix}.call.").split(".")
        return EndpointTag("/".join(parts if len(parts) > 1 else ("default", *parts)))

    def replica(self, replica_tag: ReplicaTag) -> str:
        """Where one replica receives requests and their further frames."""
        return f"{self.prefix}.replica.{tokens(replica_tag)}"

    def models(self, replica_tag: ReplicaTag) -> str:
        """Where one replica publishes to all routers which multiplexed models it has loaded."""
        return f"{self.prefix}.models.{tokens(replica_tag)}"

    @property
    def all_models(self) -> str:
        """The models of all replicas; for subscriptions."""
        return f"{self.prefix}.models.>"

    def parse_models_replica(self, subject: str) -> ReplicaTag:
        """The replica that a subject of `models` names."""
        *parts, ordinal = subject.removeprefix(f"{self.prefix}.models.").split(".")
        return ReplicaTag("/".join(parts) + "#" + ordinal)

    def wake(self, backend_tag: BackendTag) -> str:
        """Where a router reports that requests wait for a backend that has no replica."""
        return f"{self.prefix}.wake.{tokens(backend_tag)}"

    @property
    def wakes(self) -> str:
        """All backends' wake-ups."""
        return f"{self.prefix}.wake.>"

    def parse_wake_backend(self, subject: str) -> BackendTag:
        """The backend that a subject of `wake` names."""
        return BackendTag(subject.removeprefix(f"{self.prefix}.wake.").replace(".", "/"))

    def host_goal(self, host_id: HostId) -> str:
        """Where one host receives its whole goal."""
        return f"{self.prefix}.host.{host_id}.goal"

    def host_evaluation(self, host_id: HostId) -> str:
        """Where one host receives what one of its replicas is to evaluate."""
        return f"{self.prefix}.host.{host_id}.evaluate"

    def evaluation_report(self, host_id: HostId) -> str:
        """Where one host publishes what came of that."""
        return f"{self.prefix}.report.evaluation.{host_id}"

    @property
    def evaluation_reports(self) -> str:
        """All hosts' results of evaluations."""
        return f"{self.prefix}.report.evaluation.*"

    @property
    def leader(self) -> str:
        """Where a new leader publishes its id and epoch; hosts and proxies then report at once."""
        return f"{self.prefix}.leader"

    def host_report(self, host_id: HostId) -> str:
        """Where one host publishes its inventory."""
        return f"{self.prefix}.report.host.{host_id}"

    @property
    def host_reports(self) -> str:
        """All hosts' inventories."""
        return f"{self.prefix}.report.host.*"

    def proxy_report(self, proxy_id: ProxyId) -> str:
        """Where one proxy publishes what it has applied."""
        return f"{self.prefix}.report.proxy.{proxy_id}"

    def event(self, kind: str, subject: str) -> str:
        """Where an event of a kind about something is published: ``serve.event.goal.g7``."""
        return f"{self.prefix}.event.{kind}.{tokens(subject)}"

    @property
    def events(self) -> str:
        """All events."""
        return f"{self.prefix}.event.>"

    def log(self, kind: str, process_id: str) -> str:
        """Where a process publishes its log lines: ``serve.log.replica.shop.digits.3``."""
        return f"{self.prefix}.log.{kind}.{tokens(process_id)}"

    def logs(self, kind: str | None = None, process_id: str = "") -> str:
        """The log lines of all processes, of a kind, of one process, or of all replicas of a backend."""
        if kind is None:
            return f"{self.prefix}.log.>"
        # A backend's tag and a replica's are the same but for the last token.
        return f"{self.prefix}.log.{kind}.{f'{tokens(process_id)}.' if process_id else ''}>"

    def parse_log_kind(self, subject: str) -> str:
        """The kind of process that a subject of `log` names; `RECALLED` for one of `recalled_log`."""
        return subject.removeprefix(f"{self.prefix}.log.").partition(".")[0]

    @property
    def log_replay(self) -> str:
        """Where all processes receive requests for their recent log lines."""
        return f"{self.prefix}.log-recall"

    def recalled_log(self, token: str, kind: str = "*") -> str:
        """Where they publish those lines, to the requester that chose ``token``."""
        return f"{self.prefix}.log.{RECALLED}.{token}.{kind}"

    @property
    def proxy_reports(self) -> str:
        """All proxies' reports."""
        return f"{self.prefix}.report.proxy.*"


def endpoint_key(endpoint_tag: EndpointTag) -> str:
    """The bucket key of an endpoint's snapshot."""
    return f"{ENDPOINTS}.{tokens(endpoint_tag)}"


def backend_key(backend_tag: BackendTag) -> str:
    """The bucket key of a backend's snapshot."""
    return f"{BACKENDS}.{tokens(backend_tag)}"


def parse_key(key: str) -> tuple[str, str]:
    """The kind (`ENDPOINTS`, `BACKENDS` or `HTTP`) and the tag that a bucket key names.

    Raises `BadField` for a key that is none of ours.
    """
    kind, dot, rest = key.partition(".")
    if kind not in (ENDPOINTS, BACKENDS, HTTP) or not dot or not rest:
        raise BadField("key", f"{key[:100]!r} is not a snapshot key")
    return kind, rest.replace(".", "/")
