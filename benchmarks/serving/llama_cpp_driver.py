"""llama.cpp as a peer: runs under a Python of its own, see llama_cpp_requirements.txt. Without torch.

    python llama_cpp_driver.py FOLDER THREADS SLOTS KIND [plain]

FOLDER has config.json and weights.npz of a Llama. The first answer is {"version": v}. Then, on standard input, one JSON
object a line, {"prompts": [[token]], "num_new": [count]}; each answer is {"seconds": s, "tokens": [[token]]}.

llama.cpp has no scheduler in its library, so this is one: SLOTS sequences at a time, each step one llama_decode of a
token of each that runs and of the prompts that were given a slot, which begins when another one has ended. Greedy; KV
in float32. KIND is that of the linear layers' weights, F32 or Q8_0: int8 with a scale for 32 neighbours. All others are
float32, as the other rows have them. With "plain" weights stay in their order: no AMX, which some machines name and do
not let a process use.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import llama_cpp
import numpy as np

MAX_BATCH_TOKENS = 2048
SLOT_TOKENS = 512
F32 = 0


def write_gguf(folder: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The checkpoint as llama.cpp reads it, without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    weights = np.load(folder / "weights.npz")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    path = folder / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name in weights.files:
        tensor = weights[name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        own_kind = kind if name.endswith("_proj.weight") else gguf.GGMLQuantizationType.F32
        place = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(place, gguf.quants.quantize(tensor, own_kind), raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head in the order of llama.cpp's rope, which turns neighbours; transformers turns halves."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


class Llama:
    """A model and a context with room for `slots` sequences."""

    def __init__(self, path: Path, threads: int, slots: int, *, is_plain: bool) -> None:
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = not is_plain
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = slots * SLOT_TOKENS, MAX_BATCH_TOKENS, slots
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = F32
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._slots = slots

    def generate(self, prompts: list[list[int]], num_new: list[int]) -> list[list[int]]:
        """So many tokens of each prompt."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        waiting = list(range(len(prompts)))[::-1]
        free = list(range(self._slots))
        running: dict[int, int] = {}
        tokens: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            step = [(slot, index, tokens[index][-1:]) for slot, index in running.items()]
            budget = MAX_BATCH_TOKENS - len(step)
            while waiting and free and len(prompts[waiting[-1]]) <= budget:
                index, slot = waiting.pop(), free.pop()
                step.append((slot, index, prompts[index]))
                running[slot] = index
                budget -= len(prompts[index])
            starts = [
                0 if given is prompts[index] else len(prompts[index]) + len(tokens[index]) - 1
                for _, index, given in step
            ]
            for (slot, index, _), token in zip(step, self._decode(step, starts), strict=True):
                tokens[index].append(token)
                if len(tokens[index]) == num_new[index]:
                    del running[slot]
                    free.append(slot)
                    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), slot, -1, -1)
        return tokens

    def _decode(self, step: list[tuple[int, int, list[int]]], starts: list[int]) -> list[int]:
        """One forward; the most probable next token of each sequence."""
        batch, place, last = self._batch, 0, []
        for (slot, _, given), start in zip(step, starts, strict=True):
            for offset, token in enumerate(given):
                batch.token[place] = token
                batch.pos[place] = start + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = slot
                batch.logits[place] = offset == len(given) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return [self._best(at) for at in last]

    def _best(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: Any) -> None:
    """Says nothing."""


def main() -> None:
    folder, threads, slots = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    llama = Llama(
        write_gguf(folder, gguf.GGMLQuantizationType[sys.argv[4]]), threads, slots, is_plain="plain" in sys.argv[5:]
    )
    llama.generate([[1] * 32], [2])  # before the first answer: where an instruction is missing, the process ends here
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        tokens = llama.generate(work["prompts"], work["num_new"])
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
