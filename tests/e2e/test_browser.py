"""A page of another origin in a real browser, and what it may read."""

import asyncio
import json
import shutil
from pathlib import Path

from ..conftest import CHAT, serving
from ..tokens import JWT_SETTINGS, token

PAGE = """<!doctype html><title>page</title><pre id="seen"></pre><script>
(async () => {
  const seen = {};
  try {
    const response = await fetch("%(url)s/v1/chat/completions", {
      method: "POST",
      headers: { "Authorization": "Bearer %(token)s", "Content-Type": "application/json", "X-Stainless-OS": "test" },
      body: JSON.stringify(%(body)s),
    });
    seen.status = response.status;
    seen.id = response.headers.get("x-request-id");
    seen.limit = response.headers.get("x-ratelimit-limit-requests");
    seen.text = await response.text();
    const refused = await fetch("%(url)s/v1/models");
    seen.refused = [refused.status, (await refused.json()).error.code];
  } catch (error) {
    seen.error = String(error);
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
})();
</script>"""


async def visit(url: str, folder: Path) -> dict:
    """What the page has written into itself."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser, "chromium is not installed; scripts/system_packages.sh installs it"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=9000",
    ]
    process = await asyncio.create_subprocess_exec(
        browser, *options, "--dump-dom", url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    return json.loads(output.decode().partition('<pre id="seen">')[2].partition("</pre>")[0])


async def test_page_of_a_configured_origin_reads_a_stream_and_any_other_nothing(tmp_path: Path) -> None:
    page = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():  # browsers open connections to spare
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n" + page)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    known, unknown = f"http://localhost:{port}", f"http://127.0.0.1:{port}"
    limits = {"subject": {"requests_per_minute": 50}}
    async with serving(server={"cors_origins": [known]}, auth={"jwt": JWT_SETTINGS}, limits=limits) as client:
        body = json.dumps({**CHAT, "stream": True})
        page = (PAGE % {"url": client.gateway.server.url, "token": token(), "body": body}).encode()
        seen = await visit(known, tmp_path / "known")
        assert (seen["status"], seen["limit"], seen["refused"]) == (200, "50", [401, "missing_token"]), seen
        assert len(seen["id"]) == 32
        assert seen["text"].endswith("data: [DONE]\n\n")
        assert seen["text"].count('"content"') == 5
        calls = client.engine.calls
        seen = await visit(unknown, tmp_path / "unknown")
        assert set(seen) == {"error"}
        assert client.engine.calls == calls  # the preflight was refused, so nothing was asked
    server.close()
