"""Who may say and hear what on the bus, and how it is proved.

`roles` is the table; `claims` and `nkeys` are NATS' tokens and keys; `credentials` is what processes hold, `minting`
makes users of it; `plain` is the table for a NATS with plain users. All of it is pure.
"""

from __future__ import annotations
