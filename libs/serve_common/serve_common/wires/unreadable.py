"""What decoding a message raises when the message is not what it should be.

Why a name for it: what comes from outside may be no UTF-8, or nested deeper than the decoder goes, and neither is a
`msgspec.DecodeError`. Whoever forgets one of them lets a sender end what should only log and go on.
"""

from __future__ import annotations

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
