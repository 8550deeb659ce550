"""Make the language model that `make demo` runs: corpus, tokenizer, training, model folder.

    python deploy/demo/train.py --out deploy/demo/model --minutes 11

The text is the documentation that is already on the disk of any machine with this project installed: the docstrings,
long string constants and block comments of the Python standard library and of a few installed packages (see SOURCES).
Source files are parsed, never imported. Only sentences that read as plain English are kept, so that what the model
prints is legible. Nothing is downloaded.

The result is a Llama of about 1.6 million parameters, 3.2 MB in bfloat16. It writes sentences in the style of software
documentation; it does not know anything and it is not a chat model.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import platform
import re
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 20
EOS = "<|endoftext|>"

# ---------------------------------------------------------------------------------------------------------------------
# Corpus: which packages
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A package with texts for training. All but Python itself are direct or indirect dependencies of this project."""

    package: str
    licence: str
    headers: tuple[str, ...] = ()  # folders of C++ headers, read for their comments


SOURCES = (
    Source("python", "PSF-2.0"),  # the standard library, pydoc_data.topics (the language reference) included
    Source("numpy", "BSD-3-Clause"),
    Source("torch", "BSD-3-Clause", headers=("include/ATen", "include/c10", "include/torch")),
    Source("transformers", "Apache-2.0"),
    Source("huggingface_hub", "Apache-2.0"),
    Source("networkx", "BSD-3-Clause"),
    Source("sympy", "BSD-3-Clause"),
    Source("mpmath", "BSD-3-Clause"),
    Source("fsspec", "BSD-3-Clause"),
    Source("jinja2", "BSD-3-Clause"),
    Source("click", "BSD-3-Clause"),
)

# Tests have little prose, the other folders hold other people's code under other licences.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "ensurepip", "_vendor", "vendored")
)
# Files written by a program, or tables.
SKIPPED_FILES = re.compile(r"(^test_|_test\.py$|_pb2|dummy_|^_?sysconfigdata|_generated)")


def source_root(source: Source) -> Path:
    if source.package == "python":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(source.package)
    if spec is None or spec.origin is None:
        raise click.ClickException(f"{source.package} is not installed; the corpus is made of its documentation")
    return Path(spec.origin).parent


def source_version(source: Source) -> str:
    if source.package == "python":
        return platform.python_version()
    return importlib.metadata.version(source.package)


def source_files(source: Source) -> Iterator[Path]:
    root = source_root(source)
    headers = [path for folder in source.headers for path in (root / folder).rglob("*.h")]
    for path in sorted(root.rglob("*.py")) + sorted(headers):
        inner = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(inner.parts[:-1]) and not SKIPPED_FILES.search(inner.name):
            yield path


# ---------------------------------------------------------------------------------------------------------------------
# Corpus: from a source file to raw texts
# ---------------------------------------------------------------------------------------------------------------------

COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#(?![!:-]).*\n){3,}", re.MULTILINE)
CPP_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*//.*\n){3,}", re.MULTILINE)


