"""Messages of VllmEngine: decodes requests to the engine's parameters, and encodes its chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from quire.client.engine.grammar import Grammar
from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.grpc.errors import DOMAIN, answering, invalid
from quire.gateway.grpc.messages import MAX_MESSAGE_TOKENS, bounded
from quire.gateway.limits import MAX_TOKEN_IDS
from quire.gateway.routing.backend import EngineBackend
from quire.gateway.texts import check_length, encode_text
from quire.serving.errors import CallEnded, ErrorStatus

# Fields that SamplingParams has under the same name and with the same meaning: always set, set if present, and set
# if they are not 0, which stands for "not given" there.
_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")
_ZERO_IS_DEFAULT = ("top_p", "repetition_penalty", "n")
# Fields that a request must not have, and the reason.
_NO_MEDIA, _NO_TRANSFER = "unset: models take text only here", "unset: KV is not transferred between workers here"
_REFUSED = {
    "mm_inputs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
}
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "length"}
_ABORTED = "abort"


@contextlib.contextmanager
def answering_smg() -> Iterator[None]:
    """Make the call's status of an error that the block raises, with the names that fields have in these messages."""
    try:
        with answering():
            yield
    except CallEnded as ended:
        raise CallEnded(_renamed(ended.error)) from None


def _renamed(error: ErrorStatus) -> ErrorStatus:
    """Return a status with the name that its field has in VllmEngine's messages, in place of EngineService's."""
    named = error.metadata.get("field", "")
    if not named.startswith("parameters."):
        return error
    rest = named.removeprefix("parameters.").removeprefix("grammar.")
    ours = f"sampling_params.{'grammar' if rest in ('ebnf', 'lark') else rest}"
    return replace(error, message=error.message.replace(named, ours, 1), metadata={**error.metadata, "field": ours})


def unimplemented(message: str) -> ErrorStatus:
    return ErrorStatus(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", message, DOMAIN)


async def prompt_of(backend: EngineBackend, request: Any) -> Sequence[int]:
    """Return the prompt's tokens. Raises CallEnded, and InvalidRequest for text that can't be encoded."""
    for name, limit in _REFUSED.items():
        if getattr(request, name) if name == "extra_mm_inputs" else request.HasField(name):
            raise CallEnded(invalid(name, "given", limit))
    if request.data_parallel_rank:
        raise CallEnded(invalid("data_parallel_rank", request.data_parallel_rank, "0, the one rank there is"))
    match request.WhichOneof("input"):
        case "tokenized":
            return list(request.tokenized.input_ids)
        case "text" if backend.tokenizer is not None:
            check_length("text", len(request.text), backend.tokenizer, max_tokens=backend.max_model_len)
            return await encode_text(backend.tokenizer, request.text)
        case "text":
            raise CallEnded(invalid("text", "given", "unset: this model has no tokenizer here"))
    raise CallEnded(invalid("input", "unset", "tokenized or text"))


def decode_parameters(request: Any) -> SamplingParams:
    """Return the sampling parameters of a request. Raises InvalidRequest, CallEnded."""
    given = request.sampling_params
    values = {name: getattr(given, name) for name in _PLAIN}
    values |= {name: getattr(given, name) for name in _OPTIONAL if given.HasField(name)}
    values |= {name: getattr(given, name) for name in _ZERO_IS_DEFAULT if getattr(given, name)}
    values.setdefault("max_tokens", None)
    if given.HasField("truncate_prompt_tokens"):
        limit = "unset: prompts are not truncated here"
        raise CallEnded(invalid("sampling_params.truncate_prompt_tokens", given.truncate_prompt_tokens, limit))
    return SamplingParams(
        stop=tuple(given.stop),
        stop_token_ids=bounded("stop_token_ids", given.stop_token_ids, MAX_TOKEN_IDS, "tokens"),
        logit_bias=dict(given.logit_bias),
        grammar=_decode_grammar(given),
        **values,
    )


def _decode_grammar(given: Any) -> Grammar | None:
    """Return the grammar of a constraint; None without one. Raises InvalidRequest, CallEnded."""
    match given.WhichOneof("constraint"):
        case None:
            return None
        case "structural_tag":
            limit = "unset: give json_schema, regex, grammar, json_object or choice"
            raise CallEnded(invalid("sampling_params.structural_tag", "given", limit))
        case "grammar":
            return Grammar(ebnf=given.grammar) if "::=" in given.grammar else Grammar(lark=given.grammar)
        case "choice":
            return Grammar(choice=list(given.choice.choices))
        case kind:
            values: dict[str, Any] = {kind: getattr(given, kind)}
            return Grammar(**values)


def _encode_output_logprobs(entries: Sequence[TokenLogprobs]) -> Any:
    """Return the log-probabilities of generated tokens as a message; None of no tokens."""
    if not entries:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=list(map(_encode_top, entries)),
    )


