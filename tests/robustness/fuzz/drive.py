"""Sends messages, several at a time, looks at every answer, and from time to time at what must not have changed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from robustness.fuzz import frames, names
from robustness.fuzz.messages import Generator, Message, Origin
from robustness.fuzz.subject import DEADLINE_S, Changed, Subject, difference
from robustness.fuzz.surface import CODES, UNEXPECTED, Method, errors_in

from quire.cache.v1 import attach_pb2, error_pb2

LANES = 24
ROUND = 5_000
"""Messages between two looks at everything."""
NUM_REPEATED = 40
"""Messages that were refused before and are sent once more at each look, with all books compared around each."""
MESSAGES_OF_A_STREAM = 2_000
MAX_KEPT = 400
"""Messages of a method that were answered in a new way."""
FRAME_SHARE = 0.01
MAX_TEXT = 1_500
"""Characters of an error's message: it has to fit into HTTP/2's headers, twice."""
SILENCE_S = 0.2
"""A stream of the server's that has not said anything by then has nothing to say."""
ANSWERED_ONE_BY_ONE = {"PlanSteps", "RunSteps"}
"""Methods with streams of requests; for the others, a conversation is a message with the calls that it needs before."""
VARIES = re.compile(
    r"""(?s:(?<=lease ).*(?=…))|'(?:[^'\\]|\\.)*(?:'|…)|"(?:[^"\\]|\\.)*(?:"|…)"""
    r"""|\b[0-9a-f]{8}\b|-?[0-9][0-9.e+-]*|\b(?:inf|nan)\b"""
)
# What grpc.aio's client says of a call that the server ends while the client writes: the server's status is lost.
LOST_STATUS = "Internal error from Core"
MAX_CONVERSATIONS = 20


class Broken(AssertionError):
    """An answer that must not be."""


@dataclass(frozen=True)
class Answer:
    """The answer to a message: messages, and the end of the call if it ended.

    code     None if the call goes on
    reason   of its ErrorInfo
    """

    parts: tuple[bytes, ...] = ()
    code: grpc.StatusCode | None = None
    reason: str = ""
    text: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: Any) -> Answer:
        """A call that failed. Raises Broken if its status can't be read."""
        try:
            status = rpc_status.from_call(error)
        except (ValueError, DecodeError) as problem:
            raise Broken(f"{error.code()}: {problem}") from None
        info = error_details_pb2.ErrorInfo()
        if status is None or not status.details or not status.details[0].Unpack(info):
            raise Broken(f"{error.code()} without a reason: {(error.details() or '')[:200]!r}")
        return cls((), error.code(), info.reason, error.details() or "", tuple(info.metadata.items()))


@dataclass
class Count:
    """Messages of one method by what became of them."""

    sent: int = 0
    ok: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Failure:
    """A failure, and its message; None if it was found later."""

    origin: Origin | None
    method: str
    problem: str


