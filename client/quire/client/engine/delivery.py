"""Results of steps for the callers: tokens as text, the next beams, failures.

The engine's task calls all of it. It changes the scheduler: a stop string ends a sequence, and a search has new beams.
"""

import contextlib
import logging
from collections import abc

from quire.client.engine.metrics import Measured
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.request import BeamRequest, Request, undeliverable
from quire.client.engine.requests import Requests
from quire.client.engine.scheduling.faults import BrokenInvariantError, UnexpectedError, to_failure
from quire.client.engine.scheduling.plans import Failed, StepInFlight, StepTokens
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason, Sequence
from quire.client.engine.tracing import RequestSpan
from quire.client.errors import InvalidRequest, ProtocolViolation, QuireError, RequestFailed
from quire.compute.v1 import worker_service_pb2

_log = logging.getLogger(__name__)


class Delivery:
    """Gives results to the open requests."""

    def __init__(
        self, requests: Requests, scheduler: Scheduler, measured: Measured, *, max_unread_tokens: int | None
    ) -> None:
        """A request with more unread tokens than max_unread_tokens fails; None: there is no limit."""
        self._requests = requests
        self._scheduler = scheduler
        self._measured = measured
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

    def choose(self, tokens: StepTokens, response: worker_service_pb2.RunStepResponse, at_s: float) -> None:
        """Continue beam searches with the outcome of a step that has just ended, before the next step is planned.

        at_s as in deliver. Raises ProtocolViolation if an outcome is missing.
        """
        beams = {
            seq_id: sequence
            for seq_id, sequence in zip(tokens.seq_ids, tokens.sequences, strict=True)
            if sequence.group is not None
        }
        if not beams:
            return
        logprobs = {entry.sequence_id: entry for entry in response.logprobs}
        for seq_id, beam in beams.items():
            entry = logprobs.get(seq_id)
            if entry is None:
                raise ProtocolViolation("a beam was computed without log-probabilities")
            self._scheduler.take_top(beam, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
        for request_id in dict.fromkeys(beam.request_id for beam in beams.values()):
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
        request.times.begin(at_s)
        self._measured.tokens((request.first,), at_s)
        if heirs:
            self._scheduler.branch(request.group, heirs)
            return
        best = request.search.best()[0]
        request.times.finish_one(best.finish_reason, at_s, num_generated=len(best.token_ids))
        self._scheduler.end(beams, FinishReason.STOP)
        request.end()

    def deliver(self, tokens: StepTokens, response: worker_service_pb2.RunStepResponse, at_s: float) -> None:
        """Give the tokens of a step, which came at this time of time.perf_counter(), to their requests.

        A caller that wants its samples whole is not woken, and nothing is done for its tokens, before they end.
        """
        logprobs = _by_sequence(response.logprobs)
        samples = [each for each in tokens.sequences if each.group is None] if logprobs else tokens.sequences
        self._measured.tokens(samples, at_s)
        counts = tokens.counts
        if counts:
            self._measured.further_tokens(sum(counts.values()) - len(counts))
        broken = {failure.sequence_id: failure.message for failure in response.grammar_failures}
        ended = tokens.ended
        failed: list[Failed] = []
        for seq_id, sequence in zip(tokens.seq_ids, tokens.sequences, strict=True):
            if sequence.is_silent and sequence not in ended:
                continue
            if broken and seq_id in broken:
                failed.append(Failed(sequence, _not_followed(broken[seq_id])))
                continue
            try:
                of_tokens = logprobs.get(seq_id, ()) if logprobs else ()
                last = counts.get(seq_id, 1) - 1 if counts and not sequence.is_silent else 0
                for index in range(last):
                    self._deliver_one(sequence, None, of_tokens[index] if of_tokens else None, at_s)
                self._deliver_one(sequence, ended.get(sequence), of_tokens[last] if of_tokens else None, at_s)
            except RequestFailed as error:
                failed.append(Failed(sequence, error))
            except Exception as error:  # the tokenizer's, about this text: no other request has to do with it
                _log.exception("the text of a request can't be made")
                failed.append(Failed(sequence, undeliverable(error)))
        self.fail(failed)  # when all others have their tokens

    def _deliver_one(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        logprobs: worker_service_pb2.TokenLogprobs | None,
        at_s: float,
    ) -> None:
        request = self._requests.find(sequence.request_id)
        if request is None:
            return
        if sequence.index not in request.open:
            return  # it was sampled before the sample's end was known: a stop string, or the request's time
        output = request.outputs[sequence.index]
        if sequence.is_silent:
            num_unread = request.put(output, output.show_all(reason))
        else:
            if request.waits:
                self._begin(request, at_s)
            of_token = None if logprobs is None else _decode_logprobs(output.next_token_id, logprobs)
            output.show_one(reason, of_token)
            if output.finish_reason is not reason:
                self._scheduler.end([sequence], FinishReason.STOP)
            num_unread = request.put(output, 1)
        if output.finish_reason is not None:
            request.finish_one(sequence.index, output.finish_reason)
            request.times.finish_one(output.finish_reason, at_s, num_generated=request.num_generated)
        if not request.is_whole or output.finish_reason is not None or output.num_generated == 1:
            request.wake()
        if not request.is_whole:
            self._check_unread(request, num_unread)

    def _begin(self, request: Request, at_s: float) -> None:
        """Take a request as begun, with its first token."""
        self._requests.wait_no_longer(request)
        request.times.begin(at_s)
        if request.tells_of_prompt:
            of_prompt = request.first.prompt_logprobs
            request.tell_of_prompt(None if of_prompt is None else _whole(of_prompt))

    def _check_unread(self, request: Request, num_unread: int) -> None:
        """End a request with more unread tokens than the limit. Raises RequestFailed."""
        limit = self._max_unread_tokens
        if limit is not None and num_unread > limit and request.open:
            metadata = {"unread": str(num_unread), "limit": str(limit)}
            message = f"{num_unread} tokens are unread, more than max_unread_tokens, {limit}"
            raise RequestFailed(message, reason="TOO_SLOW", metadata=metadata)


def _by_sequence(
    entries: abc.Iterable[worker_service_pb2.TokenLogprobs],
) -> abc.Mapping[int, abc.Sequence[worker_service_pb2.TokenLogprobs]]:
    """Return the log-probabilities of each sequence's tokens, in order."""
    found: dict[int, list[worker_service_pb2.TokenLogprobs]] = {}
    for entry in entries:
        found.setdefault(entry.sequence_id, []).append(entry)
    return found


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
