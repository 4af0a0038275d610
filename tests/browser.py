"""The console in a real Chromium."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, async_playwright, expect

TIMEOUT_MS = 15_000
REFUSED = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
FORBIDDEN = REFUSED.replace("401 (Unauthorized)", "403 (Forbidden)")

WIDER_THAN_THE_SCREEN = """() => [...document.querySelectorAll("main *, header *")]
  .filter((element) => element.getClientRects().length && !element.closest("svg, .hidden, thead"))
  .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5)
  .map((element) => element.outerHTML.slice(0, 100))"""

# WCAG 2.2, contrast ratio and relative luminance.
CONTRASTS = """() => {
  const partsOf = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => {
    const [red, green, blue] = partsOf(color).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const groundOf = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if ((partsOf(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (color, ground) => {
    const [dark, light] = [luminance(color), luminance(ground)].sort((one, other) => one - other);
    return (light + 0.05) / (dark + 0.05);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility() || element.closest(".hidden, noscript")) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const ground = groundOf(element);
    const add = (text, of) => found.push({ text, of, ground, contrast: contrast(of, ground) });
    const own = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (own) add(own, color);
    if (element.placeholder) add(element.placeholder, getComputedStyle(element, "::placeholder").color);
  }
  return found;
}"""

expect.set_options(timeout=TIMEOUT_MS)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "chromium is not installed; scripts/system_packages.sh installs it"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            await browser.close()


class Console:
    """One tab with the console in it. `complaints` are what the browser has said of it: errors, warnings, violations of
    its policy."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def __call__(self, selector: str) -> Locator:
        return self.page.locator(selector)

    @property
    def last_turn(self) -> Locator:
        return self(".turn").last

    def fact(self, name: str) -> Locator:
        """What the last answer says of itself."""
        return self.last_turn.locator(f'[data-fact="{name}"] strong')

    async def use_token(self, token: str) -> None:
        await self("#token").fill(token)
        await self("#token").press("Enter")

    async def open(self, view: str) -> None:
        await self(f"#tab-{view}").click()
        await expect(self(f"#{view}")).to_be_visible()

    async def ask(self, question: str) -> None:
        await self("#question").fill(question)
        await self("#question").press("Enter")

    async def until(self, state: str) -> None:
        """Wait for the last answer to be in this state."""
        await expect(self.last_turn).to_have_attribute("data-state", state)

    async def too_wide(self) -> list[str]:
        """What reaches beyond the screen's right edge."""
        found: list[str] = await self.page.evaluate(WIDER_THAN_THE_SCREEN)
        return found

    async def contrasts(self) -> list[dict[str, Any]]:
        """Each text that is shown, with its contrast against what lies behind it."""
        found: list[dict[str, Any]] = await self.page.evaluate(CONTRASTS)
        return found


@asynccontextmanager
async def console(
    browser: Browser,
    url: str,
    token: str | None = None,
    view: str = "",
    complaints: list[str] | None = None,
    **context: Any,
) -> AsyncIterator[Console]:
    """The page of the gateway at `url`. In the end, the browser must have no complaints but `complaints`, and the one
    that comes of asking without a token before one is typed in."""
    async with await browser.new_context(**context) as tab:
        tab.set_default_timeout(TIMEOUT_MS)
        seen = Console(await tab.new_page())
        await seen.page.goto(f"{url}/console/" + (view and f"#/{view}"))
        if token is not None:
            await seen.use_token(token)
            await expect(seen("#token-state")).to_have_text("Token in use.")
        yield seen
        known = [REFUSED] if token is not None else []
        assert seen.complaints == known + (complaints or []), seen.complaints