def raw_texts(path: Path) -> Iterator[str]:
    """The documentation of one file: every long multi-line string, then every comment of three lines or more.

    A docstring is one such string; so are the arguments of numpy's add_newdoc and torch's add_docstr and the values of
    pydoc_data.topics, which have no other home.
    """
    try:
        code = path.read_text(encoding="utf-8")
        if path.suffix == ".h":
            for block in CPP_COMMENT_BLOCK.findall(code):
                yield "\n".join(re.sub(r"^\s*//+ ?", "", line).rstrip() for line in block.splitlines())
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= 100
    ]
    for node in sorted(strings, key=lambda found: (found.lineno, found.col_offset)):
        assert isinstance(node.value, str)
        if "\n" in node.value:
            yield inspect.cleandoc(node.value)
    for block in COMMENT_BLOCK.findall(code):
        yield "\n".join(re.sub(r"^\s*# ?", "", line).rstrip() for line in block.splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# Corpus: from raw text to English sentences
# ---------------------------------------------------------------------------------------------------------------------

# Markup, replaced in this order: reStructuredText roles, Markdown links, the cross references of transformers, quotes.
MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\[`~?([^`\]]+)`\](\([^)]*\))?"), r"\1"),
    (re.compile(r"!?\[([^\]\[]+)\]\([^)\s]*\)"), r"\1"),
    (re.compile(r":math:`[^`]*`"), "\0"),
    (re.compile(r":[a-zA-Z:+-]+:`[~!]?([^`<]+?)\s*(?:<[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"\s?\[[\w#*]+\]_"), ""),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r'"{1,2}([\w.]+(?:\(\))?)"{1,2}'), r"\1"),
    (re.compile(r"`([^`]*)`_?"), r"\1"),
    (re.compile(r"\*\*([^*\n]+)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s][^*\n]*)\*(?!\w)"), r"\1"),
    (re.compile(r"(?<!\w)_([A-Za-z][a-z]+)_(?!\w)"), r"\1"),
    (re.compile("[\u2018\u2019]"), "'"),
    (re.compile("[\u201c\u201d]"), '"'),
    (re.compile(r"\s*(?:\u2014|\u2013|---|--)\s*"), " - "),
)

# A piece of text with one of these is code, a table, a directive or legal text.
NOT_PROSE = re.compile(
    r">>>|^\s*\.\.\s|^\s*[-=~^+*|#]{3,}|\\\w+\{|^\s*:\w+|```|^\s*@|</?\w+>"
    r"|^\s*(?:def|class|if|for|while|with) .*:$|^\s*import [\w.]+$|copyright|licen[sc]e|warrant|TODO|FIXME",
    re.MULTILINE | re.IGNORECASE,
)
# Where a paragraph falls into pieces: bullets, the heads of parameter descriptions (three styles), section titles.
PIECES = re.compile(
    r"^\s*(?:[-*+\u2022]|\(?\d+[.)]|\[\d+\]|[a-z]\))\s+"
    r"|^\s*[\w*, ]+ : .*$|^\s*[\w.*`]+ ?\([^\n]*?\):|^\s*:\w+ [\w ]+:"
    r"|^\s*(?:Args|Arguments|Parameters|Attributes|Returns?|Yields|Raises|Examples?|Notes?|See Also|References):?\s*$",
    re.MULTILINE,
)
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|al|resp|Fig|Eq|Sec|No|Dr|Mr|St|approx)|\b[A-Z])\.$")
SENTENCE_END = re.compile(r"(?<=[.?!])[\"')]*\s+(?=[A-Z\"'(])")
PLAIN = re.compile(r"[A-Za-z ,.';?!\-]")
ODD = re.compile(
    r"[^\x20-\x7e]|[=<>\\{}\[\]|~^$@#&%+*_]{2}|[\\{}|~^$@&=<>#]|https?:|::|www\.|\.\.\.|\bet al\b|\bpp\."
    r"|'[^\w\s]*'|(?:^|\s)[^\w\s]+(?=\s)(?<!-)|\?\?|!!"
)
# A name from code, a quoted word, an acronym or a number.
IDENTIFIER = re.compile(
    r"\b\w*_\w*\b|\b\w+\.\w+|\b\w+\(|\b[a-z]+[A-Z]\w*|\b[A-Z][a-z0-9]+[A-Z]\w*|\b[A-Z]{2,}\d*\b|\d+|(?<!\w)['\"]\w"
)
COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an the of to in is are be for and or that this it with by as on if not from which can will when at has have "
        "must may should used was were been does do no any all its you we they their these those there each other such "
        "than then so but one only also more into after before between how what where while without both same use uses",
    )
)


def strip_markup(text: str) -> str:
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return text


def sentences(paragraph: str) -> Iterator[str]:
    """Split at sentence ends, except after an abbreviation."""
    held = ""
    for piece in SENTENCE_END.split(paragraph):
        held = f"{held} {piece}" if held else piece
        if not ABBREVIATION.search(held):
            yield held.strip()
            held = ""
    if held:
        yield held.strip()


def is_english(sentence: str) -> bool:
    """Does it read as a whole sentence of plain English, with at most one name from code in it?"""
    words = sentence.split()
    if not 5 <= len(words) <= 40 or not sentence[0].isupper() or sentence[-1] not in ".?!":
        return False
    if ODD.search(sentence) or sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    if len(PLAIN.findall(sentence)) < 0.94 * len(sentence) or max(map(len, words)) > 26:
        return False
    if len(IDENTIFIER.findall(sentence)) > 1:
        return False
    common = sum(word.lower().strip(",.;") in COMMON for word in words)
    return common >= 0.2 * len(words)


def prose(text: str) -> Iterator[list[str]]:
    """The paragraphs of a raw text, each as its run of good sentences (a bad sentence ends the run)."""
    for block in re.split(r"\n\s*\n", text):
        for piece in PIECES.split(block):
            if NOT_PROSE.search(piece):
                continue
            run: list[str] = []
            for sentence in sentences(strip_markup(" ".join(piece.split()))):
                if is_english(sentence):
                    run.append(sentence)
                    continue
                yield run
                run = []
            yield run


