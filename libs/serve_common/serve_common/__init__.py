"""Words, wires and routing that the services share.

Why a library of its own: controller, proxies, replica hosts and clients must agree to the letter on names, values
and messages, and must not import one another. Nothing here decides what the controller decides, and only
``adapters/`` touches the outside.
"""

from __future__ import annotations
