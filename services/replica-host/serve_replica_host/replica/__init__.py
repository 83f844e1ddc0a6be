"""What runs inside a replica's process: the user's code on one thread, its NATS connection on another.

Why two threads: user code that computes or blocks must not delay cancel, probe and drain. Both run event loops, which
exchange messages in bursts through two `Mailbox`es.
"""

from __future__ import annotations
