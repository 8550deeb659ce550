"""Check the pages: each block is run or says why not; each flag, metric, link and file that a page names is there; the
index and the glossary are complete; the prose can be read."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pages
import pytest
import reading
from deploy.tools import SERVERS, parse_service
from google.protobuf import json_format
from pages import PAGES, ROOT, SHELL, Block
from roots import ROOTS

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.shares import read_shares
from quire.cli.bench import PARTS
from quire.cli.commands import quire
from quire.cli.up_flags import TABLE, flags_of_services
from quire.serving.access import read_token_file

THIS = "tests/unit/repository/test_docs.py"
BLOCKS = [block for page in PAGES for block in pages.blocks(page)]
COMMANDS = [(each.place, command) for each in BLOCKS if each.language in SHELL for command in each.commands()]
QUIRE = [(place, command) for place, command in COMMANDS if re.match(r"(\w+=\S+ )*quire \w", command)]
# Of usermod, podman, aiperf, smg, venv.
FOREIGN_FLAGS = {"--append", "--clear", "--build-arg", "--index-url", "--extra-inputs", "--tokenizer-path"}
BESIDE_VLLM = "docs/how-to/move-from-vllm.md"  # the first column of its tables has vLLM's flags
SCRIPTS = [path for folder in ("benchmarks", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]
# What may read a variable that is not for a flag.
READERS = [ROOT / "Makefile", *(ROOT / "client").rglob("*.go")] + [
    path for folder in (*ROOTS, "tests") for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)
]
METRICS = (
    "cachemgr/quire/cachemgr/metrics.py",
    "worker/quire/worker/service/metrics.py",
    "client/quire/client/engine/metrics.py",
    "gateway/quire/gateway/metrics.py",
    "integrations/quire/integrations/kv_events/metrics.py",
    "serving/quire/serving/metrics.py",
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_block_is_run_or_says_why_not(block: Block) -> None:
    if block.language == "text":
        assert block.test is None
        return
    assert (block.test is None) != (block.reason is None), (
        "say which test runs it, or why none does: framework/pages.py"
    )
    if block.test is not None:
        assert (ROOT / block.test).is_file()
        assert block.page in (ROOT / block.test).read_text(), "the test does not name the page"


@pytest.mark.parametrize(("place", "command"), QUIRE, ids=[f"{place} {command[:40]}" for place, command in QUIRE])
def test_the_flags_of_quire_are_there(
    place: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = list(arguments(command))
    for name in ("ca.pem", "server.pem", "server.key", "worker-1.pem", "worker-1.key", "tokens", "tenants.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    name, *flags = words
    if name == "bench":
        check_bench(flags)
    elif "..." in flags:
        context = service(name).make_context(name, [flag for flag in flags if flag != "..."], resilient_parsing=True)
        assert context.params
    elif name in SERVERS and flags != ["--help"]:
        parse_service(name, flags, {}, monkeypatch)
    elif name not in SERVERS:
        context = quire.commands[name].make_context(name, flags)
        if name == "up":
            given = flags_of_services({shared: context.params[shared.name] for shared in TABLE}).arguments["worker"]
            parse_service("worker", ["--model", "x", *given], {}, monkeypatch)


def arguments(command: str) -> Iterator[str]:
    """The words behind `quire`, up to a pipe or a redirection."""
    words = iter(shlex.split(command))
    for word in words:
        if word == "quire":
            break
    for word in words:
        if word in ("|", ">", ">>", "&"):
            return
        yield word


def service(name: str) -> click.Command:
    command: click.Command = importlib.import_module(SERVERS[name]).main
    return command


def check_bench(words: list[str]) -> None:
    name, *flags = words
    assert name in PARTS
    assert not flags or flags[0].startswith("-") or flags[0] in PARTS[name]
    own = {flag for parameter in quire.commands["bench"].params for flag in parameter.opts}
    scripts = [path for path in (ROOT / "benchmarks").rglob("*.py") if name.replace("-", "_") in path.as_posix()]
    script = "".join(path.read_text() for path in scripts)
    for flag in flags:
        assert not flag.startswith("--") or flag in own or f'"{flag}' in script or f"/{flag}" in script, flag


def test_flags_in_the_text_are_there() -> None:
    known = FOREIGN_FLAGS | {flag for command in all_commands() for flag in flags_of(command)}
    known |= {flag for path in SCRIPTS for flag in re.findall(r'"(--[a-z-]+)', path.read_text())}
    unknown = {
        (page, flag)
        for page in PAGES
        for code in inline_code(page)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)
        if flag not in known
    }
    assert not unknown


def test_flags_beside_those_of_vllm_are_there() -> None:
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", pages.read(BESIDE_VLLM), re.M)
    named = {flag for cell in rows for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    assert len(named) > 15
    assert not named - {flag for command in all_commands() for flag in flags_of(command)}


def all_commands() -> list[click.Command]:
    return [quire, *quire.commands.values(), *map(service, SERVERS)]


def flags_of(command: click.Command) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def inline_code(page: str) -> list[str]:
    """`code` within the text, without the blocks and without what vLLM's is."""
    text = re.sub(r"^```.*?^```$", "", pages.read(page), flags=re.M | re.S)
    if page == BESIDE_VLLM:
        text = re.sub(r"^\|[^|]*\||^This is `vllm serve.*$", "|", text, flags=re.M)
    return re.findall(r"`([^`]+)`", text)


