"""The arguments of single calls, put together to the arguments of the batch function.

Why bound when a call comes: one with wrong arguments must fail its own caller and nobody else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from muster.per_instance import is_method

_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Bound = tuple[Any, ...] | dict[str, Any]
"""The arguments of one call: a single positional one as a tuple, which is the usual case; otherwise by name."""


@final
class Arguments:
    """How the calls of one batch function are put together."""

    __slots__ = ("_bind", "_first", "_function_name", "_parameters", "_takes_one", "has_instance")

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError for a function whose arguments cannot be batched."""
        self._function_name = function.__qualname__
        parameters = list(inspect.signature(function).parameters.values())
        self.has_instance = is_method(function, parameters)
        """True when calls bring the instance as their first argument."""
        if self.has_instance:
            parameters = parameters[1:]
        if not parameters:
            raise TypeError(f"{self._function_name} takes no argument that could be batched")
        for parameter in parameters:
            if parameter.kind in _VARIADIC:
                raise TypeError(
                    f"{self._function_name} cannot be batched with {parameter}: "
                    "it must name its parameters, as each becomes a list"
                )
        self._bind = inspect.Signature(parameters).bind
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._first = parameters[0].name
        self._takes_one = parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY and all(
            parameter.default is not inspect.Parameter.empty for parameter in parameters[1:]
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """The arguments of one call, without the instance; raises TypeError as the function itself would."""
        if self._takes_one and len(args) == 1 and not kwargs:
            return args
        try:
            return self._bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._function_name}() {error}") from None

    def item(self, bound: Bound) -> Any:
        """What ``batch_size_fn`` is given for a call: its first argument."""
        return bound[0] if isinstance(bound, tuple) else bound.get(self._first)

    def merge(self, calls: Sequence[Bound]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments of the batch function: one list per parameter.

        A parameter that no call gives is left to its default; for one that only some give, the others' place in the
        list has the default.
        """
        single = [bound[0] for bound in calls if isinstance(bound, tuple)]
        if len(single) == len(calls):
            return [single], {}
        named = [{self._first: bound[0]} if isinstance(bound, tuple) else bound for bound in calls]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if not any(name in bound for bound in named):
                continue
            values = [bound.get(name, parameter.default) for bound in named]
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(values)
            else:
                kwargs[name] = values
        return args, kwargs
