"""Permissions of each role on the bus, and the credentials that prove a role.

`roles` is the table; `credentials` has NATS' keys and tokens, the files that hold them, and the minting of users. Both
are pure. Run as a program, the package prints the table for a NATS with plain users.
"""

from __future__ import annotations
