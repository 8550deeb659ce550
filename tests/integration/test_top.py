"""`quire top` as a process in a terminal of its own: keys are pressed, the screen is read, the terminal is put back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sysconfig
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import CreateLease
from integration.lone_cachemgr import BLOCK_SIZE, LoneCachemgr, Serve, Tenant, call, prompt
from integration.protocol_client import DEADLINE_S, Pair, draw_tokens

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
HOME = "\x1b[H"
LEFT = "\x1b[?1049l"
NUM_BLOCKS = 65


class Terminal:
    """A terminal of some size with `quire top` in it."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24, **environment: str) -> None:
        self._near, self._far = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self._far)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "NO_COLOR"))}
        for name in ("COLUMNS", "LINES"):
            kept.pop(name, None)
        self.process = subprocess.Popen(
            [QUIRE, "top", "--interval", "0.1", *arguments],
            stdin=self._far,
            stdout=self._far,
            stderr=self._far,
            env={**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | environment,
            process_group=0,
        )
        self.written = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._near, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def read(self, timeout_s: float = 0.1) -> None:
        """Takes what was written, if there is something within the time."""
        if select.select([self._near], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):
                self.written += os.read(self._near, 65536).decode(errors="replace")

    def frame(self) -> list[str]:
        """The lines of the last frame that was drawn whole, without colours."""
        frames = self.written.split(HOME)
        text = frames[-2] if len(frames) > 2 else ""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").rstrip("\n").split("\n")

    def await_frame(self, pattern: str) -> list[str]:
        """The first frame from now on that the pattern is found in, `^` and `$` being a line's ends."""
        deadline = time.monotonic() + DEADLINE_S
        self.written = self.written[-1:] if not self.written.endswith(HOME) else HOME
        while not re.search(pattern, "\n".join(self.frame()), re.MULTILINE):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.frame()}"
            assert self.process.poll() is None, self.written
            self.read()
        return self.frame()

    def await_end(self) -> int:
        """The exit status. The terminal has to be as it was, and the screen the shell's again."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self.read()
        while select.select([self._near], [], [], 0)[0]:
            self.read()
        assert termios.tcgetattr(self._far) == self.before
        assert LEFT in self.written
        assert self.written.rindex("\x1b[?25h") > self.written.rfind("\x1b[?25l")
        assert "Traceback" not in self.written
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._near)
        os.close(self._far)


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


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_screen_shows_what_cachemgr_has(
    held: dict[str, Tenant], open_terminal: Any, width: int, height: int
) -> None:
    frame = open_terminal(width=width, height=height).await_frame("7 held, 0 shared +57 cached|7 held, 0 shared")
    text = "\n".join(frame)
    assert len(frame) == height
    assert max(map(len, frame)) <= width
    assert re.search(r"pool main +attached", text)
    assert "2 leases" in text
    assert "1 in flight" in text
    alice, bob = (held[name].lease_id[:8] for name in ("alice", "bob"))
    assert re.search(rf"{alice} +alice +7 +{4 * BLOCK_SIZE + 1} +{4 * BLOCK_SIZE} ", text)
    assert re.search(rf"{bob} +bob +8 +{3 * BLOCK_SIZE + 1} +0 +{3 * BLOCK_SIZE} ", text)


def test_the_map_follows_the_blocks(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.await_frame("0 shared +█ 7 held +▓ 0 retired +▒ 0 cached +· 57 free")
    held["alice"].release(7)
    terminal.await_frame("0 shared +█ 3 held +▓ 0 retired +▒ 4 cached +· 57 free")


def test_steps_and_hits_are_rates(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.await_frame(r"hits – now, 0.0 % in all")
    terminal.await_frame(r"steps +0\.0/s")
    held["alice"].admit(9, prompt(1, 4))
    held["alice"].settle()
    terminal.await_frame(r"steps +(?!0\.0)[\d.]+/s")
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


@pytest.mark.parametrize("width", [80, 200])
def test_a_sequence_that_is_opened_shows_its_block_table(
    cachemgr: LoneCachemgr, held: dict[str, Tenant], open_terminal: Any, width: int
) -> None:
    lease_id = held["alice"].lease_id
    held["alice"].admit(9, prompt(1, 4))
    table = call(cachemgr, "alice", "GetSequence", lease_id=lease_id, sequence_id=9).sequence.block_ids
    blocks = {block.block_id: block for block in call(cachemgr, "olga", "ListBlocks", pool="main").blocks}
    assert [blocks[block_id].reference_count for block_id in table] == [2, 2, 2, 1]
    terminal = open_terminal(width=width)
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
    terminal.read()
    assert LEFT in terminal.written
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


def test_ascii_only(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    terminal.await_frame("@ 7 held +x 0 retired +o 0 cached")
    assert terminal.written.isascii()


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
    terminal.await_frame("0 shared +█ 0 held +▓ 0 retired +▒ 0 cached +· 64 free")
    terminal.press("q")
    assert terminal.await_end() == 0


def test_a_pool_that_detaches_is_said(held: dict[str, Tenant], open_terminal: Any) -> None:
    terminal = open_terminal()
    terminal.await_frame("Sequences 2")
    held["alice"].worker.detach()
    terminal.await_frame("pool main +NOT ATTACHED")


def test_a_pool_too_big_to_be_watched_is_read_in_pages(
    cachemgr: LoneCachemgr, serve: Serve, open_terminal: Any
) -> None:
    big = serve("big", num_blocks=100_001)
    tenant = Tenant.begin(cachemgr, big, "alice")
    tenant.admit(1, prompt(1, 50_000))
    terminal = open_terminal()
    terminal.await_frame(r"a cell: \d+ blocks +█ 0 shared +█ 50,0\d\d held")
    tenant.settle()
    tenant.release(1)
    terminal.await_frame(r"a cell: \d+ blocks +█ 0 shared +█ 0 held +█ 0 retired +█ 50,000 cached")


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


@pytest.mark.parametrize("arguments", [(), ("--once",)])
def test_into_a_pipe_goes_one_frame(
    cachemgr: LoneCachemgr, folder: Path, held: dict[str, Tenant], arguments: tuple[str, ...]
) -> None:
    done = once(cachemgr, folder, "olga", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "7 held, 0 shared" in done.stdout
    assert "█ 7 held" in done.stdout
    assert held["alice"].lease_id[:8] in done.stdout


def test_one_frame_of_a_big_pool_has_all_of_its_blocks(cachemgr: LoneCachemgr, folder: Path, serve: Serve) -> None:
    tenant = Tenant.begin(cachemgr, serve("big", num_blocks=100_001), "alice")
    tenant.cache(1, prompt(1, 50_000))
    done = once(cachemgr, folder, "olga")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"a cell: \d+ blocks +█ 0 shared +█ 0 held +█ 0 retired +█ 50,000 cached", done.stdout)


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


def test_over_both_real_services(pair: Pair, create_lease: CreateLease) -> None:
    lease = create_lease()
    lease.run(lease.admit((1, draw_tokens(9, seed=1))))
    lease.await_settled()
    terminal = Terminal("--cachemgr", pair.services.cachemgr_address, "--pool", "default")
    try:
        terminal.await_frame(rf"^[▸ ]pool default +attached(.|\n)*^ {lease.lease_id[:8]} +– +1 +10 +9 ")
        terminal.press("q")
        assert terminal.await_end() == 0
    finally:
        terminal.close()
