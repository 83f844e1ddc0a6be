"""What users configure, as frozen values with every default, meaning, unit and limit in one place.

Why here: the CLI sends these, the controller stores them, hosts run replicas from them and proxies route by them.
A value that exists is valid: `check_backend_config` and its siblings run where a value enters the system.
"""

from __future__ import annotations
