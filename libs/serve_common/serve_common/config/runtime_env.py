"""Ray's runtime environment of a replica: what of it is supported, and how long it may take to make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from serve_common.errors import BadField
from serve_common.values import check_between, check_size

PACKAGES_MAX: Final = 500
SETUP_TIMEOUT_S: Final = 600.0
"""Ray's default limit for installing packages."""
_INSTALLERS: Final = {
    "pip": frozenset({"packages", "pip_check", "pip_version", "pip_install_options"}),
    "uv": frozenset({"packages", "uv_check", "uv_version", "uv_pip_install_options"}),
}
_REFUSED: Final = {
    "working_dir": "must be uploaded; name its digest in replica_config.working_dir",
    "py_modules": "must be uploaded; name their digests in replica_config.py_modules",
}


def check_runtime_env(runtime_env: Mapping[str, Any], field: str) -> None:
    """Raise `BadField` with the path of what is not supported or has a wrong type."""
    for key, value in runtime_env.items():
        at = f"{field}.{key[:80]}"
        if key == "env_vars":
            _check_env_vars(value, at)
        elif key in _INSTALLERS:
            _check_installer(value, key, at)
        elif key == "config":
            _check_config(value, at)
        else:
            supported = (
                "is not supported; env_vars, pip, uv and config are. Put anything else into the hosts' image"
            )
            raise BadField(at, _REFUSED.get(key, supported))
    if "pip" in runtime_env and "uv" in runtime_env:
        raise BadField(f"{field}.uv", "and pip exclude each other")
    check_size(runtime_env, field)


def setup_seconds(runtime_env: Mapping[str, Any]) -> float:
    """Most seconds that Ray may take to make the environment, beside the replica's start."""
    if not _INSTALLERS.keys() & runtime_env.keys():
        return 0.0
    return float(runtime_env.get("config", {}).get("setup_timeout_seconds", SETUP_TIMEOUT_S))


def _check_env_vars(env_vars: Any, field: str) -> None:
    if not isinstance(env_vars, dict):
        raise BadField(field, "must be an object of strings")
    for name, value in env_vars.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise BadField(field, f"{str(name)[:80]!r} is not a name of a variable")
        if not isinstance(value, str) or "\0" in value:
            raise BadField(f"{field}.{name[:80]}", "must be a string without NUL")


def _check_installer(value: Any, installer: str, field: str) -> None:
    options = value if isinstance(value, dict) else {"packages": value}
    for name in options:
        if name not in _INSTALLERS[installer]:
            known = ", ".join(sorted(_INSTALLERS[installer]))
            raise BadField(f"{field}.{str(name)[:80]}", f"is unknown; known are {known}")
    at = f"{field}.packages" if options is value else field
    packages = _check_texts(options.get("packages"), at)
    if not packages or len(packages) > PACKAGES_MAX:
        raise BadField(at, f"must be a list of 1 to {PACKAGES_MAX} requirements")
    for name in _INSTALLERS[installer]:
        if name.endswith("_options"):
            _check_texts(options.get(name, []), f"{field}.{name}")
    if not isinstance(options.get(f"{installer}_check", False), bool):
        raise BadField(f"{field}.{installer}_check", "must be true or false")
    if not isinstance(options.get(f"{installer}_version", ""), str):
        raise BadField(f"{field}.{installer}_version", "must be a version specifier, such as ==25.0")


def _check_texts(value: Any, field: str) -> list[str]:
    if not isinstance(value, list):
        raise BadField(field, "must be a list of strings")
    for at, text in enumerate(value):
        if not isinstance(text, str) or not text or "\n" in text or "\0" in text:
            raise BadField(f"{field}[{at}]", "must be one line of text")
    return value


def _check_config(config: Any, field: str) -> None:
    if not isinstance(config, dict):
        raise BadField(field, "must be an object")
    for name, value in config.items():
        if name != "setup_timeout_seconds":
            raise BadField(f"{field}.{str(name)[:80]}", "is not supported; setup_timeout_seconds is")
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadField(f"{field}.{name}", "must be a whole number of seconds")
        check_between(value, 1, 86_400, f"{field}.{name}")
