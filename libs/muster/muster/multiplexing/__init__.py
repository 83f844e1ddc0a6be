"""Many models in one replica: loaded when they are asked for, let go when others need the room.

Why in the replica: which models fit beside each other is known only where they are. Routers are told which models a
replica holds and prefer it for them; they decide nothing here.

`shelf` decides who must go, `models` carries out on the event loop, `closing` lets go of a model, `decorator` is what
users import.
"""

from __future__ import annotations

from muster.multiplexing.models import multiplexed

__all__ = ["multiplexed"]
