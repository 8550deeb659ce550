"""The command `quire`, as a process among real ones: its output, its exit status, and the files that it leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import DEADLINE_S
from integration.terminal import Terminal
from ports import free_port

from quire.worker.holder.holder import listen_at

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
MODEL = str(Path(__file__).parents[2] / "deploy" / "demo" / "model")
NUM_BLOCKS = 64
GREEDY = ("--temperature", "0", "--max-tokens", "8")
# Invariants are checked; no `quire up` takes the default port for HTTP, which only one process can have.
KEPT = ("QUIRE_VERIFY", "QUIRE_UP_NO_HTTP")
Process = subprocess.Popen[str]


def clean_environment(folder: Path, **more: str) -> dict[str, str]:
    """Ours without anything that would stand for a flag; the runtime folder is folder/quire."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_") or name in KEPT}
    return {**kept, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "100", **more}


def run(folder: Path, *arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `quire` to its end."""
    done = subprocess.run(
        [QUIRE, *arguments],
        input=stdin,
        capture_output=True,
        env=clean_environment(folder, **environment),
        timeout=DEADLINE_S,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The message of a command that ended with this status, in words and not in a traceback."""
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    return done.stderr


@contextmanager
def begun(folder: Path, *arguments: str, timeout_s: float = DEADLINE_S) -> Iterator[Process]:
    """A `quire` that runs within the block; it is killed if it does not end in time."""
    process = subprocess.Popen(
        [QUIRE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(folder),
    )
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        watchdog.cancel()


def ended(process: Process, number: int | None = None) -> tuple[int, str]:
    """Sends a signal, waits, and returns the status and the remaining stderr."""
    if number is not None:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stderr


def ready(process: Process) -> dict[str, str]:
    """Waits until `quire up` says that both serve. Returns "cachemgr", "worker" (their lines) and "address".

    "export" is there if clients have to be told the address.
    """
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        words = line.split()
        if words[:1] == ["export"]:
            found["export"] = words[1].removeprefix("QUIRE_CACHEMGR=")
        elif words[:1] in (["cachemgr"], ["worker"], ["logs"]):
            found.setdefault(words[0], line)
            found.setdefault("address", words[1])
        if words == ["quire", "stats"]:
            return found
    raise AssertionError(f"ended before it was ready: {process.stderr.read() if process.stderr else ''}")


def takewhile_not(lines: Iterable[str], text: str) -> Iterator[str]:
    """Yield lines until one has this text."""
    return takewhile(lambda line: text not in line, lines)


def pid_in(line: str) -> int:
    return int(line.rsplit("(pid ", 1)[1].split(")", maxsplit=1)[0])


def nothing_left(folder: Path) -> bool:
    """No private folder, no socket in the runtime folder, and no service that was told to listen in one."""
    processes = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"unix:{folder}" in argument for argument in process.info["cmdline"] or ())
    ]
    return not processes and not list(folder.glob("quire-*")) and not list(folder.glob("quire/*.sock"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def up(shared_folder: Path) -> Iterator[str]:
    """The address of a cachemgr that `quire up` runs for this file. Ended by Ctrl-C, and looked at afterwards."""
    arguments = ("up", "--model", MODEL, "--num-blocks", str(NUM_BLOCKS), "--device", "cpu")
    with begun(shared_folder, *arguments, timeout_s=10 * DEADLINE_S) as process:
        yield ready(process)["address"]
        status, stderr = ended(process, signal.SIGINT)
    assert status == 0, stderr
    assert nothing_left(shared_folder)


# Help


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ((), ["quire demo", "up", "cachemgr", "worker", "generate", "stats"]),
        (("up",), ["QUIRE_UP_MODEL", "quire up deploy", "quire worker --help", "--chat-template"]),
        (
            ("generate",),
            ["QUIRE_GENERATE_TOP_K", "QUIRE_CACHEMGR", "QUIRE_GENERATE_JSON", "--stop", "| quire generate -"],
        ),
        (("stats",), ["QUIRE_STATS_WATCH", "QUIRE_CACHEMGR", "--watch"]),
        (("demo",), ["QUIRE_DEMO_MODEL", "quire demo --samples"]),
        (("cachemgr",), ["QUIRE_CACHEMGR_LISTEN"]),
        (("worker",), ["QUIRE_WORKER_NUM_BLOCKS"]),
    ],
)
def test_help_teaches(folder: Path, command: tuple[str, ...], texts: list[str]) -> None:
    done = run(folder, *command, "--help")
    assert done.returncode == 0
    assert all(text in done.stdout for text in texts), done.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "quire.cli.commands",
            ("torch", "transformers", "numpy", "grpc", "google", "prometheus_client", "asyncio", "rich"),
        ),
        ("quire.cli.commands, quire.cli.up", ("torch", "transformers", "numpy", "grpc", "asyncio", "rich")),
        ("quire.cachemgr.__main__", ("torch", "transformers", "numpy", "uvloop", "prometheus_client")),
        ("quire.worker.__main__", ("torch", "transformers", "numpy", "llguidance", "uvloop", "prometheus_client")),
        (
            "quire.gateway.__main__",
            ("numpy", "tokenizers", "starlette", "uvicorn", "jinja2", "uvloop", "quire.client.engine.engine"),
        ),
    ],
)
def test_help_and_check_import_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "[]"


