"""Routes that are methods of a class: given ``self``, and answered only for instances of that class.

Why routes are made anew: a web framework reads a function's signature when the route is declared, in the middle of
the class, where it must take ``self`` for a parameter of the request. Only when the class is whole can it be told
better.

FastAPI is not imported unless the application is one of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import Scope

from muster.asgi.instance import INSTANCE, current_instance, instance_of

_OWNER: Final = "_muster_owner"
"""Attribute of a route that was bound already: the class whose method it is."""

Endpoint = Callable[..., Any]


def bind_routes(app: Any, cls: type[Any]) -> None:
    """Give all routes of ``app`` that are methods of ``cls`` or its bases their ``self``.

    Does nothing for an application whose routes are not Starlette's. Raises ValueError for a method without ``self``.
    """
    for router, route in _walk(app, set()):
        owner = _owner_of(route.endpoint, cls)
        if owner is None or hasattr(route, _OWNER):
            continue
        bind = _with_dependency if hasattr(route, "dependant") else _with_instance
        endpoint = bind(route.endpoint)
        # In its place, for other routers and the documentation of the API know this very object.
        vars(route).update(vars(_made_anew(route, endpoint, router)))
        setattr(route, _OWNER, owner)
        _answer_only_for(route, owner)


def _walk(router: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """All routes with an endpoint, with the router that they are in."""
    if id(router) in seen:
        return
    seen.add(id(router))
    router = getattr(router, "router", router)  # an application has one, and passes its routes on
    for route in list(getattr(router, "routes", None) or ()):
        if isinstance(route, Route | WebSocketRoute):
            yield router, route
        # FastAPI keeps an included router as a node of its own, Starlette a mounted application.
        inner = getattr(route, "original_router", None) or getattr(route, "app", None)
        if inner is not None and not isinstance(route, Route | WebSocketRoute):
            yield from _walk(inner, seen)


def _owner_of(endpoint: Any, cls: type[Any]) -> type[Any] | None:
    """The class among ``cls`` and its bases in whose body the function was written, unless it takes no ``self``.

    By its name, for a later method may have taken its place in the class.
    """
    module, name = getattr(endpoint, "__module__", None), getattr(endpoint, "__qualname__", "")
    for base in cls.__mro__:
        prefix = f"{base.__qualname__}."
        if base is object or module != base.__module__ or not name.startswith(prefix):
            continue
        own_name = name.removeprefix(prefix)
        if "." in own_name:
            continue  # of an inner class, or made within a method
        return None if isinstance(vars(base).get(own_name), staticmethod) else base
    return None


def _with_dependency(method: Endpoint) -> Endpoint:
    """``method`` with ``self`` as a dependency: the same code with another signature, so whatever it is (plain, async,
    a generator) it stays."""
    from fastapi import Depends  # noqa: PLC0415 - only applications of FastAPI have dependencies

    signature = inspect.signature(method)
    first, *others = _parameters(method, signature)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = first.replace(kind=keyword, default=Depends(current_instance), annotation=inspect.Parameter.empty)
    # FastAPI passes all by name; without an order, one with a default may come before one without.
    others = [p.replace(kind=keyword) if p.kind is not p.VAR_KEYWORD else p for p in others]
    endpoint: Any
    if isinstance(method, types.FunctionType):
        endpoint = types.FunctionType(
            method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__
        )
        endpoint.__kwdefaults__ = method.__kwdefaults__
        functools.update_wrapper(endpoint, method)
        del endpoint.__wrapped__
        if hasattr(method, "__wrapped__"):
            endpoint.__wrapped__ = method.__wrapped__
    else:
        endpoint = functools.partial(method)
    named = sorted([own, *others], key=lambda p: p.kind)
    endpoint.__signature__ = signature.replace(parameters=named)
    bound: Endpoint = endpoint
    return bound


def _with_instance(method: Endpoint) -> Endpoint:
    """``method`` as Starlette calls it, with the request or the WebSocket only."""
    _parameters(method, inspect.signature(method))
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def endpoint(connection: Any) -> Any:
            return await method(instance_of(connection), connection)

        return endpoint

    @functools.wraps(method)
    def plain_endpoint(connection: Any) -> Any:
        return method(instance_of(connection), connection)

    return plain_endpoint


def _parameters(method: Endpoint, signature: inspect.Signature) -> list[inspect.Parameter]:
    parameters = list(signature.parameters.values())
    if not parameters:
        raise ValueError(
            f"{method.__qualname__} is a route of an @ingress class; it needs self as its first parameter"
        )
    return parameters


def _made_anew(route: Any, endpoint: Endpoint, router: Any) -> Any:
    """A route that differs from ``route`` only in its endpoint, made of what a route tells about itself."""
    made: dict[str, Any] = {}
    for name in inspect.signature(type(route).__init__).parameters:
        if hasattr(route, name):
            made[name] = getattr(route, name)
        elif hasattr(router, name):  # such as dependency_overrides_provider
            made[name] = getattr(router, name)
    made["endpoint"] = endpoint
    if getattr(route, "stream_item_type", None) is not None:
        made.pop("response_model", None)  # then it follows from the signature, as the type of the items does
    return type(route)(**made)


def _answer_only_for(route: BaseRoute, owner: type[Any]) -> None:
    """Let ``route`` match nothing for instances of other classes that share the application."""
    matches = route.matches

    def matches_for_owner(scope: Scope) -> tuple[Match, Scope]:
        instance = scope.get(INSTANCE)
        if instance is not None and not isinstance(instance, owner):
            return Match.NONE, {}
        return matches(scope)

    vars(route)["matches"] = matches_for_owner
