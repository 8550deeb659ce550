"""Continuous batching over the two services: schedule, run, postprocess, one step ahead.

    turn k      plan step k+1      cachemgr answers; no token of step k is needed for it
                send step k+1      the worker queues it after step k
                deliver step k-1   texts, stop strings; the device has work meanwhile
                await step k       its tokens, then turn k+1

Two steps are in flight at most, four while a GPU's steps are short (FlightLimit). One task does all of this and owns
the scheduler. Callers read the output of their samples, and put their calls for the scheduler into the inbox. The task
takes these before each plan and before a step's tokens.

The engine keeps every request's tokens, so requests survive failures of both services. After a failure it takes the
answers of the steps in flight, drops the tokens being sampled, and admits all requests again, under the pool's new
epoch or a new lease. Callers see a pause, and each token once.

A step or a plan that is refused for one sequence's input is no failure of a service: only that request fails. The
refused step is sent again with `skip`, since its number is not used up, and planned again without that sequence. If
only the worker's room for compiling the sequence's grammar was used up, the request does not fail: it is planned
again when the worker has compiled the grammar. A sequence with a mask that was too late for a step is planned again,
too, when the worker has made the mask.

An unexpected exception, of this package or of a custom policy, fails the request that it is about (faults.py). The
others are admitted again. Only if the exception leaves a mess does the loop end: then `failed` returns, and the process
that has this engine should end, too.

A plan without an answer is no failure yet: it is repeated with its request_id while the lease can be valid, and steps
in flight finish meanwhile. A cachemgr that restarts with its books answers it as before.
"""

import asyncio
import logging
import random
import time
from collections import abc, deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

