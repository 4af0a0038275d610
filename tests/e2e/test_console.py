"""The console in front of a real engine."""

import re

from playwright.async_api import expect

from ..browser import FORBIDDEN, chromium, console
from .conftest import MODEL, Process

NOT_ZERO = r"(?=[\d.]*[1-9])[\d.]+"


async def test_chat_with_a_real_engine_streams_and_its_kv_cache_is_shown(gateway: Process) -> None:
    # The token has the scope `inference` alone, so the overview goes without the cache's tiers.
    without = [FORBIDDEN]
    async with chromium() as browser, console(browser, gateway.url, gateway.token, "chat", without) as page:
        await page("#model").select_option(MODEL)
        await page("#max-tokens").fill("400")
        await page.ask("Tell a long story about a miller and the water that turns the wheel of the mill.")
        answer = page.last_turn.locator(".answer")
        await expect(answer).to_have_text(re.compile(r"\w+ \w+"))
        first = await answer.inner_text()
        await page.until("running")
        await page.open("overview")
        await expect(page("#chart-kv .legend")).to_contain_text(re.compile(rf"local{NOT_ZERO} %"))
        await expect(page("#chart-kv path.line").first).to_be_attached()
        await expect(page("#table-engines tbody tr").filter(has_text="local")).to_contain_text("up")
        await page.open("chat")
        await expect(page.last_turn).to_have_attribute("data-state", "done", timeout=120_000)
        whole = await answer.inner_text()
        assert whole.startswith(first)
        assert len(whole) > len(first)
        await expect(page.fact("cache")).to_have_text("miss")
        await expect(page.fact("ttft")).to_have_text(re.compile(rf"^{NOT_ZERO} m?s$"))
        await expect(page.fact("speed")).to_have_text(re.compile(rf"^{NOT_ZERO} tok/s$"))
        await expect(page.last_turn.locator(".steplist")).to_contain_text("engine")
