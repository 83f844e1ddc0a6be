"""Client of the admin API: sends any request to ``serve.admin.<verb>`` and returns its typed reply.

Why a package of its own: the command line and programs use it; neither should have to know subjects, headers or how to
retry while a controller restarts.
"""

from __future__ import annotations

from muster.client.admin import AdminClient, Caller, Stack, connect_stack
from muster.client.requests import StackAddress

__all__ = ["AdminClient", "Caller", "Stack", "StackAddress", "connect_stack"]
