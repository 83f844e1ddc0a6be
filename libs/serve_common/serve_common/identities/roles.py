"""Permissions: the accounts of an instance, and the roles in each with the subjects they need.

Why one table: operator mode generates account tokens from it, deploy/nats/plain.conf is generated from it, and the
tests check it row by row.

Why several accounts: JetStream and services respond on any reply subject, regardless of the permissions of the user
that sent the request, and NATS never checks reply subjects. What must not be reached by such a confused deputy is
therefore in another account.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from serve_common.api.queries import OPERATE_VERBS, VERBS, VIEW_VERBS
from serve_common.config.backend import EVERYTHING

NAME: Final = "{{name()}}"
"""In a subject: replaced by the name in the user's token, which may be several tokens."""
CALLED_REPLICAS: Final = "{{tag(replicas)}}"
"""In a subject: expanded once for each tag ``replicas:…`` of the user's token."""
CALLED_ENDPOINTS: Final = "{{tag(endpoints)}}"
GATE_RESPONSE_S: Final = 10
"""Seconds that a responder of a rollout's external gate has."""
CONNECTIONS_MAX: Final = 4352
"""Connections of the server that nats.conf describes."""


class AccountName(enum.Enum):
    """The accounts; the value is their name in tokens."""

    CONTROL = "control"
    DATA = "data"
    CLIENT = "client"
    PEOPLE = "people"
    SYSTEM = "system"


class Role(enum.Enum):
    """The role of a process on the bus; the value is also its plain user's name and part of its inbox."""

    CONTROLLER = "controller"
    HOST = "host"
    ADMIN = "admin"
    PROXY = "proxy"
    REPLICA = "replica"
    CLIENT = "client"
    CALLER = "caller"
    VIEW = "view"
    OPERATE = "operate"
    SYSTEM = "system"


VERBS_OF: Final[Mapping[Role, frozenset[str]]] = {
    Role.VIEW: VIEW_VERBS,
    Role.OPERATE: OPERATE_VERBS,
    Role.ADMIN: frozenset(VERBS),
}
"""Commands and queries that users of a role may send; those of no other role may send any."""