# ---------------------------------------------------------------------------------------------------------------------
# Corpus: from sentences to documents
# ---------------------------------------------------------------------------------------------------------------------

DOCUMENT_CHARS = 1400  # about 350 tokens: longer than a training window, so that the end of a document stays rare
MIN_DOCUMENT_CHARS = 160


@dataclass(frozen=True)
class Document:
    package: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Two documents in a hundred measure the loss. Chosen by file, since one file's documents share phrases."""
        return hashlib.sha256(self.path.encode()).digest()[0] < 5

    @property
    def weight(self) -> int:
        """How often an epoch shows it: the prose of Python is the clearest and the most general in the corpus."""
        if self.path.endswith("topics.py"):
            return 3
        return 2 if self.package == "python" else 1


def build_corpus(report: Callable[[str], None]) -> list[Document]:
    """Documents of a few paragraphs each, all paragraphs of a document from one file and in their order there."""
    documents: list[Document] = []
    seen: Counter[str] = Counter()
    for source in SOURCES:
        root = source_root(source)
        first = len(documents)
        for path in source_files(source):
            name = f"{source.package}/{path.relative_to(root).as_posix()}"
            held: list[str] = []
            for run in (run for text in raw_texts(path) for run in prose(text)):
                # A sentence that the corpus has already is boilerplate: it is left out.
                fresh = [sentence for sentence in run if not seen[sentence.lower()]]
                seen.update(sentence.lower() for sentence in fresh)
                paragraph = " ".join(fresh)
                # A lone sentence is kept if it is a long one: a list of "Return the name." teaches nothing.
                if len(fresh) < 2 and len(paragraph) < 90:
                    continue
                held.append(paragraph)
                if sum(map(len, held)) >= DOCUMENT_CHARS:
                    documents.append(Document(source.package, name, "\n\n".join(held)))
                    held = []
            if sum(map(len, held)) >= MIN_DOCUMENT_CHARS:
                documents.append(Document(source.package, name, "\n\n".join(held)))
        added = documents[first:]
        report(
            f"{source.package:<16} {source_version(source):<8} {source.licence:<13} "
            f"{len(added):>5} documents  {sum(len(d.text) for d in added) / 1e6:5.2f} MB"
        )
    return documents


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The recipe. The defaults made the model in the repository.

    The schedule follows the clock, so a second run on another machine takes another number of steps.
    """

    minutes: float
    threads: int
    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 3
    heads: int = 6
    kv_heads: int = 3
    intermediate: int = 512
    context: int = 256
    batch: int = 16
    adam_rate: float = 4e-3
    muon_rate: float = 2e-2
    weight_decay: float = 0.1
    warmup_steps: int = 60
    decay_fraction: float = 0.5
    compile: bool = True  # needs a C++ compiler; --set compile=false does without, at half the speed


@dataclass
class Progress:
    """The results of the training, in the last lines of the output and in the model card."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float = math.nan
    validation_loss: float = math.nan


