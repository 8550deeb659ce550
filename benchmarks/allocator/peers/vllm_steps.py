"""vLLM's v1 scheduler whole, as its server has it: AsyncScheduler with one step in flight, prefix caching on, sha256.

Inside: schedule (its block manager, and the message for the workers as an object) and update_from_output (the tokens
taken, stops checked, blocks hashed, an EngineCoreOutput a request). Outside: the model's output, and what would carry
these objects to other processes.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from stepping import MAX_SEQUENCE_TOKENS, MAX_STEP_TOKENS, SAMPLED_TOKEN, VOCABULARY, Load, Stopwatch, drive
from transformers import LlamaConfig
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from workload import BLOCK_SIZE


def make_config(load: Load) -> VllmConfig:
    """The configuration of a server with a made-up model of one layer. No weights are loaded."""
    model = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=MAX_SEQUENCE_TOKENS,
        architectures=["LlamaForCausalLM"],
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        described = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=MAX_SEQUENCE_TOKENS
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = load.num_blocks
        return VllmConfig(
            model_config=described,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=load.num_running,
                max_num_batched_tokens=MAX_STEP_TOKENS,
                max_model_len=MAX_SEQUENCE_TOKENS,
                is_encoder_decoder=False,
                async_scheduling=True,
            ),
            device_config=DeviceConfig(device="cpu"),
        )


class Vllm:
    """All requests decode once it is made, with a step in flight."""

    def __init__(self, load: Load) -> None:
        config = make_config(load)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
        blocks = KVCacheConfig(
            num_blocks=load.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self._scheduler = config.scheduler_config.get_scheduler_cls()(
            config, blocks, StructuredOutputManager(config), block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        params = SamplingParams(max_tokens=load.max_new_tokens, ignore_eos=True)
        for number, tokens in enumerate(load.prompts()):
            self._scheduler.add_request(Request(str(number), tokens, params, None, block_hasher=hasher))
        self._in_flight = self._with_output(self._scheduler.schedule())
        while self.step(Stopwatch()) < load.num_running:
            pass

    def _with_output(self, scheduled: Any) -> tuple[Any, ModelRunnerOutput]:
        """A step, and its output: a token of each request with a computed prompt."""
        ids = list(scheduled.num_scheduled_tokens)
        requests = self._scheduler.requests
        tokens = [[] if requests[each].is_prefill_chunk else [SAMPLED_TOKEN] for each in ids]
        places = {request_id: place for place, request_id in enumerate(ids)}
        return scheduled, ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)

    def step(self, watch: Stopwatch) -> int:
        """The next step scheduled, and the output of the one before it taken."""
        watch.start()
        scheduled = self._scheduler.schedule()
        watch.lap("schedule")
        before, self._in_flight = self._in_flight, self._with_output(scheduled)
        watch.start()
        outputs = self._scheduler.update_from_output(*before)
        watch.lap("update_from_output")
        return sum(len(each.new_token_ids) for each in outputs[0].outputs) if outputs else 0


if __name__ == "__main__":
    drive(Vllm, package="vllm")
