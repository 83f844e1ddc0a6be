"""All pages of the console, by name; those that need an object show the deployment ``seen``."""

from __future__ import annotations

from typing import Final

SEEN: Final = "default/seen"
PAGES: Final = {
    "sign-in": "/sign-in",
    "now": "/",
    "deployment": f"/deployments/{SEEN}",
    "deployment-logs": f"/deployments/{SEEN}?tab=logs",
    "deployment-configuration": f"/deployments/{SEEN}?tab=configuration",
    "rollouts": "/rollouts",
    "rollout": f"/rollouts/{SEEN}",
    "hosts": "/hosts",
    "events": "/events",
    "events-filtered": f"/events?subject={SEEN}",
    "history": "/events?tab=history",
    "try": f"/try?name={SEEN}",
    "deploy": "/deploy",
    "deploy-again": f"/deploy?name={SEEN}",
    "scale": f"/do/scale?backend_tag={SEEN}",
    "rollback": f"/do/rollback?name={SEEN}",
    "traffic": f"/do/set_traffic?endpoint={SEEN}",
    "start-rollout": f"/do/start_rollout?name={SEEN}",
    "delete": f"/do/delete_deployment?name={SEEN}",
    "http-options": "/do/set_http_options",
}
