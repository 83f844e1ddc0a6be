"""The controller: decides, records, publishes.

``core`` decides without any I/O, ``ports`` says what it needs from outside, ``shell`` drives the core, ``adapters``
are the outside, ``wiring`` joins them.
"""

from __future__ import annotations
