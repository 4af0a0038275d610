"""The console as people meet it: in a real Chromium, in front of a real gateway with scripted engines."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from app.engines.scripted import Gate, Script, ScriptedEngine

from .browser import FORBIDDEN, REFUSED, Console, chromium, console
from .conftest import CHAT, Client, serving
from .fault_answers import GOOD, Behaviour
from .test_pool_failures import fleet
from .tokens import JWT_SETTINGS, token

pytestmark = pytest.mark.slow

TEXT = "One two three four five."
STEPS_OF_A_MISS = ["auth", "limit", "body", "route", "key", "lookup", "dispatch", "engine"]
STEPS_OF_A_HIT = ["auth", "limit", "body", "route", "key", "lookup"]
OVERLOADED = "Failed to load resource: the server responded with a status of 503 (Service Unavailable)"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script> </p><b>bold</b>'


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
async def lasting() -> AsyncIterator[Client]:
    """A gateway for tests that leave nothing behind; it asks nobody for a token."""
    async with serving() as client:
        yield client


@asynccontextmanager
async def chat(
    browser: Browser, script: Script | Callable[..., Script], complaints: list[str] | None = None, **settings: Any
) -> AsyncIterator[tuple[Client, Console]]:
    async with (
        serving(script, **settings) as client,
        console(browser, client.gateway.server.url, view="chat", complaints=complaints) as page,
    ):
        await expect(page("#model option")).to_have_count(1)
        yield client, page


def good_token(**more: Any) -> str:
    return token(**{"scope": "inference routing:read cache:read", **more})


async def numbers_of(page: Console, chart: str) -> list[str]:
    """What a chart says in words."""
    return await page(f"#chart-{chart} .legend strong").all_inner_texts()


# The token


async def test_token_is_asked_for_and_kept_in_the_pages_memory_alone(browser: Browser) -> None:
    mine = good_token()
    async with (
        serving(auth={"jwt": JWT_SETTINGS}) as client,
        console(browser, client.gateway.server.url, complaints=[REFUSED, REFUSED]) as page,
    ):
        await expect(page("#token-state")).to_have_text("A token is needed.")
        await expect(page("#tiles")).to_contain_text("ok")  # health and metrics need none
        await expect(page("#table-tiers .note")).to_have_text("This needs a token with the scope cache:read.")
        await page.use_token(mine)
        await expect(page("#token-state")).to_have_text("Token in use.")
        await expect(page("#token")).to_be_hidden()
        await expect(page("#table-tiers")).to_contain_text("memory")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, history.state])"
        assert mine not in await page.page.evaluate(kept)
        assert mine not in await page.page.content()
        assert await page.page.context.cookies() == []
        assert (await page.page.evaluate("indexedDB.databases()")) == []
        assert await page("#token").input_value() == ""
        await page.page.reload()
        await expect(page("#token-state")).to_have_text("A token is needed.")


async def test_gateway_that_lets_everybody_in_asks_for_no_token(browser: Browser, lasting: Client) -> None:
    async with console(browser, lasting.gateway.server.url) as page:
        await expect(page("#token-state")).to_have_text("No token needed.")
        await expect(page("#token")).to_be_hidden()


async def test_bad_token_is_refused_in_words_and_another_one_may_be_typed(browser: Browser) -> None:
    async with (
        serving(auth={"jwt": JWT_SETTINGS}) as client,
        console(browser, client.gateway.server.url, complaints=[REFUSED, REFUSED]) as page,
    ):
        await page.use_token("not\u00a0a token")
        await expect(page("#token-state")).to_contain_text("This is no token")
        await page.use_token("x.y.z")
        await expect(page("#token-state")).to_contain_text("Not accepted")
        await expect(page("#token-state")).to_contain_text("invalid_token")
        await expect(page("#token")).to_be_focused()
        await page.use_token(good_token())
        await expect(page("#token-state")).to_have_text("Token in use.")
        await page("#token-forget").click()
        await expect(page("#token-state")).to_have_text("A token is needed.")
        page.complaints.pop()  # of the models, once more without a token


async def test_token_without_a_scope_shows_what_it_may_and_names_the_scope(browser: Browser) -> None:
    async with serving(auth={"jwt": JWT_SETTINGS}) as client:
        url = client.gateway.server.url
        async with console(browser, url, good_token(scope="inference"), complaints=[FORBIDDEN] * 2) as page:
            await expect(page("#table-tiers .note")).to_contain_text("the scope cache:read")
            await expect(page("#table-replicas")).to_contain_text("demo")
            await page.open("routing")
            await expect(page("#routing-note")).to_have_text(
                "This needs the scope routing:read, which the token does not have."
            )
            await page.open("chat")
            await expect(page("#model option")).to_have_text(["demo"])


async def test_expired_token_is_told_and_nothing_that_was_typed_is_lost(browser: Browser) -> None:
    async with serving(auth={"jwt": {**JWT_SETTINGS, "leeway_s": 0}}) as client:
        exp = int(time.time()) + 3
        async with console(
            browser, client.gateway.server.url, good_token(exp=exp), "chat", complaints=[REFUSED, REFUSED]
        ) as page:
            await expect(page("#model option")).to_have_count(1)
            await page("#system").fill("Be brief.")
            await page.ask("Before")
            await page.until("done")
            await asyncio.sleep(exp - time.time() + 0.1)
            await page.ask("A long question")
            await page.until("failed")
            await expect(page.last_turn.locator(".error")).to_contain_text("expired_token")
            await expect(page("#token-state")).to_contain_text("expired_token")
            assert await page("#question").input_value() == "A long question"
            assert await page("#system").input_value() == "Be brief."
            await page.use_token(good_token())
            await expect(page("#token-state")).to_have_text("Token in use.")
            await page("#question").press("Enter")
            await page.until("done")
            await expect(page(".turn .answer")).to_have_text([TEXT, "", TEXT])


# The chat


async def test_answer_comes_as_it_is_generated_and_tells_its_way(browser: Browser) -> None:
    gate = Gate()
    variants = [{"name": "only", "pool": "demo", "weight": 1}, {"name": "never", "pool": "demo", "weight": 0}]
    async with chat(browser, Script(TEXT, gate=gate), models=[{"name": "demo", "variants": variants}]) as (
        client,
        page,
    ):
        await page.ask("Count")
        await gate.arrived.wait()
        await expect(page("#stop")).to_be_visible()
        for tokens, text in ((2, "One two"), (1, "One two three")):
            gate.release(tokens)
            await expect(page.last_turn.locator(".answer")).to_have_text(text)
        await asyncio.sleep(0.05)  # some time for the answer's speed
        gate.open()
        await page.until("done")
        await expect(page.last_turn.locator(".answer")).to_have_text(TEXT)
        await expect(page.fact("cache")).to_have_text("miss")
        await expect(page.fact("variant")).to_have_text("only")
        await expect(page.fact("ttft")).to_have_text(re.compile(r"^[\d.]+ (ms|s)$"))
        await expect(page.fact("speed")).to_contain_text("tok/s")
        await expect(page.fact("tokens")).to_have_text("1 + 5")
        steps = await page.last_turn.locator(".steplist span").all_inner_texts()
        assert [step for step in steps if step != "other"] == [*STEPS_OF_A_MISS, "total"]
        await page.last_turn.get_by_role("button", name="Ask again").click()
        await page.until("done")
        await expect(page.fact("cache")).to_contain_text("hit, memory")
        await expect(page.fact("speed")).to_have_text(re.compile(r"at once|tok/s"))
        steps = await page.last_turn.locator(".steplist span").all_inner_texts()
        assert [step for step in steps if step != "other"] == [*STEPS_OF_A_HIT, "total"]
        assert client.engine.calls == 1


@pytest.mark.parametrize("way", ["button", "key"])
async def test_stopped_answer_ends_the_engines_work_and_keeps_what_there_is(browser: Browser, way: str) -> None:
    gate = Gate()
    async with chat(browser, Script(TEXT, gate=gate)) as (client, page):
        await page.ask("Count")
        gate.release(2)
        await expect(page.last_turn.locator(".answer")).to_have_text("One two")
        assert client.engine.load.running == 1
        if way == "button":
            await page("#stop").click()
        else:
            await page.page.keyboard.press("Escape")
        await page.until("stopped")
        await client.until_idle(timeout_s=2)
        metrics = (await client.http.get("/metrics")).text
        assert 'headrace_admission_in_flight{pool="demo"} 0.0' in metrics
        assert 'outcome="disconnected"' in metrics
        await expect(page.last_turn.locator(".answer")).to_have_text("One two")
        await expect(page.last_turn.locator(".error")).to_have_text("Stopped.")
        await expect(page("#question")).to_be_focused()
        gate.open()
        await page.ask("Once more")
        await page.until("done")
        await expect(page.last_turn.locator(".answer")).to_have_text(TEXT)


async def test_conversation_goes_along_and_a_new_one_begins_without_it(browser: Browser) -> None:
    seen: list[list[str]] = []

    def answer(call: Any) -> Script:
        seen.append([message["content"] for message in call.body["messages"]])
        return Script(TEXT)

    async with chat(browser, answer) as (_, page):
        await page("#system").fill("Be brief.")
        await page.ask("First")
        await page.until("done")
        await page.ask("Second")
        await expect(page(".turn[data-state=done]")).to_have_count(2)
        await page("#new-chat").click()
        await expect(page(".turn")).to_have_count(0)
        await page.ask("Third")
        await page.until("done")
    assert seen == [["Be brief.", "First"], ["Be brief.", "First", TEXT, "Second"], ["Be brief.", "Third"]]


async def test_error_within_a_stream_is_told_under_the_text_before_it(browser: Browser) -> None:
    async with chat(browser, Script(TEXT, error_after=2)) as (_, page):
        await page.ask("Count")
        await page.until("failed")
        await expect(page.last_turn.locator(".answer")).to_have_text("One two")
        await expect(page.last_turn.locator(".error")).to_contain_text("engine_error")


async def test_refusal_is_told_in_words_with_the_time_to_come_back(browser: Browser) -> None:
    gate = Gate()
    full = [{"name": "demo", "engine": "scripted", "admission": {"max_in_flight": 1, "max_queue": 0}}]
    async with chat(browser, Script(TEXT, gate=gate), [OVERLOADED], pools=full) as (client, page):
        await client.open(CHAT)
        await gate.arrived.wait()
        await page.ask("Count")
        await page.until("failed")
        await expect(page.last_turn.locator(".error")).to_have_text(
            re.compile(r"Try again in [\d.]+ s\. \(503, overloaded, request [0-9a-f]{32}\)$")
        )
        gate.open()


async def test_what_a_model_says_is_text_and_never_markup(browser: Browser) -> None:
    async with chat(browser, Script(HOSTILE)) as (_, page):
        await page.ask(f"Say {HOSTILE}")
        await page.until("done")
        await expect(page.last_turn.locator(".answer")).to_have_text(HOSTILE)
        await expect(page.last_turn.locator(".asked .text")).to_have_text(f"Say {HOSTILE}")
        assert await page(".turn img, .turn script, .turn b").count() == 0
        assert await page.page.title() == "Headrace console"


# The figures


async def test_charts_and_tables_show_what_the_gateway_does(browser: Browser) -> None:
    engines = {name: ScriptedEngine(Script(TEXT)) for name in ("a", "b")}
    variants = [{"name": name, "pool": name, "weight": 1} for name in engines]
    async with serving(
        engines=engines,
        pools=[{"name": name, "engine": "scripted"} for name in engines],
        models=[{"name": "demo", "variants": variants, "sticky_by": "session"}],
    ) as client:
        engines["a"].load.kv_cache_usage = 0.42

        async def ask() -> None:
            for number in range(10_000):
                headers = {"x-session-id": str(number % 20)}
                await client.post({**CHAT, "temperature": 0, "stream": True, "seed": number % 7}, headers=headers)
                await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask())
        async with console(browser, client.gateway.server.url) as page:
            for chart in ("requests", "ttft", "hits", "queue", "tokens", "variant-requests", "variant-ttft", "kv"):
                await expect(page(f"#chart-{chart} path.line").first).to_be_attached()
            await expect(page("#chart-requests .legend")).to_contain_text(re.compile(r"ok[1-9][\d.]*/s"))
            await expect(page("#chart-hits .legend")).to_contain_text(re.compile(r"memory[1-9][\d.]* %"))
            await expect(page("#chart-ttft .legend")).to_contain_text(re.compile(r"median[\d.]+ [µm]?s"))
            await expect(page("#chart-variant-requests .legend")).to_contain_text(re.compile(r"demo / b[\d.]+/s"))
            await expect(page("#chart-kv .legend")).to_have_text("a42 %")
            await expect(page("#table-variants tbody tr")).to_have_count(2)
            await expect(page("#table-variants tbody tr").first).to_contain_text("50 %")
            await expect(page("#table-engines")).to_contain_text("42 %")
            await expect(page("#table-tiers")).to_contain_text("memory")
            await page("#chart-requests svg.plot").focus()
            await page.page.keyboard.press("ArrowLeft")
            await expect(page("#chart-requests .tip")).to_contain_text(re.compile(r"(now|s ago)\nok "))
            await page.page.keyboard.press("Escape")
            await expect(page("#chart-requests .tip")).to_be_hidden()
        asking.cancel()
        await asyncio.wait([asking])


async def test_routing_shows_pools_replicas_and_open_breakers(browser: Browser) -> None:
    async with fleet(Behaviour(status=500), GOOD, breaker={"failures": 3, "open_s": 60}) as ships:
        for _ in range(8):
            await ships.ask()
        async with console(browser, ships.client.gateway.server.url, view="routing") as page:
            pool = page("#table-pool-far")
            await expect(pool).to_contain_text("round_robin")
            rows = pool.locator("tbody tr")
            await expect(rows).to_have_count(2)
            for server, breaker in zip(ships.servers, ("open", "closed"), strict=True):
                row = rows.filter(has_text=server.url)
                await expect(row.locator("[data-label=Breaker]")).to_have_text(breaker)
                await expect(row.locator("[data-label=State]")).to_have_text("up")
            await expect(page("#table-model-demo")).to_contain_text("100 %")
            ships.servers[1].behave(Behaviour(status=500))
            for _ in range(3):
                await ships.ask()
            await expect(pool.locator("[data-label=Breaker]")).to_have_text(["open", "open"])
            await expect(pool).to_contain_text("no replica can answer")


async def test_gateway_that_was_away_is_told_and_its_counters_begin_anew(browser: Browser) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with AsyncExitStack() as first:
        client = await first.enter_async_context(serving(server={"port": port}))
        async with console(browser, client.gateway.server.url) as page:
            await expect(page("#status")).to_have_text("ok")
            for _ in range(50):
                await client.post()
            await expect(page("#chart-requests .legend")).to_contain_text(re.compile(r"ok[1-9][\d.]*/s"))
            await first.aclose()
            await expect(page("#banner")).to_contain_text("cannot be reached")
            await expect(page("#status")).to_have_text("unreachable")
            async with serving(server={"port": port}) as client:
                await expect(page("#status")).to_have_text("ok")
                await expect(page("#banner")).to_be_hidden()
                await client.post()
                await expect(page("#chart-requests .legend")).to_contain_text(re.compile(r"ok0?\.\d+/s"))
                page.complaints[:] = [text for text in page.complaints if "net::ERR_" not in text]


async def test_what_the_scripts_read_is_what_was_written(browser: Browser, lasting: Client) -> None:
    """Streams cut anywhere, escaped labels, counters that go back, and PromQL's own example of a quantile."""
    async with console(browser, lasting.gateway.server.url) as page:
        run = page.page.evaluate
        stream = 'data: {"text": "Größe"}\r\n\r\n: ping\n\nevent: x\ndata: two\ndata:lines\n\ndata: [DONE]\n\n'
        events = await run(
            """async (text) => {
              const { EventParser } = await import("./sse.js");
              const bytes = new TextEncoder().encode(text);
              return Array.from(bytes, (_, cut) => {
                const parser = new EventParser();
                return [...parser.push(bytes.slice(0, cut)), ...parser.push(bytes.slice(cut))];
              });
            }""",
            stream,
        )
        assert len(events) == len(stream.encode())
        assert all(found == ['{"text": "Größe"}', "two\nlines", "[DONE]"] for found in events)
        before = 'a_total{x="1"} 10\na_total{x="q\\"\\\\\\n,}"} 7\n# HELP h x\n'
        after = 'a_total{x="1"} 4\na_total{x="q\\"\\\\\\n,}"} 9\na_total{x="new"} 5 1700000000\n'
        buckets = 'h_bucket{le="1.0"} 10\nh_bucket{le="2.0"} 30\nh_bucket{le="+Inf"} 40\n'
        grown, half, most = await run(
            """async ([before, after]) => {
              const { Snapshot, growth, parse, quantile } = await import("./metrics.js");
              const [one, other] = [new Snapshot(0, parse(before)), new Snapshot(1, parse(after))];
              const quantiles = [0.5, 0.99].map((q) => quantile(one, other, "h", q));
              return [Object.fromEntries(growth(one, other, "a_total", "x")), ...quantiles];
            }""",
            [before, after + buckets],
        )
        assert grown == {"1": 4, 'q"\\\n,}': 2, "new": 5}
        assert (half, most) == (1.5, 2)


