"""LoRA adapters through the worker's executor: tokens against merged weights, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import executor_driver as driver
import lora_zoo
import model_zoo as zoo
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quire.cache.v1 import grant_pb2
from quire.worker.__main__ import main
from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.adapters import lora_linear
from quire.worker.adapters.adapter import Adapter, UnsupportedAdapter
from quire.worker.adapters.adapter_table import AdapterTable, NoAdapterRoomError
from quire.worker.adapters.peft_checkpoint import read_adapter
from quire.worker.grant.adapter_users import AdapterUsers
from quire.worker.grant.decoding import check_adapters
from quire.worker.grant.errors import Refused
from quire.worker.memory.step_batch import AdapterTokens, tokens_of_adapters
from quire.worker.model.adapter_check import check_adapter
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import Outcome
from quire.worker.run.verify import OwnershipViolation

NEW_TOKENS = 8
SCALING = 2.0
ADAPTED = ("a", "", "b", "b", "a")
"""The adapters of the driver's prompts."""
LAYER = "base_model.model.model.layers.1.self_attn.q_proj"


def adapter_of(family: str, seed: int, folder: Path, **fields: Any) -> Adapter:
    return read_adapter(folder.name, lora_zoo.save(zoo.build(family), folder, seed=seed, **fields))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    """A llama with two adapters, "a" of all layers and "b" of the attention's."""
    folder = tmp_path_factory.mktemp("adapters")
    paged = prepare_model(zoo.build("llama"), max_model_len=driver.MAX_MODEL_LEN)
    b = adapter_of("llama", 2, folder / "b", targets=lora_zoo.ATTENTION)
    put(paged, adapter_of("llama", 1, folder / "a"))
    put(paged, b)
    return paged


def put(paged: PagedModel, adapter: Adapter) -> bytes:
    """Add an adapter to a model, checked; return its identity."""
    prepared = paged.adapters.prepare(adapter)
    paged.adapters.add(prepared)
    check_adapter(paged, prepared)
    return prepared.identity


def merged(name: str) -> Any:
    """The llama with one of the two adapters in its weights, or none."""
    base = zoo.build("llama")
    if not name:
        return base
    targets = lora_zoo.ALL if name == "a" else lora_zoo.ATTENTION
    weights = lora_zoo.draw_weights(base, seed=1 if name == "a" else 2, targets=targets)
    return lora_zoo.merge(base, weights, scaling=SCALING)


def identities(model: PagedModel) -> list[bytes]:
    return [identity_of(model, name) if name else b"" for name in ADAPTED]


def identity_of(model: PagedModel, name: str) -> bytes:
    """Return the identity of the first adapter, "a", or of the second one."""
    return list(model.adapters.numbers)["ab".index(name)]


def test_tokens_are_those_of_merged_weights(model: PagedModel) -> None:
    """Two adapters and the base in one batch: prompts in chunks, forks and a preemption."""
    found, forked = driver.run_mixed(model, NEW_TOKENS, adapters=identities(model))
    plain = {name: merged(name) for name in ("a", "b", "")}
    expected = [
        zoo.generate(plain[name], prompt, NEW_TOKENS)
        for name, prompt in zip(ADAPTED, driver.make_prompts(), strict=True)
    ]
    assert found == expected
    assert forked == [expected[i] for i in driver.FORKED]
    without = [zoo.generate(plain[""], prompt, NEW_TOKENS) for prompt in driver.make_prompts()]
    assert [tokens == others for tokens, others in zip(found, without, strict=True)] == [not name for name in ADAPTED]


