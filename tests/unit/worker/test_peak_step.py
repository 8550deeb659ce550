"""The largest step: its contents, and that it runs."""

import model_zoo as zoo
import pytest
import torch

from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.preparing import prepare_model
from quire.worker.run.peak_step import COSTLY_SAMPLING, largest_counts, run_largest_step
from quire.worker.sampling.drafts import DraftRows
from quire.worker.sampling.parameters import MAX_LOGPROBS
from quire.worker.sampling.sampler import Sampled, Sampler


@pytest.mark.parametrize(
    ("max_step_tokens", "max_num_seqs", "max_model_len", "counts"),
    [
        (100, 4, 1000, [97, 1, 1, 1]),
        (100, 4, 40, [40, 40, 19, 1]),
        (100, 2, 40, [40, 40]),
        (3, 256, 40, [1, 1, 1]),
    ],
)
def test_tokens_of_each_sequence(
    max_step_tokens: int, max_num_seqs: int, max_model_len: int, counts: list[int]
) -> None:
    assert largest_counts(max_step_tokens, max_num_seqs=max_num_seqs, max_model_len=max_model_len) == counts


def test_runs_all_of_it_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_model(zoo.build("llama"), max_model_len=32)
    batches: list[StepBatch] = []
    forward = type(model).forward

    def note(self: object, batch: StepBatch, pool: object) -> torch.Tensor:
        batches.append(batch)
        return forward(self, batch, pool)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model), "forward", note)
    sampled: list[Sampled] = []
    sample = Sampler.sample

    def note_sampled(
        self: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int], drafts: DraftRows | None = None
    ) -> Sampled:
        assert all(self.params(row) == COSTLY_SAMPLING for row in rows)
        sampled.append(sample(self, logits, rows, positions, drafts=drafts))
        return sampled[-1]

    monkeypatch.setattr(Sampler, "sample", note_sampled)
    sizes = {"max_step_tokens": 50, "max_num_seqs": 3, "block_size": 16, "kv_dtype": torch.float8_e4m3fn}
    run_largest_step(model, **sizes, max_drafts=4)
    first, last_chunks, decodes, drafted = batches
    assert (first.counts_host, first.seq_lens_host) == ((32, 17, 1), (32, 17, 1))
    assert (last_chunks.counts_host, last_chunks.seq_lens_host) == ((16, 16, 1), (32, 32, 32))
    assert (decodes.counts_host, decodes.seq_lens_host) == ((1, 1, 1), (32, 32, 32))
    assert (drafted.counts_host, len(drafted.logit_indices)) == ((5, 5, 5), 15)
    num_rows = [each.top_logprobs.shape[0] for each in sampled if each.top_logprobs is not None]
    assert num_rows == [3, 3, 3, 15]
    assert all(each.top_logprobs is not None and each.top_logprobs.shape[1] == MAX_LOGPROBS for each in sampled)
    batches.clear()
    run_largest_step(model, **sizes)
    assert len(batches) == 3


def test_the_costliest_sampling_does_all_that_takes_memory() -> None:
    assert COSTLY_SAMPLING.has_penalties
    assert COSTLY_SAMPLING.num_logprobs == MAX_LOGPROBS
    assert (COSTLY_SAMPLING.is_greedy, COSTLY_SAMPLING.top_k) == (False, 0)
    assert COSTLY_SAMPLING.top_p < 1
