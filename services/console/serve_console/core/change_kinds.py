"""All changes that the console makes: what each is called, its form, and how the form becomes a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from serve_common.api import commands as c
from serve_common.config.backend import (
    EndpointOptions,
    HttpOptions,
    check_endpoint_options,
    check_http_options,
    merged,
)
from serve_common.errors import BadField
from serve_console.core import change_forms as forms
from serve_console.core.change_forms import FormContext, FormField
from serve_console.core.deploy_form import deploy_fields, parse_create_backend, parse_deploy
from serve_console.core.form_values import FieldsWrong, FormValues, find_field, get_changed, whole

_HUGE: Final = 1e15
_DIGITS_MAX: Final = 18
Need = Literal["backends", "present", "revisions", "http"]
Choice = Literal["", "deployment", "backend", "endpoint", "application", "host"]


class ChangeKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of change."""

    title: str
    """What it does, as the heading of its page."""
    intro: str
    """What happens, and what does not."""
    parse: Callable[[FormValues], c.Command[Any]]
    """Raises `FieldsWrong`."""
    fields: Callable[[FormContext], list[FormField]] = forms.no_fields
    subject: str = ""
    """The field that names the object that is changed; empty: the form asks for it, or there is none."""
    choice: Choice = ""
    """What the object is, to choose one where none is named."""
    needs: frozenset[Need] = frozenset()
    """What the form is filled in from, beyond the system."""
    link: str = ""
    """What stands between the title and the name of the object, such as `` of``."""
    deletes: bool = False
    """Whether it cannot be undone, so that the name is typed first."""
    was: Callable[[FormContext], Any] | None = None
    """The values that the form shows, to send only what was changed."""

    def heading(self, name: str) -> str:
        """The title with the object's name; empty: without one."""
        return f"{self.title}{self.link} {name}" if name else self.title


def _split(values: FormValues, prefix: str) -> dict[str, float]:
    weights = values.shares(prefix)
    values.finish()
    return weights


def _scale(values: FormValues) -> c.Scale:
    tag, replicas = values.tag("backend_tag"), values.replicas("num_replicas")
    if replicas is None:
        values.required("num_replicas")
    values.finish()
    return c.Scale(backend_tag=tag, num_replicas=replicas or 0)


def _set_traffic(values: FormValues) -> c.SetTraffic:
    return c.SetTraffic(endpoint=values.tag("endpoint"), weights=_split(values, "weights"))


def _shadow_traffic(values: FormValues) -> c.ShadowTraffic:
    endpoint, tag, share = values.tag("endpoint"), values.tag("backend_tag"), values.share("proportion")
    if share is None:
        values.required("proportion")
    values.finish()
    return c.ShadowTraffic(endpoint=endpoint, backend_tag=tag, proportion=share or 0.0)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX


def _rollback(values: FormValues) -> c.Rollback:
    name, to = values.tag("name"), values.text("to")
    values.finish()
    return c.Rollback(name=name, to=int(to) if _is_number(to) else to or None)


def _start_rollout(values: FormValues) -> c.StartRollout:
    name, version = values.tag("name"), values.optional("version")
    code, config = values.json_object("replica_config"), values.json_object("backend_config")
    limits, steps = values.json_object("rollout_fields"), values.comma_list("steps")
    was = _parse_was(values)
    if values.text("import_path") and values.text("import_path") != was.get("import_path"):
        code = {"import_path": values.text("import_path"), "code": "", **code}
    if values.text("app_dir") and values.text("app_dir") != was.get("app_dir"):
        code["app_dir"] = values.text("app_dir")
    if steps and steps != was.get("steps"):
        limits["steps"] = steps
    values.finish()
    return c.StartRollout(
        name=name,
        version=version,
        replica_config=code,
        backend_config=config,
        rollout_fields=limits,
        again=values.is_on("again"),
    )


def _was_code(context: FormContext) -> dict[str, Any]:
    if context.present is None:
        return {}
    code, rollout = context.present.replica_config, context.present.backend_config.rollout
    steps = [] if rollout is None else list(rollout.steps)
    return {"import_path": code.import_path, "app_dir": code.app_dir, "steps": steps}


def _control_rollout(values: FormValues) -> c.ControlRollout:
    name, action = values.tag("name"), values.required("action")
    if action and action not in {each.value for each in c.RolloutAction}:
        values.errors["action"] = f"{action[:40]!r} is nothing that can be done with a rollout"
    step = values.integer("step", 0, 1000)
    values.finish()
    return c.ControlRollout(
        name=name, action=c.RolloutAction(action), reason=values.text("reason")[:1000], step=step
    )


