"""What the console shows, computed from the replies of the admin API without any I/O."""

from __future__ import annotations