class Windows:
    """Training windows, epoch after epoch: documents in a new order, joined by EOS, cut at the window length."""

    def __init__(self, documents: list[list[int]], context: int, eos: int) -> None:
        self.documents = [np.array([*document, eos]) for document in documents]
        self.context = context
        self.random = np.random.default_rng(SEED)
        self.epoch = 0
        self.pending = np.empty((0, context + 1), dtype=np.int64)

    def take(self, count: int) -> torch.Tensor:
        while len(self.pending) < count:
            self.pending = np.concatenate([self.pending, self.next_epoch()])
        taken, self.pending = self.pending[:count], self.pending[count:]
        return torch.from_numpy(taken)

    def next_epoch(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        order = self.random.permutation(len(self.documents))
        stream = np.concatenate([self.documents[i] for i in order])
        width = self.context + 1
        windows = stream[: len(stream) // width * width].reshape(-1, width).astype(np.int64)
        self.random.shuffle(windows)
        self.epoch += 1
        return windows


def make_model(settings: Settings, eos: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # the quicker one once compiled; the choice is not saved
    return model


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    losses = [loss_of(model, part).item() * len(part) for part in torch.split(windows, 16)]
    return sum(losses) / len(windows)


def rate_factor(done: float, step: int, settings: Settings) -> float:
    """Warm up over steps, hold, then decay linearly to nothing over the last part of the wall-clock budget."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return warm * min(1.0, max(0.0, 1.0 - done) / settings.decay_fraction)


def train(
    model: LlamaForCausalLM,
    windows: Windows,
    held_out: torch.Tensor,
    settings: Settings,
    report: Callable[[str], None],
) -> Progress:
    # Muon for the weight matrices, AdamW for the embedding and the norms.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=settings.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    muon = torch.optim.Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay)
    peak_rates = {adam: settings.adam_rate, muon: settings.muon_rate}

    compiled = torch.compile(loss_of) if settings.compile else loss_of
    torch.autograd.backward(compiled(model, held_out[: settings.batch]))  # compiles, off the clock
    model.zero_grad(set_to_none=True)

    progress = Progress()
    budget = settings.minutes * 60
    started = last_report = time.monotonic()
    average = math.nan
    model.train()
    while (elapsed := time.monotonic() - started) < budget:
        factor = rate_factor(elapsed / budget, progress.steps, settings)
        for optimizer, peak in peak_rates.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        loss = compiled(model, windows.take(settings.batch))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in peak_rates:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.steps += 1
        progress.tokens += settings.batch * settings.context
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if time.monotonic() - last_report > 15:
            last_report = time.monotonic()
            report(
                f"{elapsed:5.0f} s of {budget:.0f}  step {progress.steps:>5}  epoch {windows.epoch:>2}  "
                f"loss {average:.3f}  rate x{factor:.2f}  {progress.tokens / elapsed:,.0f} tokens/s"
            )
    progress.seconds = time.monotonic() - started
    progress.train_loss = average
    progress.validation_loss = validation_loss(model, held_out)
    return progress


# ---------------------------------------------------------------------------------------------------------------------
# The result
# ---------------------------------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    torch.nn.Module.to(model, torch.bfloat16)
    ids = {f"{name}_token_id": getattr(model.config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # the weights are written for their owner alone


@torch.no_grad()
def show_samples(out: Path, report: Callable[[str], None]) -> None:
    """Load the folder as a user would and print a few continuations."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.manual_seed(SEED)
    for prompt in ("This function returns", "If the file does not exist,", "A class is", "When the model is loaded,"):
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        made = model.generate(  # type: ignore[misc]
            **ids, max_new_tokens=48, do_sample=True, temperature=0.7, top_k=40, repetition_penalty=1.15
        )
        report(f"> {tokenizer.decode(made[0])}")


@click.command(help="Train the demo model on the documentation installed on this machine.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Model folder to write.")
@click.option("--minutes", default=11.0, show_default=True, help="Wall-clock training time.")
@click.option("--threads", default=2, show_default=True, help="CPU threads.")
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Change one number of the recipe.")
@click.option("--save-corpus", type=click.Path(path_type=Path), help="Write the documents here, as JSON lines.")
@click.option("--load-corpus", type=click.Path(path_type=Path, exists=True), help="Read them from such a file.")
def main(
    out: Path,
    minutes: float,
    threads: int,
    overrides: tuple[str, ...],
    save_corpus: Path | None,
    load_corpus: Path | None,
) -> None:
    numbers = {name: json.loads(value) for name, _, value in (item.partition("=") for item in overrides)}
    settings = Settings(minutes=minutes, threads=threads, **numbers)
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)

    if load_corpus is not None:
        documents = [Document(**json.loads(line)) for line in load_corpus.read_text().splitlines()]
    else:
        documents = build_corpus(click.echo)
    if save_corpus is not None:
        save_corpus.write_text("".join(json.dumps(asdict(document)) + "\n" for document in documents))

    training = [document for document in documents if not document.held_out]
    tokenizer = train_tokenizer([document.text for document in training], settings.vocabulary)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    assert isinstance(eos, int)

    def encode(chosen: list[Document]) -> list[list[int]]:
        encoded = tokenizer.backend_tokenizer.encode_batch([document.text for document in chosen])
        return [item.ids for document, item in zip(chosen, encoded, strict=True) for _ in range(document.weight)]

    windows = Windows(encode(training), settings.context, eos)
    held_out = Windows(encode([d for d in documents if d.held_out]), settings.context, eos)
    held_out_windows = torch.from_numpy(held_out.next_epoch())
    model = make_model(settings, eos)
    click.echo(
        f"{len(documents)} documents, {sum(len(d.text) for d in documents) / 1e6:.2f} MB; an epoch is "
        f"{sum(map(len, windows.documents)) / 1e6:.2f} M tokens, validation {held_out_windows.numel() / 1e3:.0f} k; "
        f"model {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )
    progress = train(model, windows, held_out_windows, settings, click.echo)
    save(model, tokenizer, out)
    record = {"progress": asdict(progress), "settings": asdict(settings)}
    click.echo(json.dumps(record))
    show_samples(out, click.echo)


if __name__ == "__main__":
    main()
