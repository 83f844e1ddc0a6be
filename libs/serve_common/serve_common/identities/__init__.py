"""Permissions of each role on the bus, and the credentials that prove a role.

`roles` is the table; `credentials` has NATS' keys and tokens, the files that hold them, and the minting of users;
`plain` is the table for a NATS with plain users. All of it is pure.
"""

from __future__ import annotations
