"""`quire top` as a process in a terminal of its own: keys are pressed, the screen is read, the terminal is put back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.lone_cachemgr import BLOCK_SIZE, LoneCachemgr, Serve, Tenant, call, prompt
from integration.protocol_client import DEADLINE_S
from integration.terminal import QUIRE, Terminal

NUM_BLOCKS = 65


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def cachemgr(folder: Path) -> Iterator[LoneCachemgr]:
    cachemgr = LoneCachemgr(folder).start()
    yield cachemgr
    cachemgr.close()


@pytest.fixture
def open_terminal(cachemgr: LoneCachemgr, folder: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, caller: str = "olga", **options: Any) -> Terminal:
        token = folder / f"{caller}.token"
        token.write_text(caller)
        token.chmod(0o600)
        flags = ("--cachemgr", cachemgr.process.address, "--token-file", str(token))
        opened.append(Terminal(*flags, *arguments, **options))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.close()


@pytest.fixture
def held(cachemgr: LoneCachemgr, serve: Serve) -> dict[str, Tenant]:
    """Pool "main": alice computes 4 blocks in a step that has ended, bob 3 in a step in flight; "other" is empty."""
    main = serve("main", num_blocks=NUM_BLOCKS)
    serve("other", num_blocks=17)
    tenants = {name: Tenant.begin(cachemgr, main, name) for name in ("alice", "bob")}
    tenants["alice"].admit(7, prompt(1, 4))
    tenants["alice"].settle()
    tenants["bob"].admit(8, prompt(2, 3))
    return tenants


def test_the_screen_shows_what_cachemgr_has(held: dict[str, Tenant], open_terminal: Any) -> None:
    frame = open_terminal().await_frame("7 held, of these 0 shared +0 cached +0 retired +57 free")
    text = "\n".join(frame)
    assert len(frame) == 24
    assert max(map(len, frame)) <= 80
    assert re.search(r"pool main +attached", text)
    assert "2 leases" in text
    assert "1 in flight" in text
    alice, bob = (held[name].lease_id[:8] for name in ("alice", "bob"))
    assert re.search(rf"{alice} +alice +7 +{4 * BLOCK_SIZE + 1} +{4 * BLOCK_SIZE} ", text)
    assert re.search(rf"{bob} +bob +8 +{3 * BLOCK_SIZE + 1} +0 +{3 * BLOCK_SIZE} ", text)


def test_the_map_follows_the_blocks(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.await_frame("^ +1 (█ ){7}(· )+ *$")
    held["alice"].release(7)
    terminal.await_frame("^ +1 (▒ ){4}(█ ){3}(· )+ *$")


def test_steps_and_hits_are_rates(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.await_frame(r"hits – now, 0.0 % in all")
    terminal.await_frame(r"steps +0\.0/s")
    held["alice"].admit(9, prompt(1, 4))
    held["alice"].settle()
    terminal.await_frame(r"steps +(?!0\.0)[\d.]+/s")
    terminal.await_frame(r"tokens +[1-9]\d* generated/s +[1-9]\d* computed/s +[1-9]\d* admitted/s")
    terminal.await_frame(r"hits 75.0 % now")


def test_keys(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal, alice = open_terminal(), held["alice"].lease_id[:8]
    terminal.await_frame("Sequences 2")
    terminal.press("\t")
    terminal.await_frame("Leases 2")
    terminal.press("\t")
    terminal.await_frame(r"Tenants 2(.|\n)* alice +4 +0 ")
    terminal.press("\x1b[B\r")
    terminal.await_frame("Sequences 1 of 2|Sequences 1 +filter: bob")
    terminal.press("\x1b")
    terminal.await_frame("Sequences 2")
    terminal.press("/ALI\r")
    terminal.await_frame("Sequences 1.* filter: ALI")
    terminal.press("\r")
    terminal.await_frame(f"Sequence 7 of lease {alice}, tenant alice")
    terminal.await_frame("17 known +16 computed +16 planned +0 found in the cache")
    held["alice"].release(7)
    terminal.await_frame("It has ended.")
    terminal.press("\x1b\x1b")
    terminal.await_frame("Sequences 1 ")
    terminal.press("b")
    terminal.await_frame(r"of their slots *\n *\n Sequences")
    terminal.press("?")
    terminal.await_frame("Any key goes back")
    terminal.press("x")
    terminal.await_frame("Sequences 1")
    terminal.press("p")
    terminal.await_frame("▸pool other")
    terminal.press("q")
    assert terminal.await_end() == 0


def test_a_sequence_that_is_opened_shows_its_block_table(
    cachemgr: LoneCachemgr, held: dict[str, Tenant], open_terminal: Any
) -> None:
    lease_id = held["alice"].lease_id
    held["alice"].admit(9, prompt(1, 4))
    table = call(cachemgr, "alice", "GetSequence", lease_id=lease_id, sequence_id=9).sequence.block_ids
    blocks = {block.block_id: block for block in call(cachemgr, "olga", "ListBlocks", pool="main").blocks}
    assert [blocks[block_id].reference_count for block_id in table] == [2, 2, 2, 1]
    terminal = open_terminal()
    terminal.await_frame("Sequences 3")
    terminal.press("/alice\r")
    terminal.await_frame("Sequences 2")
    terminal.press("j\r")
    text = "\n".join(terminal.await_frame(f"Sequence 9 of lease {lease_id[:8]}(.|\n)* held +1 "))
    for index, block_id in enumerate(table):
        first, holders = index * BLOCK_SIZE, blocks[block_id].reference_count
        state, prefix_hash = "held" if holders == 1 else "shared", blocks[block_id].prefix_hash.hex()[:4] or "–"
        tokens = f"{first} to {first + BLOCK_SIZE - 1}"
        assert re.search(rf" {index} +{tokens} +{block_id} +{state} +{holders} +5 +0  {prefix_hash}", text)
    held["alice"].settle()


def test_a_pool_can_be_chosen_at_the_start(held: dict[str, Tenant], open_terminal: Any) -> None:
    open_terminal("--pool", "other").await_frame("▸pool other")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)])
def test_signals_put_the_terminal_back(held: dict[str, Tenant], open_terminal: Any, number: int, status: int) -> None:
    terminal = open_terminal()
    terminal.await_frame("Sequences 2")
    terminal.signal(number)
    assert terminal.await_end() == status


def test_a_stop_gives_the_terminal_back_and_goes_on_after_it(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.await_frame("Sequences 2")
    terminal.signal(signal.SIGTSTP)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(terminal._far) == terminal.before
    terminal.await_left()
    terminal.signal(signal.SIGCONT)
    terminal.await_frame("Sequences 2")
    terminal.press("q")
    assert terminal.await_end() == 0


def test_another_size_is_another_frame(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    assert len(terminal.await_frame("Sequences 2")) == 24
    terminal.resize(200, 50)
    terminal.signal(signal.SIGWINCH)
    frame = terminal.await_frame("Sequences 2(.|\n)*Tenants 2")
    assert len(frame) == 50


def test_without_colour(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal(NO_COLOR="1")
    terminal.await_frame("Sequences 2")
    codes = {code for codes in re.findall(r"\x1b\[([\d;]+)m", terminal.written) for code in codes.split(";")}
    assert codes <= {"0", "1", "2", "4", "5", "7"}


def test_a_server_that_goes_away_is_said_and_waited_for(
    cachemgr: LoneCachemgr, serve: Serve, open_terminal: Any
) -> None:
    serve("main", num_blocks=NUM_BLOCKS)
    terminal = open_terminal()
    terminal.await_frame("pool main +attached")
    cachemgr.process.kill()
    frame = terminal.await_frame("no answer for .*, trying again")
    assert "0 held" in "\n".join(frame)
    cachemgr.process.restart(DEADLINE_S)
    terminal.await_frame("no worker is attached")
    serve("again", num_blocks=NUM_BLOCKS)
    terminal.await_frame("pool again +attached")
    terminal.await_frame("^ +1 (· )+ *$")
    terminal.press("q")
    assert terminal.await_end() == 0


def test_watched_statistics_go_on_when_a_server_goes_away(
    cachemgr: LoneCachemgr, serve: Serve, open_terminal: Any
) -> None:
    serve("main", num_blocks=1001)
    terminal = open_terminal("--pool", "main", command=("stats", "--watch", "--interval", "0.1"))
    frame = terminal.await_frame("pool main .* attached")
    assert len(frame) <= 24
    assert any(line.startswith("╰") for line in frame), "the map is there to its end"
    cachemgr.process.kill()
    frame = terminal.await_frame("^no answer for .* s \\(.*\\), trying again: unix:")
    assert "pool main" in "\n".join(frame), "the last look stays"
    assert not re.search("UNAVAILABLE|failed to connect|last error", "\n".join(frame))
    cachemgr.process.restart(DEADLINE_S)
    terminal.await_frame("has no pool 'main'")
    serve("main", num_blocks=NUM_BLOCKS)
    frame = terminal.await_frame("pool main .* 64 blocks .* attached")
    assert "no answer" not in "\n".join(frame)
    terminal.signal(signal.SIGINT)
    assert terminal.await_end() == 0


def test_statistics_in_a_pipe_go_on_when_a_server_goes_away(cachemgr: LoneCachemgr, serve: Serve, folder: Path) -> None:
    serve("main", num_blocks=NUM_BLOCKS)
    (folder / "olga.token").write_text("olga")
    (folder / "olga.token").chmod(0o600)
    flags = ("--cachemgr", cachemgr.process.address, "--token-file", str(folder / "olga.token"))
    process = subprocess.Popen(
        [QUIRE, "stats", "--watch", "--json", "--interval", "0.1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert '"main"' in process.stdout.readline()
            cachemgr.process.kill()
            assert re.match(r"no answer for \d+ s \(.*\), trying again: unix:", process.stderr.readline())
            cachemgr.process.restart(DEADLINE_S)
            assert process.stderr.readline().startswith("cachemgr answers again: unix:")
            while json.loads(process.stdout.readline())["pools"]:
                pass
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_a_pool_too_big_to_be_watched_is_read_in_pages(
    cachemgr: LoneCachemgr, serve: Serve, open_terminal: Any
) -> None:
    big = serve("big", num_blocks=100_001)
    tenant = Tenant.begin(cachemgr, big, "alice")
    tenant.admit(1, prompt(1, 50_000))
    terminal = open_terminal()
    terminal.await_frame(r"a cell: \d+ blocks *\n +1 █+ *$")
    terminal.await_colour("32m█")
    tenant.settle()
    tenant.release(1)
    terminal.await_colour("36m█")


# One frame.


def once(cachemgr: LoneCachemgr, folder: Path, caller: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    token = folder / f"{caller}.token"
    token.write_text(caller)
    token.chmod(0o600)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return subprocess.run(
        [QUIRE, "top", "--cachemgr", cachemgr.process.address, "--token-file", str(token), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        check=False,
        env=environment | {"COLUMNS": "80", "LC_ALL": "C.UTF-8"},
    )


def test_into_a_pipe_goes_one_frame(cachemgr: LoneCachemgr, folder: Path, held: dict[str, Tenant]) -> None:
    done = once(cachemgr, folder, "olga")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "7 held, of these 0 shared" in done.stdout
    assert re.search("^ +1 (█ ){7}· ", done.stdout, re.MULTILINE)
    assert held["alice"].lease_id[:8] in done.stdout


def test_one_frame_of_a_big_pool_has_all_of_its_blocks(cachemgr: LoneCachemgr, folder: Path, serve: Serve) -> None:
    tenant = Tenant.begin(cachemgr, serve("big", num_blocks=100_001), "alice")
    tenant.cache(1, prompt(1, 50_000))
    done = once(cachemgr, folder, "olga", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    per_cell = int(re.findall(r"a cell: (\d+) blocks", done.stdout)[0])
    cells = "".join(re.findall(r"^ +\d+ ([▁-█·]+) *$", done.stdout, re.MULTILINE))
    assert cells.count("█") == 50_000 // per_cell
    assert cells.count("·") == 100_000 // per_cell - cells.count("█")


def test_one_frame_of_a_pool_too_big_to_be_read_in_time_says_so(
    cachemgr: LoneCachemgr, folder: Path, serve: Serve
) -> None:
    serve("huge", num_blocks=700_001)
    done = once(cachemgr, folder, "olga")
    assert (done.returncode, done.stderr) == (0, "")
    assert "being read" in done.stdout


def test_who_is_no_operator_is_told(cachemgr: LoneCachemgr, folder: Path, held: dict[str, Tenant]) -> None:
    done = once(cachemgr, folder, "alice")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ROLE_MISSING" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_that_is_not_there(cachemgr: LoneCachemgr, folder: Path, held: dict[str, Tenant]) -> None:
    done = once(cachemgr, folder, "olga", "--pool", "nowhere")
    assert done.returncode == 1
    assert "has no pool 'nowhere'; it has: main, other" in done.stderr


def test_a_cachemgr_that_is_not_there(folder: Path) -> None:
    done = subprocess.run(
        [QUIRE, "top", "--cachemgr", f"unix:{folder}/none.sock"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "no cachemgr answers" in done.stderr