def _encode_input_logprobs(prompt: Sequence[int], entries: PromptLogprobs) -> Any:
    """Return those of a prompt's tokens. The first token has none."""
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[
            vllm_engine_pb2.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries
        ],
        token_ids=prompt,
        top_logprobs=[vllm_engine_pb2.TopLogProbs() if entry is None else _encode_top(entry) for entry in entries],
    )


def _encode_top(entry: TokenLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[logprob for _, logprob in entry.top], token_ids=[token_id for token_id, _ in entry.top]
    )


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class GenerateMessages:
    """The messages of a request: of each chunk, if it is streamed, and of each sample's end."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, *, is_stream: bool) -> None:
        self._prompt = prompt
        self._params = params
        self._is_stream = is_stream
        self._num_cached_tokens = 0
        self._input_logprobs: Any = None
        self._open = {index: _Sample() for index in range(params.n)}

    def of_chunk(self, chunk: Chunk) -> Iterator[Any]:
        """Yield the messages of a chunk."""
        self._num_cached_tokens += chunk.num_cached_tokens or 0
        if chunk.prompt_logprobs is not None:
            self._input_logprobs = _encode_input_logprobs(self._prompt, chunk.prompt_logprobs)
        sample = self._open[chunk.index]
        sample.token_ids += chunk.token_ids
        if self._is_stream:
            yield from self._parts_of(chunk)
        else:
            sample.logprobs += chunk.logprobs or ()
        if chunk.finish_reason is not None:
            yield self._complete(chunk.index, _FINISH_REASONS[chunk.finish_reason])

    def of_abort(self) -> Iterator[Any]:
        """Yield the messages of the samples that have not ended."""
        for index in list(self._open):
            yield self._complete(index, _ABORTED)

    def _parts_of(self, chunk: Chunk) -> Iterator[Any]:
        for first in range(0, len(chunk.token_ids), MAX_MESSAGE_TOKENS):
            part = slice(first, first + MAX_MESSAGE_TOKENS)
            token_ids = chunk.token_ids[part]
            yield vllm_engine_pb2.GenerateResponse(
                chunk=vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=token_ids,
                    prompt_tokens=len(self._prompt),
                    completion_tokens=len(token_ids),  # of this message: smg adds them up
                    cached_tokens=self._num_cached_tokens,
                    output_logprobs=_encode_output_logprobs((chunk.logprobs or ())[part]),
                    input_logprobs=self._input_logprobs if not first and chunk.prompt_logprobs is not None else None,
                    index=chunk.index,
                )
            )

    def _complete(self, index: int, reason: str) -> Any:
        sample = self._open.pop(index)
        is_stop_token = reason == "stop" and sample.token_ids and sample.token_ids[-1] in self._params.stop_token_ids
        return vllm_engine_pb2.GenerateResponse(
            complete=vllm_engine_pb2.GenerateComplete(
                output_ids=sample.token_ids,
                finish_reason=reason,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(sample.token_ids),
                cached_tokens=self._num_cached_tokens,
                output_logprobs=_encode_output_logprobs(sample.logprobs),
                input_logprobs=self._input_logprobs,
                index=index,
                matched_token_id=sample.token_ids[-1] if is_stop_token else None,
            )
        )
