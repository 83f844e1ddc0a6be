"""State per instance of a user's class, for a decorated function that all instances share.

Why not an attribute of the instance: it may have slots, be pickled or compared, and none of that may see this state.
The state lives as long as the instance, and is not pickled with the function.

It belongs to one event loop, and is dropped with a closed loop (as after each test).
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, final


def is_method(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether ``function`` is called with an instance. A decorator sees a plain function, so its signature decides."""
    if not parameters:
        return False
    if parameters[0].name == "self":
        return True
    outer = function.__qualname__.rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>") and len(parameters) > 1


class OnLoop(Protocol):
    """State that belongs to an event loop."""

    loop: asyncio.AbstractEventLoop
    """The only loop that the state may be used on."""


V = TypeVar("V", bound=OnLoop)


class _NoInstance:
    """Stands for the instance of a plain function."""


_NO_INSTANCE = _NoInstance()


@final
class PerInstance(Generic[V]):
    """Creates a value for each instance on first use."""

    def __init__(self, make: Callable[[], V]) -> None:
        """``make`` is called on the running event loop."""
        self._make = make
        self._values: dict[int, tuple[weakref.ref[Any], V]] = {}

    def of(self, instance: Any) -> V:
        """The value of ``instance``; None stands for a plain function.

        Raises TypeError for an instance that cannot be referenced weakly, and RuntimeError when it belongs to another
        event loop that still runs.
        """
        holder = _NO_INSTANCE if instance is None else instance
        found = self._values.get(id(holder))
        if found is not None:
            value = found[1]
            loop = asyncio.get_running_loop()
            if value.loop is loop:
                return value
            if not value.loop.is_closed():
                raise RuntimeError(
                    f"{holder!r} is used on two event loops; its batches and models belong to one"
                )
        key = id(holder)
        try:
            reference = weakref.ref(holder, lambda gone: self._drop(key, gone))
        except TypeError as error:
            raise TypeError(f"{type(holder).__name__} needs __weakref__ among its __slots__") from error
        value = self._make()
        self._values[key] = (reference, value)
        return value

    def all(self) -> list[V]:
        """The values of all live instances."""
        return [value for _, value in list(self._values.values()) if not value.loop.is_closed()]

    def _drop(self, key: int, gone: weakref.ref[Any]) -> None:
        found = self._values.get(key)
        if found is not None and found[0] is gone:  # the same id may belong to a new instance by now
            del self._values[key]

    def __reduce__(self) -> tuple[type[PerInstance[V]], tuple[Callable[[], V]]]:
        return PerInstance, (self._make,)