def test_version(folder: Path) -> None:
    assert run(folder, "--version").stdout.startswith("quire, version 0.")


# generate


def generated(folder: Path, address: str, *arguments: str, stdin: bytes = b"", **environment: str) -> dict[str, Any]:
    """The JSON that `quire generate` writes."""
    done = run(folder, "generate", "--json", *arguments, stdin=stdin, QUIRE_CACHEMGR=address, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_same_text_in_every_way_to_ask_for_it(folder: Path, up: str) -> None:
    (sample,) = generated(folder, up, "A list of", *GREEDY)["samples"]
    assert len(sample["token_ids"]) <= 8
    assert generated(folder, up, "-", *GREEDY, stdin=b"A list of")["samples"] == [sample]
    by_environment = {"QUIRE_GENERATE_TEMPERATURE": "0", "QUIRE_GENERATE_MAX_TOKENS": "8"}
    assert generated(folder, up, "A list of", **by_environment)["samples"] == [sample]
    plain = run(folder, "generate", "A list of", *GREEDY, "--cachemgr", up)
    assert plain.returncode == 0
    assert plain.stdout == sample["text"] + "\n"


def test_several_samples_are_printed_whole_and_in_order(folder: Path, up: str) -> None:
    arguments = ("The value", "--n", "3", "--seed", "5", "--max-tokens", "6")
    texts = [sample["text"] for sample in generated(folder, up, *arguments)["samples"]]
    assert len(texts) == 3
    done = run(folder, "generate", *arguments, "--cachemgr", up)
    assert done.returncode == 0
    blocks = done.stdout.split("--- ")[1:]
    assert [block.split(" (", 1)[0] for block in blocks] == ["1 of 3", "2 of 3", "3 of 3"]
    assert [block.split(" ---\n", 1)[1] for block in blocks] == [text + "\n" for text in texts]


def test_log_probabilities(folder: Path, up: str) -> None:
    (sample,) = generated(folder, up, "A list of", *GREEDY, "--logprobs", "2")["samples"]
    assert [entry["token_id"] for entry in sample["logprobs"]] == sample["token_ids"]
    for entry in sample["logprobs"]:
        assert len(entry["top"]) == 2
        assert entry["top"][0]["logprob"] == pytest.approx(entry["logprob"])  # greedy takes the most probable one
    done = run(folder, "generate", "A list of", *GREEDY, "--logprobs", "2", "--cachemgr", up)
    assert "most probable" in done.stdout


def test_log_probabilities_of_the_prompt(folder: Path, up: str) -> None:
    flags = ("A list of", *GREEDY, "--prompt-logprobs", "2", "--cache-use", "none")
    answer = generated(folder, up, *flags)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [entry["token_id"] for entry in others] == answer["prompt_token_ids"][1:]
    done = run(folder, "generate", *flags, "--cachemgr", up)
    assert all(f'"{entry["token"]}"' in done.stdout for entry in others)


def test_a_schema_is_followed_and_a_wrong_one_names_its_flag(folder: Path, up: str) -> None:
    path = folder / "schema.json"
    path.write_text(json.dumps({"enum": ["a", {"b": 1}], "x-guidance": {"whitespace_flexible": False}}))
    (sample,) = generated(folder, up, "A list of", "--json-schema", str(path))["samples"]
    assert json.loads(sample["text"]) in ("a", {"b": 1})
    path.write_text('{"type": "strng"}')
    said = refused(run(folder, "generate", "A list of", "--json-schema", str(path), "--cachemgr", up), 2)
    assert "'--json-schema'" in said
    assert "Invalid type: strng" in said


def test_stop_string(folder: Path, up: str) -> None:
    (whole,) = generated(folder, up, "A list of", *GREEDY)["samples"]
    word = whole["text"].split()[-1]
    (sample,) = generated(folder, up, "A list of", *GREEDY, "--stop", word)["samples"]
    assert sample["finish_reason"] == "stop"
    assert sample["text"] == whole["text"][: whole["text"].index(word)]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--n", "0"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--max-tokens", "0"),
        ("--repetition-penalty", "nan"),
        ("--stop", ""),
        ("--top-k", "many"),
        ("--seed", str(2**80)),
    ],
)
def test_a_wrong_value_names_its_flag(folder: Path, flag: str, value: str) -> None:
    said = refused(run(folder, "generate", "A list of", flag, value), 2)
    assert f"'{flag}'" in said


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("A list of", "--max-tokens", "100000"), ["'--max-tokens'", "100000"]),
        (("A list of", "--logprobs", "100000"), ["'--logprobs'", "at most"]),
        (("",), ["'PROMPT'", "at least 1 token"]),
        (("word " * 5000,), ["'PROMPT'", "fewer than"]),
        (("A list of", "--tokenizer", "/nowhere"), ["'--tokenizer'", "/nowhere"]),
    ],
)
def test_what_the_pool_or_the_model_has_no_room_for(
    folder: Path, up: str, arguments: tuple[str, ...], texts: list[str]
) -> None:
    said = refused(run(folder, "generate", *arguments, "--cachemgr", up), 2)
    assert all(text in said for text in texts), said


