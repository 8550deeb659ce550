"""Results of steps for the callers: tokens as text, the next beams, failures.

The engine's task calls all of it. It changes the scheduler: a stop string ends a sequence, and a search has new beams.
"""

import contextlib
import logging
from collections import abc

from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.request import BeamRequest, Request, undeliverable
from quire.client.engine.requests import Requests
from quire.client.engine.scheduling.faults import BrokenInvariantError, UnexpectedError, to_failure
from quire.client.engine.scheduling.plans import Failed, Sampled, StepInFlight
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason, Sequence
from quire.client.engine.tracing import RequestSpan
from quire.client.errors import InvalidRequest, ProtocolViolation, QuireError, RequestFailed
from quire.compute.v1 import worker_service_pb2

_log = logging.getLogger(__name__)


class Delivery:
    """Gives results to the open requests."""

    def __init__(self, requests: Requests, scheduler: Scheduler, *, max_unread_tokens: int | None) -> None:
        """A request with more unread tokens than max_unread_tokens fails; None: there is no limit."""
        self._requests = requests
        self._scheduler = scheduler
        self._max_unread_tokens = max_unread_tokens

    def fail(self, failed: abc.Iterable[Failed]) -> None:
        """Fail the requests of these sequences."""
        for sequence, error in ((entry.sequence, entry.error) for entry in failed):
            request = self._requests.find(sequence.request_id)
            if isinstance(error, UnexpectedError):
                _log.error("a request fails for an unexpected error", exc_info=error.__cause__)
            if request is not None:
                request.fail(error)
                self._scheduler.end(request.sequences, FinishReason.CANCELLED)

    def spans_of(self, sequences: abc.Iterable[Sequence]) -> list[RequestSpan | None]:
        """The spans of the open requests that these sequences belong to."""
        request_ids = dict.fromkeys(sequence.request_id for sequence in sequences)
        found = map(self._requests.find, request_ids)
        return [request.span for request in found if request is not None]

    def take_prompt_logprobs(self, step: StepInFlight, response: worker_service_pb2.RunStepResponse) -> None:
        """Take a step's results for prompts. Raises ProtocolViolation if they do not fit the request."""
        runs = {seq_id: index for index, seq_id in enumerate(step.seq_ids)}
        for entry in response.prompt_logprobs:
            index = runs.get(entry.sequence_id)
            logprobs = None if index is None else step.sequences[index].prompt_logprobs
            if index is None or logprobs is None:
                raise ProtocolViolation("log-probabilities of a prompt without a request for them")
            with self._failing(step.sequences[index]):
                logprobs.put(
                    step.starts[index] + 1,
                    entry.logprobs,
                    entry.top_token_ids,
                    entry.top_logprobs,
                    top_count=entry.top_count,
                )

    @contextlib.contextmanager
    def _failing(self, sequence: Sequence) -> abc.Iterator[None]:
        """Fail the request of a sequence for an unexpected exception within the block: it concerns no other one."""
        try:
            yield
        except (QuireError, BrokenInvariantError):
            raise
        except Exception as error:
            self.fail([Failed(sequence, to_failure(error))])

    def choose(self, events: abc.Iterable[Sampled], response: worker_service_pb2.RunStepResponse, at_s: float) -> None:
        """Continue beam searches with the outcome of a step that has just ended, before the next step is planned.

        at_s as in deliver. Raises ProtocolViolation if an outcome is missing.
        """
        beams = [event for event in events if event.sequence.group is not None]
        if not beams:
            return
        logprobs = {entry.sequence_id: entry for entry in response.logprobs}
        for event in beams:
            entry = logprobs.get(event.seq_id)
            if entry is None:
                raise ProtocolViolation("a beam was computed without log-probabilities")
            self._scheduler.take_top(event.sequence, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
        for request_id in dict.fromkeys(event.sequence.request_id for event in beams):
            request = self._requests.find(request_id)
            if not isinstance(request, BeamRequest) or request.is_over:
                continue
            if request.sequences and request.group.is_ready:
                with self._failing(request.first):
                    self._go_on(request, at_s)

    def _go_on(self, request: BeamRequest, at_s: float) -> None:
        self._requests.wait_no_longer(request)
        beams = request.sequences
        heirs = request.search.step([beam.top or () for beam in beams], [beam.output_token_ids for beam in beams])
        if heirs:
            request.times.token(0, at_s, None)
            self._scheduler.branch(request.group, heirs)
            return
        request.times.token(0, at_s, request.search.best()[0].finish_reason)
        self._scheduler.end(beams, FinishReason.STOP)
        request.end()

    def deliver(self, events: abc.Iterable[Sampled], response: worker_service_pb2.RunStepResponse, at_s: float) -> None:
        """Give the tokens of a step, which came at this time of time.perf_counter(), to their requests."""
        logprobs = {entry.sequence_id: entry for entry in response.logprobs}
        broken = {failure.sequence_id: failure.message for failure in response.grammar_failures}
        failed: list[Failed] = []
        for event in events:
            if event.seq_id in broken:
                failed.append(Failed(event.sequence, _not_followed(broken[event.seq_id])))
                continue
            try:
                self._deliver_one(event, logprobs.get(event.seq_id), at_s)
            except RequestFailed as error:
                failed.append(Failed(event.sequence, error))
            except Exception as error:  # the tokenizer's, about this text: no other request has to do with it
                _log.exception("the text of a request can't be made")
                failed.append(Failed(event.sequence, undeliverable(error)))
        self.fail(failed)  # when all others have their tokens

    def _deliver_one(self, event: Sampled, logprobs: worker_service_pb2.TokenLogprobs | None, at_s: float) -> None:
        sequence, reason = event.sequence, event.finish_reason
        request = self._requests.find(sequence.request_id)
        if request is None:
            return
        if sequence.index not in request.open:
            return  # it was sampled before the sample's end was known: a stop string, or the request's time
        self._requests.wait_no_longer(request)
        text = request.texts[sequence.index]
        piece = text.push(event.token_id, reason)
        if text.stop_string is not None:
            reason = FinishReason.STOP
            self._scheduler.end([sequence], FinishReason.STOP)
        request.times.token(sequence.index, at_s, reason)
        if request.tells_of_prompt:
            of_prompt = sequence.prompt_logprobs
            request.mailbox.put_prompt(
                logprobs=None if of_prompt is None else _whole(of_prompt),
                num_cached_tokens=request.sequences[0].num_cached_tokens,
            )
            request.tells_of_prompt = False
        request.mailbox.put(
            sequence.index,
            text=piece,
            token_ids=(event.token_id,),
            logprobs=() if logprobs is None else (_decode_logprobs(event.token_id, logprobs),),
            finish_reason=reason,
            stop_string=text.stop_string,
        )
        if reason is not None:
            request.finish_one(sequence.index, reason)
        request.news.set()
        self._check_unread(request)

    def _check_unread(self, request: Request) -> None:
        """End a request with more unread tokens than the limit. Raises RequestFailed."""
        num_unread, limit = request.mailbox.num_unread_tokens, self._max_unread_tokens
        if limit is not None and num_unread > limit and request.open:
            metadata = {"unread": str(num_unread), "limit": str(limit)}
            message = f"{num_unread} tokens are unread, more than max_unread_tokens, {limit}"
            raise RequestFailed(message, reason="TOO_SLOW", metadata=metadata)


def _decode_logprobs(token_id: int, entry: worker_service_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    return TokenLogprobs(token_id, entry.sampled_logprob, top)


def _whole(logprobs: PromptLogprobs) -> PromptLogprobs:
    if not logprobs.is_complete:
        raise RequestFailed(
            "no log-probabilities of the prompt: a part of it was found in the cache, though not asked for"
        )
    return logprobs


def _not_followed(message: str) -> InvalidRequest:
    metadata = {"field": "grammar", "limit": message}
    return InvalidRequest(f"the grammar can't be followed any more: {message}", metadata=metadata)