@pytest.mark.parametrize("at_once", [True, False])
def test_both_ways_to_add_updates_are_the_formula(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters of several ranks, of which two are in the step; what a token overflows in is its own alone."""
    monkeypatch.setattr(lora_linear, "MAX_TOKENS_AT_ONCE", 64 if at_once else 0)
    generator = torch.Generator().manual_seed(5)
    base, routing = torch.nn.Linear(6, 5).requires_grad_(False), lora_linear.Routing()
    layer = lora_linear.LoraLinear(base, routing)
    pairs = {
        number: (torch.randn(rank, 6, generator=generator), torch.randn(5, rank, generator=generator))
        for number, rank in ((7, 2), (8, 1), (9, 3))
    }
    for number, (a, b) in pairs.items():
        layer.add(number, a, b)
    layer.remove(8)
    layer.add(8, torch.full((1, 6), 3e38), torch.zeros(5, 1))
    input = torch.randn(1, 4, 6, generator=generator)
    groups = (AdapterTokens(9, slice(0, 1)), AdapterTokens(7, torch.tensor([1, 3])))
    with routing.routed(groups, 4):
        found = layer(input)[0]
    expected = base(input)[0]
    for token, number in {0: 9, 1: 7, 3: 7}.items():
        a, b = pairs[number]
        expected[token] += b @ a @ input[0, token]
    torch.testing.assert_close(found, expected)
    layer.remove(7)
    layer.remove(8)
    layer.remove(9)
    with routing.routed(groups, 4):
        torch.testing.assert_close(layer(input), base(input))


def test_a_sequence_with_an_adapter_comes_back_from_the_host_tier(model: PagedModel) -> None:
    prompt, orders = driver.make_prompts()[1], driver.ExecutorDriver(model)
    stream = orders.admit(prompt, identity_of(model, "a"))
    assert orders.step([(stream, len(prompt))]) is Outcome.COMPUTED
    orders.offload(stream)
    other = orders.admit(prompt)
    assert orders.step([(other, len(prompt))]) is Outcome.COMPUTED
    orders.restore(stream)
    for _ in range(NEW_TOKENS - 1):
        assert orders.step([(stream, 1), (other, 1)]) is Outcome.COMPUTED
    assert stream.tokens == zoo.generate(merged("a"), prompt, NEW_TOKENS)
    assert other.tokens == zoo.generate(merged(""), prompt, NEW_TOKENS)


def test_blocks_of_another_adapter_are_a_violation(model: PagedModel) -> None:
    prompt, orders = driver.make_prompts()[1], driver.ExecutorDriver(model)
    owner = orders.admit(prompt, identity_of(model, "a"))
    orders.step([(owner, len(prompt))])
    same, other = (orders.admit(prompt, identity_of(model, name)) for name in ("a", "b"))
    orders.share(owner, same, 32)
    assert orders.step([(same, 1)]) is Outcome.COMPUTED
    orders.share(owner, other, 32)
    with pytest.raises(OwnershipViolation, match="I4"):
        orders.step([(other, 1)])


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "phi3"])
def test_layers_of_every_kind_take_updates(family: str, tmp_path: Path) -> None:
    """Conv1D, layers with a bias, and layers that compute several projections at once."""
    names = {"gpt2": ("c_attn", "c_fc"), "qwen2": ("q_proj", "v_proj"), "phi3": ("qkv_proj", "gate_up_proj")}[family]
    paged = prepare_model(zoo.build(family), max_model_len=driver.MAX_MODEL_LEN)
    identity = put(paged, adapter_of(family, 3, tmp_path / "c", targets=names))
    adapters = [identity] * len(driver.PROMPT_LENGTHS)
    found, _ = driver.run_mixed(paged, 4, adapters=adapters)
    base = zoo.build(family)
    prompt = driver.make_prompts()[0]
    weights = lora_zoo.draw_weights(base, seed=3, targets=names)
    assert found[0] == zoo.generate(lora_zoo.merge(base, weights, scaling=SCALING), prompt, 4)


def test_scaling_by_the_root_of_the_rank_and_by_layer(tmp_path: Path) -> None:
    stable = adapter_of("llama", 1, tmp_path / "s", use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 2})
    assert stable.updates["model.layers.0.self_attn.q_proj"].scaling == 8 / 2
    assert stable.updates["model.layers.1.self_attn.q_proj"].scaling == 2 / 2


def test_the_identity_is_the_content(tmp_path: Path) -> None:
    one, same = adapter_of("llama", 1, tmp_path / "one"), adapter_of("llama", 1, tmp_path / "same")
    others = [
        adapter_of("llama", 2, tmp_path / "seed"),
        adapter_of("llama", 1, tmp_path / "alpha", alpha=9),
        adapter_of("llama", 1, tmp_path / "targets", targets=lora_zoo.ATTENTION),
    ]
    assert one.identity() == same.identity()
    assert len({each.identity() for each in (one, *others)}) == 4
    paged = prepare_model(zoo.build("llama"), max_model_len=64)
    assert put(paged, one) == put(paged, same)
    assert len(paged.adapters.numbers) == 1


def test_tokens_of_an_adapter_are_a_slice_where_they_lie_together() -> None:
    first, second = tokens_of_adapters([0, 0, None, 1, None, 1], [2, 1, 4, 1, 1, 2])
    assert (first.adapter, first.tokens) == (0, slice(0, 3))
    assert second.adapter == 1
    assert isinstance(second.tokens, torch.Tensor)
    assert second.tokens.tolist() == [7, 9, 10]
    assert tokens_of_adapters([None], [3]) == ()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type in adapter_config.json is 'IA3'; must be LORA"),
    "dora": ({"use_dora": True}, "use_dora in adapter_config.json is True; must be unset"),
    "bias": ({"bias": "all"}, "bias in adapter_config.json is 'all'; must be none"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save in adapter_config.json is"),
    "rank": ({"r": 200}, "r in adapter_config.json is 200; must be 1 to 128"),
    "other rank": ({"r": 5}, "and adapter_config.json says rank 5"),
    "alpha": ({"lora_alpha": float("nan")}, "lora_alpha in adapter_config.json is nan; must be a finite number"),
    "changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights in adapter_config.json is 'pissa'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_beyond_plain_lora_is_refused(case: str, tmp_path: Path) -> None:
    fields, message = CONFIGS[case]
    folder = lora_zoo.save(zoo.build("llama"), tmp_path / "x", seed=1)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    with pytest.raises(UnsupportedAdapter) as error:
        read_adapter("x", folder)
    assert str(error.value).startswith("adapter x is not supported: ")
    assert message in str(error.value)


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "adapter_model.safetensors is damaged"),
    "missing": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "there is no file"),
    "no configuration": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "adapter_config.json can't be read: No such file",
    ),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is no JSON"),
    "half a pair": (
        lambda folder: rewrite(folder, lambda weights: weights.pop(f"{LAYER}.lora_B.weight")),
        "its layer model.layers.1.self_attn.q_proj has no lora_B.weight",
    ),
    "not finite": (
        lambda folder: rewrite(folder, lambda weights: weights[f"{LAYER}.lora_A.weight"].fill_(float("inf"))),
        "q_proj.lora_A.weight has elements that are no finite numbers",
    ),
    "embedding": (
        lambda folder: rewrite(
            folder, lambda weights: weights.update({"base_model.model.embed.lora_embedding_A": torch.ones(4, 4)})
        ),
        "is not lora_A or lora_B of a linear layer",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    damage, message = FILES[case]
    folder = lora_zoo.save(zoo.build("llama"), tmp_path / "x", seed=1)
    damage(folder)
    with pytest.raises(UnsupportedAdapter, match=message):
        read_adapter("x", folder)


def test_one_of_too_many_bytes_is_refused(model: PagedModel, tmp_path: Path) -> None:
    adapter = adapter_of("llama", 5, tmp_path / "x")
    num_bytes = model.adapters.prepare(adapter).num_bytes
    bounds = AdapterBounds(max_bytes=num_bytes - 1)
    with pytest.raises(UnsupportedAdapter, match=f"take {num_bytes} bytes; --lora-memory is {num_bytes - 1}"):
        model.adapters.prepare(adapter, bounds)


def renamed(adapter: Adapter, old: str, new: str) -> Adapter:
    return Adapter(adapter.name, {name.replace(old, new): update for name, update in adapter.updates.items()})


def test_an_adapter_of_another_model_is_refused(model: PagedModel, tmp_path: Path) -> None:
    adapter = adapter_of("llama", 1, tmp_path / "x")
    wide = Adapter("x", dict(adapter_of("llama", 1, tmp_path / "w").updates))
    update = wide.updates["model.layers.0.mlp.down_proj"]
    cases = {
        "has no layer model.layers.0.attn": renamed(adapter, "self_attn", "attn"),
        "is a LlamaRMSNorm, and no linear layer": renamed(adapter, "layers.0.self_attn.q_proj", "norm"),
        "is the output layer": Adapter("x", {"lm_head": update}),
        "is of another base: model.layers.0.mlp.up_proj has 32 inputs": Adapter(
            "x", {"model.layers.0.mlp.up_proj": update}
        ),
        "times its scaling 1e\\+300, is beyond torch.float32": Adapter(
            "x", {"model.layers.0.mlp.down_proj": replace(update, scaling=1e300)}
        ),
    }
    for message, case in cases.items():
        with pytest.raises(UnsupportedAdapter, match=message):
            model.adapters.prepare(case)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tensor-parallel-size", "2"), "--lora excludes --tensor-parallel-size 2: an adapter's weights"),
        (("--device", "cpu", "--fuse"), "--lora excludes --fuse on a CPU: fused modules add updates"),
        (("--lora", "x=."), "--lora gives the name x twice"),
        (("--max-loras", "1", "--lora", "y=."), "--lora is given 2 times; --max-loras is 1"),
        (("--lora", "a b=."), "'a b=.' is not NAME=PATH with a name of 1 to 128 letters"),
    ],
)
def test_flags_that_exclude_adapters_are_refused(flags: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--model", str(tmp_path), "--lora", "x=.", *flags])
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())


def test_a_run_with_an_adapter_that_is_not_here_is_refused_with_the_list() -> None:
    grant = grant_pb2.StepGrant(run_sequence_ids=[4, 5], adapters=[b"y" * 32], run_adapters=[0, 1])
    check_adapters(grant, {"mine": b"y" * 32})
    with pytest.raises(Refused) as error:
        check_adapters(grant, {"mine": b"x" * 32})
    assert error.value.metadata["sequence_id"] == "5"
    assert str(error.value).endswith(f"must be one of this worker's 1 adapters, like {(b'x' * 32).hex()} (mine)")
    with pytest.raises(Refused, match="empty: this worker has no adapters"):
        check_adapters(grant, {})
    for numbers in ([1], [0, 2], [0, -1]):
        grant.run_adapters[:] = numbers
        with pytest.raises(Refused, match=r"grant\.run_adapters"):
            check_adapters(grant, {"mine": b"y" * 32})


def test_one_beyond_the_bounds_of_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = lora_zoo.save(zoo.build("llama"), tmp_path / "x", seed=1)
    with pytest.raises(UnsupportedAdapter, match=r"r in adapter_config.json is 4; must be 1 to 3, --max-lora-rank"):
        read_adapter("x", folder, AdapterBounds(max_rank=3))
    weights = folder / "adapter_model.safetensors"
    with weights.open("ab") as file:  # sparse: no bytes of it are written, and none are to be read
        file.truncate(3 << 20)
    with pytest.raises(UnsupportedAdapter, match=r"has 3145728 bytes; --lora-memory 1000000 keeps no adapter"):
        read_adapter("x", folder, AdapterBounds(max_bytes=1_000_000))


def test_the_adapters_unused_the_longest_make_room() -> None:
    """Two names of one content have its bytes once, and neither goes while a sequence has it."""
    table = AdapterTable(AdapterBounds(max_adapters=3, max_bytes=100))
    for name, identity in {"a": b"1", "b": b"2", "same": b"1"}.items():
        assert table.find_room(identity, 40) == []
        table.add(name, identity, 40)
        table.check_invariants()
    table.use(b"2")
    assert (table.num_bytes, table.find_room(b"3", 20)) == (80, ["a"])
    assert table.find_room(b"3", 60) == ["a", "same"]
    assert table.find_room(b"3", 60, is_used=lambda identity: identity == b"2") == ["a", "same"]
    with pytest.raises(NoAdapterRoomError, match="--max-loras 3 is reached, and all adapters are in use"):
        table.find_room(b"3", 20, is_used=lambda identity: True)
    with pytest.raises(NoAdapterRoomError, match="--lora-memory 100 is reached, and all adapters are in use"):
        table.find_room(b"3", 70, is_used=lambda identity: identity == b"2")
    assert [table.remove(name) for name in ("a", "same")] == [None, b"1"]
    table.check_invariants()


def test_an_adapter_is_in_use_while_a_sequence_of_an_accepted_grant_has_it() -> None:
    users = AdapterUsers()
    first, second = b"1" * 32, b"2" * 32
    users.accept(
        grant_pb2.StepGrant(lease_id="l", run_sequence_ids=[1, 2, 3], adapters=[first, second], run_adapters=[1, 0, 2])
    )
    users.accept(grant_pb2.StepGrant(lease_id="l", fork_parent_ids=[1, 2], fork_child_ids=[4, 5]))
    assert users.counts() == {first: 2, second: 1}
    users.accept(grant_pb2.StepGrant(lease_id="l", released_sequence_ids=[1], offloaded_sequence_ids=[3]))
    assert users.counts() == {first: 1, second: 1}, "one in the host tier is restored without an admission"
    users.accept(grant_pb2.StepGrant(lease_id="l", released_sequence_ids=[3]))
    assert users.counts() == {first: 1}
    users.end_lease("l")
    assert users.counts() == {}
