"""A person at a browser: what they open, type and press, and what the browser complains of."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Response

from tests.support.browser.console_process import PASSWORD
from tests.support.paths import ROOT

AXE: Final = ROOT / "tests/vendor/axe-core/axe.min.js"
MOUSE: Final = "mouse"
KEYBOARD: Final = "keyboard"
PHONE_WIDTH: Final = 375
SOON_MS: Final = 30_000
"""For what takes a moment on a quiet machine."""
LOST_STREAM: Final = r"\[object Event\]|net::ERR_|status of 50\d"
"""What the browser complains of when a page's stream ends, or cannot be opened."""
_TABS_MAX: Final = 250
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The path of a chromium of this machine; None: there is none."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


class Visitor:
    """One context of the browser with one page, as a person with a clean browser or with a session has it."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        state: Any = None,
        width: int = 1280,
        theme: str = "light",
        bypass_csp: bool = False,
        way: str = MOUSE,
    ) -> None:
        """``state`` are the cookies of an earlier visit. Scripts of tests are let in by ``bypass_csp`` only.

        ``way`` is `MOUSE`, or `KEYBOARD`: by keyboard alone, on a screen as narrow as a phone's.
        """
        self.url = url
        self.way = way
        width = width if way == MOUSE else PHONE_WIDTH
        self.complaints: list[str] = []
        """Errors of scripts and of the browser's console."""
        self.expected: list[str] = []
        """Patterns of complaints that belong to what the test does; see `LOST_STREAM`."""
        self.context: BrowserContext = browser.new_context(
            base_url=url,
            storage_state=state,
            viewport={"width": width, "height": 900},
            color_scheme="dark" if theme == "dark" else "light",
            bypass_csp=bypass_csp,
            permissions=["clipboard-read", "clipboard-write"],
        )
        self.context.set_default_timeout(SOON_MS)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error of a script: {error}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    @property
    def unexpected(self) -> list[str]:
        """Complaints that no pattern of ``expected`` matches."""
        return [each for each in self.complaints if not any(re.search(p, each) for p in self.expected)]

    def close(self) -> None:
        """Close the context with all of its pages."""
        self.context.close()

    def save(self, directory: Path) -> None:
        """Write what is seen now to files, for people who look why a test failed."""
        directory.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=directory / "page.png", full_page=True)
        (directory / "page.html").write_text(self.page.content())
        (directory / "complaints.txt").write_text("\n".join([self.page.url, *self.complaints]))

    # -- what people do ------------------------------------------------------------------------------------------------

    def open(self, path: str, status: int = 200) -> Response:
        """Open an address of the console, which must respond with ``status``."""
        response = self.page.goto(path, wait_until="load")
        assert response is not None
        assert response.status == status, f"{path}: {response.status}"
        return response

    def sign_in(self, name: str, password: str = PASSWORD) -> None:
        """Fill the form of the sign-in page, which must be open, and send it."""
        self.write(self.page.get_by_label("Name"), name)
        self.write(self.page.get_by_label("Password"), password)
        self.press(self.page.get_by_role("button", name="Sign in"))

    def sign_out(self) -> None:
        """By the button in the head."""
        self.press(self.page.get_by_role("button", name="Sign out"))

    def press(self, target: Locator) -> None:
        """Click on a button or link, or reach it by Tab and press Enter."""
        if self.way == MOUSE:
            target.click()
            return
        target.wait_for()
        assert self.get_overflow() == []
        self.tab_to(target)
        self.page.keyboard.press("Enter")

    def write(self, target: Locator, text: str) -> None:
        """Write into a field, in place of what is there."""
        if self.way == MOUSE:
            target.fill(text)
            return
        target.wait_for()
        self.tab_to(target)
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.type(text)

    def choose(self, target: Locator, option: str) -> None:
        """Choose the option of a list that begins with this text."""
        if self.way == MOUSE:
            target.select_option(option)
            return
        target.wait_for()
        self.tab_to(target)
        self.page.keyboard.type(option)

    def row(self, name: str) -> Locator:
        """The row of a deployment in the table of Now, by the name its user gave it."""
        link = self.page.get_by_role("link", name=name, exact=True)
        return self.page.get_by_role("row").filter(has=link)

    def tab_to(self, target: Locator) -> None:
        """Press Tab until ``target`` has the focus, and see that this is shown."""
        is_first = target.evaluate("e => e === document.activeElement")
        for _ in range(_TABS_MAX):
            if not is_first:
                self.page.keyboard.press("Tab")
            is_first = False
            if target.evaluate("e => e === document.activeElement"):
                outline = target.evaluate(
                    "e => { const s = getComputedStyle(e); return s.outlineStyle + s.boxShadow; }"
                )
                assert outline != "nonenone", f"nothing shows that {target} has the focus"
                return
        raise AssertionError(f"{target} cannot be reached by Tab")

    # -- what is measured ----------------------------------------------------------------------------------------------

    def find_axe_violations(self) -> list[str]:
        """What axe-core finds on the page now, in lines."""
        self.page.evaluate("source => { if (!window.axe) { (0, eval)(source); } }", AXE.read_text())
        found = self.page.evaluate(
            "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"
        )
        return [
            f"{violation['id']} ({violation['help']}): {node['html'][:160]} {node['failureSummary']}"
            for violation in found
            for node in violation["nodes"]
        ]

    def get_first_paint_ms(self) -> float:
        """Time from the start of the navigation to the first content on the screen."""
        read = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        while (found := self.page.evaluate(read)) is None:
            self.page.wait_for_timeout(20)
        return float(found)

    def get_overflow(self) -> list[str]:
        """Elements that reach beyond the right edge, if the page scrolls sideways."""
        found: Iterable[str] = self.page.evaluate(
            """() => {
              const width = document.documentElement.clientWidth;
              if (document.documentElement.scrollWidth <= width) return [];
              return [...document.body.querySelectorAll("*")]
                .filter((e) => e.getBoundingClientRect().right > width + 0.5)
                .map((e) => e.outerHTML.slice(0, 160));
            }"""
        )
        return list(found)