def test_variables_are_there() -> None:
    known = {
        f"QUIRE_{name}_{parameter.name}".upper()
        for name, command in [*quire.commands.items(), *((name, service(name)) for name in SERVERS)]
        for parameter in command.params
    }
    known |= set(re.findall(r"QUIRE_[A-Z_]*[A-Z]", "".join(path.read_text() for path in READERS)))
    assert not {
        (page, name)
        for page in PAGES
        for name in re.findall(r"QUIRE_[A-Z_]*[A-Z]", pages.read(page))
        if name not in known
    }


def test_metrics_are_there() -> None:
    source = "".join((ROOT / path).read_text() for path in METRICS)
    made = set(re.findall(r'"(quire_\w+)"', source))
    made |= {f"quire_engine_{name}" for name in re.findall(r'"(\w+)"', source)}
    named = {
        (page, name)
        for page in PAGES
        for code in inline_code(page)
        for name in re.findall(r"\bquire_(?:kv|cache|leases|sequences|pool|worker|engine|gateway|build|tls)\w*", code)
    }
    assert len(named) > 50
    assert not {(page, name) for page, name in named if not {name, re.sub("_(total|info)$", "", name)} & made}


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = [(place, command) for place, command in COMMANDS if command.startswith("make ")]
    named += [(page, code) for page in PAGES for code in inline_code(page) if code.startswith("make ")]
    assert named
    assert not {(place, command) for place, command in named if command.split()[1] not in targets}


