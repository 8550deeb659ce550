"""A model with an output that says what it read: a stand-in for a language model, that runs on the real pool of blocks.

A layer keeps a 64-bit digest of each token in the token's slot, in place of a key. Its output at position p is a digest
of the slots of all positions that its mask shows at p, each weighted by its distance from p. This output is the next
layer's key, and that of the last layer chooses the next token. So a sequence's tokens are those of `DigestFunction`,
which knows nothing of slots, only if every slot that was read had the right content: a stale block, a missed copy, the
null block or a wrong table entry give others, but for one case in 2^60.

    layer 0     key(p) = mix(token, p)
    layer l     output(p) = mix(sum of key(q) * weight(p - q) over the visible q, + salt of l)  = key(p) of layer l + 1
    states      output(p) = mix(output(p - 1) * STATE_FACTOR + the last layer's output(p)), kept per sequence
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import LayerGroupChoice, group_layers
from quire.worker.memory.layer_spec import Causal, LayerSpec, Mask
from quire.worker.memory.state_slots import StateKey, StateSpec
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.modes import Modes
from quire.worker.model.paged_model import PagedModel
from quire.worker.sampling.constraints import NUM_REMEMBERED
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler

Digests = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Logits = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

GREEDY = SamplingParams()
TWO_FULL_LAYERS: tuple[Mask, ...] = (Causal(), Causal())

_WORD = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15
_SHIFT, _LAST_SHIFT = 32, 29
_FACTOR_64, _SHIFT_64, _LAST_SHIFT_64 = np.uint64(_FACTOR), np.uint64(_SHIFT), np.uint64(_LAST_SHIFT)
_STATE_FACTOR = 0xD1342543DE82EF95
_SALTS = np.arange(1, 65, dtype=np.uint64) * np.uint64(_STATE_FACTOR)
_STATE = StateKey(0, "recurrent", 0)

NUM_CANDIDATES = 4
"""Tokens with a logit that stands out. The first of them is the greatest."""
NUM_VARIANTS = 8
"""Of the logits with the same greatest one."""


@dataclass(frozen=True)
class DigestFunction:
    """The logits of tokens by the tokens before them, without a pool: what an undisturbed model computes.

    masks are those of the layers. has_states: the output also depends on a state, which is kept per sequence. Memory:
    8 * max_model_len^2 bytes for each distinct mask.
    """

    masks: tuple[Mask, ...] = TWO_FULL_LAYERS
    vocab_size: int = 64
    max_model_len: int = 64
    has_states: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size < NUM_CANDIDATES:
            raise ValueError(f"vocab_size={self.vocab_size} is below {NUM_CANDIDATES}")

    def weights(self, layer: int) -> Digests:
        """[max_model_len, max_model_len]: that of position q for the output at p; 0 where p does not see q."""
        return _weights(self.masks[layer], self.max_model_len)

    def outputs(self, tokens: Sequence[int]) -> Digests:
        """The last output at each of a sequence's tokens, [n]."""
        positions = np.arange(len(tokens))
        keys = embed(np.asarray(tokens, dtype=np.int64), positions)
        for layer in range(len(self.masks)):
            weights = self.weights(layer)[: len(tokens), : len(tokens)]
            keys = next_keys(keys[None], weights, layer)
        return through_states(keys, 0)[0] if self.has_states else keys

    def logits(self, outputs: Digests) -> Logits:
        """[n, vocab_size] of outputs [n]: a few candidates, and all others far below, no two alike.

        The greatest is that of the token output % vocab_size.
        """
        rows = _logits(self.vocab_size)
        return rows[(outputs % np.uint64(len(rows))).view(np.int64)]

    def expected_logits(self, tokens: Sequence[int]) -> Logits:
        """[n, vocab_size]: the logits behind each of a sequence's tokens."""
        return self.logits(self.outputs(tokens))

    def expected_tokens(self, prompt: Sequence[int], count: int, params: SamplingParams = GREEDY) -> list[int]:
        """The tokens behind a prompt: greedy ones, or those that `params` choose. No token ends the text.

        Cost: some 5 us a token, ten times as much if they are not greedy.
        """
        text = Undisturbed(self, prompt, count)
        choose = self._greedy if params == GREEDY else self._chooser(prompt, params)
        for _ in range(count):
            text.append(choose(text))
        return text.tokens[len(prompt) :]

    def _greedy(self, text: Undisturbed) -> int:
        return text.output % self.vocab_size

    def _chooser(self, prompt: Sequence[int], params: SamplingParams) -> Callable[[Undisturbed], int]:
        """The choice of the worker's sampler for a row that it has alone."""
        sampler = Sampler(max_num_seqs=1, vocab_size=self.vocab_size, device="cpu")
        sampler.set_params(0, params, prompt_token_ids=prompt, last_token_ids=prompt[-NUM_REMEMBERED:])

        def choose(text: Undisturbed) -> int:
            logits = torch.from_numpy(self.logits(np.array([text.output], dtype=np.uint64)))
            return int(sampler.sample(logits, [0], [len(text.tokens)]).tokens)

        return choose


