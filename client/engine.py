"""Continuous batching over the two services: schedule, run, postprocess, one step ahead.

    turn k      plan step k+1      cachemgr answers; no token of step k is needed for it
                send step k+1      the worker queues it behind step k
                deliver step k-1   texts, stop strings; the device has work meanwhile
                await step k       its tokens, then turn k+1

Two steps are in flight at most. One task does all of this and owns the scheduler; callers only read their mailboxes.

The engine holds every request's tokens, so it outlives both services: after a failure it takes what the steps in flight
still answer, forgets what was being sampled, and admits everybody again, under the pool's new epoch or a new lease.
Callers see a pause, and each token once.

A step or a plan that is refused for what one sequence brings is no failure of a service: that request fails, alone. The
refused step is sent again to be skipped, since its number is not used up, and planned again without that sequence.

A plan whose answer does not come is no failure yet: it is repeated under its request_id while the lease can be alive,
and steps in flight are taken meanwhile. A cachemgr that comes back with its books answers it as if nothing had been.
"""

import asyncio
import contextlib
import logging
import os
import random
import time
from collections import abc, deque
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import TracebackType
from typing import Any, Self

from quire.cache.v1.cache_service_pb2 import PlanStepRequest
from quire.cache.v1.grant_pb2 import SignedGrant
from quire.client.cache_client import CacheApi, CacheClient
from quire.client.channel import RetryPolicy, is_being_cancelled
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine_metrics import EngineLook, EnginePage, Measured, RequestTimes
from quire.client.errors import (
    AccessDenied,
    EngineStopped,
    EpochChanged,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutOfRoom,
    ProtocolViolation,
    QuireError,
    RequestFailed,
    StepFailed,
    Unavailable,
    WorkerUnavailable,
    after_delivery,
)
from quire.client.messages import limits_of
from quire.client.outputs import Chunk, Completion, Mailbox, SampleText, TokenLogprobs, complete
from quire.client.sampling import SamplingParams
from quire.client.scheduler import (
    Failed,
    Plan,
    PlanOutcome,
    Sampled,
    Scheduler,
    SchedulerLimits,
    SchedulerStatistics,
    Step,
)
from quire.client.sequence import FinishReason, Sequence
from quire.client.session import ConnectWorker, Session
from quire.client.tokenizer import Tokenizer
from quire.client.tracing import NO_SPAN, NoSpan, RequestSpan, StepSpan, TracedCacheClient, TracedWorkerClient, Tracing
from quire.client.worker_client import StepAnswer, WorkerApi, WorkerClient
from quire.compute.v1 import worker_service_pb2
from quire.serving.runtime_folder import default_cachemgr

Prompt = str | abc.Sequence[int]

_log = logging.getLogger(__name__)
_MAX_STEPS_IN_FLIGHT = 2
# A plan that is not answered within this time is asked again while steps in flight are taken.
_PATIENCE_S = 1.0
# A session that could not be opened in the time left may have this long all the same.
_MIN_OPENING_S = 1.0
# Between plans that ran nothing, and after steps that computed nothing.
_PAUSES = RetryPolicy(first_delay_s=0.0005, max_delay_s=0.05)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine uses a pool.

    pool                     its name; "": the only one there is
    max_step_tokens          tokens computed per step at most; the worker may allow fewer
    max_running_sequences    sequences that hold blocks at once at most; the worker may have room for fewer
    lease_ttl_s              the pool's blocks come back this long after this process has died, 1 to 3600
    recovery_timeout_s       requests fail if a service can't be used for this long; errors say what was delivered
    max_recoveries           requests fail after this many recoveries without a computed step in between
    verify                   check the scheduler's invariants after each change; on if QUIRE_VERIFY is 1
    metrics_listen           "host:port" for a page of metrics, port 0 being a free one; None: no page
    """

    pool: str = ""
    max_step_tokens: int = 2048
    max_running_sequences: int = 256
    lease_ttl_s: float = 30.0
    recovery_timeout_s: float = 60.0
    max_recoveries: int = 8
    verify: bool = field(default_factory=lambda: os.environ.get("QUIRE_VERIFY") == "1")
    metrics_listen: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running_sequences", "max_recoveries"):
            if getattr(self, name) < 1:
                raise InvalidRequest.of_field(name, getattr(self, name), "at least 1")
        if not 1 <= self.lease_ttl_s <= 3600:
            raise InvalidRequest.of_field("lease_ttl_s", self.lease_ttl_s, "from 1 to 3600")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Present numbers, and counters since the engine started. Times in seconds of the engine's loop.

    plan_s        waiting for cachemgr's answers        the control plane: plan_s + schedule_s
    schedule_s    the scheduler and building messages
    wait_s        waiting for steps' tokens
    deliver_s     texts and mailboxes
    offloaded_bytes, restored_bytes    copied to the pool's host tier, and back
    prefill_tokens_per_s, copy_bytes_per_s    by what preempted sequences are kept there or computed again: of late
    """

    scheduler: SchedulerStatistics
    num_requests: int
    computed_steps: int
    recoveries: int
    plan_s: float
    schedule_s: float
    wait_s: float
    deliver_s: float
    offloaded_bytes: int
    restored_bytes: int
    prefill_tokens_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """The engine waits for a service; requests go on when it is back.

    waiting_for   "cachemgr" or "the worker"
    error         the last answer, or why there was none
    gives_up_s    the event loop's time at which requests fail
    """

    waiting_for: str
    error: QuireError
    gives_up_s: float


