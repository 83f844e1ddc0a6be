"""Views of the checkpoint and the observed state for callers. Pure functions that never wait.

Why one module for each kind of object: they share nothing but the paging of lists.
"""

from __future__ import annotations