class Undisturbed:
    """The tokens of a sequence, and the last output at each, one token after the other and without a pool."""

    def __init__(self, function: DigestFunction, prompt: Sequence[int], room: int) -> None:
        """`room` is the number of tokens that can be appended."""
        self.tokens = list(prompt)
        self._has_states = function.has_states
        self._weights = [function.weights(layer) for layer in range(len(function.masks))]
        length = len(prompt)
        keys = np.zeros((len(function.masks) + 1, length + room), dtype=np.uint64)
        keys[0, :length] = embed(np.asarray(prompt, dtype=np.int64), np.arange(length))
        for layer, weights in enumerate(self._weights):
            keys[layer + 1, :length] = next_keys(keys[layer, None, :length], weights[:length, :length], layer)
        self._keys = keys
        outputs = keys[-1, :length]
        self.output = int((through_states(outputs, 0)[0] if self._has_states else outputs)[-1])
        """The last one."""

    def append(self, token: int) -> None:
        """Add a token behind the others."""
        position, output = len(self.tokens), _mix_one(token << _SHIFT | len(self.tokens))
        for layer, weights in enumerate(self._weights):
            self._keys[layer, position] = output
            seen = self._keys[layer, : position + 1] * weights[position, : position + 1]
            output = _mix_one(int(seen.sum()) + int(_SALTS[layer]))
        self.output = _mix_one(self.output * _STATE_FACTOR + output) if self._has_states else output
        self.tokens.append(token)


class HiddenDigests:
    """The outputs of all tokens of one step, for the log-probabilities of prompts."""

    def __init__(self, function: DigestFunction) -> None:
        self._function = function
        self.outputs: Digests = np.zeros(0, dtype=np.uint64)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return what makes logits [n, vocab_size] float32 of n tokens of the step, given by index [n] int64."""
        return lambda tokens: torch.from_numpy(self._function.logits(self.outputs[tokens.numpy()]))


class DigestModel(PagedModel):
    """A DigestFunction that runs on blocks as the worker's models do. A key is the 64 bits of a float64."""

    def __init__(
        self, function: DigestFunction, *, eos_token_ids: tuple[int, ...] = (), layer_groups: LayerGroupChoice = "auto"
    ) -> None:
        self.function = function
        self.specs = {layer: _spec(layer, mask) for layer, mask in enumerate(function.masks)}
        self.layer_groups = group_layers(self.specs, max_model_len=function.max_model_len, choice=layer_groups)
        self.max_model_len = function.max_model_len
        self.eos_token_ids = eos_token_ids
        self.architecture = "DigestModel"
        self.dtype = torch.float64
        self.device = torch.device("cpu")
        self.vocab_size = function.vocab_size
        self.fingerprint = f"digest:{function}"
        self.min_block_size = 1
        self.fusion = None
        self.modes = Modes()
        if function.has_states:
            self.state_specs = {_STATE: StateSpec((1,), torch.int64)}
        self.allocate_states(0)
        self._weights = [function.weights(layer) for layer in self.specs]
        self._memory: tuple[KVPool, list[Digests]] | None = None
        self._kept: HiddenDigests | None = None

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """See PagedModel.forward. In each layer all of the step's keys are written before any is read."""
        positions, written = batch.positions.numpy(), batch.slot_mapping.numpy()
        run_of = np.arange(batch.num_seqs).repeat(batch.counts_host)
        shown = slots_of_tables(batch.block_tables.numpy()[:, run_of], pool.block_size)[..., : self.max_model_len]
        length = shown.shape[-1]
        outputs = embed(batch.input_ids.numpy(), positions)
        for layer, memory in enumerate(self._memory_of(pool)):
            group = pool.group_of(layer)
            memory[written[group]] = outputs
            outputs = next_keys(memory[shown[group]], self._weights[layer][positions, :length], layer)
        if self.function.has_states:
            outputs = self._through_states(batch, outputs)
        if self._kept is not None:
            self._kept.outputs = outputs
        return torch.from_numpy(self.function.logits(outputs[batch.logit_indices.numpy()]))

    def _memory_of(self, pool: KVPool) -> list[Digests]:
        """The slots of each layer, [B * S]: the same memory as that of the pool's tensors."""
        if self._memory is None or self._memory[0] is not pool:
            views: list[Digests] = [
                pool.k(layer).view(torch.int64).numpy().reshape(-1).view(np.uint64) for layer in self.specs
            ]
            self._memory = pool, views
        return self._memory[1]

    def _through_states(self, batch: StepBatch, outputs: Digests) -> Digests:
        starts = [end - count for end, count in zip(batch.seq_lens_host, batch.counts_host, strict=True)]
        after = self.states.load(batch.rows_host, starts)[_STATE]
        before, found, first = after.clone(), outputs.copy(), 0
        states, states_before = after.numpy().view(np.uint64), before.numpy().view(np.uint64)
        for run, count in enumerate(batch.counts_host):
            tokens = slice(first, first + count)
            found[tokens], states_before[run, 0] = through_states(outputs[tokens], int(states[run, 0]))
            states[run, 0] = found[first + count - 1]
            first += count
        self.states.store(batch.rows_host, batch.seq_lens_host, before={_STATE: before}, after={_STATE: after})
        return found

    @contextmanager
    def keeping_hidden_states(self, batch: StepBatch, pool: KVPool) -> Iterator[Any]:
        """See PagedModel.keeping_hidden_states."""
        self._kept = HiddenDigests(self.function)
        try:
            yield self._kept
        finally:
            self._kept = None