@dataclass(slots=True)
class _Counters:
    computed_steps: int = 0
    recoveries: int = 0
    plan_s: float = 0.0
    schedule_s: float = 0.0
    wait_s: float = 0.0
    deliver_s: float = 0.0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@dataclass(slots=True)
class _Sent:
    """A step in flight.

    sent_at  by time.perf_counter()
    void     why it computes nothing, if that is known: it was refused, or one before it was, and is skipped now
    """

    step: Step
    grant: SignedGrant
    answer: StepAnswer
    sent_at: float
    span: StepSpan | NoSpan
    void: QuireError | None = None


class _Request:
    """A caller's request: its samples' texts, and what the caller has not read."""

    __slots__ = ("error", "mailbox", "news", "num_open", "sequences", "span", "texts", "times")

    def __init__(
        self,
        sequences: list[Sequence],
        texts: list[SampleText],
        times: RequestTimes,
        span: RequestSpan | None,
        *,
        has_logprobs: bool,
    ) -> None:
        self.sequences = sequences
        self.span = span
        self.texts = texts
        self.times = times
        self.mailbox = Mailbox(has_logprobs=has_logprobs)
        self.news = asyncio.Event()
        self.num_open = len(sequences)
        self.error: QuireError | None = None

    def fail(self, error: QuireError) -> None:
        self.error = self.error or error
        self.news.set()

    async def chunks(self) -> abc.AsyncGenerator[Chunk, None]:
        delivered = [0] * len(self.sequences)
        while self.num_open or self.news.is_set():
            await self.news.wait()
            self.news.clear()
            for chunk in self.mailbox.take():
                delivered[chunk.index] += len(chunk.token_ids)
                yield chunk
            if self.error is not None:
                raise after_delivery(self.error, delivered)


