"""The page at `/`: its files, its stream of the cache, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE_S
from deploy.tools import find
from gateway.chat_templates import GLM
from gateway.conftest import MODEL, ROOT, Gateway
from samples import others_at_night

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.client.block_kinds import BlockKind
from quire.client.cache_client import CacheClient
from quire.gateway.http import page

PROMPT = "A model is a module that takes a tensor"
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@contextmanager
def live(gateway: Gateway) -> Iterator[Iterator[tuple[str, Any]]]:
    with gateway.client() as client, client.stream("GET", "/live") as answer:
        assert answer.status_code == 200
        yield events(answer)


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_files_are_served_and_may_load_nothing_from_elsewhere(http_client: httpx.Client) -> None:
    for path, kind in {"/": "text/html", "/page/page.js": "javascript", "/page/page.css": "text/css"}.items():
        answer = http_client.get(path)
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert http_client.get("/page/../page.py").status_code == 404


def test_openapi_names_each_endpoint_and_its_page_loads_nothing_from_elsewhere(http_client: httpx.Client) -> None:
    document = http_client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/models", "/health"):
        assert document["paths"][path]
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    summaries = [each["summary"] for methods in document["paths"].values() for each in methods.values()]
    assert [summary for summary in summaries if summary.startswith("/")] == []
    page_of_docs = http_client.get("/docs")
    assert "default-src 'self'" in page_of_docs.headers["content-security-policy"]
    assert "://" not in page_of_docs.text
    assert http_client.get("/page/docs.js").status_code == 200


@pytest.mark.parametrize("path", ["nothing.js", "", "%00", "..%2fpage.py", "x" * 5000, "a/b/c", "page.js/x"])
def test_a_file_that_is_not_there_is_not_found(http_client: httpx.Client, path: str) -> None:
    answer = http_client.get(f"/page/{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "path_not_found")
    assert http_client.post("/page/page.js").status_code == 405


def test_the_stream_tells_of_pools_and_of_blocks_as_they_change(gateway: Gateway, http_client: httpx.Client) -> None:
    with live(gateway) as stream:
        seen: dict[str, Any] = {}
        while set(seen) < {"pools", "blocks"}:
            name, data = next(stream)
            seen.setdefault(name, data)
        [pool] = seen["pools"]
        assert pool["attached"]
        assert seen["blocks"]["cleared"]
        assert seen["blocks"]["block_count"] == pool["block_count"]
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
        assert http_client.post("/v1/completions", json=body).status_code == 200
        kinds = set()
        while not {BlockKind.ACTIVE, BlockKind.CACHED} <= kinds:
            name, data = next(stream)
            if name == "blocks":
                kinds |= {kind for _, kind, _ in data["changes"]}


def test_an_open_page_does_not_hold_up_the_end(services: LocalServices, tmp_path: Path) -> None:
    gateway = Gateway(services.cachemgr_address, "--drain-timeout", "20", log=tmp_path / "log")
    try:
        with live(gateway) as stream:
            next(stream)
            gateway.process.terminate()
            for _ in stream:  # until it ends
                pass
        assert gateway.process.wait(DEADLINE_S) == 0
        assert "drain timed out" not in gateway.log.read_text()
    finally:
        gateway.close()


def test_a_sequence_that_is_not_there_is_not_found(http_client: httpx.Client) -> None:
    assert http_client.get("/live/sequence", params={"lease": "01234567", "id": "1"}).status_code == 404
    assert http_client.get("/live/sequence", params={"lease": "01234567", "id": "1e3"}).status_code == 400
    assert http_client.get("/live/sequence").status_code == 400


def test_of_another_tenants_blocks_only_that_they_are_taken_is_told() -> None:
    theirs = pb.Block(block_id=7, state=pb.BLOCK_STATE_ACTIVE, reference_count=3, tenant="theirs")
    free = pb.Block(block_id=8, state=pb.BLOCK_STATE_FREE)
    answer = pb.WatchBlocksResponse(events=[pb.BlockEvent(block=block) for block in (theirs, free)])
    assert page.describe_changes(answer, 9, "mine")["changes"] == [(7, page.UNSEEN, 0), (8, BlockKind.FREE, 0)]
    assert page.describe_changes(answer, 9, "theirs")["changes"][0] == (7, BlockKind.SHARED, 3)
    assert page.describe_changes(answer, 9, None)["changes"][0] == (7, BlockKind.SHARED, 3)


def test_the_blocks_of_a_host_tier_are_told_by_state() -> None:
    pool = pb.Pool(host_block_counts=pb.HostBlockCounts(free_count=1, held_count=2, retired_count=3, cached_count=4))
    assert page.describe_host_blocks(pool) is None
    pool.geometry.host_block_count = 10
    assert page.describe_host_blocks(pool) == {"cached": 4, "held": 2, "retired": 3, "free": 1}


def test_a_caller_is_told_of_its_own_kept_blocks() -> None:
    tenants = [pb.Tenant(name=name, kept_block_count=3, keep_limit_block_count=9) for name in ("mine", "theirs")]
    tenants.append(pb.Tenant(name="keeps nothing", keep_limit_block_count=9))
    for each in tenants[:2]:
        each.next_keep_end_time.seconds = 60
    mine = {"tenant": "mine", "blocks": 3, "limit": 9, "until": 60.0}
    assert page.describe_keeping(tenants, "mine") == [mine]
    assert page.describe_keeping(tenants, None) == [mine, {**mine, "tenant": "theirs"}]


@contextmanager
def browser_tab(**options: Any) -> Iterator[Any]:
    """A tab of a headless Chromium. The page may write nothing to its console."""
    chromium = find("chromium", required_by="QUIRE_REQUIRE_FOREIGN", for_what="the page in a browser")
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(**{"viewport": {"width": 1300, "height": 900}, **options})
        tab.set_default_timeout(1000 * DEADLINE_S)
        expect.set_options(timeout=1000 * DEADLINE_S)
        troubles: list[str] = []
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        yield tab
        browser.close()
    assert troubles == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway on a pool of 32,768 blocks, of which the first ones are cached."""
    log = tmp_path_factory.mktemp("large") / "log"
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=32_768) as services:
        gateway = Gateway(services.cachemgr_address, log=log)
        try:
            with gateway.client() as client:
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
                assert client.post("/v1/completions", json=body).status_code == 200
            yield gateway
        finally:
            gateway.close()


