"""Web applications in replicas: FastAPI, Starlette or any other ASGI application as the HTTP interface of a class.

Why routes are rebuilt: a web framework reads a function's signature when the route is declared, in the middle of the
class, and takes ``self`` for a parameter of the request. That can only be corrected once the class is complete.

Why the instance is in the ASGI scope: an application is one object of the user's module, but its routes are methods of
whichever instance was constructed. The scope reaches routes, dependencies, middlewares and mounted applications alike.

FastAPI is imported only for an application that uses it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar, final, overload

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_common.dispatch.errors import BackPressureError
from serve_common.errors import NoReplicaAvailable

INSTANCE: Final = "muster.instance"
"""Key of the ASGI scope: the instance that a request is for."""


@final
class BoundApplication:
    """An ASGI application together with the instance that its routes are methods of."""

    __slots__ = ("_application", "_instance")

    def __init__(self, application: ASGIApp, instance: Any) -> None:
        self._application = application
        self._instance = instance
        handlers = getattr(application, "exception_handlers", None)
        if isinstance(handlers, dict):
            # As in Ray Serve: frameworks would make a 500 of a full or missing deployment behind this one.
            handlers.setdefault(NoReplicaAvailable, _respond_unavailable)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, WebSocket or lifespan."""
        scope[INSTANCE] = self._instance
        await self._application(scope, receive, send)


async def _respond_unavailable(_: HTTPConnection, error: Exception) -> Response:
    """The response to a request of which a deployment called by handle could take no part."""
    delay_s = error.retry_after_s if isinstance(error, BackPressureError) else None
    headers = None if delay_s is None else {"Retry-After": str(math.ceil(delay_s))}
    return PlainTextResponse(str(error), getattr(error, "status", 503), headers)


async def current_instance(connection: HTTPConnection) -> Any:
    """The ``self`` of a route; a FastAPI dependency."""
    return get_instance(connection)


def get_instance(connection: HTTPConnection) -> Any:
    """The ``self`` of a route. Raises RuntimeError when the application runs without an instance."""
    try:
        return connection.scope[INSTANCE]
    except KeyError:
        raise RuntimeError(
            "this route is a method, and the application runs without an instance of its class: "
            "run the instance's __muster_asgi__ instead"
        ) from None


_OWNER: Final = "_muster_owner"
"""Attribute of a bound route: the class whose method it is."""

Endpoint = Callable[..., Any]


def bind_routes(app: Any, cls: type[Any]) -> None:
    """Bind all routes of ``app`` that are methods of ``cls`` or its bases to the instance as their ``self``.

    Does nothing for an application whose routes are not Starlette's. Raises ValueError for a method without ``self``.
    """
    for router, route in _walk(app, set()):
        owner = _get_owner(route.endpoint, cls)
        if owner is None or hasattr(route, _OWNER):
            continue
        bind = _with_dependency if hasattr(route, "dependant") else _with_instance
        endpoint = bind(route.endpoint)
        # Updated in place: other routers and the documentation of the API refer to this very object.
        vars(route).update(vars(_rebuild_route(route, endpoint, router)))
        setattr(route, _OWNER, owner)
        _restrict_to(route, owner)


