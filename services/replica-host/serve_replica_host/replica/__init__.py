"""What runs inside a replica's process: the user's code on one thread, its NATS connection on another.

Why two threads: user code that computes or blocks must not keep cancel, probe and drain from being seen. Both are
event loops; what passes between them goes through two `Mailbox`es in bursts.
"""

from __future__ import annotations