def point_at(tab: Any, *, column: int, row: int, width: float) -> None:
    """Move the mouse to the middle of a cell of the map."""
    box = tab.locator("#map").bounding_box()
    tab.mouse.move(box["x"] + (column + 0.5) * width, box["y"] + (row + 0.5) * width)


def cell_width(tab: Any) -> float:
    """Find the width of a cell: the pixels in which the first cell is described."""
    tab.locator("#map").scroll_into_view_if_needed()
    box, first = tab.locator("#map").bounding_box(), None
    for x in range(1, 40):
        tab.mouse.move(box["x"] + x, box["y"] + 1)
        tab.evaluate("() => new Promise(requestAnimationFrame)")
        text = tab.inner_text("#block-text")
        first = first or text
        if text != first:
            return float(x)
    raise AssertionError(f"one cell is wider than 40 pixels: {first}")


@pytest.mark.verify
@pytest.mark.parametrize("viewport", others_at_night([WIDE, NARROW], [WIDE]))
def test_each_block_of_32768_can_be_pointed_at(large: Gateway, viewport: Any) -> None:
    from playwright.sync_api import expect

    with browser_tab(viewport=viewport) as tab:
        tab.goto(large.url)
        expect(tab.locator("#zoom-text")).to_have_text("all blocks, 32 a cell")
        expect(tab.locator("#legend")).to_contain_text("cached")
        width = cell_width(tab)
        assert width >= 10
        point_at(tab, column=0, row=0, width=width)
        expect(tab.locator("#block-text")).to_have_text(re.compile("^Blocks 1 to 32: .*cached"))
        for cells_hold in ("8", "2"):
            tab.click("#zoom-in")
            expect(tab.locator("#zoom-text")).to_have_text(re.compile(f", {cells_hold} a cell$"))
        tab.click("#zoom-in")
        expect(tab.locator("#zoom-in")).to_be_disabled()
        expect(tab.locator("#block-text")).to_have_text("Block 1: cached")
        tab.press("#map", "End")
        expect(tab.locator("#block-text")).to_have_text("Block 32,767: free")
        tab.press("#map", "ArrowLeft")
        expect(tab.locator("#block-text")).to_have_text("Block 32,766: free")
        tab.press("#map", "-")
        expect(tab.locator("#block-text")).to_have_text(re.compile("^Blocks 32,76. to 32,767: . free"))
        tab.press("#map", "0")
        expect(tab.locator("#zoom-text")).to_have_text("all blocks, 32 a cell")
        assert tab.evaluate("document.querySelectorAll('*').length") < 200, "an element for each block"