def test_a_prompt_that_is_no_text(folder: Path) -> None:
    assert "UTF-8" in refused(run(folder, "generate", "-", stdin=b"\xff\xfe"), 2)


@pytest.mark.parametrize("command", [("generate", "A list of"), ("stats",), ("stats", "--watch")])
def test_an_unreachable_cachemgr_is_named_with_what_to_do(folder: Path, command: tuple[str, ...]) -> None:
    address = f"unix:{folder}/nobody.sock"
    said = refused(run(folder, *command, "--cachemgr", address), 1)
    assert address in said
    assert "quire up" in said


def test_an_unreachable_worker_is_named(folder: Path, up: str) -> None:
    address = f"unix:{folder}/nobody.sock"
    said = refused(run(folder, "generate", "A list of", "--cachemgr", up, "--worker", address), 1)
    assert address in said


@pytest.mark.parametrize("command", [("generate", "A list of"), ("stats",)])
def test_a_pool_that_does_not_exist(folder: Path, up: str, command: tuple[str, ...]) -> None:
    said = refused(run(folder, *command, "--cachemgr", up, "--pool", "other"), 1)
    assert "no pool 'other'" in said
    assert "default" in said


def test_ctrl_c_while_generating_gives_everything_back(folder: Path, up: str) -> None:
    # As many long samples as take a while; nothing is printed before the first has ended.
    arguments = ("generate", "The", "--n", "24", "--max-tokens", "900", "--temperature", "100", "--ignore-eos")
    with begun(folder, *arguments, "--cachemgr", up) as process:
        while not statistics_of(folder, up)["sequence_count"]:
            assert process.poll() is None
        status, stderr = ended(process, signal.SIGINT)
    assert (status, stderr) == (130, "Interrupted.\n")
    # The worker has to confirm that the lease is fenced.
    assert any(statistics_of(folder, up)["sequence_count"] == 0 for _ in range(20))


