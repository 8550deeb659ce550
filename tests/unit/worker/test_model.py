"""Whole models on the block pool: the tokens of transformers' own generate(), and refusals at load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import model_zoo as zoo
import pytest
import torch

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import Chunked, LayerSpec, Sliding
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import build_step_batch
from quire.worker.model import checkpoint, preparing, self_check
from quire.worker.model.checkpoint import ModelNotFound, load_model
from quire.worker.model.fingerprint import fingerprint
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.pinned_rope import pin_rope
from quire.worker.model.preparing import prepare_model
from quire.worker.model.probe import probe
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler
from quire.worker.unsupported_model import UnsupportedModel

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
NEW_TOKENS = 12


@dataclass
class Stream:
    """One sequence: its tokens, as far as the host has them, and how many of them are in the pool."""

    row: int
    tokens: list[int]
    num_computed: int = 0


@dataclass
class Driver:
    """A minimal engine: greedy, with blocks handed out in shuffled order from a pool full of NaN."""

    model: PagedModel
    num_blocks: int = 128
    streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.model
        self.pool = KVPool(
            model.specs, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device="cpu"
        )
        for tensor in self.pool.tensors():
            tensor[1:].fill_(float("nan"))
        self.table = SequenceTable(max_num_seqs=8, max_blocks_per_seq=MAX_MODEL_LEN // BLOCK_SIZE, device="cpu")
        self.sampler = Sampler(max_num_seqs=8, vocab_size=model.vocab_size, device="cpu")
        generator = torch.Generator().manual_seed(5)
        self.free_blocks = (torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist()

    def admit(self, tokens: list[int]) -> Stream:
        stream = Stream(self.table.add(), list(tokens))
        self.sampler.set_params(stream.row, SamplingParams())
        self.streams.append(stream)
        return stream

    def fork(self, stream: Stream) -> Stream:
        """A second sequence on the same blocks; the last one, if it is not full, is copied."""
        child = Stream(self.table.fork(stream.row), list(stream.tokens), stream.num_computed)
        self.sampler.fork(stream.row, child.row)
        self.table.stage_blocks(child.row, 0, self.table.block_ids(stream.row))
        if stream.num_computed % BLOCK_SIZE:
            last = stream.num_computed // BLOCK_SIZE
            copy = self.free_blocks.pop()
            self.pool.copy_blocks([(self.table.block_ids(stream.row)[last], copy)])
            self.table.stage_blocks(child.row, last, [copy])
        self.streams.append(child)
        return child

    def step(self, counts: list[tuple[Stream, int]], *, tokens_on_device: bool = True) -> None:
        """Run so many tokens of each sequence; one that has then computed all its tokens gets the next one."""
        for stream, count in counts:
            held = self.table.num_blocks(stream.row)
            needed = -(-(stream.num_computed + count) // BLOCK_SIZE)
            self.table.stage_blocks(stream.row, held, [self.free_blocks.pop() for _ in range(needed - held)])
        batch = build_step_batch(
            self.table,
            block_size=BLOCK_SIZE,
            rows=[stream.row for stream, _ in counts],
            starts=[stream.num_computed for stream, _ in counts],
            counts=[count for _, count in counts],
            token_ids=[self._token_ids(stream, count, tokens_on_device) for stream, count in counts],
        )
        logits = self.model.forward(batch, self.pool)
        assert logits.shape == (len(counts), self.model.vocab_size)
        assert logits.dtype == torch.float32
        for stream, count in counts:
            stream.num_computed += count
        ready = [i for i, (stream, _) in enumerate(counts) if stream.num_computed == len(stream.tokens)]
        if ready:
            self._sample(logits[ready], [counts[i][0] for i in ready])

    def _token_ids(self, stream: Stream, count: int, tokens_on_device: bool) -> list[int] | None:
        if tokens_on_device and self.table.last_token_position(stream.row) == stream.num_computed and count == 1:
            return None
        return stream.tokens[stream.num_computed : stream.num_computed + count]

    def _sample(self, logits: torch.Tensor, streams: list[Stream]) -> None:
        rows = [stream.row for stream in streams]
        positions = [stream.num_computed for stream in streams]
        tokens = self.sampler.sample(logits, rows, positions).tokens
        self.table.store_sampled(rows, tokens, positions)
        for stream, token in zip(streams, tokens.tolist(), strict=True):
            stream.tokens.append(token)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, zoo.VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 33, 12, 1, 20)]


def reference_model(name: str) -> Any:
    """The family with its own attention, and a rope that does not depend on the length generated so far."""
    model = zoo.build(name)
    pin_rope(model, MAX_MODEL_LEN)
    model.set_attn_implementation("eager")
    return model


# Tokens per step and sequence; a sequence at the end of its list decodes. Sequence i enters at step i // 2.
CHUNKS = [[3, 2], [7, 26], [12], [1], [9, 1, 10]]


def run_ragged(driver: Driver, num_tokens: int) -> None:
    """Prompts in chunks, mixed with decodes, until each sequence has num_tokens new ones."""
    chunks = [list(sizes) for sizes in CHUNKS]
    everything = prompts()
    streams: list[Stream] = []
    step = 0
    while len(streams) < len(everything) or any(wanted(streams, i, num_tokens) for i in range(len(streams))):
        while len(streams) < len(everything) and step >= len(streams) // 2:
            streams.append(driver.admit(everything[len(streams)]))
        counts = [
            (stream, chunks[i].pop(0) if chunks[i] else 1)
            for i, stream in enumerate(streams)
            if wanted(streams, i, num_tokens)
        ]
        driver.step(counts[::-1] if step % 2 else counts)
        step += 1


def wanted(streams: list[Stream], i: int, num_tokens: int) -> bool:
    return len(streams[i].tokens) < len(prompts()[i]) + num_tokens


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    driver = Driver(prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN))
    run_ragged(driver, NEW_TOKENS)
    own = reference_model(name)
    expected = [zoo.generate(own, prompt, NEW_TOKENS) for prompt in prompts()]
    assert [stream.tokens for stream in driver.streams] == expected
    assert len({token for stream in driver.streams for token in stream.tokens[-NEW_TOKENS:]}) > 10
    driver.pool.check_invariants()
    driver.table.check_invariants()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama4", "gpt2"])
@pytest.mark.parametrize("length", [12, 13])
def test_a_fork_goes_on_from_shared_blocks(name: str, length: int) -> None:
    """Parent and child share full blocks, differ by one forced token, and both go on as if alone."""
    driver = Driver(prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN))
    parent = driver.admit(prompts()[1][:length])
    driver.step([(parent, length)])
    child = driver.fork(parent)
    child.tokens[-1] = other = (child.tokens[-1] + 1) % zoo.VOCAB_SIZE
    driver.step([(child, 1), (parent, 1)], tokens_on_device=False)
    for _ in range(8):
        driver.step([(parent, 1), (child, 1)])
    own = reference_model(name)
    prompt = prompts()[1][:length]
    assert parent.tokens == zoo.generate(own, prompt, 10)
    assert child.tokens == zoo.generate(own, [*prompt, other], 9)
    assert driver.table.block_ids(parent.row)[:3] == driver.table.block_ids(child.row)[:3]


def test_a_forked_row_reads_its_last_token_on_the_device() -> None:
    driver = Driver(prepare_model(zoo.build("llama"), max_model_len=MAX_MODEL_LEN))
    parent = driver.admit(prompts()[2])
    driver.step([(parent, 12)])
    child = driver.fork(parent)
    for _ in range(3):
        driver.step([(child, 1), (parent, 1)])
    assert child.tokens == parent.tokens == zoo.generate(reference_model("llama"), prompts()[2], 4)


def test_transformers_builds_neither_mask_nor_cache() -> None:
    """Either would be right and cost a step's whole gain: a mask is tokens by tokens, a cache grows in every layer."""
    seen: list[Any] = []
    model = zoo.build("llama")
    driver = Driver(prepare_model(model, max_model_len=MAX_MODEL_LEN))
    model.register_forward_hook(lambda module, arguments, output: seen.append(output.past_key_values))
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, arguments, keywords: seen.append(keywords["attention_mask"]), with_kwargs=True
    )
    driver.step([(driver.admit(prompts()[0]), 5)])
    assert seen == [None, None]


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_runs_in_bfloat16(name: str) -> None:
    """prepare_model's self-check is the comparison; then a few steps must give finite logits."""
    model = zoo.build(name).to(torch.bfloat16)
    driver = Driver(prepare_model(model, max_model_len=MAX_MODEL_LEN))
    stream = driver.admit(prompts()[2])
    for count in (7, 5, 1, 1):
        driver.step([(stream, count)])
    assert len(stream.tokens) == 15


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_a_saved_checkpoint_loads(name: str, tmp_path: Path) -> None:
    folder = zoo.save(name, tmp_path)
    loaded = load_model(folder, device="cpu", max_model_len=MAX_MODEL_LEN)
    built = prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN)
    assert loaded.specs == built.specs
    assert loaded.fingerprint == built.fingerprint
    assert (loaded.vocab_size, loaded.max_model_len, loaded.dtype) == (zoo.VOCAB_SIZE, MAX_MODEL_LEN, torch.float32)
    assert loaded.architecture == type(zoo.build(name)).__name__
    assert loaded.eos_token_ids == ()
    driver = Driver(loaded)
    stream = driver.admit(prompts()[0])
    driver.step([(stream, 5)])
    assert stream.tokens == zoo.generate(reference_model(name), prompts()[0], 1)


