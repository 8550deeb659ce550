"""Fused modules in torch: equal to the model's own, per architecture, and the modules that stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import model_zoo as zoo
import pytest
import torch
from paged_run import MAX_LEN, run
from torch import Tensor, nn
from transformers.activations import ACT2FN

from quire.worker.fusion.fuse import FusionReport, fuse_model
from quire.worker.fusion.modules import FusedAttention, FusedMLP, ResidualStream, swap_back
from quire.worker.fusion.steps import Norm, TorchSteps, choose_steps
from quire.worker.model.fingerprint import fingerprint
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.pinned_rope import pin_rope
from quire.worker.model.preparing import prepare_model

NEW_TOKENS = 6
BLOCK_SIZE = 4

# What differs of logits in float32, over their size: sums in another order.
ROUNDING = 1e-4

Count = tuple[int, int]
ALL = (3, 3)
NONE = (0, 3)
NO_MLP = "it has no gate_proj, up_proj and down_proj, and no two projections without a gate"
OTHER_ACTIVATION = "its activation is none of silu, gelu, gelu_tanh"
NO_QKV = "it has no q_proj, k_proj, v_proj and o_proj"
NO_NORMS = "it has no RMSNorms"
WIDE_NORMS = "its q_norm and k_norm are no RMSNorms of each head"
OTHER_QUERIES = "its queries are other than projections, norms and a rope give"
OTHER_SUM = "its result is another than its halves, added up, give"

# Attention, MLP and layers: how many of how many; and what is not fused, for which reason.
MATCHES: dict[str, tuple[Count, Count | None, Count, dict[str, str]]] = {
    "llama": (ALL, ALL, ALL, {}),
    "llama_dynamic_rope": (ALL, ALL, ALL, {}),
    "qwen2": (ALL, ALL, ALL, {}),
    "qwen3": (ALL, ALL, ALL, {}),
    "mistral": (ALL, ALL, ALL, {}),
    "phi3": (ALL, ALL, ALL, {}),
    "phi3_longrope": (ALL, ALL, ALL, {}),
    "smollm3": (ALL, ALL, ALL, {}),
    "glm4": (ALL, ALL, ALL, {}),
    "gemma": (ALL, ALL, ALL, {}),
    "gemma2": (ALL, ALL, ALL, {}),
    "gemma3": (ALL, ALL, ALL, {}),
    "mixtral": (ALL, NONE, ALL, {"MixtralSparseMoeBlock": NO_MLP}),
    "qwen3_moe": (ALL, NONE, ALL, {"Qwen3MoeSparseMoeBlock": NO_MLP}),
    "gpt_oss": (ALL, NONE, ALL, {"GptOssMLP": NO_MLP}),
    "olmo2": (NONE, ALL, ALL, {"Olmo2Attention": WIDE_NORMS}),
    "olmo": (NONE, ALL, NONE, {"OlmoAttention": OTHER_QUERIES, "OlmoDecoderLayer": NO_NORMS}),
    "granite": (ALL, ALL, NONE, {"GraniteDecoderLayer": OTHER_SUM}),
    "cohere": (ALL, ALL, NONE, {"CohereLayerNorm": "it is no RMSNorm", "CohereDecoderLayer": NO_NORMS}),
    "stablelm": (ALL, ALL, NONE, {"StableLmDecoderLayer": NO_NORMS}),
    "llama4": (
        NONE,
        (3, 4),
        ALL,
        {"Llama4TextAttention": "it scales queries by position", "Llama4TextMoe": NO_MLP},
    ),
    "deepseek_v3": (NONE, (3, 5), ALL, {"DeepseekV3Attention": NO_QKV, "DeepseekV3MoE": NO_MLP}),
    "phi": (NONE, ALL, NONE, {"PhiAttention": NO_QKV, "PhiDecoderLayer": NO_NORMS}),
    "gpt_neox": (NONE, ALL, NONE, {"GPTNeoXAttention": NO_QKV, "GPTNeoXLayer": NO_NORMS}),
    "gpt2": (NONE, ALL, NONE, {"GPT2Attention": NO_QKV, "GPT2Block": NO_NORMS}),
    "opt": (
        NONE,
        None,
        NONE,
        {"OPTAttention": NO_QKV, "OPTDecoderLayer": "it is not made of attention and an MLP"},
    ),
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, zoo.VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 23, 12)]


def prepare(model: Any, *, fused: bool = True) -> PagedModel:
    return prepare_model(model, max_model_len=MAX_LEN, fused_steps=TorchSteps() if fused else None)


def report_of(model: PagedModel) -> FusionReport:
    assert model.fusion is not None
    return model.fusion


def assert_equal_logits(fused: PagedModel, own: PagedModel) -> None:
    """On the same tokens; and there is something to tell apart."""
    tokens, expected = run(own, prompts(), NEW_TOKENS, block_size=BLOCK_SIZE)
    _, actual = run(fused, prompts(), NEW_TOKENS, block_size=BLOCK_SIZE, forced=tokens)
    assert float(expected.abs().max()) > 0.1
    assert float((actual - expected).abs().max() / expected.abs().max()) < ROUNDING


@pytest.mark.parametrize("name", MATCHES)
def test_what_matches_is_fused_and_says_what_the_model_says(name: str) -> None:
    fused = prepare(zoo.build(name))
    attention, mlp, layer, unmatched = MATCHES[name]
    report = report_of(fused)
    counts = {kind: count for kind, count in report.swapped.items() if kind != "norm"}
    assert counts == {k: v for k, v in {"attention": attention, "mlp": mlp, "layer": layer}.items() if v is not None}
    assert dict(report.unmatched) == {
        (class_name, reason): report.unmatched[class_name, reason] for class_name, reason in unmatched.items()
    }
    assert_equal_logits(fused, prepare(zoo.build(name), fused=False))
    tokens, _ = run(fused, prompts(), NEW_TOKENS, block_size=BLOCK_SIZE)
    own = zoo.build(name)
    pin_rope(own, MAX_LEN)
    own.set_attn_implementation("eager")
    assert tokens == [zoo.generate(own, prompt, NEW_TOKENS) for prompt in prompts()]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "smollm3"])
def test_in_bfloat16_it_is_no_further_from_the_exact_result(name: str) -> None:
    """Exact: the same rounded weights in float32. Worst of all logits, and of the model's own modules twice as much."""
    exact = prepare(zoo.build(name).to(torch.bfloat16).float(), fused=False)
    tokens, expected = run(exact, prompts(), NEW_TOKENS, block_size=BLOCK_SIZE)
    errors = []
    for fused in (True, False):
        model = prepare(zoo.build(name).to(torch.bfloat16), fused=fused)
        assert not fused or report_of(model).swapped["attention"] == ALL
        _, actual = run(model, prompts(), NEW_TOKENS, block_size=BLOCK_SIZE, forced=tokens)
        errors.append(float((actual - expected).square().mean().sqrt()))
    assert errors[0] < 1.25 * errors[1], errors


