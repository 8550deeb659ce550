"""The prompt cache's report on a request: its counts, and why it found less than an earlier request left. Pure."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from quire.client.engine.caching import Breakpoint, CacheOutcome, Miss
from quire.gateway.chat.conversation import Conversation
from quire.gateway.kept_responses import ENTRY_BYTES, Kept

_DIGEST_BYTES = 16
_LONG_TTL_S = 3_600.0


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """The prompt of an answer, for a later one that is compared with it.

    Parts are digests, empty for a prompt that is no conversation.

    further   what the template gets beside messages and tools
    pool, epoch    where it was computed
    """

    id: str
    model: str
    token_ids: array[int]
    system: bytes = b""
    tools: bytes = b""
    further: bytes = b""
    messages: tuple[bytes, ...] = ()
    pool: str = ""
    epoch: int = 0
    previous: None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it counts for."""
        return len(self.token_ids) * self.token_ids.itemsize + len(self.messages) * 4 * _DIGEST_BYTES + ENTRY_BYTES


def prompt_of_tokens(model: str, token_ids: Sequence[int]) -> KeptPrompt:
    """Return a prompt that is no conversation. It has no id yet."""
    return KeptPrompt(id="", model=model, token_ids=array("i", token_ids))


def prompt_of(model: str, conversation: Conversation, token_ids: Sequence[int]) -> KeptPrompt:
    """Return a conversation's prompt. It has no id yet. Cost: a hash of all texts."""
    is_system = [message["role"] in ("system", "developer") for message in conversation.messages]
    num_system = next((index for index, each in enumerate(is_system) if not each), len(is_system))
    return replace(
        prompt_of_tokens(model, token_ids),
        system=_digest(conversation.messages[:num_system]),
        tools=_digest(conversation.offer.shown),
        further=_digest([conversation.further, conversation.add_generation_prompt, conversation.continues]),
        messages=tuple(map(_digest, conversation.messages[num_system:])),
    )


def _digest(value: Any) -> bytes:
    # Not msgspec: a caller's integer may have any size.
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=_DIGEST_BYTES).digest()


