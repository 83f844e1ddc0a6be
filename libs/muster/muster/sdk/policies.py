"""Autoscaling policies of a program: by import path where the controller can import them, else as uploaded code.

A function of an installed module is imported beside the controller. What only the program has (in ``__main__``, in a
module beside it, a lambda), and every class, is pickled, and evaluated in a replica: no other process may unpickle it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import msgspec

from muster import autoscaling_policy
from muster.config import AutoscalingPolicy
from muster.sdk.code import dump_code
from muster.sdk.deployments import Deployment
from muster.sdk.files import is_local
from serve_common.config.autoscaling import PolicyScope
from serve_common.errors import BadField, LimitReached
from serve_common.protocol.code import digest_code
from serve_common.protocol.evaluation import POLICY_BYTES_MAX
from serve_common.runtime.policies import PolicyUnusable, check_policy


class BuiltPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """An autoscaling policy, ready to travel."""

    path: str
    """``module:function``; with ``code`` it only names the policy for people."""
    kwargs: dict[str, Any]
    code: bytes = b""
    """The function or class, by `muster.sdk.code.dump_code`; empty where the controller imports it."""
    digest: str = ""
    """Name of the code in the code store; empty for none."""
    scope: PolicyScope = PolicyScope.DEPLOYMENT
    """What one call decides."""


@final
class FoundPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as the program has it."""

    where: str
    """Path of the option, for errors."""
    path: str
    target: Any
    """The function or class; None where this process cannot import the path."""
    kwargs: dict[str, Any]


def find_policy(deployment_name: str, deployment: Deployment) -> FoundPolicy | None:
    """The policy in a deployment's ``autoscaling_config``, imported; None for the default one. Raises `BadField`."""
    config = deployment.deployment_options.autoscaling_config
    return None if config is None else _find(config.policy, f"{deployment_name}: autoscaling_config.policy")


def find_application_policy(policy: AutoscalingPolicy | None) -> FoundPolicy | None:
    """The policy of an application, imported; None for none. Raises `BadField`."""
    where = "autoscaling_policy"
    found = None if policy is None else _find(policy, where)
    if found is not None and found.target is None:
        raise BadField(where, f"{found.path} cannot be imported")
    return found


def _find(policy: AutoscalingPolicy, where: str) -> FoundPolicy | None:
    if policy.is_default_policy_function():
        return None
    target: Any = policy.policy_function
    if isinstance(target, str):
        module_name, separator, attribute = target.partition(":")
        if not separator:  # Ray Serve takes dots alone too
            module_name, _, attribute = target.rpartition(".")
        if module_name == "ray.serve.autoscaling_policy":
            module_name = autoscaling_policy.__name__
        path, target = f"{module_name}:{attribute}", _import(module_name, attribute, where)
    else:
        kind = target if hasattr(target, "__qualname__") else type(target)
        path = _readable_path(kind.__module__, kind.__qualname__)
    if target is autoscaling_policy.default_autoscaling_policy:
        return None
    if target is not None:
        try:
            check_policy(target, path)
        except PolicyUnusable as error:
            raise BadField(where, str(error)) from None
    return FoundPolicy(where=where, path=path, target=target, kwargs=policy.policy_kwargs)


def _import(module_name: str, attribute: str, where: str) -> Any:
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return None  # the controller may have it
        raise
    except ValueError as error:
        raise BadField(where, f"{module_name}:{attribute} must be module:function") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadField(where, f"the module {module_name} has no {attribute}")
        found = getattr(found, part)
    return found


def _readable_path(module: str, qualified_name: str) -> str:
    name = qualified_name.rpartition("<locals>.")[2]
    return f"{module}:{name if name.replace('.', '_').isidentifier() else 'function'}"


def build_policy(
    policy: FoundPolicy | None,
    travelling: Mapping[str, str],
    scope: PolicyScope = PolicyScope.DEPLOYMENT,
) -> BuiltPolicy | None:
    """``policy``, pickled where the controller cannot import it; ``travelling`` files as in `dump_code`.

    That of an application is always pickled.

    Raises `CodeUnpicklable`, and `LimitReached` for a policy that is too large.
    """
    if policy is None:
        return None
    is_shared = scope is PolicyScope.APPLICATION
    if policy.target is None or (_is_importable(policy.target) and not is_shared):
        return BuiltPolicy(path=policy.path, kwargs=policy.kwargs)
    code = dump_code(policy.target, (), {}, name=policy.where, files=travelling)
    if len(code) > POLICY_BYTES_MAX:
        raise LimitReached(
            f"{policy.where}: the policy and what it refers to have {len(code):,} bytes, and at most "
            f"{POLICY_BYTES_MAX:,} travel"
        )
    return BuiltPolicy(
        path=policy.path, kwargs=policy.kwargs, code=code, digest=digest_code(code), scope=scope
    )


def _is_importable(target: Any) -> bool:
    """Whether the controller can import it: a function by name, of a module that an installer put there."""
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not inspect.isroutine(target) or module is None or module.__name__ == "__main__":
        return False
    found: Any = module
    for part in target.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is target and (file is None or not is_local(Path(file)))
