"""The console: a stack in a browser.

It has no rights of its own: whatever it reads or changes is requested over NATS as a person who signed in, and NATS
enforces what that person's role may do.
"""

from __future__ import annotations
