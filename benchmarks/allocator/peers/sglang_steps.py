"""SGLang's scheduler, as far as a CPU has it without a model: its plain loop (no overlap), pages of 16, radix cache on.

Inside: Scheduler.get_next_batch_to_run (nothing waits; update_running_batch with check_decode_mem, and
ScheduleBatch.prepare_for_decode: slots, lengths, the rows of slots written, as tensors on the CPU), and
SchedulerBatchResultProcessor.process_batch_result_decode (the tokens taken, stops checked).

Outside: Scheduler.__init__, which needs a model and its workers: the object is given the state of a running server
without them. Of Scheduler.process_batch_result the stream to the detokenizer, statistics and traces. A prompt is in the
radix tree once its prefill is done, and generated tokens when their request ends: no decode step does that.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from stepping import MAX_SEQUENCE_TOKENS, SAMPLED_TOKEN, VOCABULARY, Load, Stopwatch, drive
from workload import BLOCK_SIZE

torch.set_num_threads(1)  # threads cost these small tensors more than they bring
get_context().override_server_args(page_size=BLOCK_SIZE, device="cpu", disable_overlap_schedule=True).install()


def nothing(*_: object, **__: object) -> None:
    """In place of what is outside of the timing."""


def unchanged(batch: object, **_: object) -> object:
    """In place of a step of a part that this configuration does not have."""
    return batch


class Sglang:
    """All requests decode once it is made."""

    def __init__(self, load: Load) -> None:
        self._model = SimpleNamespace(
            vocab_size=VOCABULARY,
            is_encoder_decoder=False,
            is_multimodal=False,
            self_opened_think_start_ids=None,
            think_end_ids=None,
        )
        self._slots = PagedTokenToKVPoolAllocator(
            load.num_blocks * BLOCK_SIZE, BLOCK_SIZE, torch.float16, "cpu", None, False
        )
        longest = load.prompt_tokens + BLOCK_SIZE + load.max_new_tokens
        self._rows = ReqToTokenPool(load.num_running, min(longest, MAX_SEQUENCE_TOKENS), "cpu", False)
        self._tree = RadixCache(CacheInitParams(False, self._rows, self._slots, BLOCK_SIZE))
        self._scheduler = self._make_scheduler()
        self._results = self._make_results()
        self._sampled = torch.full((load.num_running,), SAMPLED_TOKEN)
        self._last = self._prefilled(load)
        self._running = ScheduleBatch(reqs=[], batch_is_full=False)

    def _make_scheduler(self) -> Any:
        scheduler = object.__new__(Scheduler)
        vars(scheduler).update(
            waiting_queue=[],
            result_queue=[],
            chunked_req=None,
            forward_ct=0,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            token_to_kv_pool_allocator=self._slots,
            tree_cache=self._tree,
            new_token_ratio_tracker=NewTokenRatioTracker(init=0.7, min=0.1, decay=0.001, current=0.7),
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
            dp_attn_adapter=SimpleNamespace(
                maybe_prepare_mlp_sync_batch=unchanged, maybe_convert_decode_to_extend=unchanged
            ),
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=unchanged),
            scheduler_stage_metrics=None,
            dllm_config=None,
            prefill_delayer=None,
            decode_offload_manager=None,
            prefill_decode_interval=0,
            _prefill_decode_interval_remaining=0,
            _pending_chunked_abort_req=None,
            enable_hierarchical_cache=False,
            enable_unified_cache_external_linker=False,
            enable_lmcache=False,
            enable_hisparse=False,
            enable_priority_preemption=False,
            enable_skip_finishing_decode=False,
            is_hybrid_swa=False,
            require_mlp_sync=False,
        )
        return scheduler

    def _make_results(self) -> SchedulerBatchResultProcessor:
        return SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_overlap=False,
            enable_overlap_mlx=False,
            model_config=self._model,
            token_to_kv_pool_allocator=self._slots,
            tree_cache=self._tree,
            hisparse_coordinator=None,
            req_to_token_pool=self._rows,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=SimpleNamespace(
                num_generated_tokens=0,
                forward_ct_decode=0,
                report_decode_stats=nothing,
                report_prefill_stats=nothing,
            ),
            draft_worker=None,
            model_worker=None,
            logprob_result_processor=None,
            output_streamer=SimpleNamespace(stream_output=nothing),
            beam_coordinator=SimpleNamespace(commit_decode=lambda _: frozenset()),
            abort_request=nothing,
        )

    def _prefilled(self, load: Load) -> ScheduleBatch:
        """The batch of all prompts, computed."""
        params = SamplingParams(max_new_tokens=load.max_new_tokens, ignore_eos=True)
        params.normalize(None)
        requests = [
            Req(str(number), "", array("q", tokens), params, vocab_size=VOCABULARY)
            for number, tokens in enumerate(load.prompts())
        ]
        for request in requests:
            request.init_next_round_input(self._tree)
            request.extend_end = len(request.full_untruncated_fill_ids)
        batch = ScheduleBatch.init_new(
            requests, self._rows, self._slots, self._tree, self._model, False, SpeculativeAlgorithm.NONE
        )
        batch.prepare_for_extend()
        self._results.process_batch_result_prefill(batch, self._result())
        batch.input_ids = self._sampled
        return batch

    def _result(self) -> GenerationBatchResult:
        return GenerationBatchResult(logits_output=None, next_token_ids=self._sampled, can_run_cuda_graph=False)

    def step(self, watch: Stopwatch) -> int:
        """The next batch, and its result taken."""
        watch.start()
        plan = self._scheduler.get_next_batch_to_run(self._running, self._last)
        watch.lap("get_next_batch_to_run")
        self._running, self._last = plan.running_batch, plan.batch_to_run
        self._last.input_ids = self._sampled
        result = self._result()
        watch.start()
        self._results.process_batch_result_decode(self._last, result)
        watch.lap("process_batch_result_decode")
        return len(self._last.reqs)


if __name__ == "__main__":
    drive(Sglang, package="sglang")
