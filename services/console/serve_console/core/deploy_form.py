"""The form of a deploy, filled in from what runs, and the command that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from serve_common.api.commands import CreateBackend, Deploy
from serve_common.config.backend import (
    METHODS,
    BackendConfig,
    EndpointOptions,
    RayActorOptions,
    ReplicaConfig,
    check_backend_config,
    check_endpoint_options,
    check_replica_config,
    merged,
)
from serve_common.errors import BadField
from serve_common.names import short_name
from serve_console.core.change_forms import FormContext, FormField, checkbox, field, json_area, number
from serve_console.core.form_values import FieldsWrong, FormValues, find_field

MIB: Final = 1024 * 1024
ARCHIVE_FIELD: Final = "archive"
_OWN_FIELDS: Final = frozenset({"num_replicas", "user_config"})
"""Fields of `BackendConfig` with inputs of their own."""


def find_deploy(context: FormContext) -> Deploy:
    """What the form starts from: an earlier deploy, what runs now, or nothing but defaults."""
    if context.deployed is not None:
        return context.deployed
    view = context.system.find_deployment(context.subject)
    if view is None:
        return Deploy(name="", replica_config=ReplicaConfig(import_path="", app_dir=context.apps_dir))
    return Deploy(
        name=view.name,
        replica_config=view.replica_config,
        backend_config=view.backend_config,
        route_prefix=view.route_prefix,
        methods=view.methods,
        endpoint_options=view.endpoint_options,
    )


def deploy_fields(context: FormContext) -> list[FormField]:
    """All inputs. ``source`` among the typed values chooses between a mounted and a packaged app."""
    base = find_deploy(context)
    code, config = base.replica_config, base.backend_config
    options = code.ray_actor_options
    limits = config.autoscaling_config
    whole = {"step": "1", "inputmode": "numeric"}
    memory = round(options.memory / MIB) if options.memory else ""
    environment = options.runtime_env.get("env_vars", {})
    lines = "\n".join(f"{name}={value}" for name, value in environment.items())
    return [
        field(context, "name", "Name", short_name(base.name), is_required=True, row="name",
              hint="digits, or shop/digits."),
        field(context, "version", "Version", base.version, row="name",
              hint="A new name for new code; with the present one replicas stay."),
        field(context, "import_path", "Import path", code.import_path, is_required=True,
              hint="module:attribute of a class or function, such as digits:Digits."),
        *_source_fields(context, code),
        field(context, "route_prefix", "Route", base.route_prefix, row="route",
              hint="Such as /digits. Empty: over NATS only."),
        number(context, "num_replicas", "Number of replicas", config.num_replicas, row="route",
               hint="Ignored with autoscaling.", attributes=whole),
        number(context, "min_replicas", "Autoscaling from", None if limits is None else limits.min_replicas,
               row="autoscaling", hint="Empty: a fixed number.", attributes=whole),
        number(context, "max_replicas", "Autoscaling to", None if limits is None else limits.max_replicas,
               row="autoscaling", attributes=whole),
        number(context, "num_cpus", "CPUs of each", options.num_cpus, row="resources"),
        number(context, "num_gpus", "GPUs of each", options.num_gpus, row="resources"),
        number(context, "memory_mib", "Memory of each (MiB)", memory, row="resources", hint="Empty: none is reserved."),
        json_area(context, "user_config", "User configuration (JSON)", config.user_config,
                  hint="Passed to reconfigure() of every replica."),
        field(context, "methods", "HTTP methods", "" if set(base.methods) == set(METHODS) else ",".join(base.methods),
              group="more", hint="With commas between. Empty: all."),
        field(context, "env", "Environment variables", lines, kind="textarea", group="more",
              hint="NAME=value, one a line.", attributes={"rows": "3", "spellcheck": "false"}),
        json_area(context, "init_kwargs", "Arguments of the constructor (JSON)", code.init_kwargs or None, group="more",
                  hint='By name, such as {"size": 2}.'),
        json_area(context, "backend_config", "Other fields of BackendConfig (JSON)", _get_others(config), group="more",
                  hint="What is left out has its default."),
        json_area(context, "replica_config", "Other fields of ReplicaConfig (JSON)", _get_other_code(code),
                  group="more"),
        json_area(context, "endpoint_options", "Options of the endpoint (JSON)",
                  _get_options(base.endpoint_options), group="more"),
        checkbox(context, "skips_rollout", "Replace the old version at once", "Although `rollout` is set.",
                 group="more"),
    ]  # fmt: skip


def _source_fields(context: FormContext, code: ReplicaConfig) -> list[FormField]:
    if context.value("source") != "packaged":
        hint = "As the replica hosts see it; code there is imported, nothing is uploaded."
        return [field(context, "app_dir", "Directory", code.app_dir or context.apps_dir, hint=hint)]
    digest = context.value("working_dir", code.working_dir)
    hint = "A .zip of at most 32 MiB with the modules; it becomes the working directory of every replica."
    if digest:
        hint = f"The archive {digest[:12]}… is uploaded already; choose a file only to replace it."
    accept = {"accept": ".zip,application/zip"}
    return [
        FormField(
            name=ARCHIVE_FIELD,
            label="Archive",
            kind="file",
            hint=hint,
            is_required=not digest,
            attributes=accept,
        )
    ]


def _get_others(config: BackendConfig) -> dict[str, Any] | None:
    default, plain = BackendConfig(), msgspec.to_builtins(config)
    return {
        name: value
        for name, value in plain.items()
        if name not in _OWN_FIELDS and getattr(config, name) != getattr(default, name)
    } or None


def _get_other_code(code: ReplicaConfig) -> dict[str, Any] | None:
    """What no input shows: arguments by position, uploaded code, resources, packages."""
    options = code.ray_actor_options
    environment = {name: value for name, value in options.runtime_env.items() if name != "env_vars"}
    rest = msgspec.structs.replace(options, num_cpus=1.0, num_gpus=0.0, memory=0.0, runtime_env=environment)
    plain = msgspec.to_builtins(code)
    found = {name: plain[name] for name in ("code", "py_modules", "init_args") if plain[name]}
    if rest != RayActorOptions():
        found["ray_actor_options"] = msgspec.to_builtins(rest)
    return found or None


def _get_options(options: EndpointOptions) -> dict[str, Any] | None:
    default, plain = EndpointOptions(), msgspec.to_builtins(options)
    return {
        name: value for name, value in plain.items() if getattr(options, name) != getattr(default, name)
    } or None


def parse_deploy(values: FormValues) -> Deploy:
    """The command of the form. Raises `FieldsWrong`."""
    name, version = values.tag("name"), values.optional("version")
    replica_config, backend_config = parse_configs(values)
    options = values.json_object("endpoint_options")
    route = values.route("route_prefix")
    methods = [method.upper() for method in values.comma_list("methods")]
    values.finish()
    return Deploy(
        name=name,
        version=version,
        route_prefix=route,
        methods=methods or list(METHODS),
        replica_config=replica_config,
        backend_config=backend_config,
        endpoint_options=_merge_options(options, values),
        skips_rollout=values.is_on("skips_rollout"),
    )


def _merge_options(options: dict[str, Any], values: FormValues) -> EndpointOptions:
    try:
        return check_endpoint_options(
            merged(EndpointOptions(), options, "endpoint_options"), "endpoint_options"
        )
    except BadField as error:
        raise _name_field(error, values) from error


def parse_create_backend(values: FormValues) -> CreateBackend:
    """The command of the form. Raises `FieldsWrong`."""
    tag = values.tag("backend_tag")
    replica_config, backend_config = parse_configs(values)
    return CreateBackend(backend_tag=tag, replica_config=replica_config, backend_config=backend_config)


def parse_configs(values: FormValues) -> tuple[ReplicaConfig, BackendConfig]:
    """Code and treatment of replicas. Raises `FieldsWrong`."""
    code, config = values.json_object("replica_config"), values.json_object("backend_config")
    code |= {"import_path": values.required("import_path")}
    for name in ("app_dir", "working_dir"):
        if values.text(name):
            code[name] = values.text(name)
    init_kwargs = values.json_object("init_kwargs")
    if init_kwargs:
        code["init_kwargs"] = init_kwargs
    options = _get_object(code, "ray_actor_options", "replica_config", values)
    amounts = {
        "num_cpus": values.number("num_cpus", 0, 10_000),
        "num_gpus": values.number("num_gpus", 0, 10_000),
    }
    options |= {name: amount for name, amount in amounts.items() if amount is not None}
    memory = values.number("memory_mib", 0, 2**30)
    if memory is not None:
        options["memory"] = memory * MIB
    variables = _parse_environment(values)
    if variables:
        environment = _get_object(options, "runtime_env", "replica_config", values)
        options["runtime_env"] = {**environment, "env_vars": variables}
    if options:
        code["ray_actor_options"] = options
    replicas = values.replicas("num_replicas")
    if replicas is not None:
        config["num_replicas"] = replicas
    user_config = values.json("user_config")
    if user_config is not None:
        config["user_config"] = user_config
    limits = {name: values.replicas(name) for name in ("min_replicas", "max_replicas")}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if limits:
        config["autoscaling_config"] = {
            **_get_object(config, "autoscaling_config", "backend_config", values),
            **limits,
        }
    elif {"min_replicas", "max_replicas"} <= values.typed.keys():
        config.pop("autoscaling_config", None)
    values.finish()
    return _check(code, config, values)


def _get_object(outer: Mapping[str, Any], name: str, field: str, values: FormValues) -> dict[str, Any]:
    """The object within another one that was typed into ``field``; empty, and noted, where it is no object."""
    found = outer.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        values.errors[field] = f"{name} must be an object"
        return {}
    return dict(found)


def _check(
    code: dict[str, Any], config: dict[str, Any], values: FormValues
) -> tuple[ReplicaConfig, BackendConfig]:
    try:
        base = ReplicaConfig(import_path=code["import_path"])
        replica_config = check_replica_config(merged(base, code, "replica_config"))
        return replica_config, check_backend_config(merged(BackendConfig(), config, "backend_config"))
    except BadField as error:
        raise _name_field(error, values) from error


def _name_field(error: BadField, values: FormValues) -> FieldsWrong:
    aliases = {"memory": "memory_mib", "env_vars": "env", "runtime_env": "env"}
    name = aliases.get(error.field.rpartition(".")[2]) or find_field(list(values.typed), error.field)
    return FieldsWrong({name: error.reason if error.field.endswith(name) and name else str(error)})


def _parse_environment(values: FormValues) -> Mapping[str, str]:
    variables: dict[str, str] = {}
    for line in values.text("env").splitlines():
        name, equals, value = line.strip().partition("=")
        if not line.strip():
            continue
        if not equals or not name.strip():
            values.errors["env"] = f"{line.strip()[:60]!r} must read NAME=value"
        variables[name.strip()] = value
    return variables
