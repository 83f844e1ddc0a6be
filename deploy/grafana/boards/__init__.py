"""Grafana's dashboards as a short description, from which their JSON is made.

Why not the JSON by hand: five dashboards of it are thousands of lines in which a wrong unit, a place taken twice or a
filter that was forgotten is not seen. ``python -m deploy.grafana.boards`` writes it beside this package.
"""

from __future__ import annotations
