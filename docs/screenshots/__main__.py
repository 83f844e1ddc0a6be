"""``python -m docs.screenshots``: take pictures of all pages of the console, on a stack that is under load."""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from muster.secrets import Secrets
from serve_common.api.commands import StartRollout
from serve_common.api.views import GoalStatus
from serve_common.config.rollout import RolloutConfig
from tests.support.browser.console_process import ConsoleProcess, add_people, get_person
from tests.support.browser.load import under_load
from tests.support.browser.models import deploy
from tests.support.browser.visitor import Visitor, find_browser
from tests.support.paths import ROOT
from tests.support.stacks.embedded_stack import EmbeddedStack

DIRECTORY: Final = ROOT / "docs/images/console"
LOOKS: Final = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (375, "light")}
"""Width in pixels and theme by the end of the file's name."""
HEIGHTS: Final = {"phone": 1200}
HEIGHT_MAX: Final = 1500
BYTES_MAX: Final = 150_000
LOAD_S: Final = 75.0
"""So that charts have something to show."""
_SHOWN_APPS: Final = Path("/srv/apps")


def main() -> int:
    """Take all of them. The exit code: 1 without a browser."""
    executable = find_browser()
    if executable is None:
        sys.stderr.write("there is no chromium; 'make browser' installs it\n")
        return 1
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="muster-") as directory, ExitStack() as ending:
        stack = EmbeddedStack(Path(directory) / "state")
        ending.callback(stack.output.close)
        stack.principal = "ana"
        stack.start()
        ending.callback(stack.stop)
        record = stack.record()
        secrets = Secrets(Path(record["secrets"]))
        add_people(secrets)
        # What commands on the pages show is what a user has who follows the README.
        console = ending.enter_context(
            ConsoleProcess(
                record["nats_url"],
                secrets,
                Path(directory) / "console.log",
                HTTP_URL="http://127.0.0.1:8000",
                APPS_DIR=str(_SHOWN_APPS),
            )
        )
        playwright = ending.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        ending.callback(browser.close)
        # Where one may, at an address that reads well in the pictures.
        is_free = os.access(_SHOWN_APPS.parent, os.W_OK) and not _SHOWN_APPS.exists()
        apps = _SHOWN_APPS if is_free else Path(directory) / "apps"
        shutil.copytree(Path(__file__).parent / "apps", apps)
        ending.callback(shutil.rmtree, apps)
        _take_all(stack, console, browser, apps)
    return 0


def _take_all(stack: EmbeddedStack, console: ConsoleProcess, browser: Browser, apps: Path) -> None:
    first = Visitor(browser, console.url)
    first.open("/sign-in")
    first.sign_in(get_person("admin"))
    first.page.wait_for_url(f"{console.url}/")  # the console reads, and so samples the load, from now on
    _deploy_all(stack, apps)
    url = stack.record()["http_url"]
    with ExitStack() as loads:
        for path, threads, pause_s in (("greeter", 4, 0.02), ("sentiment", 2, 0.05), ("rent/docs", 1, 0.3)):
            loads.enter_context(under_load(f"{url}/{path}", threads=threads, pause_s=pause_s))
        time.sleep(LOAD_S / 3)
        _start_rollout(stack)
        goal_id = deploy(
            stack, "ranker", "Ranker", version="2026-11-28", ends=GoalStatus.FAILED, app_dir=apps
        ).goal_id
        time.sleep(LOAD_S * 2 / 3)
        state = first.context.storage_state()
        for look, (width, theme) in LOOKS.items():
            visitor = Visitor(browser, console.url, state=state, width=width, theme=theme)
            nobody = Visitor(browser, console.url, width=width, theme=theme)
            nobody.open("/sign-in")
            _save(nobody.page, "sign-in", look)
            for name, path in {
                "now": "/",
                "deployment": "/deployments/default/greeter",
                "logs": "/deployments/default/sentiment?tab=logs",
                "configuration": "/deployments/default/greeter?tab=configuration",
                "rollouts": "/rollouts",
                "rollout": "/rollouts/default/greeter",
                "hosts": "/hosts",
                "events": "/events",
                "history": "/events?tab=history",
                "deploy": "/deploy?name=default/greeter",
                "goal": f"/goals/{goal_id}",
            }.items():
                visitor.open(path)
                visitor.page.wait_for_timeout(1_500)
                _save(visitor.page, name, look)
            _show_plan(visitor)
            _save(visitor.page, "plan", look)
            _call(visitor)
            _save(visitor.page, "try", look)
            visitor.close()
            nobody.close()


def _deploy_all(stack: EmbeddedStack, apps: Path) -> None:
    deploy_model = functools.partial(deploy, app_dir=apps)
    deploy_model(stack, "greeter", "Greeter", version="v1", replicas=3, seconds=0.02)
    deploy_model(stack, "sentiment", "Sentiment", version="2026-10", replicas=2, seconds=0.03, errors=0.004)
    deploy_model(stack, "rent", "Rent", version="v4")
    deploy_model(stack, "shop/embedder", "Greeter", version="e5-small", replicas=4, seconds=0.01)
    deploy_model(
        stack,
        "shop/search",
        "Greeter",
        version="2026-11-02",
        replicas=2,
    )


def _start_rollout(stack: EmbeddedStack) -> None:
    stack.request(
        StartRollout(
            name="greeter",
            version="v2",
            replica_config={"init_kwargs": {"seconds": 0.021}},
            rollout=RolloutConfig(steps=("10% 10s", "50% 1h", "100%"), max_latency_ratio=3.0),
        )
    )


def _show_plan(visitor: Visitor) -> None:
    visitor.open("/do/scale?backend_tag=default/sentiment")
    visitor.page.get_by_label("Number of replicas").fill("4")
    visitor.page.get_by_role("button", name="Show what it would do").click()
    visitor.page.get_by_role("button", name="Apply").wait_for()


def _call(visitor: Visitor) -> None:
    visitor.open("/try?name=default/rent&schema=1")
    page = visitor.page
    page.get_by_role("link", name="/predict").click()
    page.get_by_label("area_m2").fill("70")
    page.get_by_label("rooms").fill("3")
    page.get_by_role("button", name="Send").click()
    page.get_by_text('"rent": 925').wait_for()


def _save(page: Page, name: str, look: str) -> None:
    """As a PNG of few colours: pages have few, and pictures in a repository should be small."""
    path = DIRECTORY / f"{name}-{look}.png"
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture = picture.crop((0, 0, picture.width, min(picture.height, HEIGHTS.get(look, HEIGHT_MAX))))
    for colours in (256, 128, 64, 32):
        picture.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= BYTES_MAX:
            return
    raise AssertionError(f"{path} is larger than {BYTES_MAX} bytes")


if __name__ == "__main__":
    sys.exit(main())
