"""The admin API from Python: one typed method for each verb of ``serve.admin.<verb>``.

Why a package of its own: the command line is one user of it and programs are the other; neither should have to know
subjects, headers or how a restarting controller looks from outside.
"""

from __future__ import annotations

from muster.client.address import StackAddress
from muster.client.admin import AdminClient
from muster.client.connect import Caller, Stack, connect_stack

__all__ = ["AdminClient", "Caller", "Stack", "StackAddress", "connect_stack"]