@pytest.mark.parametrize(
    ("count", "number", "status"), [(1, signal.SIGINT, 130), (3, signal.SIGINT, 130), (3, signal.SIGTERM, 143)]
)
def test_a_signal_leaves_the_text_so_far_and_the_cursor_on_the_screen(
    up: str, count: int, number: int, status: int
) -> None:
    flags = ("--n", str(count), "--max-tokens", "900", "--temperature", "100", "--top-k", "40", "--seed", "3")
    terminal = Terminal("The input", *flags, "--cachemgr", up, command=("generate",))
    try:
        # The panel of the last sample must have text: words of the first are drawn again and again.
        terminal.await_text(r"(\w+\W+){20}" if count == 1 else r"3 of 3[^╰]*?(\w\w+[^\w╰]+){10}")
        terminal.signal(number)
        assert terminal.await_end() == status
    finally:
        terminal.close()
    assert terminal.text().endswith("Interrupted.\n") == (number == signal.SIGINT)
    if count == 1:
        return
    # Live drawings are erased line by line; only what follows the last of these stays.
    stays = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.written.rpartition("\x1b[2K")[2])
    assert len(re.findall(r"╭─ \d of 3 · not finished", stays)) == 3
    assert len(re.findall(r"\w\w+", stays)) > 20


def test_an_interrupt_prints_the_text_so_far_into_a_pipe(folder: Path, up: str) -> None:
    before = statistics_of(folder, up)["generated_token_count"]
    arguments = ("generate", "The", "--n", "3", "--max-tokens", "900", "--ignore-eos", "--temperature", "100")
    with begun(folder, *arguments, "--cachemgr", up) as process:
        while statistics_of(folder, up)["generated_token_count"] < before + 60:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stderr) == (130, "Interrupted.\n")
    assert re.findall(r"--- (\d) of 3 \(not finished\) ---\n", stdout) == ["1", "2", "3"]


# stats


def statistics_of(folder: Path, address: str) -> dict[str, Any]:
    done = run(folder, "stats", "--json", "--cachemgr", address)
    assert done.returncode == 0, done.stderr
    (pool,) = json.loads(done.stdout)["pools"]
    statistics: dict[str, Any] = pool["statistics"]
    return statistics


def test_statistics_as_json_add_up(folder: Path, up: str) -> None:
    statistics = statistics_of(folder, up)
    assert sum(statistics["block_counts"].values()) == NUM_BLOCKS - 1
    before = statistics["admission_count"]
    generated(folder, up, "A list of", "--n", "2", "--max-tokens", "2")
    after = statistics_of(folder, up)
    assert after["admission_count"] == before + 1
    assert after["fork_count"] == statistics["fork_count"] + 1


def test_statistics_as_tables(folder: Path, up: str) -> None:
    done = run(folder, "stats", QUIRE_CACHEMGR=up)
    assert done.returncode == 0
    for text in ("pool default", "attached", f"{NUM_BLOCKS - 1} blocks of 16 tokens", "hit ratio", "cached", "free"):
        assert text in done.stdout
    assert "\x1b" not in done.stdout


def test_watching_goes_on_until_ctrl_c(folder: Path, up: str) -> None:
    with begun(folder, "stats", "--watch", "--interval", "0.05", "--json", "--cachemgr", up) as process:
        assert process.stdout is not None
        for _ in range(3):
            (pool,) = json.loads(process.stdout.readline())["pools"]
            assert pool["name"] == "default"
        assert ended(process, signal.SIGINT) == (0, "")


def test_a_watch_on_a_terminal_gives_the_screen_back_at_sigterm(up: str) -> None:
    terminal = Terminal("--watch", "--interval", "0.05", "--cachemgr", up, command=("stats",))
    try:
        terminal.await_text("default")
        terminal.signal(signal.SIGTERM)
        assert terminal.await_end() == 143
    finally:
        terminal.close()


# up, cachemgr, worker


