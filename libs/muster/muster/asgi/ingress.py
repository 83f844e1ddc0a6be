"""The decorator `ingress`, with the name and forms of Ray Serve's."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Final, Protocol, TypeVar, final, overload

from muster.asgi.instance import BoundApplication
from muster.asgi.routes import bind_routes

T = TypeVar("T")

_BUILDER_METHODS: Final = ("__muster_build_asgi__", "__serve_build_asgi_app__")
_BUILT: Final = "_muster_built_application"


class IngressDecorator(Protocol):
    """What `ingress` returns: for a class, or for none, which makes one that has only the application."""

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
            cls = type("Ingress", (), {"__doc__": "Answers by an application.", "__init__": _take_anything})
        if not inspect.isclass(cls):
            raise TypeError(f"@ingress decorates a class, not {cls!r}")
        if app is None and _builder_method(cls) is None:
            raise TypeError(
                f"@ingress() without an application needs {cls.__qualname__} to have {_BUILDER_METHODS[0]}"
            )
        if app is not None and not is_builder:
            bind_routes(app, cls)
        setattr(cls, "__muster_asgi__", _Application(app, is_builder=is_builder))  # noqa: B010 - the class has no such attribute yet
        return cls

    return decorate


def _take_anything(self: Any, *args: Any, **kwargs: Any) -> None:
    """What a deployment was bound with is there for the application's routes."""
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
    """The attribute ``__muster_asgi__``: of an instance, its application."""

    def __init__(self, app: Any, *, is_builder: bool) -> None:
        self._app = app
        self._is_builder = is_builder

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        return BoundApplication(self._of(instance, owner), instance)

    def _of(self, instance: Any, owner: type[Any]) -> Any:
        if self._app is not None and not self._is_builder:
            return self._app
        with contextlib.suppress(AttributeError):
            return getattr(instance, _BUILT)
        build = self._app if self._is_builder else getattr(instance, _builder_method(owner) or "")
        try:
            built = build()
        except AttributeError as error:
            # As it is, it would say that there is no such attribute as this one.
            raise RuntimeError(
                f"the application of {owner.__qualname__} could not be built: {error}"
            ) from error
        if not callable(built) or inspect.isclass(built):
            raise TypeError(
                f"the application that was built for {owner.__qualname__} is {built!r}, no ASGI application"
            )
        bind_routes(built, owner)
        with contextlib.suppress(AttributeError):  # an instance with slots builds anew
            object.__setattr__(instance, _BUILT, built)
        return built
