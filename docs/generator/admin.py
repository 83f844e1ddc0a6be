"""The page of the admin API, and its JSON Schemas: every verb with its request, reply, errors and an example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from docs.generator import configuration
from docs.generator.ranges import RANGES
from docs.generator.structs import GENERATED, class_doc, field_table, fields_of, structs_within, type_text
from serve_common.api.commands import Command, DeploymentSpec
from serve_common.api.queries import VERBS
from serve_common.api.views import ErrorView


class Verb(NamedTuple):
    """One verb of the admin API."""

    name: str
    request: type[msgspec.Struct]
    reply: Any

    @property
    def is_command(self) -> bool:
        """Whether it changes state."""
        return issubclass(self.request, Command)


def verbs() -> list[Verb]:
    """Every verb, commands first."""
    return [Verb(name, request, request.reply_type()) for name, request in VERBS.items()]


_REPLICA_CONFIG: Final = {"import_path": "digits:Digits", "app_dir": "examples/digits"}
EXAMPLES: Final[Mapping[str, dict[str, Any]]] = {
    "deploy": {
        "name": "digits",
        "route_prefix": "/digits",
        "replica_config": _REPLICA_CONFIG,
        "backend_config": {"num_replicas": 2},
    },
    "delete_deployment": {"name": "digits"},
    "deploy_application": {
        "name": "shop",
        "ingress": "digits",
        "route_prefix": "/shop",
        "deployments": [{"name": "digits", "replica_config": _REPLICA_CONFIG}],
    },
    "record_build_failure": {"name": "shop", "error": "ValueError: no weights"},
    "delete_application": {"name": "shop"},
    "create_backend": {"backend_tag": "digits-v2", "replica_config": _REPLICA_CONFIG},
    "delete_backend": {"backend_tag": "digits-v2"},
    "update_backend_config": {"backend_tag": "digits", "config": {"max_concurrent_queries": 20}},
    "scale": {"backend_tag": "digits", "num_replicas": 3},
    "pause_autoscaling": {"backend_tag": "digits"},
    "resume_autoscaling": {"backend_tag": "digits"},
    "create_endpoint": {
        "endpoint": "numbers",
        "route": "/numbers",
        "methods": ["POST"],
        "traffic": {"digits-v1": 0.9, "digits-v2": 0.1},
    },
    "delete_endpoint": {"endpoint": "numbers"},
    "set_traffic": {"endpoint": "numbers", "weights": {"digits-v1": 0.5, "digits-v2": 0.5}},
    "shadow_traffic": {"endpoint": "numbers", "backend_tag": "digits-v2", "proportion": 0.1},
    "set_endpoint_options": {"endpoint": "numbers", "options": {"relative_slo_ms": 500}},
    "set_capture": {"endpoint": "numbers", "share": 0.01, "bodies": True, "redact": ["$.user"]},
    "rollback": {"name": "digits", "to": 3},
    "start_rollout": {
        "name": "digits",
        "version": "v2",
        "replica_config": {"import_path": "digits:Digits"},
        "rollout": {"steps": ["shadow 100% 60s", "5%", "50%", "100%"]},
    },
    "control_rollout": {"name": "digits", "action": "abort", "reason": "answers look wrong"},
    "set_http_options": {"options": {"access_log": True}},
    "drain_host": {"host_id": "host-1"},
    "undrain_host": {"host_id": "host-1"},
    "shutdown": {"confirm": "everything"},
    "upload_code": {
        "digest": "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
        "page": 0,
        "pages": 1,
        "data": "Zm9v",
    },
    "restore": {"upload_id": "u1", "page": 0, "pages": 1, "data": "H4sIAAAA", "confirm": True},
    "get_deployment_info": {"name": "digits"},
    "list_deployments": {"limit": 100},
    "get_all_applications": {},
    "get_all_backends": {"limit": 100, "after": "default/digits"},
    "get_backend_config": {"backend_tag": "digits"},
    "get_all_endpoints": {},
    "get_http_config": {},
    "get_http_proxies": {},
    "get_hosts": {},
    "get_status": {"replicas": False},
    "get_autoscaling": {},
    "get_load": {},
    "get_snapshot": {},
    "get_events": {"limit": 20, "subject": "default/digits"},
    "get_history": {"limit": 20},
    "get_revisions": {"name": "digits"},
    "get_backup": {},
    "get_rollouts": {"name": "digits"},
    "get_captures": {},
    "get_schemas": {},
    "wait_for_goal": {"goal_id": "g12", "timeout_s": 30},
    "plan": {"verb": "scale", "request": {"backend_tag": "digits", "num_replicas": 5}},
}
"""One request for each verb."""

_ERRORS: Final[Mapping[str, str]] = {
    "not_found": """
        update_backend_config scale pause_autoscaling resume_autoscaling create_endpoint set_traffic shadow_traffic
        set_endpoint_options set_capture rollback start_rollout control_rollout get_rollouts drain_host undrain_host
        plan get_deployment_info get_backend_config
        get_revisions get_backup wait_for_goal
    """,
    "conflict": """
        deploy delete_deployment deploy_application delete_application create_backend delete_backend plan
        pause_autoscaling resume_autoscaling create_endpoint delete_endpoint set_traffic shadow_traffic rollback
        start_rollout control_rollout
    """,
    "limit_reached": "wait_for_goal",
    "store_unavailable": "get_history",
}
"""Verbs by the errors that are not every verb's, or every command's."""

_HEAD: Final = f"""\
# Admin API

{GENERATED}
Every verb is a request over NATS to `serve.admin.<verb>` with a JSON object as its body; the reply is JSON too.
`serve` is the subject prefix of the stack. Any NATS client can send them, with the credentials of the role `admin`:

```
nats --server nats://127.0.0.1:4222 --creds secrets/admin.creds request serve.admin.get_hosts '{{}}'
```

The leading controller replies. [JSON Schemas](../../libs/serve_common/serve_common/api/schemas.json) of every request
and reply are generated with this page; a stack has them too, as the reply to [`get_schemas`](#get_schemas).

- **Commands** change state and are idempotent: sending one again has the same result. A reply with a `goal_id`
  means that the change is recorded; [`wait_for_goal`](#wait_for_goal) tells when it has happened, or why not.
- **Queries** change nothing. Lists come in pages: at most `limit` items after the name `after`; a page with fewer
  than `limit` items is the last. A reply must fit one NATS message, 1 MiB by default.
- **Unknown fields** of requests are refused, and unknown verbs; that error names the verb that was probably meant.
  New fields of replies may appear at any time.
- The header `Muster-Principal` names the caller in the audit log; it is not verified.
- **Errors** have the headers `Nats-Service-Error` and `Nats-Service-Error-Code`, and an [ErrorView](#errorview) as
  their body. Every verb can fail with `bad_field`, `not_leading` and `internal`, and every command with
  `store_unavailable` and `limit_reached` too; [errors](errors.md) says what they mean and whether to try again.
"""


def _reply_structs() -> list[type[msgspec.Struct]]:
    """Structs of replies that have no page of their own, each once, in the order of their first use."""
    requests = {verb.request for verb in verbs()}
    found = dict.fromkeys(
        struct
        for kind in (DeploymentSpec, *(v.reply for v in verbs()), ErrorView)
        for struct in structs_within(kind)
    )
    return [struct for struct in found if struct not in configuration.STRUCTS and struct not in requests]


_LINKS: Final = {
    **{struct.__name__: f"configuration.md#{struct.__name__.lower()}" for struct in configuration.STRUCTS},
    **{struct.__name__: f"#{struct.__name__.lower()}" for struct in _reply_structs()},
}


def page() -> str:
    """The page."""
    commands = [verb for verb in verbs() if verb.is_command]
    queries = [verb for verb in verbs() if not verb.is_command]
    parts = [_HEAD]
    for title, some in (("Commands", commands), ("Queries", queries)):
        parts += [f"## {title}\n", *map(_section, some)]
    parts += ["## Types\n", *map(_type_section, _reply_structs())]
    return _with_verbs("\n".join(parts))


def _section(verb: Verb) -> str:
    example = json.dumps(EXAMPLES[verb.name])
    parts = [f"### {verb.name}\n", f"{class_doc(verb.request)}\n"]
    if verb.request.__struct_fields__:
        parts.append(field_table(verb.request, _LINKS, is_input=True))
    parts.append(f"Reply: {type_text(verb.reply, _LINKS)}.{_errors(verb.name)}\n")
    parts.append(f"```\nnats request serve.admin.{verb.name} '{example}'\n```\n")
    return "\n".join(parts)


def _errors(verb: str) -> str:
    codes = [f"`{code}`" for code, some in _ERRORS.items() if verb in some.split()]
    return f" Errors: {', '.join(codes)}." if codes else ""


def _type_section(struct: type[msgspec.Struct]) -> str:
    fields = field_table(struct, _LINKS, is_input=struct is DeploymentSpec)
    return f"### {struct.__name__}\n\n{class_doc(struct)}\n\n{fields}"


def _with_verbs(text: str) -> str:
    """Names of request classes become links to their verbs: that is what callers write."""
    by_class = {verb.request.__name__: verb.name for verb in verbs()}

    def link(found: re.Match[str]) -> str:
        verb = by_class.get(found[1])
        return found[0] if verb is None else f"[`{verb}`](#{verb})"

    return re.sub(r"`([A-Z][A-Za-z]+)`", link, text)


def schemas() -> str:
    """JSON Schemas of every request and reply, by verb."""
    kinds = [*(verb.request for verb in verbs()), *(verb.reply for verb in verbs()), ErrorView]
    parts, definitions = msgspec.json.schema_components(
        [_plain(kind) for kind in kinds], ref_template="#/$defs/{name}"
    )
    for struct in {struct for kind in kinds for struct in structs_within(kind)}:
        _describe(definitions[struct.__name__], struct)
    requests, replies = parts[: len(VERBS)], parts[len(VERBS) : -1]
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Admin API of Muster",
        "description": "Requests to serve.admin.<verb> and their replies; written by `make docs`.",
        "verbs": {
            verb.name: {"request": request, "reply": reply}
            for verb, request, reply in zip(verbs(), requests, replies, strict=True)
        },
        "error": parts[-1],
        "$defs": dict(sorted(definitions.items())),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _plain(kind: Any) -> Any:
    """A type with the same schema and without `msgspec.Raw`, whose default msgspec cannot describe."""
    fields = (
        msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
    )
    if all(field.type is not msgspec.Raw for field in fields):
        return kind
    plain: Iterable[Any] = [
        (field.encode_name, dict[str, Any], {})
        if field.type is msgspec.Raw
        else (field.encode_name, field.type)
        for field in fields
    ]
    return msgspec.defstruct(kind.__name__, plain, kw_only=True, forbid_unknown_fields=True)


def _describe(definition: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    definition["description"] = class_doc(struct)
    for field in fields_of(struct):
        known = definition["properties"][field.name]
        known["description"] = field.meaning
        limits = RANGES.get((struct.__name__, field.name))
        if limits is not None:
            known["minimum"], known["maximum"] = limits
