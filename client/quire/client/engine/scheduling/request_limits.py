"""The limits of a request, by the model's context and vocabulary and by the pool. Pure.

Each function raises InvalidRequest that names the field, its value and the limit. Nothing has changed then.
"""

from collections import abc

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.sequence import Delivered
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import InvalidRequest


def check_drafts(speculative: SpeculativeConfig, limits: SchedulerLimits, *, pool: str) -> None:
    """Raise InvalidRequest if the worker of a pool does not verify so many drafts of a sequence in a step."""
    if not limits.max_draft_count:
        limit = f"none: the worker of pool {pool} verifies no drafts (max_draft_count is 0), as with recurrent states"
        raise InvalidRequest.of_field("speculative_config", speculative.method, limit)
    if speculative.num_speculative_tokens > limits.max_draft_count:
        limit = f"at most {limits.max_draft_count}, the max_draft_count of pool {pool}"
        value = speculative.num_speculative_tokens
        raise InvalidRequest.of_field("speculative_config.num_speculative_tokens", value, limit)


def check_request(
    limits: SchedulerLimits,
    token_ids: abc.Sequence[int],
    params: SamplingParams,
    cache: CacheParams = NO_CACHE_PARAMS,
    delivered: abc.Sequence[Delivered] | None = None,
) -> int:
    """Return the most tokens that a request may generate, those delivered counted.

    Raises InvalidRequest if the prompt is empty, if it or a parameter has a token out of range, or if it does not
    fit, together with max_tokens, into the model or the pool; if a breakpoint is behind the prompt; or if delivered is
    not what such a request gives out.
    """
    max_tokens = _check_size(limits, token_ids, params)
    _check_breakpoints(cache, len(token_ids))
    if delivered is not None:
        _check_delivered(limits, delivered, params.n, max_tokens)
    return max_tokens


def check_beam_search(
    limits: SchedulerLimits, token_ids: abc.Sequence[int], params: BeamSearchParams, cache: CacheParams
) -> int:
    """Return the most tokens that a beam may generate.

    Raises InvalidRequest if check_request does, and if beam_width beams do not fit into the pool together.
    """
    width = params.beam_width
    max_tokens = check_request(limits, token_ids, params.sampling(num_logprobs=0), cache)
    if limits.has_recurrent_state:
        limit = "no beam search with this model: it keeps a state per sequence"
        raise InvalidRequest.of_field("beam_width", width, limit)
    if cache.reserve:
        raise InvalidRequest.of_field("reserve", True, "False with beams, which are best effort")
    if width > limits.num_places:
        limit = f"at most {limits.num_places}, the sequences that run at once"
        raise InvalidRequest.of_field("beam_width", width, limit)
    # The beams share the blocks before the one with the prompt's last token, which each computes again. A beam that
    # is admitted apart may share none.
    shares = cache.reads_cache and not limits.tables.has_windows
    num_each = limits.tables.max_tokens(
        limits.num_blocks,
        at_most=limits.max_sequence_tokens,
        num_shared=len(token_ids) - 1 if shares else 0,
        num_sequences=width,
    )
    most = num_each - len(token_ids)
    if params.max_tokens is None and most >= 1:
        return min(max_tokens, most)
    if max_tokens > most:
        allowed = f"at most {max(0, most)} with {width} beams after {len(token_ids)} tokens, by the pool's blocks"
        raise InvalidRequest.of_field("max_tokens", max_tokens, allowed, reason="SEQUENCE_TOO_LONG")
    return max_tokens


def _check_breakpoints(cache: CacheParams, num_prompt_tokens: int) -> None:
    end = cache.breakpoints[-1].num_tokens if cache.breakpoints else 0
    if end > num_prompt_tokens:
        limit = f"at most {num_prompt_tokens}, the tokens of the prompt"
        raise InvalidRequest.of_field("breakpoints.num_tokens", end, limit)


def _check_delivered(
    limits: SchedulerLimits, delivered: abc.Sequence[Delivered], num_samples: int, max_tokens: int
) -> None:
    if len(delivered) != num_samples:
        raise InvalidRequest.of_field("delivered", len(delivered), f"one for each of {num_samples} samples")
    if all(sample.has_ended for sample in delivered):
        raise InvalidRequest.of_field("delivered", "all samples have ended", "at least one that has not")
    for sample in delivered:
        if len(sample.token_ids) >= max_tokens and not sample.has_ended:
            allowed = f"fewer than {max_tokens} tokens of a sample that has not ended"
            raise InvalidRequest.of_field("delivered", len(sample.token_ids), allowed)
        _check_token_ids(limits, "delivered", sample.token_ids)


def _check_token_ids(limits: SchedulerLimits, field: str, token_ids: abc.Collection[int]) -> None:
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < limits.vocabulary_size:
            allowed = f"token ids from 0 to {limits.vocabulary_size - 1}"
            raise InvalidRequest.of_field(field, token_id, allowed, reason="TOKEN_OUT_OF_RANGE")


def _check_size(limits: SchedulerLimits, token_ids: abc.Sequence[int], params: SamplingParams) -> int:
    num_tokens, limit = len(token_ids), limits.max_tokens_per_sequence
    if not num_tokens:
        raise InvalidRequest.of_field("prompt", 0, "at least 1 token", reason="EMPTY_PROMPT")
    for field, given in (("prompt", token_ids), *params.token_ids_by_field()):
        _check_token_ids(limits, field, given)
    limiter = "model's context" if limit == limits.max_sequence_tokens else "pool's blocks"
    if num_tokens >= limit:
        allowed = f"fewer than {limit} tokens, by the {limiter}"
        raise InvalidRequest.of_field("prompt", num_tokens, allowed, reason="SEQUENCE_TOO_LONG")
    if params.min_tokens > limit - num_tokens:
        allowed = f"at most {limit - num_tokens} after {num_tokens} tokens, by the {limiter}"
        raise InvalidRequest.of_field("min_tokens", params.min_tokens, allowed, reason="SEQUENCE_TOO_LONG")
    if params.max_tokens is None:
        return limit - num_tokens
    if num_tokens + params.max_tokens > limit:
        allowed = f"at most {limit - num_tokens} after {num_tokens} tokens, by the {limiter}"
        raise InvalidRequest.of_field("max_tokens", params.max_tokens, allowed, reason="SEQUENCE_TOO_LONG")
    return params.max_tokens
