"""Goals: what each one owns, what it waits for, and the effects of its success or failure.

A goal succeeds when its target runs *and* every live proxy has applied the snapshots of it, so that requests after a
successful deploy are served by the new version everywhere. A failed goal makes the last good version the target again:
the version that served before still serves, and its replicas are replaced when they die.
"""

from __future__ import annotations