def embed(tokens: Ints, positions: Ints) -> Digests:
    """The first layer's keys of tokens, [n] each."""
    return _mix((tokens << _SHIFT | positions).view(np.uint64))


def next_keys(keys: Digests, weights: Digests, layer: int) -> Digests:
    """A layer's outputs at n tokens, of the keys that each is shown: both [n, length]."""
    return _mix((keys * weights).sum(1) + _SALTS[layer])


def through_states(outputs: Digests, state: int) -> tuple[Digests, int]:
    """A run's outputs, with what its sequence's state makes of them; and the state before its last token."""
    found, before = [], state
    for output in outputs.tolist():
        before, state = state, _mix_one(state * _STATE_FACTOR + output)
        found.append(state)
    return np.array(found, dtype=np.uint64), before


@lru_cache(maxsize=32)
def _weights(mask: Mask, length: int) -> Digests:
    """See DigestFunction.weights. A weight is odd."""
    by_distance = _mix(np.arange(1, length + 1, dtype=np.uint64)) | np.uint64(1)
    weights = np.zeros((length, length), dtype=np.uint64)
    for position in range(length):
        first = mask.first_visible(position)
        weights[position, first : position + 1] = by_distance[: position - first + 1][::-1]
    return weights


@lru_cache(maxsize=8)
def _logits(vocab_size: int) -> Logits:
    """All rows of logits that there are, [vocab_size * NUM_VARIANTS, vocab_size]."""
    numbers = np.arange(vocab_size * NUM_VARIANTS)
    stride = 1 + numbers // vocab_size % ((vocab_size - 1) // (NUM_CANDIDATES - 1))
    tokens = (numbers[:, None] + stride[:, None] * np.arange(NUM_CANDIDATES)) % vocab_size
    heights = 6.0 - 0.5 * np.arange(NUM_CANDIDATES) + 0.25 * np.random.default_rng(0).random(tokens.shape)
    logits = np.tile(np.linspace(0, -1, vocab_size, dtype=np.float32), (len(numbers), 1))
    logits[numbers[:, None], tokens] = heights
    return logits


def slots_of_tables(tables: np.ndarray[tuple[int, ...], np.dtype[np.int32]], block_size: int) -> Ints:
    """The slots of all positions of block tables: [..., M] -> [..., M * block_size]."""
    slots = tables[..., None] * np.int64(block_size) + np.arange(block_size)
    return slots.reshape(*tables.shape[:-1], -1)


def _spec(layer: int, mask: Mask) -> LayerSpec:
    return LayerSpec(
        layer_idx=layer,
        num_query_heads=1,
        num_kv_heads=1,
        k_head_dim=1,
        v_head_dim=1,
        mask=mask,
        scaling=1.0,
        softcap=None,
        has_sinks=False,
        values_in_keys=True,
    )


def _mix(x: Digests) -> Digests:
    x = (x ^ (x >> _SHIFT_64)) * _FACTOR_64
    return x ^ (x >> _LAST_SHIFT_64)


def _mix_one(x: int) -> int:
    """The same of one number, of which the lowest 64 bits count."""
    x &= _WORD
    x = (x ^ x >> _SHIFT) * _FACTOR & _WORD
    return x ^ x >> _LAST_SHIFT
