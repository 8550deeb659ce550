"""Write docs/reference/models.md from a run of every family of the tests.

Usage: python docs/generate_models.py [OUTPUT]

Each family is built tiny, loaded as the worker loads it, run through the worker's executor (prompts in chunks beside
decodes, forks, a preemption, shuffled blocks), and compared with transformers' own generate(), token for token.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import model_zoo as zoo  # noqa: E402
from executor_driver import FORKED, MAX_MODEL_LEN, make_prompts, run_mixed  # noqa: E402

from quire.worker.model import CachedModel, PagedModel, pin_rope, prepare_model  # noqa: E402
from quire.worker.probe import LayerSpec, UnsupportedModel  # noqa: E402

NEW_TOKENS = 10
FAMILIES = (*zoo.FAMILIES, *zoo.CACHED, *zoo.STATEFUL)
# Not the architecture's fault but the checkpoint's kind: said elsewhere, before anything is loaded.
NOT_CAUSAL = ("t5",)
HEADER = """# Models

Made by `make models` from a run; change `docs/generate_models.py`, not this page. It was made with transformers {hf}
and torch {torch}.

A model is chosen by what it does and not by its name. At load the worker asks it: one forward of a token shows whether
every layer calls attention through transformers' `AttentionInterface`, and with which mask. Then three ragged sequences
run over a pool and are compared with the model's own attention. What does not agree is refused, with the reason.

| how it runs | when | a step |
| --- | --- | --- |
| packed | every layer calls the interface | one forward of all tokens, without padding |
| packed, latents | and makes its keys and values from latents (MLA) | the same; attention works on the latents |
| cache | a layer has its own attention | a forward per part of a prompt, one for all that decode, padded |
| cache, states | it keeps a state per sequence, too | the same; the last token of a prompt is a part of its own |

**Packed** models get a function for their attention, and no mask. **Cache** models keep their attention and get the
pool as the cache they know: each layer copies what its sequences hold, so a step costs more. **States** lie in slots
beside the pool, one for each of `--max-num-seqs`: the state behind a sequence's last token, and the one before that
token, with which a fork begins. Blocks hold no states, so such sequences share no prefixes: after a preemption they are
computed from their first token, and a trim or fork that would go back further than one token is refused with
`POSITION_OUT_OF_RANGE`. `QUIRE_VERIFY=1` checks what is read and written in blocks; of states the worker checks the
positions, always.

## What was run

Tiny models with random weights, float32, on a CPU. Each ran {prompts} prompts of up to {longest} tokens in chunks
beside sequences that decode, {forks} forks and a preemption. "Per token" is what one layer keeps, in elements: heads ×
(key + value), for each kind of layer of this tiny model. "Equal" means that all {tokens} tokens sampled are those of
`generate`. "Equal, rope pinned": those of `generate` with the same [pinned rope](#ropes-that-depend-on-the-length).

| family | class | runs | masks | per token | state per sequence | shares prefixes | tokens |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

ROPES = """## Ropes that depend on the length

The frequencies of some ropes depend on the length of the sequence: dynamic NTK (`rope_type` with "dynamic") and
longrope (Phi-3 with 128 k). transformers' `generate` takes those of the present length, and in a batch those of the
longest sequence. The worker pins them at load to those of a sequence of `--max-model-len` tokens, so that a sequence
has the same keys for any length of its own, and any other sequences in the batch. Other engines do the same.

So with a `--max-model-len` above the model's original length (`original_max_position_embeddings`, or for dynamic NTK
`max_position_embeddings`) such a model can give other tokens than `generate` does. A sequence within the original
length is computed with frequencies that were made for long ones, which can lower its quality. The worker's log
says so at load, in a line with `rope` and `pinned`. With `--max-model-len` at the original length or below, the tokens
are those of `generate`. In the table above `generate` ran with a pinned rope, too.
"""


def rows() -> Iterator[str]:
    for name in FAMILIES:
        model = prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN)
        cells = [
            f"`{name}`",
            model.architecture,
            how_it_runs(model),
            masks(model),
            per_token(model),
            f"{sum(spec.num_bytes for spec in model.state_specs.values())} bytes" if model.state_specs else "",
            "no" if model.has_recurrent_state else "yes",
            tokens(name, model),
        ]
        yield f"| {' | '.join(cells)} |"


def how_it_runs(model: PagedModel) -> str:
    if isinstance(model, CachedModel):
        return "cache, states" if model.state_specs else "cache"
    return "packed, latents" if any(spec.values_in_keys for spec in model.specs.values()) else "packed"


def masks(model: PagedModel) -> str:
    kinds = Counter(str(spec.mask) if isinstance(spec, LayerSpec) else "its own" for spec in model.specs.values())
    return ", ".join(f"{count} × {kind.removesuffix('()').lower()}" for kind, count in kinds.items()) or "none"


def per_token(model: PagedModel) -> str:
    """Distinct shapes of the layers."""
    shapes = dict.fromkeys(
        f"{spec.num_kv_heads} × {spec.k_head_dim}"
        if spec.values_in_keys
        else f"{spec.num_kv_heads} × ({spec.k_head_dim} + {spec.v_head_dim})"
        for spec in model.specs.values()
    )
    return ", ".join(shapes) or "nothing"


def tokens(name: str, model: PagedModel) -> str:
    """Compare with the model alone, its rope pinned like the worker's if it has one that depends on the length."""
    found, forked = run_mixed(model, NEW_TOKENS)
    own = zoo.build(name)
    num_pinned = pin_rope(own, MAX_MODEL_LEN)
    own.set_attn_implementation("eager")
    expected = [zoo.generate(own, prompt, NEW_TOKENS) for prompt in make_prompts()]
    if found != expected or forked != [expected[i] for i in FORKED]:
        return "**differ**"
    return "equal, rope pinned" if num_pinned else "equal"


def refusals() -> Iterator[str]:
    for name in zoo.REFUSED:
        if name in NOT_CAUSAL:
            continue
        try:
            prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN)
        except UnsupportedModel as refused:
            yield f"| `{name}` | {refused.model_class} | {refused.reason} |"
        else:
            sys.exit(f"{name} was to be refused, and runs")


def write(output: Path) -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    prompts = make_prompts()
    header = HEADER.format(
        hf=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        prompts=len(prompts),
        longest=max(map(len, prompts)),
        forks=len(FORKED),
        tokens=(len(prompts) + len(FORKED)) * NEW_TOKENS,
    )
    refused = ["## What is refused", "", "| family | class | why |", "| --- | --- | --- |", *refusals(), ""]
    output.write_text(header + "\n".join([*rows(), "", ROPES, *refused]))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/reference/models.md")