class Divergence(Enum):
    """How a prompt and what was found of it compare with an earlier prompt."""

    NONE = "none"  # All that the earlier one left was found.
    NOT_FOUND = "previous_not_found"  # No earlier prompt of this id is kept for the caller.
    MODEL = "model_changed"
    SYSTEM = "system_changed"
    TOOLS = "tools_changed"
    MESSAGES = "messages_changed"
    OTHER = "other_changed"  # Other values of the template, or only the text that it makes.
    LOST = "lost"  # The prompt begins as the earlier one. The cache has lost it.


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A prompt compared with an earlier one.

    num_reusable   tokens of the earlier prompt in full blocks, at most those that this one could find
    num_missed     of these, tokens that were not found
    token          the first one that differs; None if none does
    message        the index of the first message that differs, without those of the system; None if none does
    loss           why the cache did not have it, for LOST
    """

    divergence: Divergence
    num_reusable: int = 0
    num_missed: int = 0
    token: int | None = None
    message: int | None = None
    loss: str | None = None
    miss: Miss | None = None

    @property
    def detail(self) -> Mapping[str, Any]:
        """Return all of it for a JSON answer, without what is not known."""
        values: dict[str, Any] = {
            "reason": self.loss or self.divergence.value,
            "reusable_tokens": self.num_reusable,
            "missed_tokens": self.num_missed,
            "first_changed_token": self.token,
            "first_changed_message": self.message,
        }
        if self.miss is not None:
            values |= {
                "missing_block": self.miss.block_index,
                "lost_at": self.miss.lost_at_s,
                "evicted_by_tenant": self.miss.evicted_by_tenant,
                "reset_by": self.miss.reset_by,
            }
        return {name: value for name, value in values.items() if value is not None}


def diagnose(before: KeptPrompt | None, prompt: KeptPrompt, outcome: CacheOutcome, *, block_size: int) -> Diagnosis:
    """Compare a prompt and what was found of it with an earlier prompt; block_size in tokens."""
    if before is None:
        return Diagnosis(Divergence.NOT_FOUND)
    findable = (len(prompt.token_ids) - 1) // block_size * block_size  # one token is always computed
    num_reusable = min(len(before.token_ids) // block_size * block_size, findable)
    num_missed = max(0, num_reusable - outcome.num_cached_tokens)
    token = _first_difference(before.token_ids, prompt.token_ids)
    message = _first_difference(before.messages, prompt.messages)
    divergence, loss = Divergence.NONE, None
    if before.model != prompt.model:
        divergence = Divergence.MODEL
    elif num_missed and token is not None and token < num_reusable:
        divergence = _changed(before, prompt, message)
    elif num_missed:
        divergence, loss = Divergence.LOST, _loss(before, outcome)
    return Diagnosis(
        divergence=divergence,
        num_reusable=num_reusable,
        num_missed=num_missed,
        token=token,
        message=message,
        loss=loss,
        miss=outcome.miss if divergence is Divergence.LOST else None,
    )


def _changed(before: KeptPrompt, prompt: KeptPrompt, message: int | None) -> Divergence:
    if before.system != prompt.system:
        return Divergence.SYSTEM
    if before.tools != prompt.tools:
        return Divergence.TOOLS
    if before.further != prompt.further or message is None:
        return Divergence.OTHER
    return Divergence.MESSAGES


def _loss(before: KeptPrompt, outcome: CacheOutcome) -> str:
    if before.pool != outcome.pool:
        return "other_pool"
    if before.epoch != outcome.epoch:
        return "worker_restarted"
    return "unknown" if outcome.miss is None else outcome.miss.reason.value


def _first_difference(before: Sequence[Any], behind: Sequence[Any]) -> int | None:
    """Return the first index at which two differ; None if one begins with the other."""
    size = min(len(before), len(behind))
    if before[:size] == behind[:size]:
        return None
    low, high = 0, size  # equal before low, different before high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if before[low:middle] == behind[low:middle] else (low, middle)
    return low


class CacheReport:
    """Counts and diagnosis of the prompt of one request. They are known with the first token."""

    def __init__(
        self,
        prompts: Kept[KeptPrompt],
        tenant: str,
        prompt: KeptPrompt | None,
        *,
        breakpoints: Sequence[Breakpoint] = (),
        unplaced: Sequence[str] = (),
        compared_with: str | None = None,
        block_size: int = 1,
        keeps: bool = True,
    ) -> None:
        """Make a report without an outcome.

        prompt     None: it is neither kept nor compared
        unplaced   fields that ask to keep a prefix that the template does not show
        keeps      later prompts may be compared with this one
        """
        self._prompts = prompts
        self._tenant = tenant
        self._prompt = prompt
        self._compared_with = compared_with
        self._block_size = block_size
        self._keeps = keeps
        self.breakpoints = breakpoints
        self.unplaced = unplaced
        self.outcome = CacheOutcome()
        self.diagnosis: Diagnosis | None = None

    def take(self, outcome: CacheOutcome | None, answer_id: str) -> None:
        """Take the outcome, which one chunk has, and keep the prompt under the answer's id if it may be kept."""
        if outcome is None:
            return
        self.outcome = outcome
        if self._prompt is None:
            return
        if self._compared_with is not None:
            before = self._prompts.find(self._tenant, self._compared_with)
            self.diagnosis = diagnose(before, self._prompt, outcome, block_size=self._block_size)
        if self._keeps:
            self._prompts.keep(
                self._tenant, replace(self._prompt, id=answer_id, pool=outcome.pool, epoch=outcome.epoch)
            )

    @property
    def num_created_tokens(self) -> tuple[int, int]:
        """Return the tokens that were computed and are kept: for less than an hour, and for an hour or more.

        A token within several prefixes counts for the longest time.
        """
        begin, end = self.outcome.num_cached_tokens, max(self.outcome.num_cached_tokens, self.outcome.num_kept_tokens)
        long_ends = [each.num_tokens for each in self.breakpoints if each.ttl_s >= _LONG_TTL_S]
        num_long = max(0, min(end, max(long_ends, default=0) // self._block_size * self._block_size) - begin)
        return end - begin - num_long, num_long


def kept_details(reports: Sequence[CacheReport]) -> dict[str, Any]:
    """Return what is kept of a request's prompts, for its usage; empty if it asked for nothing."""
    unplaced = [path for report in reports for path in report.unplaced]
    if not unplaced and not any(report.breakpoints for report in reports):
        return {}
    kept: dict[str, Any] = {"cache_kept_tokens": sum(report.outcome.num_kept_tokens for report in reports)}
    return kept | {"unplaced_breakpoints": unplaced} if unplaced else kept