class TestWeights:
    @pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "mixtral", "gemma", "phi", "gpt2"])
    def test_they_are_not_held_twice_and_keep_their_names(self, name: str) -> None:
        model = zoo.build(name)
        before, names = held_bytes(model), [key for key, _ in model.named_parameters()]
        own = {key: value.clone() for key, value in model.state_dict().items()}
        fused = prepare(model)
        assert any(done for done, _ in report_of(fused).swapped.values())
        assert held_bytes(model) == before
        assert [key for key, _ in model.named_parameters()] == names
        assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())

    def test_the_fingerprint_is_that_of_the_unfused_model(self) -> None:
        model = zoo.build("qwen2")
        expected = prepare(zoo.build("qwen2"), fused=False).fingerprint
        assert prepare(model).fingerprint == expected == fingerprint(model)

    def test_a_bias_that_some_of_the_merged_have(self) -> None:
        models = [zoo.build("llama") for _ in range(2)]
        for model in models:
            for layer in model.model.layers:
                layer.self_attn.q_proj.bias = nn.Parameter(torch.linspace(-1, 1, 32), requires_grad=False)
        fused, own = prepare(models[0]), prepare(models[1], fused=False)
        assert report_of(fused).swapped["attention"] == ALL
        assert_equal_logits(fused, own)
        assert models[0].model.layers[0].self_attn.k_proj.bias is None


def held_bytes(model: nn.Module) -> int:
    """The bytes of the weights, merged ones included."""
    held = list(model.parameters())
    for stand_in in (vars(module).get("forward") for module in model.modules()):
        if isinstance(stand_in, FusedAttention):
            held.append(stand_in._parts.qkv.weight)
        elif isinstance(stand_in, FusedMLP):
            held.append(stand_in._parts.up.weight)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values())