class TestSelfCheck:
    """Errors that load must find by numbers, because nothing else would."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("mistral", lambda spec: replace(spec, mask=Sliding(zoo.WINDOW + 1))),
            ("mistral", lambda spec: replace(spec, mask=Sliding(zoo.WINDOW - 1))),
            ("llama4", lambda spec: replace(spec, mask=Sliding(zoo.WINDOW))),
            ("llama", lambda spec: replace(spec, mask=Chunked(zoo.WINDOW))),
        ],
        ids=["wider window", "narrower window", "chunk as window", "causal as chunk"],
    )
    def test_a_wrong_mask(
        self,
        name: str,
        change: Callable[[LayerSpec], LayerSpec],
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(preparing, "probe", lambda model: {i: change(s) for i, s in probe(model).items()})
        with pytest.raises(UnsupportedModel, match="differ from those of its own attention by"):
            prepare_model(zoo.build(name).to(dtype), max_model_len=MAX_MODEL_LEN)

    def test_a_rope_that_looks_at_the_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preparing, "pin_rope", lambda model, max_model_len: 0)
        with pytest.raises(UnsupportedModel, match="differ from those of its own attention"):
            prepare_model(zoo.build("phi3_longrope"), max_model_len=MAX_MODEL_LEN)

    def test_a_bias_outside_the_mask(self) -> None:
        model = zoo.build("llama")
        attention = model.model.layers[1].self_attn
        forward = attention.forward

        def biased(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            mask = attention_mask
            if mask is not None and mask.shape[-1] > 1:
                mask = mask + torch.arange(mask.shape[-1])
            return forward(*args, attention_mask=mask, **kwargs)

        attention.forward = biased
        with pytest.raises(UnsupportedModel, match="LlamaForCausalLM is not supported: its logits over a block pool"):
            prepare_model(model, max_model_len=MAX_MODEL_LEN)

    def test_logits_that_are_not_numbers(self) -> None:
        model = zoo.build("llama")
        model.model.norm.weight.fill_(float("nan"))
        with pytest.raises(UnsupportedModel, match="by inf of their size"):
            prepare_model(model, max_model_len=MAX_MODEL_LEN)

    def test_a_deep_model_that_makes_much_of_rounding_loads_and_its_wrong_mask_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Llama 3.1 8B with random weights in bfloat16 on an H200."""
        asked = []
        monkeypatch.setattr(
            self_check,
            "_judge",
            lambda *arguments, judge=self_check._judge: asked.append(judge(*arguments)) or asked[-1],
        )
        prepare_model(zoo.deep_llama(dtype=torch.bfloat16), max_model_len=MAX_MODEL_LEN)
        first, second = asked
        assert first is not None
        assert first.error > self_check.TOLERANCE[torch.bfloat16]
        assert second is None
        monkeypatch.setattr(
            preparing, "probe", lambda model: {i: replace(s, mask=Chunked(8)) for i, s in probe(model).items()}
        )
        with pytest.raises(UnsupportedModel, match="differ from those of its own attention by"):
            prepare_model(zoo.deep_llama(dtype=torch.bfloat16), max_model_len=MAX_MODEL_LEN)