# For everybody


async def test_everything_can_be_done_by_keyboard(browser: Browser) -> None:
    gate = Gate()
    async with (
        serving(Script(TEXT, gate=gate), auth={"jwt": JWT_SETTINGS}) as client,
        console(browser, client.gateway.server.url, complaints=[REFUSED]) as page,
    ):
        keys = page.page.keyboard
        focused = "document.activeElement.id || document.activeElement.className"

        async def tab(*names: str) -> None:
            for name in names:
                await keys.press("Tab")
                assert await page.page.evaluate(focused) == name

        await expect(page("#token")).to_be_visible()
        await tab("skip", "tab-overview", "token", "token-use")
        await keys.press("Shift+Tab")
        await keys.type(good_token())
        await keys.press("Enter")
        await expect(page("#tab-overview")).to_be_focused()
        await keys.press("ArrowRight")
        await expect(page("#routing")).to_be_visible()
        await keys.press("End")
        await expect(page("#chat")).to_be_visible()
        await expect(page("#model option")).to_have_count(1)
        await tab("token-forget", "model")
        await keys.press("Tab")  # the settings' summary
        await tab("system", "temperature", "max-tokens", "new-chat", "question", "send")
        await keys.press("Shift+Tab")
        await keys.type("One line")
        await keys.press("Shift+Enter")
        await keys.type("and another")
        assert await page("#question").input_value() == "One line\nand another"
        await keys.press("Enter")
        await gate.arrived.wait()
        await keys.press("Escape")
        await page.until("stopped")
        await client.until_idle(timeout_s=2)
        gate.open()
        await keys.type("Again")
        await keys.press("Enter")
        await page.until("done")


