"""Ray Serve's configuration files (``ServeDeploySchema``), read and checked before anything is imported or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from muster.cli.yaml_file import FoundErrors, ValuePath, YamlFile, find_unknown_fields
from muster.schema import LOCAL_PATHS, DeploymentSchema, ServeApplicationSchema, ServeDeploySchema
from muster.sdk.deployments import check_runtime_env, deployment
from muster.sdk.run import check_route_prefix
from serve_common.errors import BadField, ServeError
from serve_common.names import check_name

_WITHOUT_EFFECT: Final = ("proxy_location", "grpc_options", "controller_options", "tracing_config")
"""Fields that configure what the services of a stack have variables for, or what Muster does not have."""
_HTTP_APPLIED: Final = frozenset({"request_timeout_s", "keep_alive_timeout_s", "root_path"})
"""Fields of ``http_options`` that a running stack can take."""

_HTTP_LISTEN: Final = frozenset({"host", "port"})
"""Fields of ``http_options`` that a stack takes when it starts."""


BUILT_OPTIONS: Final[dict[str, Any]] = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "0.0.0.0", "port": 8000},  # noqa: S104 - Ray Serve's text
    "grpc_options": {"port": 9000, "grpc_servicer_functions": [], "enable_reflection": True},
    "logging_config": {
        "encoding": "TEXT",
        "log_level": "INFO",
        "logs_dir": None,
        "enable_access_log": True,
        "additional_log_standard_attrs": [],
    },
}
"""What Ray Serve writes into a file of `build` beside the applications; the first three have no effect."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration file."""

    file: YamlFile
    schema: ServeDeploySchema
    directory: Path
    """The directory of the file, which its relative paths are resolved in."""

    @property
    def http_options(self) -> dict[str, Any]:
        """The HTTP options to set on the stack; those that the file leaves out stay."""
        options = self.schema.http_options
        applied = _HTTP_APPLIED & options.model_fields_set
        chosen = {name: getattr(options, name) for name in sorted(applied)}
        return {
            name: value.rstrip("/") if isinstance(value, str) else float(value)
            for name, value in chosen.items()
            if value is not None
        }

    @property
    def ignored(self) -> list[str]:
        """Names of fields without effect that the file sets to something else than `muster build` writes."""
        value = self.file.value
        names = [name for name in _WITHOUT_EFFECT if name in value and value[name] != BUILT_OPTIONS.get(name)]
        http, built = value.get("http_options") or {}, BUILT_OPTIONS["http_options"]
        changed = [name for name in http if http[name] != built.get(name)]
        return names + [f"http_options.{name}" for name in changed if name not in _HTTP_APPLIED]

    @property
    def listen(self) -> dict[str, Any]:
        """The options of a stack of one's own that ``host`` and ``port`` of the file set."""
        http = self.schema.http_options
        return {f"http_{name}": getattr(http, name) for name in sorted(_HTTP_LISTEN & http.model_fields_set)}

    def note(self, has_listen: bool = False) -> str | None:
        """One line that names what has no effect; None when everything has one.

        With ``has_listen``, ``host`` and ``port`` have one: the stack is the command's own.
        """
        applied = {f"http_options.{name}" for name in _HTTP_LISTEN} if has_listen else set()
        ignored = [name for name in self.ignored if name not in applied]
        if not ignored:
            return None
        return (
            f"note: {self.file.name}: without effect in Muster: {', '.join(ignored)}; proxies and ports are those "
            "of the stack"
        )


def is_serve_config(value: Any) -> bool:
    """Whether a file's value is meant for Ray Serve, and not an application in Muster's own form."""
    return not (isinstance(value, Mapping) and "ingress" in value and "applications" not in value)


def check_config(file: YamlFile, directory: Path) -> ServeConfig:
    """Check a file. Raises `BadField` with the line and the path of everything that is wrong in it."""
    if not isinstance(file.value, dict):
        raise file.build_error((), "must have the field 'applications', a list")
    if "applications" not in file.value and "import_path" in file.value:
        raise file.build_error(("import_path",), "belongs into the list 'applications'")
    known = {name: part for name, part in file.value.items() if not str(name).startswith("x-")}  # for anchors
    errors = [*find_unknown_fields(known, ServeDeploySchema)]
    if not errors:
        try:
            schema = ServeDeploySchema.model_validate(file.value, context=LOCAL_PATHS)
        except ValidationError as error:
            errors = [*_invalid_fields(file.value, error)]
        else:
            errors = [*_unsupported(schema)]
            if not errors:
                return ServeConfig(file=file, schema=schema, directory=directory)
    raise file.build_errors(errors)


def _invalid_fields(value: Any, error: ValidationError) -> FoundErrors:
    seen = set[ValuePath]()
    for each in error.errors():
        if "DEFAULT" in map(str, each["loc"]):
            continue  # a branch of a union that no file can mean
        path = _cut(value, each["loc"], is_missing=each["type"] == "missing")
        if path not in seen:
            seen.add(path)
            reason = "is missing" if each["type"] == "missing" else each["msg"].removeprefix("Value error, ")
            yield path, reason


def _cut(value: Any, place: ValuePath, *, is_missing: bool) -> ValuePath:
    """The part of Pydantic's place that is in the file: it also names branches of unions and validators."""
    path: list[str | int] = []
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return (*path, step) if is_missing else tuple(path)
        path.append(step)
    return tuple(path)


def _unsupported(schema: ServeDeploySchema) -> FoundErrors:
    if schema.target_capacity is not None:
        yield (
            ("target_capacity",),
            "is not supported by Muster; set num_replicas or autoscaling_config instead",
        )
    for at, app in enumerate(schema.applications):
        path = ("applications", at)
        for name, check in (
            ("name", _check_app_name),
            ("route_prefix", _check_route),
            ("runtime_env", _check_env),
        ):
            try:
                check(app)
            except (TypeError, ValueError, ServeError) as error:
                yield (*path, name), error.reason if isinstance(error, BadField) else str(error)
        for number, each in enumerate(app.deployments):
            if each.name in app.deployment_names[:number]:
                yield (
                    (*path, "deployments", number, "name"),
                    f"has options already: {each.name!r} is listed twice",
                )
            for option, reason in _unsupported_options(each):
                yield (*path, "deployments", number, *option), reason


def _check_app_name(app: ServeApplicationSchema) -> None:
    check_name(app.name, "name")


def _check_route(app: ServeApplicationSchema) -> None:
    if app.route_prefix is not None:
        check_route_prefix(app.route_prefix)


def _check_env(app: ServeApplicationSchema) -> None:
    check_runtime_env(app.runtime_env, "runtime_env")


def _unsupported_options(schema: DeploymentSchema) -> Iterator[tuple[tuple[str, ...], str]]:
    """What ``@serve.deployment`` refuses of the options, each alone, and then all together."""
    options, found = schema.options(), False
    for name, value in options.items():
        try:
            deployment(**{name: value})
        except (TypeError, ValueError) as error:
            found = True
            yield (name,), _reason(error)
    if not found:
        try:
            deployment(**options)
        except (TypeError, ValueError) as error:
            yield (), _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    return str(error)