def _walk(router: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Yield all routes with an endpoint, each with its router."""
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


def _get_owner(endpoint: Any, cls: type[Any]) -> type[Any] | None:
    """The class among ``cls`` and its bases whose body defines the function, unless it takes no ``self``.

    Found by name, because a later method may have replaced it in the class.
    """
    module, name = getattr(endpoint, "__module__", None), getattr(endpoint, "__qualname__", "")
    for base in cls.__mro__:
        prefix = f"{base.__qualname__}."
        if base is object or module != base.__module__ or not name.startswith(prefix):
            continue
        own_name = name.removeprefix(prefix)
        if "." in own_name:
            continue  # defined in an inner class or within a method
        return None if isinstance(vars(base).get(own_name), staticmethod) else base
    return None


def _with_dependency(method: Endpoint) -> Endpoint:
    """``method`` with ``self`` as a dependency: the same code with another signature, so it stays plain, async or a
    generator."""
    from fastapi import Depends  # noqa: PLC0415 - only applications of FastAPI have dependencies

    signature = inspect.signature(method)
    first, *others = _parameters(method, signature)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = first.replace(kind=keyword, default=Depends(current_instance), annotation=inspect.Parameter.empty)
    # FastAPI passes all by name; keyword-only parameters with a default may come before ones without.
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
            return await method(get_instance(connection), connection)

        return endpoint

    @functools.wraps(method)
    def plain_endpoint(connection: Any) -> Any:
        return method(get_instance(connection), connection)

    return plain_endpoint


def _parameters(method: Endpoint, signature: inspect.Signature) -> list[inspect.Parameter]:
    parameters = list(signature.parameters.values())
    if not parameters:
        raise ValueError(
            f"{method.__qualname__} is a route of an @ingress class; it needs self as its first parameter"
        )
    return parameters


def _rebuild_route(route: Any, endpoint: Endpoint, router: Any) -> Any:
    """A route that differs from ``route`` only in its endpoint, built from the attributes of ``route``."""
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


def _restrict_to(route: BaseRoute, owner: type[Any]) -> None:
    """Restrict ``route`` to instances of ``owner``, for applications that several classes share."""
    matches = route.matches

    def matches_for_owner(scope: Scope) -> tuple[Match, Scope]:
        instance = scope.get(INSTANCE)
        if instance is not None and not isinstance(instance, owner):
            return Match.NONE, {}
        return matches(scope)

    vars(route)["matches"] = matches_for_owner


T = TypeVar("T")

_BUILDER_METHODS: Final = ("__muster_build_asgi__", "__serve_build_asgi_app__")
_BUILT: Final = "_muster_built_application"


class IngressDecorator(Protocol):
    """Return type of `ingress`: decorates a class, or without one creates a class that only has the application."""

    @overload
    def __call__(self, cls: type[T], /) -> type[T]: ...
    @overload
    def __call__(self) -> type[Any]: ...


def ingress(app: Any = None) -> IngressDecorator:
    """Let a class answer HTTP and WebSockets by a FastAPI, Starlette or other ASGI application::

        app = FastAPI()

        @serve.ingress(app)
        class Summarizer:
            def __init__(self) -> None:
                self.model = load()

            @app.post("/summarize")
            async def summarize(self, text: str) -> str:
                return await self.model(text)

    Routes that are methods of the class get the constructed instance as ``self``: those of FastAPI (with all that its
    signatures can say, WebSockets too) and those that ``add_route`` and ``add_websocket_route`` of Starlette were
    given. Other routes of the application, its middlewares, mounts, exception handlers and lifespan work as they
    are. The application may be shared by several classes; each instance answers only for the routes of its own class.

    ``app`` may also be a function without parameters that builds the application, called when the instance has been
    constructed; or be left out, when the class has a method ``__muster_build_asgi__`` (or Ray Serve's
    ``__serve_build_asgi_app__``) that does. ``serve.ingress(app)()``, without a class, makes one.

    The decorated class is the same class. Its instances have the ASGI application in ``__muster_asgi__``, which tests
    can run as well.

    Raises TypeError for what is no application or no class, ValueError for a route method without ``self``.
    """
    is_builder = app is not None and _is_builder(app)
    if app is not None and not callable(app):
        raise TypeError(f"@ingress needs an ASGI application or a function that builds one, not {app!r}")
    if inspect.isclass(app):
        raise TypeError(
            f"@ingress needs an application, and {app.__qualname__} is a class; pass an instance of it"
        )

    def decorate(cls: type[Any] | None = None) -> type[Any]:
        if cls is None:
            cls = type("Ingress", (), {"__doc__": "Answers by an application.", "__init__": _store_arguments})
        if not inspect.isclass(cls):
            raise ValueError("@serve.ingress must be used with a class.")
        if any("__call__" in vars(base) for base in cls.__mro__):
            raise ValueError("Classes passed to @serve.ingress may not have __call__ method.")
        if app is None and _builder_method(cls) is None:
            raise ValueError(
                f"serve.ingress() called without an app argument requires {cls.__qualname__} to define "
                f"`{_BUILDER_METHODS[1]}` or `{_BUILDER_METHODS[0]}`."
            )
        if app is not None and not is_builder:
            bind_routes(app, cls)
        setattr(cls, "__muster_asgi__", _Application(app, is_builder=is_builder))  # noqa: B010 - the class has no such attribute yet
        return cls

    return decorate


def _store_arguments(self: Any, *args: Any, **kwargs: Any) -> None:
    """Constructor of a created class: stores the arguments for the application's routes."""
    self.args = args
    self.kwargs = kwargs


def _is_builder(app: Any) -> bool:
    if not inspect.isfunction(app) or inspect.iscoroutinefunction(app):
        return False
    try:
        inspect.signature(app).bind()
    except TypeError:
        return False
    return True


def _builder_method(cls: type[Any]) -> str | None:
    return next((name for name in _BUILDER_METHODS if hasattr(cls, name)), None)


@final
class _Application:
    """Descriptor ``__muster_asgi__``: the bound application of an instance."""

    def __init__(self, app: Any, *, is_builder: bool) -> None:
        self._app = app
        self._is_builder = is_builder

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        return BoundApplication(self._get_application(instance, owner), instance)

    def _get_application(self, instance: Any, owner: type[Any]) -> Any:
        if self._app is not None and not self._is_builder:
            return self._app
        with contextlib.suppress(AttributeError):
            return getattr(instance, _BUILT)
        build = self._app if self._is_builder else getattr(instance, _builder_method(owner) or "")
        try:
            built = build()
        except AttributeError as error:
            # Raised unchanged, it would read as if this attribute itself were missing.
            raise RuntimeError(
                f"the application of {owner.__qualname__} could not be built: {error}"
            ) from error
        if not callable(built) or inspect.isclass(built):
            raise TypeError(
                f"the application that was built for {owner.__qualname__} is {built!r}, no ASGI application"
            )
        bind_routes(built, owner)
        with contextlib.suppress(AttributeError):  # an instance with slots builds it again each time
            object.__setattr__(instance, _BUILT, built)
        return built


__all__ = ["ingress"]
