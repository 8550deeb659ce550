"""The engine's measurements, and its page of metrics."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from deadlines import DEADLINE_S
from prometheus_client.parser import text_string_to_metric_families
from unit.engine.test_engine import PROMPT_END, TOKENIZER, Services, greedy, read, turns

from quire.client import (
    Engine,
    EngineConfig,
    EngineStopped,
    InvalidRequest,
    LeaseLost,
    RequestFailed,
    SamplingParams,
)
from quire.client.engine.metrics import EngineLook, EnginePage, Histogram, Measured, RequestTimes, families
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason, Sequence
from quire.serving import loop_collector

Page = dict[str, float]
"""Values by "name{label=value,…}", pool and model left out."""
PROMPT = "once\n"
NUM_PROMPT = len(TOKENIZER.encode(PROMPT))
LIMITS = SchedulerLimits(
    max_step_tokens=1,
    max_running_sequences=1,
    block_size=1,
    num_blocks=1,
    max_sequence_tokens=1,
    vocabulary_size=1,
)


def get(address: str, path: str = "/metrics", *, content_type: str = "text/plain; version=") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}{path}", timeout=DEADLINE_S) as page:
        assert page.headers["Content-Type"].startswith(content_type)
        return str(page.read().decode())


async def page_of(engine: Engine) -> Page:
    assert engine.metrics_address is not None
    text = await asyncio.to_thread(get, engine.metrics_address)
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("pool", "model")}
            assert sample.labels["pool"] == "p"
            page[f"{sample.name}{{{','.join(f'{name}={value}' for name, value in labels.items())}}}"] = sample.value
    return page


def measured(body: Callable[[Engine, Services], Awaitable[None]]) -> None:
    async def main() -> None:
        services = Services()
        config = EngineConfig(verify=True, metrics_listen="127.0.0.1:0")
        async with Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER) as engine:
            await asyncio.wait_for(body(engine, services), DEADLINE_S)

    asyncio.run(main())


# Histograms.


def test_a_value_is_in_the_bucket_it_is_not_above() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0, 3.0, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 7)]
    assert (histogram.count, histogram.total) == (7, 20.0)


# Times.


def began(num_samples: int = 1) -> tuple[Measured, RequestTimes]:
    measured = Measured()
    return measured, RequestTimes(measured, began_s=100.0, num_prompt_tokens=7, num_samples=num_samples)


def samples(count: int) -> list[Sequence]:
    limits = replace(LIMITS, max_sequence_tokens=8, num_blocks=8)
    return new_samples(limits, 1, [0], SamplingParams(n=count, max_tokens=1), end_token_ids=(), seed=0)


def test_the_times_of_a_request() -> None:
    measured, times = began()
    for at_s in (100.5, 100.75, 101.0):
        times.begin(at_s)
        assert measured.request.count == 0
    times.finish_one(FinishReason.LENGTH, 101.0, num_generated=3)
    times.close(FinishReason.CANCELLED)
    assert (measured.first_token.total, measured.first_token.count) == (0.5, 1)
    assert (measured.request.total, measured.request.count) == (1.0, 1)
    assert (measured.prompt.total, measured.generated.total, measured.num_prompt_tokens) == (7, 3, 7)
    assert +measured.finished == {FinishReason.LENGTH: 1}


def test_the_last_of_several_samples_ends_the_request() -> None:
    measured, times = began(2)
    times.finish_one(FinishReason.STOP, 101.0, num_generated=1)
    assert measured.request.count == 0
    times.finish_one(FinishReason.STOP, 105.0, num_generated=3)
    assert (measured.request.total, measured.generated.total) == (5.0, 3)


def test_the_times_between_tokens_are_those_of_each_sample() -> None:
    measured = Measured()
    first, second, third = samples(3)
    measured.tokens([first, second], 100.0)
    assert measured.inter_token.count == 0
    measured.tokens([first, second, third], 101.0)
    assert (measured.inter_token.count, measured.inter_token.total) == (2, 2.0)
    measured.tokens([second], 102.0)
    measured.tokens([first, second, third], 105.0)
    assert (measured.inter_token.count, measured.inter_token.total) == (6, 2.0 + 1.0 + 4.0 + 3.0 + 4.0)


def test_what_is_broken_off_is_counted_and_not_measured() -> None:
    measured, times = began(3)
    times.finish_one(FinishReason.STOP, 101.0, num_generated=1)
    times.close(FinishReason.CANCELLED)
    times.close(FinishReason.FAILED)
    assert +measured.finished == {FinishReason.STOP: 1, FinishReason.CANCELLED: 2}
    assert measured.request.count == 0


# The page.


def test_a_label_may_be_any_text() -> None:
    model = 'a"b\\nc\nd é'
    look = EngineLook("p", model, Scheduler(LIMITS).statistics(), 0, 0, 0, {}, Measured())

    async def main() -> str:
        page = EnginePage("127.0.0.1:0", lambda: look)
        try:
            return await asyncio.to_thread(get, page.address)
        finally:
            await asyncio.to_thread(page.close)

    read = list(text_string_to_metric_families(asyncio.run(main())))
    assert {sample.labels["model"] for family in read for sample in family.samples} == {model}
    assert {family.name for family in read} == {family.name for family in families(look)}


def test_a_page_counts_what_happened() -> None:
    async def body(engine: Engine, services: Services) -> None:
        await read(engine.generate(PROMPT, greedy(20)))
        await read(engine.generate(PROMPT, greedy(10, n=2)))
        page = await page_of(engine)
        assert page["quire_engine_samples_finished_total{reason=length}"] == 3
        assert page["quire_engine_samples_finished_total{reason=cancelled}"] == 0
        assert page["quire_engine_prompt_tokens_total{}"] == 2 * NUM_PROMPT
        assert page["quire_engine_generation_tokens_total{}"] == 40
        assert page["quire_engine_time_to_first_token_seconds_count{}"] == 2
        assert page["quire_engine_inter_token_latency_seconds_count{}"] == 19 + 9 + 9
        assert page["quire_engine_inter_token_latency_seconds_bucket{le=+Inf}"] == 37
        assert page["quire_engine_request_latency_seconds_count{}"] == 2
        assert page["quire_engine_request_generation_tokens_sum{}"] == 40
        assert page["quire_engine_requests{}"] == 0
        statistics = engine.statistics()
        assert page["quire_engine_steps_computed_total{}"] == statistics.computed_steps
        assert page["quire_engine_step_seconds_count{}"] >= statistics.computed_steps
        assert page["quire_engine_plan_seconds_count{}"] == statistics.scheduler.planned_steps == len(services.plans)
        assert 0 < page["quire_engine_plan_seconds_sum{}"] == pytest.approx(statistics.plan_s)

    measured(body)


def test_times_are_those_of_the_services() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.gate.clear()
        before_s = time.perf_counter()
        task = asyncio.create_task(read(engine.generate(PROMPT, greedy(1))))
        await turns()
        held_s = time.perf_counter()
        page = await page_of(engine)
        assert page["quire_engine_requests{}"] == 1
        assert page["quire_engine_sequences{state=running}"] == 1
        assert page["quire_engine_steps_in_flight{}"] == 1
        least_s = time.perf_counter() - held_s
        services.gate.set()
        await task
        most_s = time.perf_counter() - before_s
        page = await page_of(engine)
        for name in ("time_to_first_token", "request_latency"):
            assert least_s < page[f"quire_engine_{name}_seconds_sum{{}}"] < most_s
        assert page["quire_engine_step_seconds_sum{}"] > least_s
        assert page["quire_engine_plan_seconds_sum{}"] < most_s - least_s

    measured(body)


def test_who_goes_away_is_cancelled_and_who_is_given_up_has_failed() -> None:
    async def body(engine: Engine, services: Services) -> None:
        stream = engine.generate(PROMPT, greedy(300))
        await anext(stream)
        await stream.aclose()
        services.poison = PROMPT_END
        with pytest.raises(RequestFailed):
            await read(engine.generate(PROMPT, greedy(5)))
        page = await page_of(engine)
        assert page["quire_engine_samples_finished_total{reason=cancelled}"] == 1
        assert page["quire_engine_samples_finished_total{reason=failed}"] == 1
        assert page["quire_engine_steps_failed_total{}"] >= 3

    measured(body)


def test_recoveries_are_counted() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_errors.append(LeaseLost("gone"))
        await read(engine.generate(PROMPT, greedy(5)))
        assert (await page_of(engine))["quire_engine_recoveries_total{}"] == 1

    measured(body)


def test_there_is_nothing_but_the_page_and_a_sign_of_life() -> None:
    async def body(engine: Engine, services: Services) -> None:
        address = engine.metrics_address
        assert address is not None
        text = await asyncio.to_thread(get, address)
        assert all(line.startswith(("quire_engine_", "# ")) for line in text.splitlines())
        assert await asyncio.to_thread(get, address, "/healthz", content_type="text/plain; charset=") == "ok\n"
        for path in ("", "/", "/metric", "/metrics/", "/../etc/hostname"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await asyncio.to_thread(get, address, path)

    measured(body)


def test_a_loop_that_is_busy_costs_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: Engine, services: Services) -> None:
        assert engine.metrics_address is not None
        with monkeypatch.context() as short:
            short.setattr(loop_collector, "READ_TIMEOUT_S", 0.2)
            with pytest.raises(urllib.error.HTTPError, match="500"):
                get(engine.metrics_address)  # holds the loop up
        assert await page_of(engine)

    measured(body)


def test_without_an_address_there_is_no_page_and_with_the_engine_it_ends() -> None:
    async def main() -> None:
        services = Services()
        async with Engine(services, lambda _: services, tokenizer=TOKENIZER) as engine:
            assert engine.metrics_address is None
        config = EngineConfig(metrics_listen="127.0.0.1:0")
        engine = Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER)
        async with engine:
            address = engine.metrics_address
        assert engine.metrics_address is None
        assert address is not None
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(get, address)
        with pytest.raises(EngineStopped):
            engine.generate(PROMPT)

    asyncio.run(main())


@pytest.mark.parametrize("address", ["127.0.0.1:x", "127.0.0.1:70000", "nowhere", "256.0.0.1:0"])
def test_an_address_that_is_none_is_said_at_the_start(address: str) -> None:
    async def main() -> None:
        services = Services()
        config = EngineConfig(metrics_listen=address)
        with pytest.raises(InvalidRequest) as caught:
            async with Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER):
                pass
        assert caught.value.metadata["field"] == "metrics_listen"
        assert services.open_leases == []

    asyncio.run(main())
