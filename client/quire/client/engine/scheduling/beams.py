"""The beams of a search as sequences: the successors of a beam continue its table or are forked from it. Pure.

The beams of one search are a group. No beam runs ahead, because the next tokens are chosen when the outcome of all
beams is known. Then the first successor of a beam continues in its table, and the others are forked from it. A group is
preempted, admitted and suspected as a whole. Its first beam waits in the queue, and the others are forked from it
again. A running group keeps places for all of its beams. beam_search.py chooses the successors.
"""

from collections import abc

from quire.client.engine.scheduling.beam_search import Heir
from quire.client.engine.scheduling.ending import Endings
from quire.client.engine.scheduling.queues import Queues
from quire.client.engine.scheduling.sequence import BeamGroup, FinishReason, Sequence, SequenceState


class Beams:
    """Replaces the beams of groups by their successors."""

    def __init__(self, queues: Queues, endings: Endings) -> None:
        self._queues = queues
        self._endings = endings

    def branch(self, group: BeamGroup, heirs: abc.Sequence[Heir]) -> None:
        """Continue a group with these beams, the best first. A beam without an heir ends."""
        parents = list(group.members)
        firsts = {heir.parent: heir for heir in reversed(heirs)}
        for index, parent in enumerate(parents):
            if index not in firsts:
                self._endings.finish(parent, FinishReason.CANCELLED)
        further = {heir: _child_of(parents[heir.parent], heir) for heir in heirs if heir is not firsts[heir.parent]}
        for index, heir in firsts.items():
            parents[index].choose(heir.token_id)
        group.members[:] = [further.get(heir) or parents[heir.parent] for heir in heirs]
        for heir, child in further.items():
            self._queues.follow(child, parents[heir.parent])


def _child_of(parent: Sequence, heir: Heir) -> Sequence:
    """Make a new beam, to be forked from its parent before the parent's next step."""
    group = parent.group
    if group is None:
        raise AssertionError("only beams have heirs")
    group.num_begun += 1
    arrival = (parent.request_id, group.num_begun - 1)
    return Sequence(
        request_id=parent.request_id,
        index=arrival[1],
        arrival=arrival,
        token_ids=[*parent.token_ids, heir.token_id],
        num_prompt_tokens=parent.num_prompt_tokens,
        max_tokens=parent.max_tokens + 1,
        end_token_ids=parent.end_token_ids,
        params=parent.params,
        seed=parent.seed,
        cache=parent.cache,
        state=SequenceState.FOLLOWING,
        num_forked_tokens=len(parent.token_ids),
        num_shared_tokens=parent.num_shared_tokens,
        rank=(*parent.rank[: -len(arrival)], *arrival),
        group=group,
    )
