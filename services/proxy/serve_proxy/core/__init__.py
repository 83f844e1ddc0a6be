"""What the proxy decides, without any I/O."""

from __future__ import annotations
