"""Goals: what each one decides, what it waits for, and what its end leaves behind.

A goal succeeds when what it asked for runs *and* every live proxy has applied the snapshots that say so, so what
follows a successful deploy is served by the new version everywhere. A failed one leaves what last succeeded as what is
wanted: the version that served before still serves, and keeps being replaced when its replicas die.
"""

from __future__ import annotations