class Permissions(msgspec.Struct, frozen=True):
    """Subjects that a user may publish and subscribe; nothing else is allowed."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    response_s: int = 0
    """Seconds in which one response may be published to the sender of a received message; 0: none may."""

    def as_claim(self) -> dict[str, Any]:
        """The claim in a JWT."""
        claim: dict[str, Any] = {"pub": {"allow": list(self.publish)}, "sub": {"allow": list(self.subscribe)}}
        return {**claim, "resp": {"max": 1, "ttl": self.response_s * 10**9}} if self.response_s else claim


class UserLimits(msgspec.Struct, frozen=True):
    """Limits of one connection of a user; -1 is no limit."""

    subscriptions: int = -1
    payload_bytes: int = -1

    def as_claim(self) -> dict[str, Any]:
        """The claim in a JWT."""
        return {"subs": self.subscriptions, "data": -1, "payload": self.payload_bytes}


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all users of an account together; -1 is no limit. JetStream is off where it has no storage."""

    connections: int = -1
    subscriptions: int = -1
    payload_bytes: int = -1
    memory_bytes: int = 0
    disk_bytes: int = 0
    streams: int = 0
    consumers: int = 0

    def as_claim(self) -> dict[str, Any]:
        """The claim in a JWT."""
        return {
            "subs": self.subscriptions,
            "data": -1,
            "payload": self.payload_bytes,
            "imports": -1,
            "exports": -1,
            "wildcards": True,
            "conn": self.connections,
            "leaf": 0,
            "mem_storage": self.memory_bytes,
            "disk_storage": self.disk_bytes,
            "streams": self.streams,
            "consumer": self.consumers,
        }


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A subject that an account lets another one import."""

    subject: str
    is_service: bool = False
    """Requests go to the exporter and responses come back; otherwise messages go from the exporter to the importer."""


class RoleRights(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    account: AccountName
    permissions: Permissions
    limits: UserLimits = UserLimits()
    """Limits of each connection."""


class Crossing(msgspec.Struct, frozen=True):
    """A subject that is shared from one account with others."""

    exporter: AccountName
    share: Share
    importers: tuple[AccountName, ...]


ACCOUNT_LIMITS: Final = {
    AccountName.CONTROL: AccountLimits(
        connections=1008,
        subscriptions=65_536,
        memory_bytes=64 << 20,
        disk_bytes=2 << 30,
        streams=4,
        consumers=256,
    ),
    AccountName.DATA: AccountLimits(connections=2560, subscriptions=262_144),
    AccountName.CLIENT: AccountLimits(connections=512, subscriptions=65_536),
    AccountName.PEOPLE: AccountLimits(connections=256, subscriptions=65_536),
    AccountName.SYSTEM: AccountLimits(connections=16, subscriptions=4096),
}
"""Connections add up to `CONNECTIONS_MAX`, so that no account can exhaust those of another."""


def inbox_prefix(role: Role, name: str | None = None) -> str:
    """Inbox of users of ``role``; with a ``name``, of that user alone."""
    return f"_INBOX_{role.value}" + (f".{name}" if name else "")


def call_tags(backend_tag: str, may_call: Sequence[str] | None) -> tuple[str, ...]:
    """Tags in the token of a replica of ``backend_tag`` for what its handles may call (`BackendConfig.may_call`)."""
    calls = [backend_tag.partition("/")[0]] if may_call is None else may_call
    tags = []
    for called in calls:
        app, slash, name = called.partition("/")
        if called == EVERYTHING:
            tags += ["replicas:>", "endpoints:>"]
        elif slash:
            tags += [f"replicas:{app}.{name}.*", f"endpoints:{app}.{name}"]
        else:
            tags += [f"replicas:{app}.>", f"endpoints:{app}.>"]
    return tuple(tags)


def get_rights(role: Role, prefix: str) -> RoleRights:
    """The row of ``role`` in an instance whose subjects begin with ``prefix``."""
    bucket = f"{prefix}-snapshots"
    events = f"{prefix}-events"
    reads_bucket = _reads_bucket(prefix)
    bucket_changes = f"{prefix}.snapshot.>"
    match role:
        case Role.CONTROLLER:
            # Decides: responds to commands, sends hosts their goals, alone writes the bucket and the events and
            # manages their streams. Sends captured requests again for rollouts.
            return RoleRights(
                account=AccountName.CONTROL,
                permissions=Permissions(
                    publish=(
                        f"{prefix}.host.>",
                        f"{prefix}.call.>",
                        f"{prefix}.leader",
                        f"{prefix}.event.>",
                        f"{prefix}.log.controller.>",
                        f"{prefix}.log.recalled.*.controller",
                        f"$KV.{bucket}.>",
                        f"{prefix}.code.>",
                        f"{prefix}.gate.>",
                        "$JS.API.>",
                        "$JS.ACK.>",
                        "$JS.FC.>",
                        # answers to those who send commands
                        "_INBOX.>",
                        "_INBOX_admin.>",
                        "_INBOX_view.>",
                        "_INBOX_operate.>",
                        "_INBOX_controller.>",
                    ),
                    subscribe=(
                        f"{prefix}.admin.>",
                        f"{prefix}.report.>",
                        f"{prefix}.leader",
                        f"{prefix}.event.>",
                        f"{prefix}.wake.>",
                        f"{prefix}.log-recall",
                        bucket_changes,
                        f"$KV.{bucket}.>",
                        "$SRV.>",
                        "_INBOX_controller.>",
                    ),
                ),
            )
        case Role.HOST:
            # Runs replicas: receives its own goal, reports its own inventory. Sees no request and no snapshot.
            return RoleRights(
                account=AccountName.CONTROL,
                permissions=Permissions(
                    publish=(
                        f"{prefix}.report.host.{NAME}",
                        f"{prefix}.report.evaluation.{NAME}",
                        f"{prefix}.log.host.{NAME}",
                        f"{prefix}.log.recalled.*.host",
                        f"$JS.API.DIRECT.GET.{prefix}-code.{prefix}.code.>",
                    ),
                    subscribe=(
                        f"{prefix}.host.{NAME}.goal",
                        f"{prefix}.host.{NAME}.evaluate",
                        f"{prefix}.leader",
                        f"{prefix}.log-recall",
                        f"{inbox_prefix(Role.HOST, NAME)}.>",
                    ),
                ),
                limits=UserLimits(subscriptions=64),
            )
        case Role.ADMIN:
            # People and their tools: any NATS client, with NATS' default inbox or with _INBOX_admin. Receives events,
            # also those that the stream still retains, and all log lines. Answers what rollouts ask: it may abort and
            # promote them anyway.
            return RoleRights(
                account=AccountName.CONTROL,
                permissions=Permissions(
                    publish=(
                        f"{prefix}.admin.>",
                        f"{prefix}.call.>",
                        f"{prefix}.log-recall",
                        "$SRV.>",
                        "$JS.API.INFO",
                        "$JS.API.STREAM.NAMES",
                        "$JS.API.STREAM.LIST",
                        "$JS.API.STREAM.INFO.*",
                        f"$JS.API.DIRECT.GET.KV_{bucket}",
                        f"$JS.API.DIRECT.GET.KV_{bucket}.>",
                        *(
                            subject
                            for stream in (f"KV_{bucket}", events)
                            for subject in (
                                f"$JS.API.STREAM.MSG.GET.{stream}",
                                f"$JS.API.CONSUMER.CREATE.{stream}",
                                f"$JS.API.CONSUMER.CREATE.{stream}.>",
                                f"$JS.API.CONSUMER.INFO.{stream}.>",
                                f"$JS.API.CONSUMER.DELETE.{stream}.>",
                                f"$JS.FC.{stream}.>",
                            )
                        ),
                        f"$JS.API.CONSUMER.MSG.NEXT.{events}.>",
                        *_reads_captures(prefix),
                    ),
                    subscribe=(
                        f"{prefix}.event.>",
                        f"{prefix}.log.>",
                        f"{prefix}.report.>",
                        f"{prefix}.leader",
                        f"{prefix}.gate.>",
                        "_INBOX.>",
                        "_INBOX_admin.>",
                    ),
                    response_s=GATE_RESPONSE_S,
                ),
                limits=UserLimits(subscriptions=1024),
            )
        case Role.PROXY:
            # Routes: reads the bucket, sends requests to replicas, answers plain calls, reports what it applied.
            return RoleRights(
                account=AccountName.DATA,
                permissions=Permissions(
                    publish=(
                        f"{prefix}.replica.>",
                        f"{prefix}.wake.>",
                        f"{prefix}.capture.>",
                        f"{prefix}.report.proxy.{NAME}",
                        f"{prefix}.log.proxy.{NAME}",
                        f"{prefix}.log.recalled.*.proxy",
                        *reads_bucket,
                        # answers to those who call an endpoint over NATS; service answers to admins (_R_)
                        "_R_.>",
                        "_INBOX.>",
                        "_INBOX_admin.>",
                        "_INBOX_replica.>",
                        "_INBOX_client.>",
                        "_INBOX_caller.>",
                        "_INBOX_operate.>",
                    ),
                    subscribe=(
                        f"{prefix}.call.>",
                        f"{prefix}.leader",
                        f"{prefix}.models.>",
                        f"{prefix}.log-recall",
                        bucket_changes,
                        f"{inbox_prefix(Role.PROXY, NAME)}.>",
                    ),
                ),
                limits=UserLimits(subscriptions=1024),
            )
        case Role.REPLICA:
            # Runs user code: answers its own requests, calls what its handles may call.
            return RoleRights(
                account=AccountName.DATA,
                permissions=Permissions(
                    publish=(
                        f"{prefix}.models.{NAME}",
                        f"{prefix}.log.replica.{NAME}",
                        f"{prefix}.log.recalled.*.replica",
                        f"{prefix}.replica.{CALLED_REPLICAS}",
                        f"{prefix}.call.{CALLED_ENDPOINTS}",
                        f"{prefix}.wake.{CALLED_ENDPOINTS}",
                        *reads_bucket,
                        # answers to its callers: proxies, other replicas, and handles outside
                        "_INBOX_proxy.>",
                        "_INBOX_replica.>",
                        "_INBOX_client.>",
                    ),
                    subscribe=(
                        f"{prefix}.replica.{NAME}",
                        f"{prefix}.models.>",
                        f"{prefix}.log-recall",
                        bucket_changes,
                        f"{inbox_prefix(Role.REPLICA, NAME)}.>",
                    ),
                ),
                limits=UserLimits(subscriptions=64),
            )
        case Role.CLIENT:
            # Programs outside of replicas that hold deployment handles: they route by themselves, as proxies do. What
            # they send is pickled, and a program that can send pickles to a replica runs code there: these credentials
            # are worth as much as the right to deploy. Programs that only call models come as callers, or use HTTP.
            return RoleRights(
                account=AccountName.CLIENT,
                permissions=Permissions(
                    publish=(f"{prefix}.replica.>", f"{prefix}.call.>", f"{prefix}.wake.>", *reads_bucket),
                    subscribe=(f"{prefix}.models.>", bucket_changes, f"{inbox_prefix(Role.CLIENT)}.>"),
                ),
                limits=UserLimits(subscriptions=64),
            )
        case Role.CALLER:
            # Programs that only call endpoints, with any NATS client: bytes to a proxy, which are never unpickled.
            return RoleRights(
                account=AccountName.CLIENT,
                permissions=Permissions(
                    publish=(f"{prefix}.call.>",), subscribe=(f"{inbox_prefix(Role.CALLER)}.>",)
                ),
                limits=UserLimits(subscriptions=64),
            )
        case Role.VIEW:
            # People who see everything but requests, captures and backups, and change nothing.
            return RoleRights(
                account=AccountName.PEOPLE,
                permissions=_people_permissions(role, prefix),
                limits=UserLimits(subscriptions=1024),
            )
        case Role.OPERATE:
            # People who besides keep running what others deployed, and call it. They bring in no code.
            return RoleRights(
                account=AccountName.PEOPLE,
                permissions=_people_permissions(role, prefix, f"{prefix}.call.>"),
                limits=UserLimits(subscriptions=1024),
            )
        case Role.SYSTEM:
            # Monitors the servers.
            return RoleRights(
                account=AccountName.SYSTEM, permissions=Permissions(publish=(">",), subscribe=(">",))
            )


def _people_permissions(role: Role, prefix: str, *more: str) -> Permissions:
    """Permissions of people who may not deploy; ``more`` is what they may publish beside queries and commands."""
    return Permissions(
        publish=(
            *(f"{prefix}.admin.{verb}" for verb in sorted(VERBS_OF[role])),
            f"{prefix}.log-recall",
            *more,
        ),
        subscribe=(
            f"{prefix}.event.>",
            f"{prefix}.log.>",
            f"{prefix}.report.>",
            f"{prefix}.leader",
            f"{inbox_prefix(role)}.>",
        ),
    )


def _reads_bucket(prefix: str) -> tuple[str, ...]:
    """All that a router needs of JetStream: many keys at once, and the stream's state."""
    stream = f"KV_{prefix}-snapshots"
    return (f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.STREAM.INFO.{stream}")


def _reads_captures(prefix: str) -> tuple[str, ...]:
    """All that reading captured requests needs: clients' data, so no role has it that only looks at the system."""
    return (f"$JS.API.DIRECT.GET.{prefix}-captures",)


_SHADOW: Final = "$JS.API.INFO"
"""No importer may publish it. An account without it gets a JetStream API of the server's, which responds to
``STREAM.INFO`` before ours, with an error that JetStream is not enabled."""


def crossings(prefix: str) -> Iterator[Crossing]:
    """All subjects that are shared between accounts."""
    control, data, client = AccountName.CONTROL, AccountName.DATA, AccountName.CLIENT
    people = AccountName.PEOPLE
    for subject in (*_reads_bucket(prefix), _SHADOW):
        yield Crossing(control, Share(subject=subject, is_service=True), (data, client))
    yield Crossing(control, Share(subject=f"{prefix}.snapshot.>"), (data, client))
    yield Crossing(control, Share(subject=f"{prefix}.leader"), (data, people))
    yield Crossing(control, Share(subject=f"{prefix}.log-recall"), (data,))
    # What people receive and send are messages only: to a service their requests could name any reply subject.
    for subject in (f"{prefix}.event.>", f"{prefix}.report.>", f"{prefix}.log.>"):
        yield Crossing(control, Share(subject=subject), (people,))
    for role in (Role.VIEW, Role.OPERATE):
        yield Crossing(control, Share(subject=f"{inbox_prefix(role)}.>"), (people,))
    yield Crossing(data, Share(subject=f"{prefix}.call.>", is_service=True), (control,))
    yield Crossing(data, Share(subject=f"{prefix}.report.proxy.*"), (control, people))
    yield Crossing(data, Share(subject=f"{prefix}.wake.>"), (control,))
    yield Crossing(data, Share(subject=f"{prefix}.capture.>"), (control,))
    yield Crossing(data, Share(subject=f"{prefix}.log.>"), (control, people))
    yield Crossing(data, Share(subject=f"{prefix}.models.>"), (client,))
    yield Crossing(data, Share(subject=f"{inbox_prefix(Role.CLIENT)}.>"), (client,))
    yield Crossing(data, Share(subject=f"{inbox_prefix(Role.CALLER)}.>"), (client,))
    yield Crossing(data, Share(subject=f"{inbox_prefix(Role.OPERATE)}.>"), (people,))
    yield Crossing(client, Share(subject=f"{prefix}.replica.>"), (data,))
    yield Crossing(client, Share(subject=f"{prefix}.call.>"), (data,))
    yield Crossing(client, Share(subject=f"{prefix}.wake.>"), (control,))
    yield Crossing(people, Share(subject=f"{prefix}.admin.>"), (control,))
    yield Crossing(people, Share(subject=f"{prefix}.log-recall"), (control, data))
    yield Crossing(people, Share(subject=f"{prefix}.call.>"), (data,))