def test_two_at_a_time_one_over_tcp_and_its_worker_starts_again(folder: Path, up: str) -> None:
    cachemgr, worker = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    listen = ("--cachemgr-listen", cachemgr, "--worker-listen", worker)
    with begun(folder, "up", "--model", MODEL, "--num-blocks", "16", *listen) as process:
        found = ready(process)
        assert found["address"] == f"unix:{folder}/quire/cachemgr.sock" != up
        (here,) = generated(folder, cachemgr, "A list of", *GREEDY, "--worker", worker)["samples"]
        (there,) = generated(folder, up, "A list of", *GREEDY)["samples"]
        assert here == there
        os.kill(pid_in(found["worker"]), signal.SIGKILL)
        assert process.stderr is not None
        said = list(takewhile_not(process.stderr, "worker serves again"))
        (again,) = generated(folder, cachemgr, "A list of", *GREEDY, "--worker", worker)["samples"]
        assert again == here
        status, stderr = ended(process, signal.SIGINT)
    assert status == 0
    assert "worker was ended by SIGKILL (Linux sends it when memory runs out); the end of its log:" in said[1]
    assert "starts again in 1 s" in said[-1]
    assert "Traceback" not in "".join(said) + stderr
    assert nothing_left(folder)
    assert statistics_of(folder, up)["block_counts"]


@pytest.mark.parametrize("command", [("stats",), ("generate", "a")], ids=str)
def test_an_address_with_too_long_a_path_is_one_line(command: tuple[str, ...], folder: Path) -> None:
    address = f"unix:{folder}/{'x' * 100}"
    (line,) = refused(run(folder, *command, "--cachemgr", address), 1).splitlines()
    assert f"{address!r}: the path has" in line


def test_a_given_runtime_folder_keeps_logs_and_is_not_shared(folder: Path) -> None:
    runtime_dir = folder / "run"
    arguments = ("up", "--model", MODEL, "--num-blocks", "16", "--runtime-dir", str(runtime_dir))
    with begun(folder, *arguments) as process:
        address = ready(process)["export"]
        assert address == f"unix:{runtime_dir}/cachemgr.sock"
        said = refused(run(folder, *arguments), 1)
        assert "another --runtime-dir" in said
        assert statistics_of(folder, address)["block_counts"]
        status, _ = ended(process, signal.SIGTERM)
    assert status == 0
    assert sorted(path.name for path in runtime_dir.iterdir()) == ["cachemgr.log", "worker.log"]
    assert nothing_left(folder)


@pytest.mark.usefixtures("started_by_exec")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_starting(folder: Path, number: int, status: int) -> None:
    with begun(folder, "up", "--model", MODEL) as process:
        while not psutil.Process(process.pid).children():
            assert process.poll() is None
        found, stderr = ended(process, number)
    assert found == status
    assert "Traceback" not in stderr
    assert nothing_left(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--num-blocks", "1"), "worker: Invalid value for '--num-blocks': 1 is not in the range"),
        (("--max-leases", "0"), "cachemgr: Invalid value for '--max-leases': 0 is not in the range"),
        (("--tenants", "/nowhere"), "cachemgr: /nowhere: No such file"),
        (("--worker-metrics-listen", "0.0.0.0:1"), "worker: --metrics-listen 0.0.0.0:1: not loopback"),
        (("--runtime-dir", "/tmp/" + 100 * "x"), "cachemgr: Invalid value for '--listen':"),
        (("--device", "cuda"), "worker: --device cuda: torch finds 0 GPUs on this machine"),
        (("--model", "deploy/demo/modle"), "worker: Invalid value for '--model': no model at 'deploy/demo/modle'"),
    ],
)
def test_a_wrong_flag_is_said_before_anything_starts(
    folder: Path, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda" in arguments:  # with another environment the process is not forked
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stderr = refused(run(folder, "up", "--model", MODEL, *arguments), 2)
    assert said in stderr
    assert len(stderr.splitlines()) == 1
    assert nothing_left(folder)


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        (("--listen", "127.0.0.1:1"), "--cachemgr-listen or --worker-listen"),
        (("--metrics-listen=127.0.0.1:1",), "--cachemgr-metrics-listen or --worker-metrics-listen"),
        (("--cachemgr=127.0.0.1:1",), "the one that is started here"),
        (("--check",), "every start checks the flags"),
        (
            ("--tensor-parallel-siez", "2"),
            "No such option '--tensor-parallel-siez'. Did you mean '--tensor-parallel-size'?",
        ),
    ],
)
def test_flags_that_up_does_not_pass_on(folder: Path, flag: tuple[str, ...], instead: str) -> None:
    assert instead in refused(run(folder, "up", "--model", MODEL, *flag), 2)