class Driver:
    """Drives one subject with one generator."""

    def __init__(self, subject: Subject, generator: Generator, *, lanes: int = LANES) -> None:
        self.counts: dict[Method, Count] = defaultdict(Count)
        self.outcomes: dict[tuple[Method, str], Origin] = {}
        self.failures: list[Failure] = []
        self.num_sent = self.num_frames = self.num_repeated = 0
        self._subject = subject
        self._generator = generator
        self._num_lanes = lanes
        self._kept: dict[Method, list[Message]] = defaultdict(list)
        self._refused: dict[tuple[Method, str], Message] = {}  # the last one of each kind
        self._rng = random.Random(generator.seed)

    async def run(self, numbers: range, *, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Sends the messages of these numbers. Stops at the end of the round in which something went wrong.

        `goes_on` is asked after each round, whether to.
        """
        for first in range(numbers.start, numbers.stop, ROUND):
            await self.send(iter(range(first, min(first + ROUND, numbers.stop))))
            await self.look(f"messages {first} to {min(first + ROUND, numbers.stop) - 1}")
            if not goes_on() or self.failures:
                return

    async def send(self, numbers: Iterator[int]) -> None:
        """All of them, in lanes."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._num_lanes):
                lanes.create_task(self._lane(numbers))

    async def _lane(self, numbers: Iterator[int]) -> None:
        async with Streams(self._subject) as streams:
            for number in numbers:
                message = self._generator.message(number, self._kept)
                await self.send_one(message, streams)
                if self.failures:
                    return

    async def send_one(self, message: Message, streams: Streams) -> None:
        """Sends a message and enters what became of it."""
        count = self.counts[message.method]
        count.sent += 1
        self.num_sent += 1
        try:
            if random.Random(message.origin.numbers[0]).random() < FRAME_SHARE:
                await self._send_frames(message)
                return
            grant = self._subject.bindings.grants.get(names.NEXT)
            answer = await streams.exchange(message)
            responses = judge(message.method, answer)
        except (Broken, TimeoutError) as problem:
            self.failures.append(Failure(message.origin, message.method.path, repr(problem)))
            return
        reason, said = refusal_of(answer, responses), outcome_of(answer, responses)
        if reason:
            count.refused[reason] += 1
            self._refused[message.method, said] = message
        else:
            count.ok += 1
        self._keep_if_new(message, said)
        await self._make_up_for(message, responses, reason, grant)

    async def _send_frames(self, message: Message) -> None:
        method = message.method
        # Without valid stand-ins: these calls' effects could not be undone.
        data = names.confine(method, message.data).replace(names.OWN_POOL.encode(), b"nowhere")
        sent, is_answered = frames.conversation(random.Random(data), method, data)
        self.num_frames += 1
        address = {"cachemgr": self._subject.services.cachemgr, "worker": self._subject.services.worker}
        path = address[method.process].address.removeprefix("unix:")
        how = await frames.converse(path, sent, is_answered=is_answered, timeout_s=DEADLINE_S)
        self.counts[method].refused[f"frames {how}"] += 1

    def _keep_if_new(self, message: Message, said: str) -> None:
        outcome = message.method, said
        if outcome in self.outcomes:
            return
        self.outcomes[outcome] = message.origin
        kept = self._kept[message.method]
        kept.append(message)
        del kept[:-MAX_KEPT]

    async def _make_up_for(
        self, message: Message, responses: Sequence[Any], reason: str, grant: tuple[bytes, bytes] | None
    ) -> None:
        """The effect of a valid message is undone, or continued as by a real client and a real worker."""
        name, subject = message.method.name, self._subject
        for response in responses:
            if name in ("PlanStep", "PlanSteps"):
                plan = getattr(response, "plan", response)
                if plan.HasField("grant"):
                    subject.own_pool.report(plan.grant.grant)
            elif name == "CreateLease":
                await subject.end_lease(response.lease_id)
            elif name == "PinPrefix":
                await subject.unpin(response.pin_id)
        if name in ("RunStep", "RunSteps") and not reason and grant is not None:
            await subject.step_ran(grant)
        ends_own = name == "DeleteLease" and any(lease.encode() in message.data for lease in names.OWN_LEASES)
        if ends_own or self.num_sent % 1_000 == 0:
            await subject.keep_up()

    # -- looking --------------------------------------------------------------------------------------------------

    async def look(self, what: str) -> None:
        """Everything that must hold, with no message on its way."""
        if self.failures:
            return
        try:
            await self._look()
        except (Changed, Broken, TimeoutError) as problem:
            self.failures.append(Failure(None, what, str(problem)[:4_000]))
        except Exception as problem:  # a process that is gone, for one
            self.failures.append(Failure(None, what, repr(problem)[:4_000]))

    async def _look(self) -> None:
        subject = self._subject
        for service, process in zip(
            (subject.services.cachemgr, subject.services.worker), subject.processes.values(), strict=True
        ):
            if not service.is_running or service.pid != process.pid:
                raise Changed(f"{service.name} has ended, status {service.returncode}:\n{service.log_tail()}")
        await subject.keep_up()
        await subject.settled()
        await asyncio.to_thread(subject.canary.check)
        await self._repeat_refused()
        await subject.run_next()
        if lines := list(itertools.islice(subject.unexpected_lines(), 5)):
            raise Changed("in the log: " + "\n".join(lines))

    async def _repeat_refused(self) -> None:
        """Sends messages that were refused once more: one that is refused again has changed nothing."""
        known = list(self._refused.values())
        books = await asyncio.to_thread(self._subject.books)
        for message in self._rng.sample(known, min(NUM_REPEATED, len(known))):
            async with Streams(self._subject) as streams:
                grant = self._subject.bindings.grants.get(names.NEXT)
                answer = await streams.exchange(message)
                responses = judge(message.method, answer)
                reason = refusal_of(answer, responses)
                await self._make_up_for(message, responses, reason, grant)
            self.num_repeated += 1
            await self._subject.settled()
            found = await asyncio.to_thread(self._subject.books)
            if reason and found != books:
                raise Changed(f"{message.origin} was refused ({reason}) and changed\n{difference(books, found)}")
            books = found


class Streams:
    """The calls of one lane: its streams stay open from message to message."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._open: dict[Method, tuple[Any, int]] = {}

    async def __aenter__(self) -> Streams:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for method in list(self._open):
            if kind is None:
                await self._close(method)
            else:
                self._open.pop(method)[0].cancel()

    async def exchange(self, message: Message) -> Answer:
        """Sends it and returns the answer. Raises Broken."""
        method, data = message.method, message.sent(self._subject.bindings)
        channel = self._subject.channels[method.process]
        try:
            if method.name in ANSWERED_ONE_BY_ONE:
                return await self._next_on_stream(channel, method, data)
            if method.client_streaming:
                return await self._with_its_status(channel, message, data)
            if method.server_streaming:
                return await self._first_of(channel.unary_stream(method.path)(data, timeout=DEADLINE_S))
            return Answer((await channel.unary_unary(method.path)(data, timeout=DEADLINE_S),), grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            return Answer.of(error)

    async def _next_on_stream(self, channel: Any, method: Method, data: bytes) -> Answer:
        call, num_sent = self._open.pop(method, (None, 0))
        if call is None:
            call = channel.stream_stream(method.path)(timeout=None)
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it has ended: read says how
                await call.write(data)
            answer = await call.read()
        if answer is grpc.aio.EOF:
            raise await status_of(call)
        self._open[method] = call, num_sent + 1
        if num_sent >= MESSAGES_OF_A_STREAM:
            await self._close(method)
        return Answer((answer,))

    async def _close(self, method: Method) -> None:
        call, _ = self._open.pop(method)
        await call.done_writing()
        async with asyncio.timeout(DEADLINE_S):
            if await call.read() is not grpc.aio.EOF or await call.code() is not grpc.StatusCode.OK:
                raise Broken(
                    f"{method.path} ends with {await call.code()}, or goes on, when there is nothing to answer"
                )

    async def _with_its_status(self, channel: Any, message: Message, data: bytes) -> Answer:
        """Hold the conversation again if its status was lost: the server ended the stream during a write."""
        for _ in range(MAX_CONVERSATIONS - 1):
            try:
                return await self._conversation(channel, message, data)
            except grpc.aio.AioRpcError as error:
                if error.details() != LOST_STATUS:
                    raise
        return await self._conversation(channel, message, data)

    async def _conversation(self, channel: Any, message: Message, data: bytes) -> Answer:
        """A message alone, or behind the answer to one that is valid: a stream from its begin to its end."""
        call = channel.stream_stream(message.method.path)(timeout=DEADLINE_S)
        heard = []
        if message.method.name == "AttachPool" and len(data) % 2:
            await call.write(registration(message.origin.numbers[0]))
            heard.append(await call.read())
        # Nothing is written to a stream that has ended: its status would be lost.
        if grpc.aio.EOF not in heard:
            await call.write(data)
            await call.done_writing()
            while (part := await call.read()) is not grpc.aio.EOF:
                heard.append(part)
        if await call.code() is not grpc.StatusCode.OK:
            raise await status_of(call)
        return Answer(tuple(heard), grpc.StatusCode.OK)

    @staticmethod
    async def _first_of(call: Any) -> Answer:
        try:
            async with asyncio.timeout(SILENCE_S):
                first = await call.read()
        except TimeoutError:
            return Answer()
        finally:
            call.cancel()
        return Answer() if first is grpc.aio.EOF else Answer((first,))


def registration(number: int) -> bytes:
    """The registration of a small pool."""
    geometry = {"block_size_tokens": 4, "block_count": 9, "block_bytes": 1, "max_sequence_count": 4}
    pool = names.ATTACHED_POOLS[number % len(names.ATTACHED_POOLS)]
    return attach_pb2.AttachPoolRequest(
        register_pool={
            "pool": pool,
            "epoch": 1 + number % 3,
            "geometry": geometry | {"max_sequence_tokens": 24, "vocabulary_size": names.VOCABULARY},
        }
    ).SerializeToString()


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The end of a stream, as the error that it would be of a unary call."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details(),
    )


# -- judging ------------------------------------------------------------------------------------------------------


def judge(method: Method, answer: Answer) -> list[Any]:
    """The answer's messages. Raises Broken if no message may be answered like this."""
    if answer.code not in (None, grpc.StatusCode.OK):
        judge_error(method, answer.code, answer.reason, answer.text, dict(answer.metadata))
    try:
        responses = list(map(method.response_class.FromString, answer.parts))
    except DecodeError:
        raise Broken("the answer is no message") from None
    for response in responses:
        for error in errors_in(response):
            judge_error(method, code_of(error), error.reason, error.message, dict(error.metadata))
        for token in getattr(getattr(response, "step", response), "sampled_token_ids", ()):
            if token < 0:
                raise Broken(f"token {token} was sampled")
    return responses


def refusal_of(answer: Answer, responses: Sequence[Any]) -> str:
    """The reason of a call that failed, or of one request of a stream; empty if none was refused."""
    if answer.code not in (None, grpc.StatusCode.OK):
        return answer.reason
    failed = (
        error for response in responses for error in errors_in(response) if error is getattr(response, "error", 0)
    )
    return next((str(error.reason) for error in failed), "")


def judge_error(method: Method, code: grpc.StatusCode | None, reason: str, text: str, metadata: dict[str, str]) -> None:
    codes = CODES[method.process]
    said = f"{code} {reason} {text[:200]!r} {str(metadata)[:200]}"
    if reason not in codes or reason in UNEXPECTED:
        raise Broken(f"not a reason for this: {said}")
    if code is not codes[reason]:
        raise Broken(f"{reason} has the code {codes[reason]}: {said}")
    if not text or len(text) > MAX_TEXT or sum(map(len, metadata.values())) > MAX_TEXT:
        raise Broken(f"a message of {len(text)} characters: {said}")
    if reason == "INVALID_ARGUMENT" and not metadata.get("field"):
        raise Broken(f"does not name the field: {said}")


def code_of(error: error_pb2.Error) -> grpc.StatusCode | None:
    return next((code for code in grpc.StatusCode if code.value[0] == error.code), None)


def outcome_of(answer: Answer, responses: Sequence[Any]) -> str:
    """The answer to a message, without the parts that differ from message to message."""
    if answer.code not in (None, grpc.StatusCode.OK):
        return f"{answer.reason}: {VARIES.sub('#', answer.text)}"
    seen = set()
    for response in responses:
        seen |= {field.name for field, _ in response.ListFields()}
        seen |= {f"{error.reason}: {VARIES.sub('#', error.message)}" for error in errors_in(response)}
    return "OK " + ", ".join(sorted(seen))
