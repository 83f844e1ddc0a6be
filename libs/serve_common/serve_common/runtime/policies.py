"""Checks of users' autoscaling policies, where they are called: in a child of the controller, and in replicas."""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

from serve_common.errors import BadField
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
        if not isinstance(state, dict):
            raise PolicyUnusable(
                f"{path} returned a {type(state).__name__} as policy_state; it must be a dict"
            )
    text = truncate(repr(number), 100)
    if isinstance(number, bool) or not (hasattr(number, "__index__") or hasattr(number, "__float__")):
        raise PolicyUnusable(
            f"{path} returned {text}, a {type(number).__name__}; it must be a number of replicas, or that and a dict"
        )
    replicas = float(number)  # type: ignore[arg-type]  # it has one of the methods
    if not (math.isfinite(replicas) and 0 <= replicas < REPLICAS_LIMIT):
        raise PolicyUnusable(f"{path} returned {text} replicas")
    if state is not None:
        try:
            check_size(state, "policy_state")
        except (BadField, TypeError, ValueError) as error:
            raise PolicyUnusable(f"{path} returned a policy_state that cannot be kept: {error}") from None
    return replicas, state
