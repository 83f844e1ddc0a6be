"""Checks of users' autoscaling policies, where they are called: in a child of the controller, and in replicas."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from serve_common.errors import BadField
from serve_common.names import DeploymentID
from serve_common.values import check_size, truncate

REPLICAS_LIMIT: Final = 2**31


class PolicyUnusable(Exception):
    """An invalid policy or return value; reported without a traceback."""


def check_policy(found: Any, path: str) -> Any:
    """Return ``found`` if it can be called as a policy. Raises `PolicyUnusable`."""
    if not callable(found):
        raise PolicyUnusable(f"{path} is no function but a {type(found).__name__}")
    called = found if inspect.isroutine(found) or inspect.isclass(found) else type(found).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise PolicyUnusable(f"{path} is an async function; a policy is called as a plain one")
    return found


def check_result(path: str, returned: object) -> tuple[float, dict[str, Any] | None]:
    """The number of replicas that a policy returned, and its next state; None leaves that unchanged.

    Raises `PolicyUnusable`.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise PolicyUnusable(f"{path} returned an awaitable; a policy is called as a plain function")
    number, state = returned, None
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise PolicyUnusable(
                f"{path} returned a tuple of {len(returned)}; it must be (number, policy_state)"
            )
        number, state = returned
        _check_state(path, state)
    return _check_number(path, number), state


def check_results(
    path: str, returned: object, deployments: Collection[DeploymentID]
) -> dict[DeploymentID, tuple[float, dict[str, Any]]]:
    """The numbers of replicas that the policy of an application returned, and the next state of each deployment.

    Deployments that it left out are missing; a state that it left out is empty, as in Ray Serve. Raises
    `PolicyUnusable`.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise PolicyUnusable(
            f"{path} returned a {type(returned).__name__}; the policy of an application returns two dicts by "
            "DeploymentID: numbers of replicas, and policy_state"
        )
    numbers, states = returned
    for what in (numbers, {} if states is None else states):
        if not isinstance(what, Mapping):
            raise PolicyUnusable(
                f"{path} returned a {type(what).__name__}; it must be a dict by DeploymentID"
            )
        for key in what:
            if key not in deployments:
                raise PolicyUnusable(
                    f"{path} returned {truncate(repr(key), 100)}, which it was not asked for"
                )
    return {
        key: (_check_number(path, number), _check_state(path, (states or {}).get(key, {})))
        for key, number in numbers.items()
    }


def _check_number(path: str, number: object) -> float:
    text = truncate(repr(number), 100)
    if isinstance(number, bool) or not (hasattr(number, "__index__") or hasattr(number, "__float__")):
        raise PolicyUnusable(
            f"{path} returned {text}, a {type(number).__name__}; it must be a number of replicas, or that and a dict"
        )
    replicas = float(number)  # type: ignore[arg-type]  # it has one of the methods
    if not (math.isfinite(replicas) and 0 <= replicas < REPLICAS_LIMIT):
        raise PolicyUnusable(f"{path} returned {text} replicas")
    return replicas


def _check_state(path: str, state: object) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise PolicyUnusable(f"{path} returned a {type(state).__name__} as policy_state; it must be a dict")
    try:
        check_size(state, "policy_state")
    except (BadField, TypeError, ValueError) as error:
        raise PolicyUnusable(f"{path} returned a policy_state that cannot be kept: {error}") from None
    return state
