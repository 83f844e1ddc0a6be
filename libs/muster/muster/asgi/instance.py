"""Which instance a request is for, carried in its ASGI scope.

Why in the scope: an application is one object of the user's module, but its routes are methods of whichever instance
was constructed. What is in the scope reaches routes, dependencies, middlewares and mounted applications alike.
"""

from __future__ import annotations

from typing import Any, Final, final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

INSTANCE: Final = "muster.instance"


@final
class BoundApplication:
    """An ASGI application together with the instance that its routes are methods of."""

    __slots__ = ("_application", "_instance")

    def __init__(self, application: ASGIApp, instance: Any) -> None:
        self._application = application
        self._instance = instance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, WebSocket or lifespan."""
        scope[INSTANCE] = self._instance
        await self._application(scope, receive, send)


async def current_instance(connection: HTTPConnection) -> Any:
    """The ``self`` of a route; a FastAPI dependency."""
    return instance_of(connection)


def instance_of(connection: HTTPConnection) -> Any:
    """The ``self`` of a route. Raises RuntimeError when the application runs without an instance."""
    try:
        return connection.scope[INSTANCE]
    except KeyError:
        raise RuntimeError(
            "this route is a method, and the application runs without an instance of its class: "
            "run the instance's __muster_asgi__ instead"
        ) from None