def test_folders_in_the_architecture_are_there() -> None:
    """The tree at the top of docs/architecture.md."""
    tree = next(block.text for block in pages.blocks("docs/architecture.md") if "cachemgr/" in block.text)
    named = {folder.rstrip("/") for folder in re.findall(r"(?:^| )((?:\w+/)+)(?= |$)", tree, re.MULTILINE)}
    folders = {
        path.as_posix() for name in (*ROOTS, "tests", "deploy", "benchmarks") for path in (ROOT / name).rglob("*/")
    }
    folders |= {path.as_posix() for path in ROOT.iterdir()}
    assert len(named) > 30
    assert not {name for name in named if not any(folder.endswith(f"/{name}") for folder in folders)}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.read(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def anchors(text: str) -> set[str]:
    """Those that the headings of a page get."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_plan_with_advice_is_one() -> None:
    """The request in docs/how-to/advice.md, with ids in place of its "…"."""
    command = pages.block("docs/how-to/advice.md", test=THIS).text
    (written,) = re.findall(r"-d '(.*)'", command, re.S)
    filled = re.sub(r'"epoch": "…"', '"epoch": "7"', written).replace("[ … ]", "[1, 2]")
    request = json_format.Parse(filled, cache_service_pb2.PlanStepRequest())
    assert [retention.priority for retention in request.admissions[0].retention] == [9, 3]


def test_the_token_file_is_one(tmp_path: Path) -> None:
    """That of docs/reference/security.md."""
    path = tmp_path / "tokens"
    path.write_text(pages.block("docs/reference/security.md", test=THIS, language="").text)
    read = read_token_file(path)
    assert ([entry.name for entry in read.tokens], len(read.certificates)) == (["bob"], 3)


def test_the_tenants_file_is_one(tmp_path: Path) -> None:
    """That of docs/reference/security.md."""
    path = tmp_path / "tenants.toml"
    path.write_text(pages.block("docs/reference/security.md", test=THIS, language="toml").text)
    shares = read_shares(path)
    assert set(shares.tenants) == {"alice", "quire://bob"}


def test_the_status_is_at_the_top_of_the_readme() -> None:
    beginning = " ".join(pages.read("README.md").split("\n## ")[0].split())
    assert "0.1.0, not released" in beginning
    assert "passed on an NVIDIA H200" in beginning


NAMED = re.compile(r"`([\w./-]+\.(?:py|rs|pml|js|go))\b(?:::([\w.:]+))?")


@pytest.mark.parametrize(
    "page", ["tests/README.md", "docs/architecture.md", "CONTRIBUTING.md", "docs/reference/track-record.md"]
)
def test_files_and_functions_that_a_page_names_are_there(page: str) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    misses = []
    for number, line in enumerate(pages.read(page).splitlines(), 1):
        for path, names in NAMED.findall(line):
            found = [each for each in tracked if f"/{each}".endswith(f"/{path}")]
            words = [rf"\b(?:def|class|fn|func) {name}\b" for name in re.split(r"::|\.", names) if name]
            if not any(all(re.search(word, (ROOT / each).read_text()) for word in words) for each in found):
                misses.append(f"{number}: {path}::{names}")
    assert misses == []


INDEX = "docs/README.md"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/") and page != INDEX])
def test_every_page_is_in_the_index(page: str) -> None:
    links = re.findall(r"^\| \[[^\]]+\]\(([^)#]+)\) \| \S", pages.read(INDEX), re.M)
    assert links.count(page.removeprefix("docs/")) == 1, "one line of the index leads to the page"


GLOSSARY = "docs/concepts/glossary.md"


def test_the_glossary_has_every_message_and_enum() -> None:
    entries = re.findall(r"\(`(\w+)`\)", pages.read(GLOSSARY))
    assert len(entries) == len(set(entries))
    declared = {
        name
        for path in (ROOT / "protos/quire").rglob("*.proto")
        for name in re.findall(r"^(?:message|enum|service) (\w+)", path.read_text(), re.M)
        if not name.endswith(("Request", "Response"))
    }
    assert declared | {"request_id"} == set(entries)


# Nouns that the protos and docs/protocol.md use as terms, beside the names of messages.
TERMS = """
    active, attachment, audit, block id, block size, block table, books, cached, chunk, client, computed,
    copy-on-write, cursor, digest, epoch, evict, eviction policy, expiry, fence, floor, free, gateway, host
    block, host tier, known, kv, limit, null block, offload, pin budget, plan, preempt, prefix hash, publish,
    quota, reference, release, request id, reservation, reset, retired, role, run, salt, skip, slot, state
    directory, step, step in flight, step number, term, trim, ttl
"""


def test_the_glossary_has_every_term() -> None:
    entries = {entry.lower() for entry in re.findall(r"\*\*([^*]+)\*\*", pages.read(GLOSSARY))}
    assert not {" ".join(term.split()) for term in TERMS.split(",")} - entries


def test_the_pictures_of_the_concepts_are_those_of_their_script() -> None:
    name = ROOT / "docs/images/make_concepts.py"
    spec = importlib.util.spec_from_file_location("make_concepts", name)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.pictures()
    assert drawn
    assert not [path.name for path, content in drawn.items() if path.read_text() != content]


def test_the_pages_can_be_read() -> None:
    """`python tests/framework/reading.py` shows the grades, and the sentences that are hardest to read."""
    grades = {page: reading.grade(page) for page in PAGES if page not in reading.GENERATED}
    assert statistics.median(grades.values()) <= 10
    assert not {page: grade for page, grade in grades.items() if grade > 10}


def test_hard_prose_is_seen() -> None:
    easy = "The worker checks the grant. It refuses a grant of an old epoch."
    hard = (
        "Notwithstanding irreconcilable configuration inconsistencies, administrators conscientiously reconfigure `x`"
    )
    assert reading.prose(f"# A title\n\n| a | table |\n\n{easy}\n\n```\n{hard}\n```\n") == [easy]
    grades = [reading.textstat.flesch_kincaid_grade(text) for text in (easy, hard)]
    assert grades[0] < 5
    assert grades[1] > 15


def test_the_table_of_breakpoints_has_the_recorded_figures() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/prompt_cache.json").read_text())
    page = pages.read("docs/reference/benchmarks.md")
    for is_found, label in ((True, "found"), (False, "new")):
        ratios = [f"{each['ratio']:.2f}" for each in recorded["costs"] if each["is_found"] is is_found]
        [row] = re.findall(rf"^\| the prefix is {label} \| (.*) \|$", page, re.M)
        assert row.replace("*", "").split(" | ") == ratios
    for each in recorded["shared"]:
        assert f"{each['found']:.1%}".replace("%", " %") in page
