"""The replica host: runs replicas as Ray actors and reports all of them.

``core`` decides without any I/O, ``ports`` says what it needs from outside, ``shell`` drives the core, ``adapters``
are the outside, ``wiring`` joins them. ``replica`` is what runs inside an actor's process.
"""

from __future__ import annotations