class Engine:
    """Generates text over a cachemgr and a worker.

        async with Engine.connect() as engine:
            async for chunk in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(chunk.text, end="")

    Belongs to the event loop it was made in.
    """

    def __init__(
        self,
        cache: CacheApi,
        connect_worker: ConnectWorker,
        *,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | str | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Over clients of the caller's choice; connect_worker gets the address that the lease names.

        tokenizer is one, or where to load it from; None: from where the worker says it is, if that can be read here.
        Without one prompts are token ids and there is no text. tracing makes spans; None: there are none.
        """
        self._cache = cache
        self._connect_worker = connect_worker
        self._config = config or EngineConfig()
        self._tokenizer_source = tokenizer
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        self._worker: tuple[str, WorkerApi] | None = None
        self._session: Session | None = None
        self._end_token_ids: tuple[int, ...] = ()
        self._max_logprobs = 0
        self._requests: dict[int, _Request] = {}
        self._tracing = tracing
        self._flight: deque[_Sent] = deque()
        self._undelivered: list[tuple[abc.Sequence[Sampled], worker_service_pb2.RunStepResponse, float]] = []  # came at
        self._measured = Measured()
        self._page: EnginePage | None = None
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._stopped: EngineStopped | None = None
        self._counters = _Counters()
        self._outage: Outage | None = None
        self._outage_changed = asyncio.Event()
        self._failing_since: float | None = None  # the loop's time; None while the services can be used
        self._recoveries_in_row = 0
        self._fruitless_in_row = 0

    @classmethod
    def connect(
        cls,
        cachemgr: str | None = None,
        *,
        worker: str | None = None,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | str | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        tracing: Tracing | None = None,
    ) -> "Engine":
        """An engine over gRPC; enter it with `async with`. Addresses are "unix:/path" or "host:port".

        cachemgr None is the default address, where `quire up` serves. worker overrides the address that the pool's
        worker gave cachemgr; credentials are shown to both.
        """
        cache_kind = CacheClient if tracing is None else TracedCacheClient
        worker_kind = WorkerClient if tracing is None else TracedWorkerClient
        return cls(
            cache_kind(cachemgr or default_cachemgr(), credentials=credentials),
            lambda address: worker_kind(worker or address, credentials=credentials),
            config=config,
            tokenizer=tokenizer,
            tracing=tracing,
        )

    async def __aenter__(self) -> Self:
        """Take a lease and begin.

        Raises NotFound, OutOfRoom, Unavailable; OSError or ValueError for the tokenizer asked for; InvalidRequest if
        metrics can't be served where they should.
        """
        try:
            session = await self._open_session()
            await self._load_tokenizer(session.model.tokenizer)
            self._scheduler = Scheduler(self._limits_of(session), verify=self._config.verify)
            self._use(session)
            if self._config.metrics_listen is not None:
                self._page = EnginePage(self._config.metrics_listen, self._look)
        except BaseException:
            await self._close_clients()
            raise
        self._loop = asyncio.create_task(self._run(), name="quire-engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop: callers that still wait get EngineStopped, the lease is given back."""
        await self.close()

    async def close(self) -> None:
        """Stop; see __aexit__. Doing it twice is fine."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        self._stop(EngineStopped("the engine is closed"))
        if self._page is not None:
            await asyncio.to_thread(self._page.close)
            self._page = None
        await self._close_clients()

    # What callers use.

    @property
    def metrics_address(self) -> str | None:
        """Where the page of metrics is, "host:port"; None if there is none."""
        return None if self._page is None else self._page.address

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use."""
        return self._tokenizer

    @property
    def model(self) -> worker_service_pb2.GetModelResponse:
        """What the worker serves, as it said when the session began. Raises Unavailable while there is none."""
        if self._session is None:
            raise Unavailable("there is no session with the services right now")
        return self._session.model

    @property
    def outage(self) -> Outage | None:
        """The service that requests wait for, or did until they failed; None while the services can be used."""
        return self._outage

    async def next_outage(self, seen: Outage | None) -> Outage | None:
        """Wait until there is another outage than the one seen, or none any more; return it."""
        while self._outage is seen:
            await self._outage_changed.wait()
        return self._outage

    def _set_outage(self, outage: Outage | None) -> None:
        if outage != self._outage:
            self._outage = outage
            self._outage_changed.set()
            self._outage_changed = asyncio.Event()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> abc.AsyncGenerator[Chunk, None]:
        """Chunks of all samples of a prompt, as their tokens come, until each has one with a finish_reason.

        The prompt is text or token ids. fields are those of SamplingParams: `generate(prompt, max_tokens=3)`; given
        beside params they replace what params says.

        Raises InvalidRequest at once, TypeError for a field that SamplingParams does not have. The iterator raises
        RequestFailed, Unavailable, EngineStopped, or InvalidRequest if a service refuses the request; each says how
        many tokens it has given out, in delivered_token_counts. Work begins with the first item asked for; closing the
        iterator, or cancelling the task that waits in it, frees everything with the next plan.
        """
        wanted = _params_of(params, fields)
        token_ids = self._check(prompt, wanted)
        return self._generate(token_ids, wanted)

    async def complete(
        self,
        prompts: Prompt | abc.Iterable[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """All samples of all prompts, in the prompts' order.

        params are for all prompts, or one for each; fields are as in generate, for all prompts. A string is
        one prompt, and so is a list of integers: token ids. The answer is a list of one then.

        Raises what generate raises; then the other prompts are cancelled.
        """
        several = _prompts_of(prompts)
        each = [_params_of(one, fields) for one in _one_for_each(params, len(several))]
        checked = [self._check(prompt, wanted) for prompt, wanted in zip(several, each, strict=True)]
        tasks = [
            asyncio.create_task(self._complete(token_ids, wanted))
            for token_ids, wanted in zip(checked, each, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def statistics(self) -> EngineStatistics:
        """Present numbers and counters."""
        counters = self._counters
        return EngineStatistics(
            scheduler=self._scheduler.statistics(),
            num_requests=len(self._requests),
            computed_steps=counters.computed_steps,
            recoveries=counters.recoveries,
            plan_s=counters.plan_s,
            schedule_s=counters.schedule_s,
            wait_s=counters.wait_s,
            deliver_s=counters.deliver_s,
            offloaded_bytes=counters.offloaded_bytes,
            restored_bytes=counters.restored_bytes,
            prefill_tokens_per_s=self._scheduler.costs.prefill.per_s,
            copy_bytes_per_s=self._scheduler.costs.copy.per_s,
        )

    def _look(self) -> EngineLook:
        pool, model = ("", "") if self._session is None else (self._session.pool, self._session.model.model)
        return EngineLook(
            pool=pool or self._config.pool,
            model=model,
            scheduler=self._scheduler.statistics(),
            num_requests=len(self._requests),
            computed_steps=self._counters.computed_steps,
            recoveries=self._counters.recoveries,
            host_bytes={"offload": self._counters.offloaded_bytes, "restore": self._counters.restored_bytes},
            measured=self._measured,
        )

    # Requests.

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's tokens, if the request can be served."""
        if self._stopped is not None or self._loop is None:
            raise self._stopped or EngineStopped("the engine was not started: use `async with`")
        if params.logprobs is not None and params.logprobs > self._max_logprobs:
            raise InvalidRequest.of_field("logprobs", params.logprobs, f"at most {self._max_logprobs}")
        if params.stop and self._tokenizer is None:
            raise InvalidRequest.of_field("stop", params.stop, "empty, since there is no tokenizer")
        token_ids = self._token_ids(prompt)
        self._scheduler.check(token_ids, params)
        return token_ids

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _integers_of(prompt)
        if self._tokenizer is None:
            raise InvalidRequest.of_field("prompt", "text", "token ids, since there is no tokenizer")
        return self._tokenizer.encode(prompt)

    async def _generate(self, token_ids: list[int], params: SamplingParams) -> abc.AsyncGenerator[Chunk, None]:
        request_id, request = self._submit(token_ids, params)
        try:
            async with contextlib.aclosing(request.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._requests.pop(request_id, None)
            self._end_measuring(request)
            if self._stopped is None:
                self._scheduler.cancel(request.sequences)

    def _end_measuring(self, request: _Request) -> None:
        request.times.close(FinishReason.CANCELLED if request.error is None else FinishReason.FAILED)
        if request.span is not None:
            num_tokens = sum(len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in request.sequences)
            reasons = [sequence.finish_reason for sequence in request.sequences]
            request.span.end(num_tokens=num_tokens, reasons=reasons, error=request.error)

    async def _complete(self, token_ids: list[int], params: SamplingParams) -> Completion:
        async with contextlib.aclosing(self._generate(token_ids, params)) as stream:
            return complete(token_ids, [chunk async for chunk in stream])

    def _submit(self, token_ids: list[int], params: SamplingParams) -> tuple[int, _Request]:
        if self._stopped is not None:
            raise _copy_of(self._stopped)
        seed = random.getrandbits(62) if params.seed is None else params.seed
        # Before the scheduler takes the request: what raises here leaves nothing behind.
        texts = [
            SampleText(self._tokenizer.detokenizer(token_ids) if self._tokenizer else None, params.stop)
            for _ in range(params.n)
        ]
        sequences = self._scheduler.add(token_ids, params, end_token_ids=self._end_token_ids, seed=seed)
        times = RequestTimes(
            self._measured,
            began_s=time.perf_counter(),
            num_prompt_tokens=len(token_ids),
            num_samples=len(sequences),
        )
        tracing = self._tracing
        span = None if tracing is None else tracing.request(num_prompt_tokens=len(token_ids), params=params)
        request = _Request(sequences, texts, times, span, has_logprobs=params.logprobs is not None)
        request_id = sequences[0].request_id
        self._requests[request_id] = request
        self._wake.set()
        return request_id, request

    def _fail_requests(self, error: QuireError) -> None:
        for request in self._requests.values():
            self._scheduler.cancel(request.sequences)
            request.fail(error)

    def _fail_some(self, failed: abc.Iterable[Failed]) -> None:
        for sequence, error in ((entry.sequence, entry.error) for entry in failed):
            request = self._requests.get(sequence.request_id)
            if request is not None:
                self._scheduler.cancel(request.sequences)
                request.fail(error)

    # The loop.

    async def _run(self) -> None:
        try:
            while True:
                if self._scheduler.has_work:
                    await self._turn()
                    continue
                self._deliver()
                self._wake.clear()
                await self._wake.wait()
        except BaseException as error:
            if is_being_cancelled():
                raise  # the engine is closed
            _log.exception("the engine's loop has died: %s", self.statistics())
            stopped = EngineStopped(f"the engine's loop has died: {error!r}")
            stopped.__cause__ = error
            self._stop(stopped)

    async def _turn(self) -> None:
        session = self._session or await self._reconnect()
        if session is None:
            return
        try:
            planned = len(self._flight) < _MAX_STEPS_IN_FLIGHT and await self._plan(session)
            self._deliver()
            if not planned:
                await self._settle(session)
        except QuireError as error:
            await self._recover(session, error)

    async def _plan(self, session: Session) -> bool:
        """Plan a step and send it. Returns False if a step in flight has to end first."""
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return False
        scheduled = time.perf_counter()
        try:
            with self._span("quire.plan", plan.sequences.values()) as span:
                outcome, grant = await self._ask(session, plan)
            span.end(step_number=outcome.step_number, refusals=len(outcome.refusals))
        except OutOfRoom:  # TOO_MANY_STEPS: their outcomes are on the way to cachemgr
            if not self._flight:
                await self._pause()
            return not self._flight
        except InvalidRequest as error:
            if not (error.is_about_input and plan.sequences):
                raise
            _log.warning("a plan was refused: %s", error)
            self._fail_some(self._scheduler.on_plan_refused(plan, error))
            return True
        planned = time.perf_counter()
        step = self._scheduler.on_planned(plan, outcome)
        self._fail_some(step.failed)
        with self._span("quire.step", step.sequences) as span:
            answer = await session.run(step, grant)
        sent = time.perf_counter()
        self._flight.append(_Sent(step, grant, answer, sent, span))
        self._measured.plan.observe(planned - scheduled)
        self._counters.plan_s += planned - scheduled
        self._counters.schedule_s += (scheduled - started) + (sent - planned)
        if plan.asks_to_compute and not step.seq_ids and len(self._flight) == 1:
            await self._settle(session)
            await self._pause()  # blocks are on the way back, or others hold them
        return True

    async def _ask(self, session: Session, plan: Plan) -> tuple[PlanOutcome, SignedGrant]:
        """cachemgr's answer to a plan, however often it has to be asked. Raises what Session.plan raises."""
        request = session.request_of(plan)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await session.plan(request)
        except Unavailable as error:
            _log.warning("cachemgr is away: %s", error)
            return await self._ask_again(session, request, error)
        except TimeoutError:
            return await self._ask_again(session, request, Unavailable(f"no answer within {_PATIENCE_S:g} s"))

    async def _ask_again(
        self, session: Session, request: PlanStepRequest, error: Unavailable
    ) -> tuple[PlanOutcome, SignedGrant]:
        deadline = self._recovery_deadline()
        self._set_outage(Outage("cachemgr", error, deadline))
        asking = asyncio.create_task(session.plan_again(request, error, until=deadline))
        try:
            while self._flight and not asking.done():
                ended = asyncio.ensure_future(self._flight[0].answer.result())
                ended.add_done_callback(_retrieve)  # _settle asks for it too
                await asyncio.wait([asking, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await self._settle(session)
                    self._deliver()
            answer = await asking
        finally:
            asking.cancel()
        self._failing_since = None
        self._set_outage(None)
        return answer

    def _recovery_deadline(self) -> float:
        """The loop's time at which requests fail if the services can't be used before."""
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
        return self._failing_since + self._config.recovery_timeout_s

    async def _settle(self, session: Session) -> None:
        """Wait for the oldest step in flight and take its tokens."""
        if not self._flight:
            raise RuntimeError("there is work, nothing to plan and nothing to wait for")
        started = time.perf_counter()
        sent = self._flight[0]
        step, span = sent.step, sent.span
        try:
            response = await sent.answer.result()
            if response.step_number != step.step_number:
                raise ProtocolViolation(f"the answer to step {step.step_number} is about {response.step_number}")
        except QuireError as error:
            span.fail(error)
            if error.is_about_input and sent.void is None:
                await self._skip_flight(session, error)
                return
            if not isinstance(error, StepFailed):
                raise
            self._flight.popleft()
            await self._take_failure(step, error)
            return
        finally:
            ended = time.perf_counter()
            self._counters.wait_s += ended - started
        self._flight.popleft()
        if sent.void is not None:
            await self._take_failure(step, sent.void)
            return
        self._measured.step.observe(ended - sent.sent_at)
        timings = _timings_of(response)
        self._observe_costs(step, response, timings)
        if span is not NO_SPAN:
            span.end(step_number=step.step_number, tokens=sum(step.counts), **timings)
        sampled = self._scheduler.on_step_done(step, response.sequence_ids, response.sampled_token_ids)
        self._undelivered.append((sampled, response, ended))
        if step.seq_ids:
            self._counters.computed_steps += 1
            self._recoveries_in_row = self._fruitless_in_row = 0

    def _observe_costs(
        self, step: Step, response: worker_service_pb2.RunStepResponse, seconds: dict[str, float]
    ) -> None:
        """What the step says of computing tokens again, if it was mostly prompts, and of copies."""
        num_tokens = sum(step.counts)
        if 2 * sum(count for count in step.counts if count > 1) > num_tokens:
            self._scheduler.costs.prefill.observe(num_tokens, seconds["forward_s"] + seconds["sample_s"])
        block_bytes = self._scheduler.limits.block_bytes
        offloaded, restored = response.offloaded_block_count, response.restored_block_count
        self._counters.offloaded_bytes += offloaded * block_bytes
        self._counters.restored_bytes += restored * block_bytes
        copy_s = seconds["offload_s"] + seconds["restore_s"]
        self._scheduler.costs.copy.observe((offloaded + restored) * block_bytes, copy_s)

    def _span(self, name: str, sequences: abc.Iterable[Sequence]) -> StepSpan | NoSpan:
        """For what is done for these sequences."""
        if self._tracing is None:
            return NO_SPAN
        request_ids = dict.fromkeys(sequence.request_id for sequence in sequences)
        requests = [self._requests[each] for each in request_ids if each in self._requests]
        return self._tracing.step(name, [request.span for request in requests])

    async def _skip_flight(self, session: Session, error: QuireError) -> None:
        """Send the steps in flight again, to be skipped: the oldest was refused, and so were those behind it."""
        void = error
        for sent in self._flight:
            sent.span.fail(void)
            sent.void = void
            sent.answer = await session.run(sent.step, sent.grant, skip=True)
            void = StepFailed("a step before it was refused", reason="PRIOR_STEP_FAILED")

    async def _take_failure(self, step: Step, error: QuireError) -> None:
        _log.warning("step %d computed nothing: %s", step.step_number, error)
        if error.reason == "PRIOR_STEP_FAILED":
            self._scheduler.on_step_dropped(step)
        elif isinstance(error, StepFailed):
            self._fail_some(self._scheduler.on_step_failed(step, error))
        else:
            self._fail_some(self._scheduler.on_step_refused(step, error))
        if not self._flight:
            await self._pause()  # the outcome is on its way to cachemgr; a plan before it arrives would fail too

    async def _pause(self) -> None:
        self._fruitless_in_row += 1
        delay_s = min(_PAUSES.max_delay_s, _PAUSES.first_delay_s * 2 ** min(self._fruitless_in_row - 1, 16))
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    # What callers get.

    def _deliver(self) -> None:
        started = time.perf_counter()
        undelivered, self._undelivered = self._undelivered, []
        for sampled, response, at_s in undelivered:
            logprobs = {entry.sequence_id: entry for entry in response.logprobs}
            for event in sampled:
                try:
                    self._deliver_one(event, logprobs.get(event.seq_id), at_s)
                except Exception as error:  # the tokenizer's, about this text: no other request has to do with it
                    _log.exception("the text of a request can't be made")
                    self._fail_some([Failed(event.sequence, _undeliverable(error))])
        self._counters.deliver_s += time.perf_counter() - started

    def _deliver_one(self, event: Sampled, logprobs: worker_service_pb2.TokenLogprobs | None, at_s: float) -> None:
        sequence, reason = event.sequence, event.finish_reason
        request = self._requests.get(sequence.request_id)
        if request is None:
            return
        text = request.texts[sequence.index]
        if text.met_stop_string:
            return  # it was sampled before that was known
        piece = text.push(event.token_id, reason)
        if text.met_stop_string:
            reason = FinishReason.STOP
            self._scheduler.stop(sequence)
        request.times.token(sequence.index, at_s, reason)
        request.mailbox.put(
            sequence.index,
            text=piece,
            token_ids=(event.token_id,),
            logprobs=() if logprobs is None else (_decode_logprobs(event.token_id, logprobs),),
            finish_reason=reason,
        )
        request.num_open -= reason is not None
        request.news.set()

    # Failures.

    async def _recover(self, session: Session, error: QuireError) -> None:
        """Make sure that nothing is in flight, then go on: in the pool's new epoch, or without a session."""
        _log.warning("recovering: %s", error)
        self._deliver()
        await self._drain(session)
        await self._cache.hang_up()
        if self._worker is not None:
            await self._worker[1].hang_up()
        self._counters.recoveries += 1
        self._recoveries_in_row += 1
        self._scheduler.reset_all()
        if self._recoveries_in_row > self._config.max_recoveries:
            self._recoveries_in_row = 0
            self._fail_requests(_given_up(self._config.max_recoveries, error))
        try:
            if isinstance(error, EpochChanged) and await session.follow_epoch():
                self._use(session)
                return
        except QuireError as another:
            _log.warning("the pool's new epoch can't be used: %s", another)
        self._session = None
        await session.close()
        if self._recoveries_in_row > 1:
            await self._pause()

    async def _drain(self, session: Session) -> None:
        """Take what the steps in flight still answer; from the first that fails on, their tokens are void."""
        while self._flight:
            try:
                await self._settle(session)
            except QuireError as error:
                for sent in self._flight:
                    sent.span.fail(error)
                self._flight.clear()
        self._deliver()

    async def _reconnect(self) -> Session | None:
        """A new session as soon as the services let us; None, and every request failed, if they do not in time."""
        deadline = self._recovery_deadline()
        try:
            return await self._reconnect_by(deadline)
        finally:
            self._failing_since = None

    async def _reconnect_by(self, deadline: float) -> Session | None:
        delays_s = RetryPolicy(max_attempts=2**31).delays_s()
        while self._scheduler.has_work:
            try:
                session = await self._open_session_by(deadline)
            except (Unavailable, NotFound, LeaseLost, EpochChanged, OutOfRoom, AccessDenied) as error:
                if asyncio.get_running_loop().time() > deadline:
                    self._fail_requests(error)
                    return None
                self._set_outage(Outage(_waiting_for(error), error, deadline))
                await asyncio.sleep(max(next(delays_s), error.retry_after_s or 0.0))
            else:
                self._scheduler.reset_all()
                self._use(session)
                return session
        return None

    async def _open_session(self) -> Session:
        config = self._config
        return await Session.open(self._cache, self._worker_at, pool=config.pool, ttl_s=config.lease_ttl_s)

    async def _open_session_by(self, deadline: float) -> Session:
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(max(deadline, now + _MIN_OPENING_S)):
                return await self._open_session()
        except TimeoutError:
            raise Unavailable("no new session in time") from None

    def _worker_at(self, address: str) -> WorkerApi:
        if self._worker is None or self._worker[0] != address:
            self._worker = (address, self._connect_worker(address))
        return self._worker[1]

    def _use(self, session: Session) -> None:
        """The scheduler and new requests keep to what this session's pool and model allow."""
        self._session = session
        self._failing_since = None
        self._set_outage(None)
        self._end_token_ids = tuple(session.model.end_token_ids)
        self._max_logprobs = session.model.max_logprob_count
        self._scheduler.set_limits(self._limits_of(session))

    def _limits_of(self, session: Session) -> SchedulerLimits:
        allowed = session.model.max_step_tokens or self._config.max_step_tokens
        return limits_of(
            session.geometry,
            max_step_tokens=min(self._config.max_step_tokens, allowed),
            max_running_sequences=self._config.max_running_sequences,
        )

    async def _load_tokenizer(self, worker_says: str) -> None:
        source = self._tokenizer_source
        if isinstance(source, Tokenizer):
            return
        try:
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, source or worker_says)
        except (OSError, ValueError) as error:
            if source is not None:
                raise
            _log.warning("no tokenizer, so no text: %s", error)

    def _stop(self, error: EngineStopped) -> None:
        self._stopped = self._stopped or error
        for request in self._requests.values():
            request.fail(error)

    async def _close_clients(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._cache.close()
        if self._worker is not None:
            await self._worker[1].close()


def _waiting_for(error: QuireError) -> str:
    is_detached = error.reason in ("POOL_DETACHED", "POOL_NOT_FOUND")
    return "the worker" if is_detached or isinstance(error, WorkerUnavailable) else "cachemgr"


def _params_of(params: SamplingParams | None, fields: abc.Mapping[str, Any]) -> SamplingParams:
    if params is None:
        return SamplingParams(**fields)
    if not isinstance(params, SamplingParams):
        limit = "SamplingParams, or its fields as keywords: max_tokens=3"
        raise InvalidRequest.of_field("params", type(params).__name__, limit)
    return replace(params, **fields)


def _one_for_each(
    params: SamplingParams | abc.Sequence[SamplingParams] | None, count: int
) -> abc.Sequence[SamplingParams | None]:
    if not isinstance(params, abc.Iterable):
        return [params] * count
    each = list(params)
    if len(each) != count:
        raise InvalidRequest.of_field("params", len(each), f"one for all or one per prompt, {count}")
    return each


def _prompts_of(prompts: Prompt | abc.Iterable[Prompt]) -> abc.Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, abc.Iterable):
        limit = "text, token ids, or several of these"
        raise InvalidRequest.of_field("prompts", type(prompts).__name__, limit)
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], Integral) else several


def _integers_of(prompt: abc.Sequence[int]) -> list[int]:
    """Token ids as int: NumPy's integers are taken too. Raises InvalidRequest."""
    limit = "text or a sequence of integers, the token ids"
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, abc.Iterable):
        raise InvalidRequest.of_field("prompt", type(prompt).__name__, limit)
    token_ids = list(prompt)
    for kind in {type(token_id) for token_id in token_ids}:
        if kind is bool or not issubclass(kind, Integral):
            raise InvalidRequest.of_field("prompt", f"{type(prompt).__name__} of {kind.__name__}", limit)
    return list(map(int, token_ids))


def _decode_logprobs(token_id: int, entry: worker_service_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    return TokenLogprobs(token_id, entry.sampled_logprob, top)


def _timings_of(response: worker_service_pb2.RunStepResponse) -> dict[str, float]:
    """What the worker says of a step's time, in seconds."""
    timings = response.timings
    parts = {
        "queue": timings.queue,
        "prepare": timings.prepare,
        "forward": timings.forward,
        "sample": timings.sample,
        "offload": timings.offload,
        "restore": timings.restore,
    }
    return {f"{name}_s": part.seconds + part.nanos / 1e9 for name, part in parts.items()}


def _given_up(num_recoveries: int, error: QuireError) -> RequestFailed:
    failed = RequestFailed(f"given up after {num_recoveries} recoveries, the last one for: {error}")
    failed.__cause__ = error
    return failed


def _undeliverable(error: Exception) -> RequestFailed:
    failed = RequestFailed(f"the tokens can't be made a text: {error!r}")
    failed.__cause__ = error
    return failed


def _retrieve(result: asyncio.Future[worker_service_pb2.RunStepResponse]) -> None:
    if not result.cancelled():
        result.exception()


def _copy_of(error: QuireError) -> QuireError:
    """Each caller raises its own: an exception collects tracebacks."""
    copy = type(error)(error.message, reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s)
    copy.__cause__ = error.__cause__
    return copy