def _parse_was(values: FormValues) -> dict[str, Any]:
    try:
        return msgspec.json.decode(values.typed.get("was") or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise FieldsWrong({"": "The form was changed on its way; load it again."}) from error


def _require_changed(values: FormValues, now: dict[str, Any]) -> dict[str, Any]:
    changed = get_changed(_parse_was(values), now)
    values.finish()
    if not changed:
        raise FieldsWrong({"": "Nothing is changed yet: all values are the present ones."})
    return changed


def _update_backend_config(values: FormValues) -> c.UpdateBackendConfig:
    tag, now = values.tag("backend_tag"), values.json_object("config")
    for name, _ in forms.COMMON:
        number = values.number(name, -_HUGE, _HUGE)
        if number is not None:
            now[name] = whole(number)
    if "user_config" in values.typed:
        now["user_config"] = values.json("user_config")
    changed = _require_changed(values, now)
    return c.UpdateBackendConfig(backend_tag=tag, config=changed, skips_rollout=values.is_on("skips_rollout"))


def _was_backend_config(context: FormContext) -> Any:
    return {} if context.present is None else msgspec.to_builtins(context.present.backend_config)


def _set_endpoint_options(values: FormValues) -> c.SetEndpointOptions:
    tag = values.tag("endpoint")
    now: dict[str, Any] = {
        name: values.text(name) for name in ("shard_key_header", "backend_header", "error_format")
    }
    deadline = values.number("relative_slo_ms", 1, 86_400_000)
    now["relative_slo_ms"] = None if deadline is None else whole(deadline)
    changed = _require_changed(values, now)
    try:
        check_endpoint_options(merged(EndpointOptions(), changed, "options"))
    except BadField as error:
        raise _named(error, values) from error
    return c.SetEndpointOptions(endpoint=tag, options=changed)


def _was_endpoint_options(context: FormContext) -> Any:
    return {} if context.endpoint is None else msgspec.to_builtins(context.endpoint.options)


def _set_http_options(values: FormValues) -> c.SetHttpOptions:
    now: dict[str, Any] = {}
    for name, _ in forms.HTTP_NUMBERS:
        number = values.number(name, -_HUGE, _HUGE)
        if number is not None:
            now[name] = whole(number)
    now["access_log"] = values.is_on("access_log")
    now["root_path"] = values.text("root_path")
    now["middlewares"] = values.text("middlewares").split()
    changed = _require_changed(values, now)
    try:
        check_http_options(merged(HttpOptions(), changed, "options"))
    except BadField as error:
        raise _named(error, values) from error
    return c.SetHttpOptions(options=changed)


def _was_http(context: FormContext) -> Any:
    return {} if context.http is None else msgspec.to_builtins(context.http)


def _named(error: BadField, values: FormValues) -> FieldsWrong:
    return FieldsWrong({find_field(list(values.typed), error.field): error.reason})


def _create_endpoint(values: FormValues) -> c.CreateEndpoint:
    tag, route = values.tag("endpoint"), values.route("route")
    methods = [method.upper() for method in values.comma_list("methods")]
    return c.CreateEndpoint(endpoint=tag, route=route, methods=methods, traffic=_split(values, "traffic"))


def _deploy_application(values: FormValues) -> c.DeployApplication:
    found = values.json_object("application")
    values.required("application")
    values.finish()
    found.pop("request_id", None)
    try:
        return msgspec.convert(found, c.DeployApplication)
    except msgspec.ValidationError as error:
        raise FieldsWrong({"application": str(error)}) from error


def _of_tag(kind: Callable[..., c.Command[Any]], field: str) -> Callable[[FormValues], c.Command[Any]]:
    def parse(values: FormValues) -> c.Command[Any]:
        tag = values.tag(field)
        values.finish()
        return kind(**{field: tag})

    return parse


def _of_name(kind: Callable[..., c.Command[Any]], field: str) -> Callable[[FormValues], c.Command[Any]]:
    def parse(values: FormValues) -> c.Command[Any]:
        name = values.plain_name(field)
        values.finish()
        return kind(**{field: name})

    return parse


def _delete_backend(values: FormValues) -> c.DeleteBackend:
    tag = values.tag("backend_tag")
    values.finish()
    return c.DeleteBackend(backend_tag=tag, force_kill=values.is_on("force_kill"))


CHANGES: Final[Mapping[str, ChangeKind]] = {
    "scale": ChangeKind(
        title="Scale", subject="backend_tag", choice="backend", parse=_scale, fields=forms.scale_fields,
        needs=frozenset({"present"}), intro="Replicas that stay are not touched.",
    ),
    "set_traffic": ChangeKind(
        title="Split traffic", link=" of", subject="endpoint", choice="endpoint", parse=_set_traffic,
        fields=forms.traffic_fields, needs=frozenset({"backends"}),
        intro="The share of the endpoint's requests that each backend gets. Empty: none. Together they are 100 %.",
    ),
    "shadow_traffic": ChangeKind(
        title="Copy traffic", link=" of", subject="endpoint", choice="endpoint", parse=_shadow_traffic,
        fields=forms.shadow_fields, needs=frozenset({"backends"}),
        intro="Copies a share of the endpoint's requests to another backend.",
    ),
    "rollback": ChangeKind(
        title="Roll back", subject="name", choice="backend", parse=_rollback, fields=forms.rollback_fields,
        needs=frozenset({"revisions"}), intro="Returns to an earlier revision.",
    ),
    "start_rollout": ChangeKind(
        title="Start a rollout", link=" of", subject="name", choice="backend", parse=_start_rollout,
        fields=forms.start_rollout_fields, needs=frozenset({"present"}), was=_was_code,
        intro="The new version takes over step by step, compared with the old one, and is aborted where it is worse.",
    ),
    "control_rollout": ChangeKind(
        title="Change a rollout", link=" of", subject="name", choice="backend", parse=_control_rollout,
        fields=forms.control_fields, intro="Pauses, resumes, promotes or aborts it, or lets its step pass.",
    ),
    "pause_autoscaling": ChangeKind(
        title="Pause autoscaling", link=" of", subject="backend_tag", choice="backend",
        parse=_of_tag(c.PauseAutoscaling, "backend_tag"),
        intro="The number of replicas stays as it is, across deploys too, until autoscaling is resumed.",
    ),
    "resume_autoscaling": ChangeKind(
        title="Resume autoscaling", link=" of", subject="backend_tag", choice="backend",
        parse=_of_tag(c.ResumeAutoscaling, "backend_tag"),
        intro="The number of replicas follows the load again, from what it is now.",
    ),
    "drain_host": ChangeKind(
        title="Drain", subject="host_id", choice="host", parse=_of_name(c.DrainHost, "host_id"),
        intro="Moves every replica off the host, replacements first. Nothing is placed there until an undrain.",
    ),
    "undrain_host": ChangeKind(
        title="Undrain", subject="host_id", choice="host", parse=_of_name(c.UndrainHost, "host_id"),
        intro="The host takes replicas again. Those that run elsewhere by now stay there.",
    ),
    "delete_deployment": ChangeKind(
        title="Delete deployment", subject="name", choice="deployment", deletes=True,
        parse=_of_tag(c.DeleteDeployment, "name"),
        intro="Its replicas finish their requests and stop; its route goes.",
    ),
    "delete_application": ChangeKind(
        title="Delete application", subject="name", choice="application", deletes=True,
        parse=_of_name(c.DeleteApplication, "name"), intro="All its deployments are deleted, and its route goes.",
    ),
    "delete_endpoint": ChangeKind(
        title="Delete endpoint", subject="endpoint", choice="endpoint", deletes=True,
        parse=_of_tag(c.DeleteEndpoint, "endpoint"), intro="Its route goes; its backends stay.",
    ),
    "delete_backend": ChangeKind(
        title="Delete backend", subject="backend_tag", choice="backend", deletes=True, parse=_delete_backend,
        fields=forms.force_kill_fields, intro="Refused while an endpoint sends or copies requests to it.",
    ),
    "update_backend_config": ChangeKind(
        title="Configure", subject="backend_tag", choice="backend", parse=_update_backend_config,
        fields=forms.backend_config_fields, needs=frozenset({"present"}), was=_was_backend_config,
        intro="Changes how replicas are treated, without replacing one. The next deploy sets all of it again.",
    ),
    "set_endpoint_options": ChangeKind(
        title="Options of endpoint", subject="endpoint", choice="endpoint", parse=_set_endpoint_options,
        fields=forms.endpoint_option_fields, was=_was_endpoint_options,
        intro="Applied by every proxy while it serves. No replica is touched.",
    ),
    "set_http_options": ChangeKind(
        title="HTTP options", parse=_set_http_options, fields=forms.http_fields, needs=frozenset({"http"}),
        was=_was_http, intro="Applied by all proxies while they run.",
    ),
    "create_endpoint": ChangeKind(
        title="Create an endpoint", parse=_create_endpoint, fields=forms.create_endpoint_fields,
        needs=frozenset({"backends"}), intro="Sends requests to backends. A deployment has one of its own.",
    ),
    "create_backend": ChangeKind(
        title="Create a backend", parse=parse_create_backend, fields=forms.create_backend_fields,
        intro="Code with replicas but no route, for several versions at a time.",
    ),
    "deploy": ChangeKind(
        title="Deploy", parse=parse_deploy, fields=deploy_fields,
        intro="Creates or updates a deployment. Where no replica of the new version starts, the old one serves on.",
    ),
    "deploy_application": ChangeKind(
        title="Deploy an application", parse=_deploy_application, fields=forms.application_fields,
        intro="Several deployments as one: they succeed together or go back together.",
    ),
}  # fmt: skip
"""By verb."""