async def test_phone_shows_all_views_without_scrolling_sideways(browser: Browser) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    name = "a-model-whose-name-is-as-long-as-those-of-models-are/Instruct-AWQ-INT4-128k"
    text = f"{'W' * 300} {' '.join(map(str, range(400)))}"
    async with serving(Script(text), models=[{"name": name, "pool": "demo"}]) as client:
        await client.post({**CHAT, "model": name})
        async with console(browser, client.gateway.server.url, **phone) as page:
            await expect(page("#chart-requests path.line").first).to_be_attached()
            for view in ("overview", "routing", "chat"):
                await page.open(view)
                if view == "chat":
                    await expect(page("#model option")).to_have_count(1)
                    await page.ask("W" * 200)
                    await page.until("done")
                width = await page.page.evaluate("Math.max(document.documentElement.scrollWidth, visualViewport.width)")
                assert width == 390, view
                wide = await page.too_wide()
                assert wide == [], view
            left = "document.documentElement.scrollHeight - innerHeight - scrollY"
            assert await page.page.evaluate(left) < 2  # the answer's end is in view


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read_in_light_and_dark(browser: Browser, scheme: Any) -> None:
    async with serving(Script(TEXT, error_after=3)) as client:
        for _ in range(3):
            await client.post()
        async with console(browser, client.gateway.server.url, color_scheme=scheme) as page:
            ground = await page.page.evaluate("getComputedStyle(document.body).backgroundColor")
            luminance = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
            assert luminance > 200 if scheme == "light" else luminance < 60
            await expect(page("#chart-requests path.line").first).to_be_attached()
            for view in ("overview", "routing", "chat"):
                await page.open(view)
                if view == "routing":
                    await expect(page("#table-pool-demo td").first).to_be_visible()
                if view == "chat":
                    await expect(page("#model option")).to_have_count(1)
                    await page.ask("Count")
                    await page.until("failed")
                texts = await page.contrasts()
                assert len(texts) > 10, view
                assert [each for each in texts if each["contrast"] < 4.5] == [], view
