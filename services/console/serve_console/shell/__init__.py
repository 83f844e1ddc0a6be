"""What lives as long as the process: the shared view of the stack, and the sessions of people."""

from __future__ import annotations