class TestOutsideOfAStep:
    def test_the_model_is_transformers_own(self) -> None:
        model = zoo.build("qwen3")
        token_ids = torch.tensor([prompts()[1]])
        model.set_attn_implementation("eager")
        expected = model(token_ids, use_cache=False).logits
        fused = prepare(model)
        run(fused, prompts(), 2, block_size=BLOCK_SIZE)
        model.set_attn_implementation("eager")
        assert torch.equal(model(token_ids, use_cache=False).logits, expected)

    def test_swapping_back_leaves_no_trace(self) -> None:
        model = zoo.build("llama")
        prepare(model)
        swap_back(model)
        assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_residual_goes_to_whoever_gets_exactly_what_was_left() -> None:
    stream = ResidualStream()
    result, residual = torch.ones(2), torch.zeros(2)
    assert stream.leave(result, residual) is result
    assert stream.take(result.clone()) is None
    assert stream.take(result) is residual
    assert stream.take(result) is None


def test_fusing_twice_changes_nothing() -> None:
    model = zoo.build("llama")
    fused = prepare(model)
    stand_ins = {name: vars(module).get("forward") for name, module in model.named_modules()}
    report = fuse_model(model, fused.specs, max_model_len=MAX_LEN, steps=TorchSteps())
    assert {done for done, _ in report.swapped.values()} == {0}
    assert {reason for _, reason in report.unmatched} == {"its forward is not that of its class"}
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == stand_ins
    assert_equal_logits(fused, prepare(zoo.build("llama"), fused=False))


# -- models that are not what they look like --------------------------------------------------------------------------


def clamp_gate(mlp: Any) -> None:
    """Clamps what only large inputs reach."""
    derive(mlp, lambda own, x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x).clamp(max=20.0)) * mlp.up_proj(x)))


def centre(norm: Any) -> None:
    derive(norm, lambda own, x: own(x - x.mean(-1, keepdim=True)))


def raise_eps(norm: Any) -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        wide = x.float()
        return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1.2 * norm.variance_epsilon))

    derive(norm, forward)


def stretch_late_queries(attention: Any) -> None:
    """By 7 % from position 40 on, as temperature tuning does."""

    def forward(own: Any, *args: Any, position_embeddings: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        factor = torch.where(position_ids >= 40, 1.07, 1.0)[..., None]
        return own(*args, position_embeddings=tuple(x * factor for x in position_embeddings), **kwargs)

    derive(attention, forward)


def gate_output(attention: Any) -> None:
    derive(attention, lambda own, *args, **kwargs: (own(*args, **kwargs)[0] * 0.9, None))


def scale_values(attention: Any) -> None:
    derive(attention.v_proj, lambda own, x: own(x) * 0.5)


def weaken_residual(layer: Any) -> None:
    derive(layer, lambda own, x, **kwargs: own(x, **kwargs) + 0.1 * x)


def run_halves_in_parallel(layer: Any) -> None:
    def forward(own: Any, x: Tensor, **kwargs: Any) -> Tensor:
        attention = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
        return x + attention + layer.mlp(layer.post_attention_layernorm(x))

    derive(layer, forward)


def derive(module: Any, forward: Callable[..., Any]) -> None:
    """Make the module one of a subclass with this forward, which gets the class's own."""
    own = type(module).forward
    module.__class__ = type(
        f"Other{type(module).__name__}",
        (type(module),),
        {"forward": lambda self, *args, **kwargs: forward(MethodType(own, self), *args, **kwargs)},
    )


# What is changed in the middle layer, and what then is not fused.
CHANGES: dict[Callable[[Any], None], tuple[str, str, str]] = {
    clamp_gate: ("mlp", "mlp", "its result is another than silu(gate) * up gives"),
    centre: ("input_layernorm", "norm", "it is no RMSNorm"),
    raise_eps: ("post_attention_layernorm", "norm", "it is no RMSNorm"),
    stretch_late_queries: ("self_attn", "attention", OTHER_QUERIES),
    gate_output: ("self_attn", "attention", "its results are other than projections, norms and a rope give"),
    scale_values: ("self_attn", "attention", NO_QKV),
    weaken_residual: ("", "layer", OTHER_SUM),
    run_halves_in_parallel: ("", "layer", OTHER_SUM),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_module_that_only_looks_alike_is_left_alone(change: Callable[[Any], None]) -> None:
    """The other layers are fused, and the residual is handed on around it."""
    path, kind, reason = CHANGES[change]
    models = [zoo.build("llama") for _ in range(2)]
    for model in models:
        change(model.model.layers[1].get_submodule(path))
    fused, own = prepare(models[0]), prepare(models[1], fused=False)
    done, total = report_of(fused).swapped[kind]
    assert done == total - 1
    assert reason in {why for _, why in report_of(fused).unmatched}
    assert_equal_logits(fused, own)


def test_layers_that_differ() -> None:
    """Activations, norms and forwards of others' making, layer by layer."""
    models = [zoo.build("llama") for _ in range(2)]
    for model in models:
        first, second, third = model.model.layers
        first.mlp.act_fn = nn.ReLU()
        second.forward = MethodType(type(second).forward, second)
        third.self_attn.register_forward_hook(lambda module, args, output: (output[0] * 2, None))
    fused, own = prepare(models[0]), prepare(models[1], fused=False)
    assert report_of(fused).swapped == {"norm": (7, 7), "attention": (2, 3), "mlp": (2, 3), "layer": (2, 3)}
    assert "not fused: 1 LlamaAttention: its forward is not that of its class; 1 LlamaMLP" in str(fused.fusion)
    assert_equal_logits(fused, own)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU(approximate="tanh"), ACT2FN["gelu_new"]], ids=repr)
