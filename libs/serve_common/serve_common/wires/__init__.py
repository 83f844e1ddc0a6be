"""The messages between processes: one module for each pair that talks.

Why apart from the values: the wire is not the domain. A message may only grow by optional fields, because processes
of two versions meet during an upgrade.
"""

from __future__ import annotations
