"""The forms of changes: which fields each has, filled in from the present state, in words that explain them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from serve_common.api.commands import Deploy
from serve_common.api.views import BackendConfigView, EndpointView, RevisionView
from serve_common.config.backend import BackendConfig, EndpointOptions, HttpOptions
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import BadField
from serve_common.names import deployment_tag, short_name
from serve_console.core.form_values import is_on, pretty_json
from serve_console.core.system import System

CHOICES_MAX: Final = 500
"""Most names in a list to choose from; beyond that a name is typed."""
SPLIT_MAX: Final = 24
"""Most backends that a split proposes."""
COMMON: Final = (
    ("max_concurrent_queries", "Concurrent requests"),
    ("max_queued_requests", "Queue of each proxy"),
    ("graceful_shutdown_timeout_s", "Time to stop (s)"),
    ("health_check_period_s", "Health checks every (s)"),
    ("health_check_timeout_s", "Time for a check (s)"),
    ("start_timeout_s", "Time to start (s)"),
)
"""Fields of `BackendConfig` with an input of their own; all others are edited as JSON."""
HTTP_NUMBERS: Final = (
    ("request_timeout_s", "Request timeout (s)"),
    ("body_bytes_max", "Largest body (bytes)"),
    ("header_timeout_s", "Time for a request's head (s)"),
    ("body_rate_min", "Slowest body (bytes/s)"),
    ("keep_alive_timeout_s", "Idle connections close after (s)"),
)
ACTIONS: Final = (
    ("pause", "Pause: stay at this step"),
    ("resume", "Resume"),
    ("step", "Let this step pass"),
    ("promote", "Promote: go to the last step"),
    ("abort", "Abort: back to the old version"),
)

Kind = Literal["text", "number", "textarea", "select", "checkbox", "file"]


class FormField(msgspec.Struct, frozen=True, kw_only=True):
    """One input of a form."""

    name: str
    label: str
    kind: Kind = "text"
    value: str = ""
    hint: str = ""
    options: tuple[tuple[str, str], ...] = ()
    is_required: bool = False
    error: str = ""
    group: Literal["", "more"] = ""
    """``more``: folded away at first."""
    row: str = ""
    """Inputs beside one another with the same name share a row; empty: it has one of its own."""
    attributes: dict[str, str] = {}
    """Further attributes of the element."""


class FormContext(msgspec.Struct, frozen=True, kw_only=True):
    """What forms are filled in from."""

    system: System
    subject: str
    """Full tag, name or id of the object that is changed; empty: not chosen yet, or there is none."""
    typed: Mapping[str, str]
    """What was typed, or stands in the address; it goes before the present state."""
    backends: tuple[str, ...] = ()
    """Tags of all backends."""
    present: BackendConfigView | None = None
    revisions: tuple[RevisionView, ...] = ()
    http: HttpOptions | None = None
    deployed: Deploy | None = None
    """An earlier deploy to start from; None: what is deployed now."""
    apps_dir: str = ""
    """Directory of applications as replica hosts see it."""

    def value(self, name: str, present: Any = "") -> str:
        """The text of a field: what was typed, or else the present value."""
        if name in self.typed:
            return self.typed[name]
        return "" if present is None else str(present)

    @property
    def endpoint(self) -> EndpointView | None:
        """The endpoint that is changed."""
        return self.system.endpoints.get(self.subject)


def field(context: FormContext, name: str, label: str, present: Any = "", **settings: Any) -> FormField:
    """An input that shows what was typed, or else the present value."""
    return FormField(name=name, label=label, value=context.value(name, present), **settings)


def number(context: FormContext, name: str, label: str, present: Any = "", **settings: Any) -> FormField:
    """An input for a number; ``min`` and ``max`` are attributes, any step is allowed unless it is set."""
    if isinstance(present, float) and present == int(present):
        present = int(present)
    attributes = {"step": "any", "inputmode": "decimal", **settings.pop("attributes", {})}
    return field(context, name, label, present, kind="number", attributes=attributes, **settings)


def checkbox(context: FormContext, name: str, label: str, hint: str = "", **settings: Any) -> FormField:
    """A box that is not checked at first."""
    value = "true" if is_on(context.value(name)) else ""
    return FormField(name=name, label=label, kind="checkbox", hint=hint, value=value, **settings)


def json_area(context: FormContext, name: str, label: str, present: Any = None, **settings: Any) -> FormField:
    """An area for JSON; None is empty."""
    text = "" if present is None else pretty_json(present)
    attributes = {"rows": str(min(18, max(3, text.count("\n") + 2))), "spellcheck": "false"}
    return field(context, name, label, text, kind="textarea", attributes=attributes, **settings)


def choices(tags: Iterable[str], chosen: str = "") -> tuple[tuple[str, str], ...]:
    """Names to choose from, with the one that was typed even if nothing has it."""
    names = sorted(
        {*tags, *([chosen] if chosen else [])}, key=lambda tag: (tag.partition("/")[0] != "default", tag)
    )
    return (("", "Choose\N{HORIZONTAL ELLIPSIS}"), *((tag, short_name(tag)) for tag in names))


def find_tag(text: str) -> str:
    """The full tag of a name as people type it; the text itself where it is no name."""
    try:
        return deployment_tag(text)
    except BadField:
        return text


def scale_fields(context: FormContext) -> list[FormField]:
    """The number of replicas."""
    view = context.system.find_deployment(context.subject)
    scaled = context.system.autoscaling.get(context.subject)
    config = view.backend_config if view is not None else context.present and context.present.backend_config
    present = scaled.num_replicas if scaled is not None else config.num_replicas if config else ""
    hint = "0 stops all of them." if present == "" else f"{present} at present; 0 stops all of them."
    if scaled is not None:
        hint = (
            f"{present} at present. It must be between {scaled.min_replicas} and {scaled.max_replicas}; autoscaling "
            "then pauses until it is resumed."
        )
    limits = {"step": "1", "min": "0", "inputmode": "numeric"}
    return [
        number(
            context,
            "num_replicas",
            "Number of replicas",
            present,
            hint=hint,
            is_required=True,
            attributes=limits,
        )
    ]


def split_fields(context: FormContext, prefix: str, present: Mapping[str, float]) -> list[FormField]:
    """One field for each backend, in percent."""
    typed = [name.removeprefix(f"{prefix}.") for name in context.typed if name.startswith(f"{prefix}.")]
    application = context.subject.partition("/")[0]
    others = sorted(
        filter(_is_lasting, context.backends), key=lambda tag: (tag.partition("/")[0] != application, tag)
    )
    tags = list(dict.fromkeys([*present, *typed, *others]))[:SPLIT_MAX]
    return [
        number(
            context,
            f"{prefix}.{tag}",
            f"{short_name(tag)} (%)",
            round(present[tag] * 100, 8) if tag in present else "",
            row="numbers",
            attributes={"min": "0", "max": "100"},
        )
        for tag in tags
    ]


def _is_lasting(tag: str) -> bool:
    """Whether a backend is more than a part of a rollout that is under way."""
    return not tag.endswith(("--canary", "--baseline"))


def traffic_fields(context: FormContext) -> list[FormField]:
    """The share of each backend."""
    present = {} if context.endpoint is None else dict(context.endpoint.traffic)
    return split_fields(context, "weights", present)


def shadow_fields(context: FormContext) -> list[FormField]:
    """The backend that gets copies, and the share."""
    chosen = find_tag(context.value("backend_tag")) if context.value("backend_tag") else ""
    shadows = {} if context.endpoint is None else context.endpoint.shadows
    present = round(shadows[chosen] * 100, 8) if chosen in shadows else ""
    copied = ", ".join(f"{short_name(tag)} {share * 100:g} %" for tag, share in shadows.items())
    hint = f"At present: {copied}." if copied else "Nothing is copied at present."
    tags = [tag for tag in {*context.backends, *shadows} if tag != context.subject]
    return [
        FormField(
            name="backend_tag", label="Copies go to", kind="select", value=chosen, options=choices(tags, chosen),
            is_required=True, hint="Its responses and errors are dropped; callers notice nothing.",
        ),
        number(
            context, "proportion", "Share of the requests (%)", present, is_required=True,
            hint=f"0 ends the copying. {hint}", attributes={"min": "0", "max": "100"},
        ),
    ]  # fmt: skip


def rollback_fields(context: FormContext) -> list[FormField]:
    """The revision to return to, the newest first."""
    options = [("", "The last that succeeded before the current one")]
    for view in sorted(context.revisions, key=lambda view: -view.revision):
        parts = [
            f"Revision {view.revision}",
            view.version or "unversioned",
            view.import_path,
            view.status.value,
        ]
        if view.is_current:
            parts.append("current")
        options.append((str(view.revision), " \N{MIDDLE DOT} ".join(parts)))
    chosen = context.value("to")
    if chosen and chosen not in dict(options):
        options.append((chosen, f"Version {chosen}"))
    hint = "Code, configuration, route and methods come back; the number of replicas stays as it is."
    return [
        FormField(
            name="to", label="Return to", kind="select", value=chosen, options=tuple(options), hint=hint
        )
    ]


def start_rollout_fields(context: FormContext) -> list[FormField]:
    """The new version, and the steps in which it takes over."""
    present = context.present
    code = None if present is None else present.replica_config
    rollout = present.backend_config.rollout if present is not None else None
    steps = ", ".join((rollout or RolloutConfig()).steps)
    return [
        field(
            context, "version", "Version", row="numbers",
            hint=f"A name for the new code{f'; now {present.version}' if present and present.version else ''}.",
        ),
        field(
            context, "import_path", "Import path", code.import_path if code else "", row="numbers",
            hint="module:attribute of the new code.",
        ),
        field(context, "app_dir", "Directory", code.app_dir if code else "", hint="As the replica hosts see it."),
        field(
            context, "steps", "Steps", steps,
            hint="[shadow] N% [DURATION] [wait], with commas between. The last one is 100%.",
        ),
        json_area(context, "replica_config", "Other changes of the code (JSON)", group="more",
                  hint='Fields of ReplicaConfig, such as {"init_kwargs": {"size": 2}}.'),
        json_area(context, "backend_config", "Other changes of the configuration (JSON)", group="more",
                  hint='Fields of BackendConfig, such as {"user_config": {"threshold": 0.9}}.'),
        json_area(context, "rollout_fields", "Limits (JSON)", group="more",
                  hint='Other fields of the rollout, such as {"max_latency_ratio": 2}.'),
        checkbox(context, "again", "Try again a version that was aborted a short time ago", group="more"),
    ]  # fmt: skip


def control_fields(context: FormContext) -> list[FormField]:
    """What becomes of a rollout."""
    view = context.system.rollouts.get(context.subject)
    hint = "There is no rollout under way."
    if view is not None and not view.outcome:
        hint = f"It is {view.state} at step {view.step + 1} of {len(view.steps)}: {view.steps[view.step]}."
    return [
        FormField(name="action", label="What to do", kind="select", value=context.value("action"), options=ACTIONS,
                  hint=hint),
        field(context, "reason", "Reason", hint="For the history, when it is aborted."),
    ]  # fmt: skip


def backend_config_fields(context: FormContext) -> list[FormField]:
    """The most used fields of the configuration, and all others as JSON."""
    plain = {} if context.present is None else msgspec.to_builtins(context.present.backend_config)
    common = {name for name, _ in COMMON}
    others = {name: value for name, value in plain.items() if name not in common | {"user_config"}}
    return [
        *(number(context, name, label, plain.get(name, ""), row="numbers", is_required=True) for name, label in COMMON),
        json_area(context, "user_config", "User configuration (JSON)", plain.get("user_config"),
                  hint="Passed to reconfigure() of every replica, without a restart."),
        json_area(context, "config", "All other fields (JSON)", others or None,
                  hint="Only what is changed here is sent; docs/reference/configuration.md explains each field."),
        checkbox(context, "skips_rollout", "Reconfigure all replicas at once", "Although `rollout` is set.",
                 group="more"),
    ]  # fmt: skip


def endpoint_option_fields(context: FormContext, present: EndpointOptions | None = None) -> list[FormField]:
    """Options of an endpoint."""
    options = present or (EndpointOptions() if context.endpoint is None else context.endpoint.options)
    formats = (("problem", "Problem details (JSON)"), ("text", "Plain text, as Ray Serve"))
    chosen = context.value("error_format", options.error_format.value)
    return [
        field(context, "shard_key_header", "Header that pins requests to a replica", options.shard_key_header,
              hint="Empty: none."),
        field(context, "backend_header", "Header that selects a backend", options.backend_header, hint="Empty: none."),
        number(context, "relative_slo_ms", "Deadline of a request (ms)", options.relative_slo_ms,
               hint="Empty: the request timeout of all proxies."),
        FormField(name="error_format", label="Form of errors", kind="select", value=chosen, options=formats),
    ]  # fmt: skip


def http_fields(context: FormContext) -> list[FormField]:
    """Options of all proxies."""
    options = context.http or HttpOptions()
    log = context.value("access_log", str(options.access_log).lower())
    return [
        *(
            number(context, name, label, getattr(options, name), row="numbers", is_required=True)
            for name, label in HTTP_NUMBERS
        ),
        FormField(name="access_log", label="Access log", kind="select", value="true" if is_on(log) else "false",
                  options=(("false", "Off"), ("true", "One line for each request")), row="numbers"),
        field(context, "root_path", "Path that a load balancer removes", options.root_path, hint="Empty: none."),
        field(context, "middlewares", "Middlewares", "\n".join(options.middlewares), kind="textarea",
              hint="module:attribute, one a line, the outermost first.", attributes={"rows": "3"}),
    ]  # fmt: skip


def create_endpoint_fields(context: FormContext) -> list[FormField]:
    """A name, a route, and the share of each backend."""
    return [
        field(context, "endpoint", "Name", is_required=True, hint="Such as trial, or shop/trial."),
        field(context, "route", "Route", hint="Such as /trial. Empty: over NATS only."),
        field(context, "methods", "Methods", "GET,POST"),
        *split_fields(context, "traffic", {}),
    ]


def create_backend_fields(context: FormContext) -> list[FormField]:
    """Code and number of replicas."""
    return [
        field(context, "backend_tag", "Name", is_required=True, hint="No deployment may have it."),
        field(context, "import_path", "Import path", is_required=True, hint="Such as digits:Digits."),
        field(context, "app_dir", "Directory", context.apps_dir, hint="As the replica hosts see it."),
        number(context, "num_replicas", "Number of replicas", BackendConfig().num_replicas, row="numbers"),
        number(context, "num_cpus", "CPUs of each", 1, row="numbers"),
        json_area(context, "replica_config", "Other fields of ReplicaConfig (JSON)", group="more"),
        json_area(context, "backend_config", "Other fields of BackendConfig (JSON)", group="more"),
    ]


def application_fields(context: FormContext) -> list[FormField]:
    """The whole application as JSON."""
    example = {
        "name": "shop",
        "route_prefix": "/shop",
        "ingress": "front",
        "deployments": [
            {"name": "front", "replica_config": {"import_path": "shop:Front", "app_dir": context.apps_dir}},
        ],
    }
    hint = "The fields of deploy_application. Deployments that are left out are deleted."
    return [json_area(context, "application", "Application (JSON)", example, is_required=True, hint=hint)]


def force_kill_fields(context: FormContext) -> list[FormField]:
    """Whether requests in flight are finished."""
    return [checkbox(context, "force_kill", "Kill its replicas at once", "Requests in flight are lost.")]


def no_fields(_context: FormContext) -> list[FormField]:
    """Nothing but the object itself."""
    return []


def with_errors(fields: Sequence[FormField], errors: Mapping[str, str]) -> list[FormField]:
    """The fields with what is wrong with them."""
    return [msgspec.structs.replace(each, error=errors.get(each.name, each.error)) for each in fields]
