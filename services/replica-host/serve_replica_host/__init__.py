"""The replica host: runs replicas as Ray actors and reports all of them.

``core`` decides without any I/O, ``ports`` defines its interfaces, ``shell`` drives the core, ``adapters`` implement
the ports, ``wiring`` connects them. ``replica`` runs inside an actor's process.
"""

from __future__ import annotations