def test_layers_with_gelu(activation: nn.Module) -> None:
    models = [zoo.build("llama") for _ in range(2)]
    for model in models:
        model.model.layers[1].mlp.act_fn = activation
    fused, own = prepare(models[0]), prepare(models[1], fused=False)
    assert report_of(fused).swapped["mlp"] == ALL
    assert_equal_logits(fused, own)


def test_an_activation_that_no_kernel_has_is_left_alone() -> None:
    model = zoo.build("gpt2")
    model.transformer.h[0].mlp.act = ACT2FN["quick_gelu"]
    assert report_of(prepare(model)).unmatched["GPT2MLP", OTHER_ACTIVATION] == 1


def test_hidden_states_that_change_between_layers() -> None:
    class Doubled(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return self.layer(2 * hidden_states, **kwargs)

    models = [zoo.build("llama") for _ in range(2)]
    for model in models:
        model.model.layers[1] = Doubled(model.model.layers[1])
    fused, own = prepare(models[0]), prepare(models[1], fused=False)
    assert report_of(fused).swapped["layer"] == ALL
    assert_equal_logits(fused, own)


def test_a_fused_model_that_fails_the_self_check_runs_as_it_is() -> None:
    class WrongInSteps(TorchSteps):
        """Right for the 16 tokens of a trial."""

        def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
            result = super().add_rmsnorm(x, norm, residual)
            return result if x.shape[0] == 16 else result * 1.01

    model = zoo.build("llama")
    kept = prepare_model(model, max_model_len=MAX_LEN, fused_steps=WrongInSteps())
    assert str(kept.fusion).startswith("fused: nothing; not fused: 1 LlamaForCausalLM: its logits over a block pool")
    assert not any("forward" in vars(module) for module in model.modules())
    assert_equal_logits(kept, prepare(zoo.build("llama"), fused=False))


def test_who_decides_whether_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_steps(cpu, block_size=16, wanted=None) is None
    assert isinstance(choose_steps(cpu, block_size=16, wanted=True), TorchSteps)
    assert choose_steps(cuda, block_size=16, wanted=False) is None
    assert choose_steps(cuda, block_size=8, wanted=None) is None
    assert isinstance(choose_steps(cuda, block_size=8, wanted=True), TorchSteps)


def test_the_report_is_a_line() -> None:
    report = FusionReport("kernels", {"attention": (2, 3), "mlp": ALL}, {("OtherAttention", "it is odd"): 1})
    assert str(report) == "fused (kernels): attention 2 of 3, mlp 3 of 3; not fused: 1 OtherAttention: it is odd"
    assert str(FusionReport("torch", {"mlp": ALL}, {})) == "fused (torch): mlp 3 of 3"