from quire.cache.v1.cache_service_pb2 import PlanStepRequest
from quire.cache.v1.grant_pb2 import SignedGrant
from quire.client.cache_client import CacheApi, CacheClient
from quire.client.channel import RetryPolicy, is_being_cancelled
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine.adapters import adapters_of
from quire.client.engine.caching import CacheParams, cache_params_of
from quire.client.engine.config import EngineConfig
from quire.client.engine.connection import TEMPORARY_ERRORS, Connection, Outage
from quire.client.engine.delivery import Delivery
from quire.client.engine.grammar import Grammar
from quire.client.engine.inbox import Inbox
from quire.client.engine.messages import limits_of
from quire.client.engine.metrics import EngineLook, EnginePage, Measured
from quire.client.engine.outputs import BeamCompletion, Chunk, Completion
from quire.client.engine.requests import Prompt, Requests, one_for_each, params_of, prompts_of
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.client.engine.scheduling.faults import BrokenInvariantError, RequestFault, to_failure
from quire.client.engine.scheduling.flight import FlightLimit
from quire.client.engine.scheduling.plans import Failed, GrantedStep, Plan, SchedulerLimits, StepInFlight, StepTokens
from quire.client.engine.scheduling.policy import Policy
from quire.client.engine.scheduling.request_limits import check_drafts
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import Delivered, Sequence
from quire.client.engine.scheduling.statistics import SchedulerStatistics
from quire.client.engine.scheduling.step_costs import StepCosts
from quire.client.engine.session import ConnectWorker, Session
from quire.client.engine.tokenizer import Tokenizer
from quire.client.engine.tracing import NO_SPAN, NoSpan, StepSpan, TracedCacheClient, TracedWorkerClient, Tracing
from quire.client.errors import (
    EngineStopped,
    EpochChanged,
    InvalidRequest,
    OutOfRoom,
    ProtocolViolation,
    QuireError,
    RequestFailed,
    StepFailed,
    Unavailable,
)
from quire.client.worker_client import StepAnswer, WorkerClient
from quire.compute.v1 import worker_service_pb2
from quire.serving.runtime_folder import given_cachemgr

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)
# A plan that is not answered within this time is asked again while steps in flight are taken.
_PATIENCE_S = 1.0
# Between plans that ran nothing, and after steps that computed nothing.
_PAUSES = RetryPolicy(first_delay_s=0.0005, max_delay_s=0.05)


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Present numbers, and counters since the engine started. Times in seconds of the engine's loop.

    plan_s        waiting for cachemgr's answers        the control plane: plan_s + schedule_s
    schedule_s    the scheduler and building messages
    wait_s        waiting for steps' tokens
    deliver_s     taking steps' tokens, stop strings, waking callers
    copied_blocks    within the pool, by forks: shared blocks that were to be written
    offloaded_bytes, restored_bytes    copied to the pool's host tier, and back
    prefill_tokens_per_s, copy_bytes_per_s    by what preempted sequences are kept there or computed again: of late
    read_bytes_per_s    from the disk, of late
    """

    scheduler: SchedulerStatistics
    num_requests: int
    computed_steps: int
    recoveries: int
    plan_s: float
    schedule_s: float
    wait_s: float
    deliver_s: float
    copied_blocks: int
    offloaded_bytes: int
    restored_bytes: int
    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(slots=True)
class _Counters:
    computed_steps: int = 0
    recoveries: int = 0
    plan_s: float = 0.0
    schedule_s: float = 0.0
    wait_s: float = 0.0
    deliver_s: float = 0.0
    copied_blocks: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@dataclass(slots=True)
class _Sent:
    """A step in flight.

    sent_at  by time.perf_counter()
    began_at when its plan was begun, by the same clock
    is_ahead another step was in flight then
    void     why it computes nothing, if that is known: it was refused, or one before it failed, and is skipped now
    """

    step: StepInFlight
    grant: SignedGrant
    answer: StepAnswer
    sent_at: float
    span: StepSpan | NoSpan
    void: QuireError | None = None
    began_at: float = 0.0
    is_ahead: bool = False


class EngineOptions(TypedDict, total=False):
    """The options that all ways to make an engine have; see Engine."""

    config: EngineConfig | None
    tokenizer: Tokenizer | str | None
    policy: Policy | None
    tracing: Tracing | None


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
        policy: Policy | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Use the caller's clients; connect_worker gets the worker's address, which the lease has.

        tokenizer is a tokenizer, or the place to load it from; None: the place that the worker names, if this process
        can read it. Without a tokenizer prompts are token ids, and samples have no text. policy chooses the requests
        that are served first and those that are preempted; None: PriorityPolicy. tracing makes spans; None: no spans.
        """
        self._config = config or EngineConfig()
        self._connection = Connection(cache, connect_worker, self._config)
        self._tokenizer_source = tokenizer
        self._policy = policy
        self._tracing = tracing
        self._measured = Measured()
        self._inbox = Inbox()
        self._requests = Requests(
            self._config,
            self._measured,
            tracing,
            inbox=self._inbox,
            check_grammar=self._check_grammar,
        )
        self._requests.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        self._flight: deque[_Sent] = deque()
        self._limit = FlightLimit()
        self._undelivered: deque[tuple[StepTokens, worker_service_pb2.RunStepResponse, float]] = deque()
        self._page: EnginePage | None = None
        self._is_started = False
        self._loop: asyncio.Task[None] | None = None
        self._counters = _Counters()
        self._death = EngineStopped("the engine's loop runs")
        self._has_died = asyncio.Event()
        self._recoveries_in_row = 0
        self._fruitless_in_row = 0
        self._last_step_at = 0.0
        self._compilations: dict[Sequence, asyncio.Task[None]] = {}  # of postponed sequences

    @classmethod
    def connect(
        cls,
        cachemgr: str | None = None,
        *,
        worker: str | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        **options: Unpack[EngineOptions],
    ) -> "Engine":
        """An engine over gRPC; use it with `async with`, or call start() and close().

        Addresses are "unix:/path" or "host:port". cachemgr None is that of the environment variable
        QUIRE_CACHEMGR, and without it the address where `quire up` serves. worker overrides the address that the pool's
        worker gave cachemgr; credentials are shown to both. The options are those of Engine: config, tokenizer, policy
        and tracing.
        """
        is_traced = options.get("tracing") is not None
        cache_kind = TracedCacheClient if is_traced else CacheClient
        worker_kind = TracedWorkerClient if is_traced else WorkerClient
        return cls(
            cache_kind(cachemgr or given_cachemgr(), credentials=credentials),
            lambda address: worker_kind(worker or address, credentials=credentials),
            **options,
        )

    async def __aenter__(self) -> Self:
        """Start; see start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; see close."""
        await self.close()

    async def start(self) -> None:
        """Take a lease and begin. Once per engine; close() ends it, also after a start that raised.

        Raises NotFound, OutOfRoom, Unavailable; OSError or ValueError for the tokenizer asked for; InvalidRequest if
        metrics can't be served where they should, or if the pool can't have the drafts asked for; RuntimeError if the
        engine was started before.
        """
        if self._is_started:
            raise RuntimeError("the engine was started before: make another one")
        self._is_started = True
        try:
            session = await self._connection.open()
            await self._load_tokenizer(session.model.tokenizer)
            limits = self._limits_of(session)
            if self._config.speculative is not None:
                check_drafts(self._config.speculative, limits, pool=session.pool)
            self._scheduler = Scheduler(
                limits,
                policy=self._policy,
                by_tenant=self._config.tenants,
                verify=self._config.verify,
                speculative=self._config.speculative,
            )
            self._delivery = Delivery(
                self._requests, self._scheduler, self._measured, max_unread_tokens=self._config.max_unread_tokens
            )
            self._requests.use_model(session.model, limits)
            if self._config.metrics_listen is not None:
                self._page = EnginePage(self._config.metrics_listen, self._look)
        except BaseException:
            await self._connection.close()
            raise
        self._requests.start()
        self._loop = asyncio.create_task(self._run(), name="quire-engine")

    async def close(self) -> None:
        """Stop: callers that still wait get EngineStopped, the lease is given back. Doing it twice is fine."""
        if self._loop is not None:
            tasks = [self._loop, *self._compilations.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._requests.stop(EngineStopped("the engine is closed"))
        if self._page is not None:
            await asyncio.to_thread(self._page.close)
            self._page = None
        await self._connection.close()

    # For callers.

    @property
    def metrics_address(self) -> str | None:
        """The address of the page of metrics, "host:port"; None if there is none."""
        return None if self._page is None else self._page.address

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use."""
        return self._requests.tokenizer

    @property
    def model(self) -> worker_service_pb2.GetModelResponse:
        """The worker's model, as of the session's beginning or refresh_adapters(). Raises Unavailable without one."""
        return self._session().model

    @property
    def adapters(self) -> dict[str, bytes]:
        """The identities of the worker's adapters, by name; see CacheParams.adapter. Raises as model does."""
        return adapters_of(self.model)

    async def refresh_adapters(self) -> None:
        """Ask the worker for its adapters again: they may have changed while it serves. Raises Unavailable."""
        self._requests.use_adapters(await self._session().refresh_model())

    async def load_adapter(self, name: str, path: str) -> bool:
        """Have the worker load an adapter from a folder of its machine; return False if it had it before.

        Needs the role operator there. Raises InvalidRequest, OutOfRoom, AccessDenied, Unavailable.
        """
        loaded = await self._session().load_adapter(name, path)
        await self.refresh_adapters()
        return loaded.loaded

    async def unload_adapter(self, name: str) -> bool:
        """Have the worker unload an adapter; return False if there was none. OutOfRoom: sequences have it.

        Needs the role operator there. Raises OutOfRoom, AccessDenied, Unavailable.
        """
        unloaded = await self._session().unload_adapter(name)
        await self.refresh_adapters()
        return unloaded

    def _session(self) -> Session:
        if self._connection.session is None:
            raise Unavailable("there is no session with the services right now")
        return self._connection.session

    @property
    def pool(self) -> str:
        """The name of the session's pool; without a session the one that was asked for, which may be ""."""
        session = self._connection.session
        return self._config.pool if session is None else session.pool

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of a prompt and a sample together, by the model's context and the pool's blocks."""
        return self._scheduler.limits.max_tokens_per_sequence

    @property
    def max_running_sequences(self) -> int:
        """Most sequences that hold blocks at once, by the configuration and the worker."""
        return self._scheduler.limits.max_running_sequences

    @property
    def outage(self) -> Outage | None:
        """The service that requests wait for, or did until they failed; None while the services can be used."""
        return self._connection.outage

    async def failed(self) -> EngineStopped:
        """Wait until the engine can serve no request any more because its loop has died; return its error."""
        await self._has_died.wait()
        return self._death

    async def next_outage(self, seen: Outage | None) -> Outage | None:
        """Wait until there is another outage than the one seen, or none any more; return it."""
        return await self._connection.next_outage(seen)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        delivered: abc.Sequence[Delivered] | None = None,
        is_whole: bool = False,
        **fields: Any,
    ) -> abc.AsyncGenerator[Chunk, None]:
        """Chunks of all samples of a prompt, as their tokens come, until each has one with a finish_reason.

        is_whole: a sample has two chunks, of its first token and, when it ends, of all others. An error comes behind
        the tokens generated so far. This costs much less, for callers that need no token earlier.

        The prompt is text or token ids. fields are those of SamplingParams: `generate(prompt, max_tokens=3)`; given
        with params they replace its fields. cache is the request's use of the pool and its prefix cache; None:
        CacheParams().

        delivered has the tokens that another engine delivered of this request before it failed, sample by sample.
        They are not delivered again. The other tokens are those that would have followed if params has the seed that
        the request had there, except for rounding without --deterministic (docs/reference/scheduling.md, Seeds). Such
        a request is accepted though the queue is full.
        Log-probabilities of its prompt are not delivered again.

        Raises InvalidRequest at once, TypeError for a field that SamplingParams does not have. The iterator raises
        RequestFailed, Unavailable, EngineStopped, or InvalidRequest if a service refuses the request; each has the
        numbers of delivered tokens in delivered_token_counts. Work begins when the first item is requested; closing
        the iterator, or cancelling the task that waits in it, releases everything with the next plan.
        """
        wanted, caching = params_of(params, fields, SamplingParams), cache_params_of(cache)
        checked = self._requests.check(prompt, wanted, caching, delivered)
        return self._requests.generate(*checked, caching, delivered, is_whole=is_whole)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: CacheParams | None = None,
        delivered: abc.Sequence[Delivered] | None = None,
        **fields: Any,
    ) -> None:
        """Return if generate would accept these arguments, and raise what it raises at once if not. Nothing begins.

        Raises InvalidRequest, or EngineStopped if the engine does not run.
        """
        wanted, caching = params_of(params, fields, SamplingParams), cache_params_of(cache)
        self._requests.check(prompt, wanted, caching, delivered)

    def fail_all(self, error: QuireError) -> None:
        """Fail all open requests with an error. Their callers get the tokens generated so far, then the error."""
        self._requests.fail_all(error)

    async def complete(
        self,
        prompts: Prompt | abc.Iterable[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        cache: CacheParams | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """All samples of all prompts, in the prompts' order.

        params are for all prompts, or one for each; fields and cache are as in generate, for all prompts. A string is
        one prompt, and so is a list of integers: token ids. The answer is a list of one then.

        Raises what generate raises; then the other prompts are cancelled.
        """
        several, caching = prompts_of(prompts), cache_params_of(cache)
        each = [params_of(one, fields, SamplingParams) for one in one_for_each(params, len(several))]
        checked = [self._requests.check(prompt, wanted, caching) for prompt, wanted in zip(several, each, strict=True)]
        return await _all_or_none(self._requests.complete(token_ids, wanted, caching) for token_ids, wanted in checked)

    async def beam_search(
        self,
        prompts: Prompt | abc.Iterable[Prompt],
        params: BeamSearchParams | abc.Sequence[BeamSearchParams] | None = None,
        *,
        cache: CacheParams | None = None,
        **fields: Any,
    ) -> list[BeamCompletion]:
        """The most probable texts behind all prompts, in the prompts' order: docs/reference/sampling.md, Beam search.

        Arguments are those of complete, but for params and fields, which are those of BeamSearchParams. Raises what
        complete raises. Nothing is given out before a search has ended.
        """
        several, caching = prompts_of(prompts), cache_params_of(cache)
        each = [params_of(one, fields, BeamSearchParams) for one in one_for_each(params, len(several))]
        checked = [
            (self._requests.check_beams(prompt, wanted, caching), wanted)
            for prompt, wanted in zip(several, each, strict=True)
        ]
        return await _all_or_none(
            self._requests.search_beams(token_ids, wanted, caching) for token_ids, wanted in checked
        )

    def statistics(self) -> EngineStatistics:
        """Present numbers and counters."""
        counters = self._counters
        return EngineStatistics(
            scheduler=self._inbox.counted_with(self._scheduler.statistics()),
            num_requests=len(self._requests),
            computed_steps=counters.computed_steps,
            recoveries=counters.recoveries,
            plan_s=counters.plan_s,
            schedule_s=counters.schedule_s,
            wait_s=counters.wait_s,
            deliver_s=counters.deliver_s,
            copied_blocks=counters.copied_blocks,
            offloaded_bytes=counters.offloaded_bytes,
            restored_bytes=counters.restored_bytes,
            prefill_tokens_per_s=self._scheduler.costs.prefill.per_s,
            copy_bytes_per_s=self._scheduler.costs.copy.per_s,
            read_bytes_per_s=self._scheduler.costs.read.per_s,
        )

    def _look(self) -> EngineLook:
        session = self._connection.session
        return EngineLook(
            pool=self.pool,
            model="" if session is None else session.model.model,
            scheduler=self._inbox.counted_with(self._scheduler.statistics()),
            num_requests=len(self._requests),
            computed_steps=self._counters.computed_steps,
            recoveries=self._counters.recoveries,
            host_bytes={"offload": self._counters.offloaded_bytes, "restore": self._counters.restored_bytes},
            measured=self._measured,
            drafters=self._scheduler.drafters,
        )

    # The loop.

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._turn_or_wait()
                except BrokenInvariantError:
                    raise
                except Exception as error:
                    # Others run in between. If the event loop has gone, the task ends here: all that it awaits fails.
                    await asyncio.sleep(0)
                    await self._contain(error)
        except BaseException as error:
            if is_being_cancelled():
                raise  # the engine is closed
            _log.exception("the engine's loop has died: %s", self.statistics())
            stopped = EngineStopped(f"the engine's loop has died: {error!r}")
            stopped.__cause__ = error
            self._requests.stop(stopped)
            self._death = stopped
            self._has_died.set()

    async def _turn_or_wait(self) -> None:
        if self._has_work():
            await self._turn()
        else:
            self._deliver()
            await self._inbox.wait()

    def _has_work(self) -> bool:
        self._take_calls()
        return self._scheduler.has_work

    def _take_calls(self) -> None:
        """Apply the calls of other tasks to the scheduler."""
        for fault in self._inbox.take_into(self._scheduler):
            self._delivery.fail([Failed(fault.sequence, to_failure(fault))])
        for sequence in [sequence for sequence, task in self._compilations.items() if task.done()]:
            del self._compilations[sequence]
            self._scheduler.resume(sequence)

    async def _turn(self) -> None:
        session = self._connection.session
        if session is None:
            await self._reconnect()
            return  # the requests may have ended meanwhile
        try:
            planned = len(self._flight) < self._limit.max_steps and await self._plan(session)
            self._deliver()
            if not planned:
                await self._settle(session)
        except QuireError as error:
            await self._recover(session, error)

    async def _contain(self, error: Exception) -> None:
        """Go on after an unexpected exception: the request that it is about fails, or is found. Others continue.

        Raises BrokenInvariantError if the exception has left a mess.
        """
        _log.error("an unexpected error in the engine's loop", exc_info=error)
        failure = to_failure(error)
        self._deliver()
        self._void_flight(failure)
        self._count_recovery()
        known = [sequence for sequence in self._requests.unfinished() if not self._inbox.has(sequence.request_id)]
        culprit = error.sequence if isinstance(error, RequestFault) else None
        self._delivery.fail(self._scheduler.on_fault(failure, known, culprit))
        self._requests.fail_ended(failure)
        self._scheduler.check_invariants()
        self._give_up_after_many(failure)
        await self._connection.hang_up()
        await self._connection.end_session()

    async def _plan(self, session: Session) -> bool:
        """Plan a step and send it. Returns False if a step in flight has to end first."""
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return False
        scheduled, is_ahead = time.perf_counter(), bool(self._flight)
        try:
            with self._span("quire.plan", plan.sequences.values()) as span:
                granted, grant = await self._ask(session, plan)
            span.end(step_number=granted.step_number, refusals=len(granted.refusals))
        except OutOfRoom:  # TOO_MANY_STEPS: their outcomes are on the way to cachemgr
            if not self._flight:
                await self._pause()
            return not self._flight
        except InvalidRequest as error:
            if not (error.is_about_input and plan.sequences):
                raise
            _log.warning("a plan was refused: %s", error)
            self._delivery.fail(self._scheduler.on_plan_refused(plan, error))
            return True
        planned = time.perf_counter()
        step = self._scheduler.on_planned(plan, granted)
        self._delivery.fail(step.failed)
        with self._span("quire.step", step.sequences) as span:
            answer = await session.run(step, grant, skip=step.is_void)
        sent = time.perf_counter()
        void = _prior_failed() if step.is_void else None
        self._flight.append(_Sent(step, grant, answer, sent, span, void, started, is_ahead))
        if self._scheduler.step_costs is not None:
            self._scheduler.step_costs.observe_plan(sent - started)
        self._measured.plan.observe(planned - scheduled)
        self._counters.plan_s += planned - scheduled
        self._counters.schedule_s += (scheduled - started) + (sent - planned)
        if (plan.asks_to_compute or plan.gives_way) and not step.seq_ids and len(self._flight) == 1:
            await self._settle(session)
            await self._pause()  # blocks are retired or being released, or others hold them, or may take them now
        return True

    async def _ask(self, session: Session, plan: Plan) -> tuple[GrantedStep, SignedGrant]:
        """Return cachemgr's answer to a plan, after as many attempts as needed. Raises the errors of Session.plan."""
        request = session.request_of(plan)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await session.plan(request)
        except Unavailable as error:
            _log.warning("cachemgr is unavailable: %s", error)
            return await self._ask_again(session, request, error)
        except TimeoutError:
            return await self._ask_again(session, request, Unavailable(f"no answer within {_PATIENCE_S:g} s"))

    async def _ask_again(
        self, session: Session, request: PlanStepRequest, error: Unavailable
    ) -> tuple[GrantedStep, SignedGrant]:
        deadline = self._connection.begin_outage(error)
        asking = asyncio.create_task(session.plan_again(request, error, until=deadline))
        try:
            while self._flight and not asking.done():
                ended = asyncio.ensure_future(self._flight[0].answer.result())
                ended.add_done_callback(_retrieve)  # _settle uses it, too
                await asyncio.wait([asking, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await self._settle(session)
                    self._deliver()
            answer = await asking
        finally:
            asking.cancel()
        self._connection.end_outage()
        return answer

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
        step_s = timings["prepare_s"] + timings["forward_s"] + timings["sample_s"]
        if self._scheduler.step_costs is not None:
            self._observe_step(self._scheduler.step_costs, sent, ended, device_s=step_s)
        self._limit.observe(step_s, device=session.model.device)
        if span is not NO_SPAN:
            span.end(step_number=step.step_number, tokens=sum(step.counts), **timings)
        self._take_calls()  # of requests that end now no more tokens are taken
        self._delivery.take_prompt_logprobs(step, response)
        late_ids = response.late_sequence_ids
        sampled, failed = self._scheduler.on_step_done(
            step,
            response.sequence_ids,
            response.sampled_token_ids,
            token_counts=response.sampled_token_counts,
            late_ids=late_ids,
        )
        if late_ids:
            self._compile_postponed()
        self._undelivered.append((sampled, response, ended))
        self._delivery.fail(failed)
        self._delivery.choose(sampled, response, ended)
        self._counters.deliver_s += time.perf_counter() - ended
        if step.seq_ids:
            self._counters.computed_steps += 1
            self._recoveries_in_row = self._fruitless_in_row = 0

    def _observe_costs(
        self, step: StepInFlight, response: worker_service_pb2.RunStepResponse, seconds: dict[str, float]
    ) -> None:
        """Learn the costs of computing tokens again and of copies, and count what was copied."""
        block_bytes = self._scheduler.limits.block_bytes
        self._counters.copied_blocks += response.copied_block_count
        offloaded, restored = response.offloaded_block_count, response.restored_block_count
        self._counters.offloaded_bytes += offloaded * block_bytes
        self._counters.restored_bytes += restored * block_bytes
        self._scheduler.costs.observe_step(
            step.counts,
            compute_s=seconds["forward_s"] + seconds["sample_s"],
            num_copied_bytes=(offloaded + restored) * block_bytes,
            copy_s=seconds["offload_s"] + seconds["restore_s"],
            num_read_bytes=response.disk_read_block_count * block_bytes,
            read_s=response.disk_read_time.ToNanoseconds() / 1e9,
        )

    def _observe_step(self, costs: StepCosts, sent: _Sent, ended: float, *, device_s: float) -> None:
        """Learn what a step of so many tokens takes, on the device and all in all."""
        began = max(self._last_step_at, sent.began_at) if sent.is_ahead else sent.began_at
        self._last_step_at = ended
        if sent.step.seq_ids:
            costs.observe(
                sent.step.num_tokens,
                device_s=device_s,
                period_s=ended - began,
                is_ahead=sent.is_ahead,
                has_prompts=sent.step.has_prompts,
            )

    def _span(self, name: str, sequences: abc.Iterable[Sequence]) -> StepSpan | NoSpan:
        """A span for work on these sequences."""
        if self._tracing is None:
            return NO_SPAN
        return self._tracing.step(name, self._delivery.spans_of(sequences))

    async def _skip_flight(self, session: Session, error: QuireError) -> None:
        """Send the steps in flight again, to be skipped: the oldest was refused, and so were those behind it."""
        void = error
        for sent in self._flight:
            sent.span.fail(void)
            sent.void = void
            sent.answer = await session.run(sent.step, sent.grant, skip=True)
            void = _prior_failed()

    async def _take_failure(self, step: StepInFlight, error: QuireError) -> None:
        _log.warning("step %d computed nothing: %s", step.step_number, error)
        if error.reason == "PRIOR_STEP_FAILED":
            self._scheduler.on_step_dropped(step)
        elif isinstance(error, StepFailed):
            self._delivery.fail(self._scheduler.on_step_failed(step, error))
        else:
            self._delivery.fail(self._scheduler.on_step_refused(step, error))
            self._compile_postponed()
        if not self._flight:
            await self._pause()  # the outcome is on its way to cachemgr; a plan before it arrives would fail too

    def _compile_postponed(self) -> None:
        """Let the worker compile the grammars of postponed sequences and make their masks: they are planned again."""
        for sequence in self._scheduler.postponed:
            if sequence not in self._compilations:
                task = asyncio.create_task(self._compile(sequence))
                task.add_done_callback(lambda _: self._inbox.wake())
                self._compilations[sequence] = task

    async def _compile(self, sequence: Sequence) -> None:
        try:
            if sequence.params.grammar is not None:
                mask_s = await self._check_grammar(sequence.params.grammar, sequence.output_token_ids)
                self._requests.count_masks(sequence.request_id, mask_s)
        except QuireError as error:
            self._requests.fail_one(sequence.request_id, error)
        except Exception as error:
            self._requests.fail_one(sequence.request_id, to_failure(error))

    async def _pause(self) -> None:
        self._fruitless_in_row += 1
        delay_s = min(_PAUSES.max_delay_s, _PAUSES.first_delay_s * 2 ** min(self._fruitless_in_row - 1, 16))
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    def _deliver(self) -> None:
        started = time.perf_counter()
        while self._undelivered:
            self._delivery.deliver(*self._undelivered.popleft())
        self._counters.deliver_s += time.perf_counter() - started

    # Failures.

    async def _recover(self, session: Session, error: QuireError) -> None:
        """Wait until nothing is in flight. Then continue in the pool's new epoch, or without a session."""
        _log.warning("recovering: %s", error)
        self._deliver()
        await self._drain(session)
        await self._connection.hang_up()
        self._count_recovery()
        self._scheduler.reset_all()
        self._give_up_after_many(error)
        try:
            if isinstance(error, EpochChanged) and await self._connection.follow_epoch():
                self._use(session)
                return
        except QuireError as another:
            _log.warning("the pool's new epoch can't be used: %s", another)
        await self._connection.end_session()
        if self._recoveries_in_row > 1:
            await self._pause()

    def _count_recovery(self) -> None:
        self._counters.recoveries += 1
        self._recoveries_in_row += 1

    def _give_up_after_many(self, error: QuireError) -> None:
        if self._recoveries_in_row > self._config.max_recoveries:
            self._recoveries_in_row = 0
            self._requests.fail_all(_given_up(self._config.max_recoveries, error))

    async def _drain(self, session: Session) -> None:
        """Take the answers of the steps in flight; from the first that fails on, their tokens are void."""
        while self._flight:
            try:
                await self._settle(session)
            except QuireError as error:
                self._void_flight(error)
        self._deliver()

    def _void_flight(self, error: QuireError) -> None:
        """Take no answer to the steps in flight: what they sample is computed again."""
        for sent in self._flight:
            sent.span.fail(error)
        self._flight.clear()

    async def _reconnect(self) -> None:
        """Open a new session as soon as the services let us; if they do not in time, every request fails."""
        try:
            session = await self._connection.reopen(while_needed=self._has_work)
        except TEMPORARY_ERRORS as error:
            self._requests.fail_all(error)
            return
        if session is not None:
            self._scheduler.reset_all()
            self._use(session)

    def _use(self, session: Session) -> None:
        """Set the limits of this session's pool and model for the scheduler and new requests."""
        limits = self._limits_of(session)
        self._requests.use_model(session.model, limits)
        self._scheduler.set_limits(limits)

    def _limits_of(self, session: Session) -> SchedulerLimits:
        allowed = session.model.max_step_tokens or self._config.max_step_tokens
        return limits_of(
            session.geometry,
            max_step_tokens=min(self._config.max_step_tokens, allowed),
            max_running_sequences=self._config.max_running_sequences,
            max_sampled_tokens=session.model.max_sampled_token_count or None,
            max_expected_prompts=self._config.max_expected_prompts,
        )

    async def _check_grammar(self, grammar: Grammar, output_token_ids: abc.Sequence[int] = ()) -> float:
        """Let the worker compile a grammar and make the mask behind these tokens before the sequence is planned.

        Returns the seconds of a processor that the mask took. Raises InvalidRequest, OutOfRoom. While the worker is
        unavailable nothing is checked: a step with a wrong grammar is refused.
        """
        session = self._connection.session
        if session is None:
            return 0.0
        try:
            return await session.check_grammar(grammar, output_token_ids)
        except Unavailable as error:
            _log.warning("a grammar was not checked: %s", error)
            return 0.0

    async def _load_tokenizer(self, worker_says: str) -> None:
        source = self._tokenizer_source
        if isinstance(source, Tokenizer):
            return
        try:
            self._requests.tokenizer = await asyncio.to_thread(Tokenizer.load, source or worker_says)
        except (OSError, ValueError) as error:
            if source is not None:
                raise
            _log.warning("no tokenizer, so no text: %s", error)


async def _all_or_none(work: abc.Iterable[abc.Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Return the results of all; if one raises, the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _timings_of(response: worker_service_pb2.RunStepResponse) -> dict[str, float]:
    """A step's times in the worker's answer, in seconds."""
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


def _prior_failed() -> StepFailed:
    return StepFailed("a step before it computed nothing", reason="PRIOR_STEP_FAILED")


def _given_up(num_recoveries: int, error: QuireError) -> RequestFailed:
    failed = RequestFailed(f"given up after {num_recoveries} recoveries, the last one for: {error}")
    failed.__cause__ = error
    return failed


def _retrieve(result: asyncio.Future[worker_service_pb2.RunStepResponse]) -> None:
    if not result.cancelled():
        result.exception()