def test_flags_of_both_and_of_either_have_their_effect(folder: Path) -> None:
    """The unit tests walk all flags; here some are seen at work."""
    tenants = folder / "tenants.toml"
    tenants.write_text("[default]\nmax_leases = 3\n")
    pages = {service: f"127.0.0.1:{free_port()}" for service in ("cachemgr", "worker")}
    arguments = (
        *("--log-format", "json", "--state-dir", str(folder / "state"), "--tenants", str(tenants)),
        *(part for service, page in pages.items() for part in (f"--{service}-metrics-listen", page)),
    )
    with begun(folder, "up", "--model", MODEL, "--num-blocks", "16", *arguments) as process:
        ready(process)
        for page, metric in ((pages["cachemgr"], b"quire_kv_blocks"), (pages["worker"], b"quire_worker_")):
            with urllib.request.urlopen(f"http://{page}/metrics", timeout=DEADLINE_S) as answer:
                assert metric in answer.read()
        assert list((folder / "state").iterdir())
        for service in pages:
            lines = (folder / "quire" / f"{service}.log").read_text().splitlines()
            assert lines
            assert all(json.loads(line)["level"] for line in lines)
        assert ended(process, signal.SIGINT)[0] == 0


def test_a_second_up_in_the_default_folder_is_refused(folder: Path, shared_folder: Path, up: str) -> None:
    said = refused(run(folder, "up", "--model", MODEL, XDG_RUNTIME_DIR=str(shared_folder)), 1)
    assert f"a cachemgr is serving at {up} already: choose another --runtime-dir." in said
    assert statistics_of(folder, up)["block_counts"]


def test_a_holder_beside_that_of_up_is_not_taken_over(folder: Path) -> None:
    (folder / "quire").mkdir()
    path = folder / "quire" / "holder.sock"
    with closing(listen_at(path)):
        arguments = ("up", "--model", MODEL, "--keep-cache", "--runtime-dir", str(folder / "quire"))
        said = refused(run(folder, *arguments), 1)
        assert f"a holder is serving at unix:{path} already: choose another --runtime-dir." in said
        assert path.is_socket()


def test_up_needs_a_model(folder: Path) -> None:
    assert "'--model'" in refused(run(folder, "up"), 2)


def test_cachemgr_alone_is_the_process_itself(folder: Path) -> None:
    address = f"unix:{folder}/cachemgr.sock"
    with begun(folder, "cachemgr", "--listen", address) as process:
        assert process.stderr is not None
        assert any("serving" in line for line in process.stderr)
        assert psutil.Process(process.pid).cmdline()[-2:] == ["--listen", address]
        shown = run(folder, "stats", "--cachemgr", address)
        assert "no worker is attached" in shown.stdout
        said = refused(run(folder, "generate", "A list of", "--cachemgr", address), 1)
        assert f"quire worker --model PATH_OR_HUB_ID --cachemgr {address}" in said
        assert ended(process, signal.SIGTERM)[0] == 0
    assert nothing_left(folder)


def test_worker_passes_its_flags_on(folder: Path) -> None:
    said = refused(run(folder, "worker", "--model", MODEL, "--num-blocks", "1"), 2)
    assert "'--num-blocks'" in said


def test_up_needs_to_know_its_ports(folder: Path) -> None:
    said = refused(run(folder, "up", "--model", MODEL, "--worker-listen", "127.0.0.1:0"), 2)
    assert "'--worker-listen'" in said
    assert "127.0.0.1:0" in said