class TestRefusedAtLoad:
    def test_a_model_that_looks_ahead(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"asks for an unknown mask, not causal, sliding or chunked$"):
            load_model(zoo.save("bert", tmp_path), max_model_len=MAX_MODEL_LEN)

    def test_an_encoder_decoder(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is not supported: it is an encoder-dec"):
            load_model(zoo.save("t5", tmp_path))

    def test_no_language_model(self, tmp_path: Path) -> None:
        config = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match=r"ViTForImageClassification .* no causal language model .*'vit'"):
            load_model(tmp_path)

    def test_a_type_transformers_does_not_know(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
        with pytest.raises(UnsupportedModel, match="no_such_type"):
            load_model(tmp_path)

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="there is no such folder"):
            load_model(tmp_path / "nowhere")
        with pytest.raises(ModelNotFound, match=r"no config\.json"):
            load_model(tmp_path)
        with pytest.raises(ModelNotFound, match="nobody/nothing"):
            load_model("nobody/nothing")

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        folder = zoo.save("llama", tmp_path)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelNotFound, match=r"no model at .*: .*model\.safetensors"):
            load_model(folder)

    def test_weights_cut_short(self, tmp_path: Path) -> None:
        folder = zoo.save("llama", tmp_path)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(UnsupportedModel, match="its weights do not load"):
            load_model(folder)

    def test_a_checkpoint_that_lacks_weights(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        folder = zoo.save("llama", tmp_path)
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=r"lacks 1 of its weights, the first is model\.layers\.1"):
            load_model(folder)

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("llama", {"max_model_len": 129}, "--max-model-len 129 is above 128, the longest the model takes"),
            ("llama", {"max_model_len": 7}, "--max-model-len 7 is below 8"),
            ("llama_dynamic_rope", {}, "--max-model-len must be given"),
            ("llama", {"dtype": torch.float64}, r"dtype=torch\.float64 is not one of torch\.float32"),
        ],
    )
    def test_arguments_out_of_range(self, name: str, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
        folder = zoo.save(name, tmp_path)
        with pytest.raises(ValueError, match=message):
            load_model(folder, **arguments)


@pytest.mark.parametrize("name", ["gpt2", "llama4_temperature", "mpt"])
def test_the_longest_length_comes_from_the_model(name: str, tmp_path: Path) -> None:
    assert load_model(zoo.save(name, tmp_path)).max_model_len == zoo.MAX_LEN


@pytest.mark.parametrize("name", sorted(zoo.FAMILIES | zoo.CACHED | zoo.STATEFUL | zoo.FURTHER))
def test_every_family_that_has_a_longest_length_names_it(name: str) -> None:
    """ALiBi and recurrent states have no limit; a dynamic rope is made for a length that the user chooses."""
    without = {"bloom", "mamba", "mamba2", "llama_dynamic_rope"}
    length = checkpoint.longest_model_len(zoo.build(name).config.get_text_config(decoder=True))
    assert length == (None if name in without else zoo.MAX_LEN)


def test_every_end_token_counts(tmp_path: Path) -> None:
    model = zoo.build("llama")
    model.generation_config.eos_token_id = [90, 7]
    model.config.eos_token_id = 90
    assert prepare_model(model, max_model_len=MAX_MODEL_LEN).eos_token_ids == (7, 90)


def test_ids_that_are_no_tokens_are_named_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.build("llama")
    vocab_size = model.config.vocab_size
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    for name, changes in {
        "config.json": {"eos_token_id": vocab_size, "pad_token_id": vocab_size + 2},
        "generation_config.json": {"eos_token_id": [-1, 7, vocab_size + 1]},
    }.items():
        path = tmp_path / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    loaded = load_model(tmp_path, max_model_len=MAX_MODEL_LEN)
    assert loaded.eos_token_ids == (7,)
    assert f"can't be sampled: -1, {vocab_size}, {vocab_size + 1}" in caplog.text
    assert f"pad_token_id is {vocab_size + 2} and is not used" in caplog.text


def test_an_output_layer_that_does_not_fit_the_vocabulary_is_refused() -> None:
    model = zoo.build("llama")
    vocab_size = model.config.vocab_size
    model.config.vocab_size = vocab_size + 3
    with pytest.raises(UnsupportedModel, match=f"{vocab_size} rows, and its vocab_size is {vocab_size + 3}"):
        prepare_model(model, max_model_len=MAX_MODEL_LEN)


def test_pinning_keeps_ropes_that_depend_on_nothing() -> None:
    assert pin_rope(zoo.build("llama"), MAX_MODEL_LEN) == 0
    assert pin_rope(zoo.build("gemma3"), MAX_MODEL_LEN) == 0
    assert pin_rope(zoo.build("llama_dynamic_rope"), MAX_MODEL_LEN) == 1
    assert pin_rope(zoo.build("phi3_longrope"), MAX_MODEL_LEN) == 1


@pytest.mark.parametrize(("name", "rope"), [("llama_dynamic_rope", "dynamic"), ("phi3_longrope", "longrope")])
def test_a_pinned_rope_that_differs_from_that_of_short_sequences_is_logged(
    name: str, rope: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="quire.worker.model.pinned_rope"):
        pin_rope(zoo.build(name), 16)
        assert not caplog.messages, "within the original length nothing differs"
        pin_rope(zoo.build(name), MAX_MODEL_LEN)
    (said,) = caplog.messages
    assert said.startswith(f"rope ({rope}) pinned to max_model_len={MAX_MODEL_LEN}: shorter sequences")


def test_a_rope_pinned_to_a_short_length_is_the_original() -> None:
    """Within the original length nothing is stretched: the same as transformers without pinning."""
    for name in ("llama_dynamic_rope", "phi3_longrope"):
        driver = Driver(prepare_model(zoo.build(name), max_model_len=16))
        stream = driver.admit(prompts()[0])
        driver.step([(stream, 5)])
        for _ in range(10):
            driver.step([(stream, 1)])
        assert stream.tokens == zoo.generate(zoo.build(name), prompts()[0], 11)


class TestFingerprint:
    def test_equal_weights_in_other_files(self, tmp_path: Path) -> None:
        zoo.build("llama").save_pretrained(tmp_path / "one")
        zoo.build("llama").save_pretrained(tmp_path / "many", max_shard_size="10KB")
        assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
        assert load_model(tmp_path / "one").fingerprint == load_model(tmp_path / "many").fingerprint

    def test_what_changes_a_block_changes_it(self) -> None:
        seen = {fingerprint(zoo.build("llama")), fingerprint(zoo.build("llama").to(torch.bfloat16))}
        weights = zoo.build("llama")
        weights.model.layers[1].mlp.up_proj.weight.mul_(1.001)
        seen.add(fingerprint(weights))
        norm = zoo.build("llama")
        norm.model.norm.weight[3] += 1e-6
        seen.add(fingerprint(norm))
        config = zoo.build("llama")
        config.config.rms_norm_eps = 1e-5
        seen.add(fingerprint(config))
        assert len(seen) == 5

    def test_a_pinned_rope_is_part_of_it(self) -> None:
        lengths = (32, 64, 96)
        models = [prepare_model(zoo.build("llama_dynamic_rope"), max_model_len=length) for length in lengths]
        assert len({model.fingerprint for model in models}) == 3
        models = [prepare_model(zoo.build("llama"), max_model_len=length) for length in lengths]
        assert len({model.fingerprint for model in models}) == 1
