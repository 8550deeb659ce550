"""Make the sequences of a request. They are values until Scheduler.add takes them. Pure."""

from collections import abc

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams
from quire.client.engine.prompt_logprobs import PromptLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.request_limits import check_beam_search, check_request
from quire.client.engine.scheduling.sequence import BeamGroup, Delivered, Sequence, SequenceState


def new_samples(
    limits: SchedulerLimits,
    request_id: int,
    prompt_token_ids: abc.Sequence[int],
    params: SamplingParams,
    *,
    end_token_ids: abc.Iterable[int],
    seed: int,
    cache: CacheParams = NO_CACHE_PARAMS,
    delivered: abc.Sequence[Delivered] | None = None,
) -> list[Sequence]:
    """Return the params.n sequences of a request. Sample i has seed + i, in 64 bits.

    request_id is unique in its scheduler; a lower one has arrived earlier. With delivered, each sample that has not
    ended continues after its tokens; the others have no sequence. Without it, all but the first follow the first.

    Raises InvalidRequest if check_request() does.
    """
    max_tokens = check_request(limits, prompt_token_ids, params, cache, delivered)
    ends = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        ends |= frozenset(end_token_ids)
    prompt = list(prompt_token_ids)
    num_top = params.prompt_logprobs
    # They came with the first token that was delivered.
    logprobs = None if num_top is None or delivered is not None else PromptLogprobs(prompt, num_top=num_top)
    known = [[*prompt, *sample.token_ids] for sample in delivered or ()]
    return [
        Sequence(
            request_id=request_id,
            index=index,
            arrival=(request_id, index),
            token_ids=known[index] if known else prompt if index else prompt.copy(),
            num_prompt_tokens=len(prompt_token_ids),
            max_tokens=max_tokens,
            end_token_ids=ends,
            params=params,
            prompt_logprobs=logprobs,
            cache=cache,
            seed=(seed + index + 2**63) % 2**64 - 2**63,
            state=SequenceState.FOLLOWING if index and not known else SequenceState.WAITING,
            num_forked_tokens=len(prompt),
            was_admitted=bool(known),
        )
        for index in range(params.n)
        if delivered is None or not delivered[index].has_ended
    ]


def new_beam_group(
    limits: SchedulerLimits,
    request_id: int,
    prompt_token_ids: abc.Sequence[int],
    params: BeamSearchParams,
    *,
    end_token_ids: abc.Set[int],
    cache: CacheParams = NO_CACHE_PARAMS,
) -> BeamGroup:
    """Return the group of a beam search with one beam, the prompt. A beam ends with one of end_token_ids.

    request_id is as in new_samples. Raises InvalidRequest if check_beam_search() does.
    """
    max_tokens = check_beam_search(limits, prompt_token_ids, params, cache)
    group = BeamGroup(params.beam_width, max_tokens, [])
    beam = Sequence(
        request_id=request_id,
        index=0,
        arrival=(request_id, 0),
        token_ids=list(prompt_token_ids),
        num_prompt_tokens=len(prompt_token_ids),
        max_tokens=1,  # one more than it has: its next step depends on the other beams
        end_token_ids=frozenset(),
        params=params.sampling(num_logprobs=params.beam_width + len(end_token_ids)),
        cache=cache,
        seed=0,
        group=group,
    )
    group.members.append(beam)
    return group
