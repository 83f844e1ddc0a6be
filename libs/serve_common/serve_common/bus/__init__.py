"""The data plane's own lean NATS client: few verbs, one read path, no task per message.

Why: proxies and replica processes move every request through it, and the general client (which stays in use
for the control plane) costs a third of the throughput.
"""

from __future__ import annotations
