"""Memory of models with windows: a block table for each layer group, beside one table for all layers.

The worker's own cut of the layers, and cachemgr's own books. A block of a pool with groups has the bytes of its largest
group; layers that a smaller group lacks are counted as held. The least possible is what each layer reads, in blocks of
16 tokens: all tokens, or a window, and the tokens of the steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from books import LEASE, Books
from report import percent, plain, table
from rich.table import Table

from quire.cachemgr import geometry
from quire.cachemgr.service import messages
from quire.worker.memory.layer_groups import LayerGroupChoice, LayerGroups, group_layers
from quire.worker.memory.layer_spec import Causal, Chunked, LayerSpec, Mask, Sliding
from quire.worker.service.description import describe_layer_groups

BLOCK_SIZE = 16
CHUNK = 512
"""Tokens of a prompt in a step."""
NUM_DECODED = 64
IN_FLIGHT = 1
"""Tokens of the step in flight, when a length is measured."""
LENGTHS = (1_024, 8_192, 32_768)
QUICK_LENGTHS = (1_024, 8_192)
MAX_MODEL_LEN = 131_072
FIT_MODEL, FIT_TOKENS, FIT_BYTES = "Gemma 3 27B", 8_192, 20 * 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a model. Every layer is masked, but every full_every-th, which sees all tokens; 0: none does."""

    name: str
    num_layers: int
    mask: Mask
    full_every: int
    num_kv_heads: int
    head_dim: int

    def specs(self) -> dict[int, LayerSpec]:
        masks = [
            Causal() if self.full_every and not (index + 1) % self.full_every else self.mask
            for index in range(self.num_layers)
        ]
        heads, dim = self.num_kv_heads, self.head_dim
        return {i: LayerSpec(i, heads, heads, dim, dim, mask, 1.0, None, False) for i, mask in enumerate(masks)}

    def groups(self, choice: LayerGroupChoice = "auto") -> LayerGroups:
        return group_layers(self.specs(), max_model_len=MAX_MODEL_LEN, choice=choice)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block: keys and values in 16 bits."""
        return BLOCK_SIZE * self.num_kv_heads * self.head_dim * 2 * 2

    def block_bytes(self, groups: LayerGroups) -> int:
        return max(len(group.layers) for group in groups) * self.layer_bytes

    def least_bytes(self, num_tokens: int) -> int:
        """The bytes that a sequence of so many computed tokens needs with a step in flight."""

        def seen(mask: Mask) -> int:
            return num_tokens - mask.first_visible(num_tokens - 1)

        return sum(-(-(seen(spec.mask) + IN_FLIGHT) // BLOCK_SIZE) * self.layer_bytes for spec in self.specs().values())


SHAPES = (
    Shape("Gemma 3 4B", 34, Sliding(1_024), 6, 4, 256),
    Shape("Gemma 3 27B", 62, Sliding(1_024), 6, 16, 128),
    Shape("gpt-oss 20B", 24, Sliding(128), 2, 8, 64),
    Shape("Llama 4 Scout", 48, Chunked(8_192), 4, 8, 128),
    Shape("Mistral 7B v0.1", 32, Sliding(4_096), 0, 8, 128),
    Shape("Command R7B", 32, Sliding(4_096), 4, 8, 128),
)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a sequence at one length, and the most bytes over the least of the last block_size lengths."""

    num_tokens: int
    with_groups: int
    one_table: int
    least: int
    worst_ratio: float


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes of one shape by length, with the layers of its groups as the worker cuts them."""

    name: str
    layers_per_group: list[int]
    held: list[Held] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WindowedFit:
    """Sequences of num_tokens that fit in num_bytes."""

    model: str
    num_tokens: int
    num_bytes: int
    with_groups: int
    one_table: int


@dataclass(frozen=True, slots=True)
class Windows:
    """All that is measured here."""

    models: list[Model]
    fit: WindowedFit


def register(groups: LayerGroups) -> tuple[geometry.LayerGroup, ...]:
    """The groups as cachemgr has them when a worker has registered its pool."""
    described = describe_layer_groups(groups)
    return messages.decode_layer_groups(messages.attach_pb2.PoolGeometry(layer_groups=described))


def make_books(num_blocks: int, groups: LayerGroups) -> Books:
    return Books(num_blocks, block_size=BLOCK_SIZE, layer_groups=register(groups))


def held_blocks(num_tokens: int, groups: LayerGroups) -> list[int]:
    """Blocks that a sequence takes from its pool, at each of the last BLOCK_SIZE lengths up to num_tokens.

    Its prompt is computed in chunks, the rest token by token. The next step is always planned before the report of the
    one before. Blocks that only a step in flight can still read are counted, cached ones are not.
    """
    books = make_books(len(groups) * (-(-num_tokens // BLOCK_SIZE) + 2), groups)
    prompt = num_tokens - NUM_DECODED
    counts = [CHUNK] * (prompt // CHUNK) + [prompt % CHUNK] * bool(prompt % CHUNK)
    in_flight = books.plan_admission(prompt, most=counts[0])
    held = []
    for count in [*counts[1:], *[1] * (NUM_DECODED + IN_FLIGHT)]:
        planned = books.plan_more(count)
        if planned.has_refusals:
            raise RuntimeError(f"refused: {planned.refusals[0]}")
        books.settle(in_flight)
        in_flight = planned
        now = messages.counts_of(books.ledger)
        held.append(now.active_count + now.retired_count)
    last = books.ledger.inspector.sequence(LEASE, 0)
    if last is None or last.num_computed != num_tokens:
        raise RuntimeError(f"the sequence has not {num_tokens} computed tokens")
    return held[-BLOCK_SIZE:]


def measure_model(shape: Shape, lengths: Sequence[int]) -> Model:
    groups, one = shape.groups(), shape.groups("one")
    model = Model(shape.name, [len(group.layers) for group in groups])
    for length in lengths:
        held = [blocks * shape.block_bytes(groups) for blocks in held_blocks(length, groups)]
        least = [shape.least_bytes(length - back) for back in reversed(range(BLOCK_SIZE))]
        one_table = held_blocks(length, one)[-1] * shape.block_bytes(one)
        worst = max(bytes_held / needed for bytes_held, needed in zip(held, least, strict=True))
        model.held.append(Held(length, held[-1], one_table, least[-1], worst))
    return model


def num_sequences(num_bytes: int, num_tokens: int, shape: Shape, groups: LayerGroups) -> int:
    """Sequences that fit, all at their full length: one after the other is admitted in chunks until one is refused."""
    books = make_books(num_bytes // shape.block_bytes(groups) - 1, groups)
    for count in range(num_bytes):
        plan, num_computed = books.plan_admission(num_tokens, most=CHUNK), CHUNK
        while not plan.has_refusals and num_computed < num_tokens:
            books.settle(plan)
            plan, num_computed = books.plan_more(min(CHUNK, num_tokens - num_computed)), num_computed + CHUNK
        if plan.has_refusals:
            return count
        books.settle(plan)
    raise RuntimeError("every sequence fits")


def measure_fit(shape: Shape) -> WindowedFit:
    with_groups, one = (
        num_sequences(FIT_BYTES, FIT_TOKENS, shape, groups) for groups in (shape.groups(), shape.groups("one"))
    )
    return WindowedFit(shape.name, FIT_TOKENS, FIT_BYTES, with_groups, one)


def measure(*, quick: bool) -> Windows:
    lengths = QUICK_LENGTHS if quick else LENGTHS
    fitting = next(shape for shape in SHAPES if shape.name == FIT_MODEL)
    return Windows([measure_model(shape, lengths) for shape in SHAPES], measure_fit(fitting))


def as_json(windows: Windows) -> dict[str, Any]:
    return {"block_size": BLOCK_SIZE, "chunk": CHUNK} | asdict(windows)


def tables(windows: Windows) -> list[Table]:
    made = table(
        "MiB of one sequence: a table for each layer group, and one table",
        *("model", "layers of the groups", "tokens", "groups", "one table", "least", "over the least, at most"),
        words=2,
    )
    for model in windows.models:
        for held in model.held:
            sizes = [f"{size / 2**20:,.1f}" for size in (held.with_groups, held.one_table, held.least)]
            cut = "+".join(map(str, model.layers_per_group))
            made.add_row(model.name, cut, f"{held.num_tokens:,}", *sizes, percent(held.worst_ratio - 1))
    fit = windows.fit
    title = f"sequences of {fit.num_tokens:,} tokens in {fit.num_bytes >> 30} GiB: {fit.model}"
    fits = table(title, "groups", "one table", "times", words=0)
    fits.add_row(str(fit.with_groups), str(fit.one_table), f"{fit.with_groups / fit.one_table:.2f}")
    return [made, fits]


def plot(windows: Windows, axes: Any) -> None:
    """Bytes at the longest length, relative to one table; the least possible as a line over each bar."""
    names = [model.name.replace(" ", "\n", 1) for model in windows.models]
    held = [model.held[-1] for model in windows.models]
    drawn = axes.bar(names, [each.with_groups / each.one_table for each in held], color="tab:blue")
    axes.bar_label(drawn, [percent(each.with_groups / each.one_table, 0) for each in held], fontsize=8)
    places = range(len(names))
    least = [each.least / each.one_table for each in held]
    axes.plot(places, least, "k_", markersize=24, label="least possible")
    axes.tick_params(axis="x", labelsize=6)
    axes.set_title(f"windows at {held[0].num_tokens:,} tokens: bytes, of one table's", fontsize=10)
    axes.legend(fontsize=8)
    plain(axes)
