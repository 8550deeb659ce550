"""Log-probabilities of prompts: the worker's scores of hidden states, and the engine's joining of the parts."""

from __future__ import annotations

import pytest
import torch
from model_zoo import CACHED, FAMILIES, STATEFUL, VOCAB_SIZE, build
from torch import Tensor

from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.errors import ProtocolViolation
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import build_step_batch
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.pinned_rope import pin_rope
from quire.worker.model.preparing import prepare_model
from quire.worker.model.self_check import eager_reference
from quire.worker.sampling import prompt_logprobs as module
from quire.worker.sampling.prompt_logprobs import score_tokens

MAX_LEN = 64
PROMPTS = (23, 9, 31)
CHUNKS = ((11, 9, 1), (12, 0, 29), (0, 0, 1))


def draw_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist() for count in PROMPTS]


def score_prompts(model: PagedModel, prompts: list[list[int]], *, num_top: int) -> list[tuple[Tensor, ...]]:
    """By prompt: log-probabilities of its tokens but the first, the likeliest tokens and theirs; in chunks."""
    block_size = max(4, model.min_block_size)
    per_seq = -(-MAX_LEN // block_size)
    device = model.device
    pool = KVPool(model.specs, num_blocks=1 + 3 * per_seq, block_size=block_size, dtype=model.dtype, device=device)
    table = SequenceTable(max_num_seqs=3, max_blocks_per_seq=per_seq, device=device)
    model.allocate_states(3)
    rows = [table.add() for _ in prompts]
    for number, row in enumerate(rows):
        table.stage_blocks(row, 0, list(range(1 + number * per_seq, 1 + (number + 1) * per_seq)))
    done = [0] * len(prompts)
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in prompts]
    for counts in CHUNKS:
        seqs = [i for i, count in enumerate(counts) if count]
        batch = build_step_batch(
            table,
            block_size=block_size,
            rows=[rows[i] for i in seqs],
            starts=[done[i] for i in seqs],
            counts=[counts[i] for i in seqs],
            token_ids=[prompts[i][done[i] : done[i] + counts[i]] for i in seqs],
        )
        with model.keeping_hidden_states(batch, pool) as kept:
            logits = model.forward(batch, pool)
        logits_of = kept.reader()
        torch.testing.assert_close(logits_of(batch.last_indices), logits, atol=2e-4, rtol=2e-4)
        first = 0
        for i in seqs:
            following = prompts[i][done[i] + 1 : done[i] + 1 + counts[i]]
            tokens = torch.arange(first, first + len(following))
            if following:
                scores = score_tokens(
                    logits_of, tokens, torch.tensor(following), num_top=num_top, vocab_size=model.vocab_size
                )
                found[i].append(scores.tensors())
            first += counts[i]
            done[i] += counts[i]
    return [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in found]


@pytest.mark.parametrize("name", [*FAMILIES, *CACHED, *STATEFUL])
def test_equal_to_the_models_own_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every kind of model, cut into chunks, five rows of logits at a time."""
    own = build(name)
    pin_rope(own, MAX_LEN)
    reference = eager_reference(own)
    model = prepare_model(build(name), max_model_len=MAX_LEN)
    monkeypatch.setattr(module, "MAX_PIECE_LOGITS", 5 * model.vocab_size)
    prompts = draw_prompts()
    for prompt, (chosen, top_ids, top) in zip(prompts, score_prompts(model, prompts, num_top=3), strict=True):
        expected = reference(torch.tensor(prompt)).float().log_softmax(-1)[:-1]
        torch.testing.assert_close(chosen, expected[range(len(prompt) - 1), prompt[1:]], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(top, expected.topk(3).values, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(expected.gather(1, top_ids), top, atol=2e-4, rtol=1e-3)


def test_the_model_is_left_as_it_was() -> None:
    model = prepare_model(build("llama"), max_model_len=MAX_LEN)
    base = model._model.model
    hooks = len(base._forward_hooks)
    score_prompts(model, draw_prompts(), num_top=0)
    assert len(base._forward_hooks) == hooks
    assert "forward" not in base.__dict__


# -- in the engine ------------------------------------------------------------------------------------------------


def test_parts_come_in_any_order_and_twice() -> None:
    logprobs = PromptLogprobs([5, 6, 7, 8], num_top=2)
    assert list(logprobs.missing_after(0, 4)) == [6, 7, 8]
    assert list(logprobs.missing_after(1, 1)) == [7]
    assert list(logprobs.missing_after(3, 1)) == []
    for _ in range(2):
        logprobs.put(2, [-1.0, -2.0], [1, 2, 3, 4], [-0.5, -0.75, -1.5, -1.75], top_count=2)
        assert not logprobs.is_complete
    assert list(logprobs.missing_after(2, 2)) == []
    assert list(logprobs.missing_after(0, 2)) == [6, 7]
    logprobs.put(1, [-3.0], [9], [-0.25], top_count=1)
    assert logprobs.is_complete
    assert list(logprobs) == [
        None,
        TokenLogprobs(6, -3.0, ((9, -0.25),)),
        TokenLogprobs(7, -1.0, ((1, -0.5), (2, -0.75))),
        TokenLogprobs(8, -2.0, ((3, -1.5), (4, -1.75))),
    ]
    assert logprobs[1:3] == (logprobs[1], logprobs[2])
    with pytest.raises(IndexError):
        logprobs[4]


def test_a_prompt_of_one_token_has_nothing_to_ask() -> None:
    logprobs = PromptLogprobs([5], num_top=2)
    assert logprobs.is_complete
    assert list(logprobs) == [None]
    assert not logprobs.missing_after(0, 1)


@pytest.mark.parametrize(
    ("first", "count", "num_ids", "top_count"),
    [(0, 1, 2, 2), (3, 2, 4, 2), (1, 1, 1, 2), (1, 1, 3, 3), (1, 1, 0, -1), (5, 0, 0, 0)],
)
def test_what_was_not_asked_for_is_refused(first: int, count: int, num_ids: int, top_count: int) -> None:
    logprobs = PromptLogprobs([5, 6, 7, 8], num_top=2)
    with pytest.raises(ProtocolViolation):
        logprobs.put(first, [-1.0] * count, [1] * num_ids, [-1.0] * num_ids, top_count=top_count)
