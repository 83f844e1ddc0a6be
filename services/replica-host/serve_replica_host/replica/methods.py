"""What a callable of the user's is: async, a generator, plain; and whether it takes an argument.

Why asked once and kept: `inspect` costs more than a whole request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, final

_ASGI_ARGUMENTS: Final = ["scope", "receive", "send"]


@final
class Method:
    """A callable, and how to call it."""

    __slots__ = ("blocks", "function", "is_async", "takes_argument")

    def __init__(self, function: Callable[..., Any]) -> None:
        called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004 - it is the method that is asked about
        self.function = function
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))
        """Calling it gives a coroutine."""
        is_generator = any(
            inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, called)
        )
        self.blocks = not self.is_async and not is_generator
        """It runs when it is called, for as long as it likes; so it needs a thread."""
        self.takes_argument = _takes_argument(function)


def is_asgi(target: Any) -> bool:
    """Whether ``target`` is an ASGI application: called with scope, receive and send."""
    if not callable(target) or inspect.isclass(target):
        return False
    return list(_parameters(target) or ())[:3] == _ASGI_ARGUMENTS


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has no parameters at all."""
    return _parameters(function) == []


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in callables have none
        return None


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return True
    try:
        signature.bind(object())
    except TypeError:
        try:
            signature.bind()
        except TypeError:
            return True  # let the call itself say what is wrong
        return False
    return True
