"""Muster for those who use it: the client, the command line and the stack on one machine.

Nothing is imported here, so that ``import muster`` stays quick in a replica's process; take what you need from
`muster.client`.
"""

from __future__ import annotations