@pytest.mark.verify
def test_the_wheel_zooms_at_the_pointer_on_a_map_that_was_chosen(large: Gateway) -> None:
    from playwright.sync_api import expect

    with browser_tab(viewport={"width": 1280, "height": 500}) as tab:
        tab.goto(large.url)
        expect(tab.locator("#zoom-text")).to_have_text("all blocks, 32 a cell")
        width = cell_width(tab)
        point_at(tab, column=5, row=2, width=width)
        expect(tab.locator("#block-text")).to_have_text(re.compile("^Blocks "))
        pointed = tab.inner_text("#block-text")
        tab.mouse.down()
        tab.mouse.up()
        tab.mouse.wheel(0, -100)
        expect(tab.locator("#zoom-text")).to_have_text(re.compile(", 8 a cell$"))
        assert tab.inner_text("#block-text").split()[1] == pointed.split()[1], "the pointed blocks moved"
        tab.mouse.wheel(0, 100)
        expect(tab.locator("#zoom-text")).to_have_text("all blocks, 32 a cell")


@pytest.mark.verify
def test_reasoning_stands_apart_from_the_answer(services: LocalServices, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    template = tmp_path / "template.jinja"
    template.write_text(GLM)
    gateway = Gateway(services.cachemgr_address, "--chat-template", str(template), log=tmp_path / "log")
    try:
        with browser_tab() as tab:
            tab.goto(gateway.url)
            expect(tab.locator("#model option")).to_have_count(1)
            tab.click("#tab-chat")
            tab.fill("#max_tokens", "12")
            tab.fill("#temperature", "0")  # a token that is drawn can be an end token
            tab.fill("#prompt", "hello")
            tab.press("#prompt", "Enter")
            expect(tab.locator("#usage")).to_contain_text("cut at max_tokens")
            expect(tab.locator("#answer .reasoning")).not_to_be_empty()
            expect(tab.locator("#prompt")).to_have_value("hello")  # it has no answer: it can be changed and sent again
    finally:
        gateway.close()


@pytest.mark.verify
@pytest.mark.parametrize("colours", others_at_night(["light", "dark"], ["dark"]))
def test_in_a_browser_a_text_comes_token_by_token_and_the_map_changes(
    gateway: Gateway, tmp_path: Path, colours: Any
) -> None:
    from playwright.sync_api import expect

    with browser_tab(color_scheme=colours) as tab:
        tab.goto(gateway.url)
        expect(tab.locator("#status")).to_have_text("live")
        expect(tab.locator("#model option")).to_have_count(1)
        tab.evaluate(
            """() => {
                window.lengths = [];
                const answer = document.getElementById("answer");
                const seen = () => window.lengths.push(answer.textContent.length);
                new MutationObserver(seen).observe(answer, { subtree: true, childList: true, characterData: true });
            }"""
        )
        draws = int(tab.locator("#map").get_attribute("data-draws") or "0")
        tab.click("#examples button >> nth=0")
        expect(tab.locator("#prompt")).to_have_value("Once upon a time")
        tab.fill("#prompt", PROMPT)
        tab.fill("#max_tokens", "480")  # a quiet machine gives 120 in half a second, and the map is drawn six times
        tab.fill("#n", "3")
        tab.press("#prompt", "Enter")
        expect(tab.locator("#send")).to_be_disabled()
        expect(tab.locator("#send")).to_be_enabled()
        lengths = tab.evaluate("window.lengths")
        assert len(set(lengths)) > 20, "the text did not come token by token"
        assert "prompt tokens" in tab.inner_text("#usage")
        assert int(tab.locator("#map").get_attribute("data-draws") or "0") > draws + 5
        assert "cached" in tab.inner_text("#legend")
        assert tab.inner_text("#host-tier") == "", "the pool has none"
        told = tab.evaluate(
            """async () => {
                const { hostBar } = await import("/page/host_bar.js");
                const [bar, text] = hostBar({ cached: 1200, held: 2, retired: 0, free: 3 });
                return [[...bar.children].map((part) => part.style.flexGrow), text.textContent];
            }"""
        )
        assert told == [
            ["1200", "2", "0", "3"],
            "Host tier: 1,200 cached · 2 of offloaded sequences · 0 retired · 3 free",
        ]
        tab.screenshot(path=tmp_path / f"{colours}.png")


@pytest.mark.verify
@pytest.mark.parametrize("viewport", others_at_night([WIDE | {"height": 900}, NARROW], [NARROW]))
def test_a_bar_beside_each_answer_says_what_was_found_and_why_not_all(
    services: LocalServices, tmp_path: Path, viewport: Any
) -> None:
    from playwright.sync_api import expect

    width = viewport["width"]
    gateway = Gateway(services.cachemgr_address, log=tmp_path / "log")
    try:
        with browser_tab(viewport=viewport) as tab, gateway.client() as client:
            tab.goto(gateway.url)
            expect(tab.locator("#model option")).to_have_count(1)
            tab.click("#tab-chat")
            tab.fill("#max_tokens", "8")
            bars = tab.locator(".prompt-bar span")
            for count in (1, 2):
                tab.fill("#prompt", f"question {width}: " + "What is a tensor? " * 12)
                tab.press("#prompt", "Enter")
                expect(bars).to_have_count(count)
            expect(bars.nth(0)).to_have_text(re.compile(r"\d+ found · \d+ written · \d+ computed otherwise$"))
            expect(bars.nth(1)).to_have_text(
                re.compile(r"^[1-9]\d* found · [1-9]\d* written · \d+ computed otherwise$")
            )
            with ThreadPoolExecutor(1) as threads:  # Playwright's loop runs in this one
                threads.submit(lambda: asyncio.run(reset(services))).result(DEADLINE_S)
            body = {"messages": [{"role": "user", "content": "Keep this. " * 20}], "max_tokens": 2}
            kept = {**body, "prompt_cache_options": {"ttl": "1h"}}
            assert client.post("/v1/chat/completions", json=kept).status_code == 200
            tab.fill("#prompt", "more")
            tab.press("#prompt", "Enter")
            expect(bars.nth(2)).to_contain_text(re.compile(r"not all found: the cache was reset \d+ s ago$"))
            expect(tab.locator("#keeping li")).to_have_text(
                re.compile(r"^kept \d+ of at most \d+ blocks, the next until")
            )
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
            tab.screenshot(path=tmp_path / f"bar-{width}.png", full_page=True)
    finally:
        gateway.close()


async def reset(services: LocalServices) -> None:
    cache = CacheClient(services.cachemgr_address)
    await cache.reset_prefix_cache()
    await cache.close()
