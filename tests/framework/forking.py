"""Start Python programs in tenths of a second: by fork of a process that has imported their modules, not by exec.

`install` replaces subprocess.Popen. A command that runs one of Quire's programs with this interpreter is then a fork of
a server process; every other command, and a command that needs its environment before imports, is started as usual. A
forked process is as after exec: a child of the caller, with its own arguments, environment, folder, descriptors,
signals and exit status. Two things differ: its modules are imported already, and native libraries have read the
server's environment. Tests of these two start their processes in `started_by_exec`.

There are two servers, started when they are first needed, because only the worker has torch. Linux only: elsewhere
`install` does nothing.

How a fork of the server becomes a child of the caller: the caller is a subreaper while the server forks twice, and the
process in between ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import itertools
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent
QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
PROGRAMS = (TESTS, TESTS.parent / "benchmarks", TESTS.parent / "client")
EXAMPLES = TESTS.parent / "client" / "examples"
PR_SET_CHILD_SUBREAPER = 36
START_TIMEOUT_S = 300.0
MAX_COMMAND_BYTES = 16384
FIRST_SPARE_FD = 512

# What native libraries and Python itself read once, when they are loaded.
READ_AT_IMPORT = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GOMP_", "OPENBLAS_", "MKL_", "GRPC_", "HF_", "TRANSFORMERS_"),
    *("TRITON_", "CUDA_", "TOKENIZERS_", "PROTOCOL_BUFFERS_"),
)
# A process that forks must have one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
STARTS_SERVICES = ("up", "demo", "bench")
LIGHT = (
    *("quire.cachemgr.service.servicer", "quire.cachemgr.catalog", "quire.cachemgr.metrics", "quire.cachemgr.state"),
    *("quire.serving.server", "quire.serving.options", "quire.serving.logs", "quire.serving.manual"),
    *("quire.cli.commands", "quire.client.engine.engine", "quire.cli.generate", "quire.cli.stats"),
    *("quire.cli.top", "quire.cli.up", "uvloop", "tokenizers"),
    *("quire.gateway.app", "quire.gateway.http.server"),
)
HEAVY = (
    *LIGHT,
    *("quire.worker.service.process", "quire.cli.demo", "transformers.models.llama.modeling_llama"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)


class ForkServerError(Exception):
    """The server has ended, or can't fork."""


@dataclass(frozen=True)
class Program:
    """A program and its arguments, as the Python command line names it.

    is_module   whether `name` is a module, not a file
    first_path  what Python puts first into sys.path; None: nothing
    """

    name: str
    is_module: bool
    arguments: list[str]
    first_path: str | None

    @classmethod
    def of(cls, command: list[str], folder: str) -> Program | None:
        """Return the program of a command line, None if it is not one that a server can become."""
        if command[0] == QUIRE:
            return cls(QUIRE, False, command[1:], str(Path(QUIRE).parent))
        if command[0] != sys.executable:
            return None
        is_safe, rest = command[1:2] == ["-P"], command[1:]
        if is_safe:
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return cls(rest[1], True, rest[2:], None if is_safe else folder)
        if rest and rest[0].endswith(".py"):
            return cls(rest[0], False, rest[1:], None if is_safe else str(Path(folder, rest[0]).parent))
        return None

    @property
    def is_quires(self) -> bool:
        """True if it is one of Quire's programs, or of the tests'."""
        target = self.arguments[1] if self.name.endswith("/quire/cli/guarded.py") else self.name
        return target.startswith(("quire.", *map(str, PROGRAMS))) or target == QUIRE

    @property
    def starts_services(self) -> bool:
        """True if it starts further processes of Quire."""
        words = [self.name, *self.arguments]
        return self.name.startswith(str(EXAMPLES)) or any(
            before in (QUIRE, "quire.cli") and word in STARTS_SERVICES for before, word in itertools.pairwise(words)
        )

    @property
    def needs_torch(self) -> bool:
        """True if it imports torch, so far as its name tells."""
        text = " ".join([Path(self.name).name, *self.arguments[:2]])
        return self.starts_services or any(word in text for word in ("worker", "model_zoo"))


@dataclass(frozen=True)
class Order:
    """A process to start: fds are the descriptors it must have, in the order in which they are sent."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    fds: list[int]
    new_session: bool
    process_group: int
    umask: int


class Server:
    """The caller's side of a server process."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """Wait until the server at the other end can fork. Raises ForkServerError."""
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()
        self._environment = read_at_import(dict(os.environ))
        self._connection.settimeout(START_TIMEOUT_S)
        self._answer()

    @classmethod
    def start(cls, modules: tuple[str, ...]) -> Server:
        """Start one that has imported these modules. Raises ForkServerError."""
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import forking; forking.main()"
        room = " " * MAX_COMMAND_BYTES  # for the command lines of the children
        with theirs:
            process = REAL_POPEN(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), *modules, room],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | ONE_THREAD,
            )
        return cls(ours, process)

    def suits(self, environment: dict[str, str]) -> bool:
        """True if this environment's values that imports read are those of the server's."""
        return read_at_import(environment) == self._environment

    def fork(self, order: Order, fds: list[int]) -> int:
        """Return the pid of a new child of this process. Raises ForkServerError."""
        body = json.dumps(asdict(order)).encode()
        with self._lock:
            subreaper(True)
            try:
                socket.send_fds(self._connection, [struct.pack("!I", len(body))], fds)
                self._connection.sendall(body)
                return self._answer()
            finally:
                subreaper(False)

    def _answer(self) -> int:
        answer = receive(self._connection, 4)
        if answer is None:
            raise ForkServerError("the fork server has ended: its own error is on stderr")
        return int(struct.unpack("!I", answer)[0])


REAL_POPEN = subprocess.Popen
REAL_EXECV = os.execv
_servers: dict[tuple[str, ...], Server] = {}
_servers_lock = threading.Lock()
_by_exec = 0
NESTED = ("nested",)


def server_for(order: Order) -> Server | None:
    """Return the server that can become this process, started if it is the first; None if exec has to start it."""
    program = Program.of(order.command, order.folder)
    if _by_exec or program is None or not program.is_quires or not os.path.isdir(order.folder):
        return None
    modules = HEAVY if program.needs_torch else LIGHT
    with _servers_lock:
        server = _servers.get(NESTED) or _servers.get(modules)
        if server is None:
            server = _servers[modules] = Server.start(modules)
    return server if server.suits(order.environment) else None


class Popen(subprocess.Popen):  # type: ignore[type-arg]  # generic at run time too, as its base is
    """subprocess.Popen that forks its children where it can."""

    def _execute_child(self, *arguments: Any) -> None:
        """Start the child. The arguments are those of CPython's own method, in its order since 3.11."""
        (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell) = arguments[:10]
        pipes = arguments[10:16]
        (_, gid, gids, uid, umask, new_session, process_group) = arguments[16:23]
        is_plain = close_fds and (shell, executable, preexec_fn, gid, gids, uid) == (False, *[None] * 5)
        order = Order(
            command=[*map(os.fsdecode, [args] if isinstance(args, str | bytes | os.PathLike) else args)],
            folder=os.path.abspath("" if cwd is None else os.fsdecode(cwd)),
            environment={
                os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()
            },
            fds=[0, 1, 2, *pass_fds],
            new_session=bool(new_session),
            process_group=process_group,
            umask=umask,
        )
        server = server_for(order) if is_plain else None
        if server is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        standard = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = server.fork(order, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@contextlib.contextmanager
def started_by_exec() -> Iterator[None]:
    """Start every process as a user does within the block."""
    global _by_exec
    _by_exec += 1
    try:
        yield
    finally:
        _by_exec -= 1


def install() -> None:
    """Make subprocess.Popen fork where it can."""
    if sys.platform == "linux":
        subprocess.Popen = Popen  # type: ignore[misc]


def read_at_import(environment: dict[str, str]) -> dict[str, str]:
    """Return the part of an environment that is read once."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def subreaper(on: bool) -> None:
    """Become the parent of grandchildren of an ended parent, or stop."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def receive(connection: socket.socket, size: int) -> bytes | None:
    """Return so many bytes, None at the end."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


# -- the server's side --------------------------------------------------------------------------------------------


def main() -> None:
    """Import, then fork until the connection ends. Returns in no process: a child becomes its program."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    for module in sys.argv[2:-1]:
        with contextlib.suppress(ModuleNotFoundError):  # on a machine without all packages: who needs it says so
            __import__(module)
    sys.path.remove(str(HERE))
    gc.collect()
    gc.freeze()  # a collection in a child would copy what all of them share
    serve(connection)


def serve(connection: socket.socket) -> None:
    """Say that it can begin; fork a child for each order."""
    if (count := len(os.listdir("/proc/self/task"))) != 1:
        raise ForkServerError(f"{count} threads after imports: a process that forks must have one")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.sendall(struct.pack("!I", os.getpid()))
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 4, 64)
        if not head:
            os._exit(0)
        head += receive(connection, 4 - len(head)) or b""
        body = receive(connection, struct.unpack("!I", head)[0])
        assert body is not None
        order = Order(**json.loads(body))
        pid = fork_twice()
        if pid is None:
            become(order, fds)
            raise SystemExit(0)
        for fd in fds:
            os.close(fd)
        connection.sendall(struct.pack("!I", pid))


def fork_twice() -> int | None:
    """Return the pid of a grandchild after the end of its parent; None in the grandchild."""
    read_fd, write_fd = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            return None
        os.write(write_fd, struct.pack("!I", pid))
        os._exit(0)
    os.waitpid(between, 0)
    pid = struct.unpack("!I", os.read(read_fd, 4))[0]
    os.close(read_fd)
    os.close(write_fd)
    return int(pid)


def become(order: Order, fds: list[int]) -> None:
    """Turn this process into the order's and run its program. Ends as the program ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.new_session:
        os.setsid()
    if order.process_group != -1:
        os.setpgid(0, order.process_group)
    if order.umask != -1:
        os.umask(order.umask)
    place(fds, order.fds)
    open_standard_streams()
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    os.execv = execute  # type: ignore[assignment]
    show_command(order.command)
    program = Program.of(order.command, order.folder)
    assert program is not None
    if program.starts_services:
        nest()
    run(program)


def place(fds: list[int], targets: list[int]) -> None:
    """Give the descriptors these numbers, and close all others."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_SPARE_FD) for fd in fds]
    os.closerange(3, FIRST_SPARE_FD)
    for fd, target in zip(kept, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)


def open_standard_streams() -> None:
    """Make sys.stdin, sys.stdout and sys.stderr as Python makes them at its start."""
    for fd, name, mode, errors in (
        (0, "stdin", "r", "strict"),
        (1, "stdout", "w", "strict"),
        (2, "stderr", "w", "backslashreplace"),
    ):
        raw = open(fd, f"{mode}b", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, errors=errors, line_buffering=fd == 2 or os.isatty(fd))
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def show_command(command: list[str]) -> None:
    """Write the command where the system reads a process's arguments: `ps` and tests look for processes by them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    first, *rest = map(os.fsencode, command)
    tail = b"".join(b"\0" + each for each in rest) + b"\0"
    text = first.ljust(end - start - len(tail)) + tail
    if len(text) == end - start:
        ctypes.memmove(start, text, len(text))


def nest() -> None:
    """Give this process, which starts processes itself, its own server: a fork of its present state."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        place([null, null, null, theirs.fileno()], [0, 1, 2, 3])
        serve(socket.socket(fileno=3))
    theirs.close()
    _servers[NESTED] = Server(ours)
    install()


def execute(path: str, command: list[str]) -> None:
    """Stand for os.execv in a child: run another of Quire's programs where this one is."""
    program = Program.of(command, os.getcwd())
    if program is None or not program.is_quires:
        REAL_EXECV(path, command)
    else:
        sys.stdout.flush()
        show_command(command)
        run(program)
        raise SystemExit(0)


def run(program: Program) -> None:
    """Run it as the interpreter does."""
    sys.argv[:] = [program.name, *program.arguments]
    if program.first_path is not None:
        sys.path.insert(0, program.first_path)
    if program.is_module:
        sys.modules.pop(program.name, None)  # what another module has imported it for; runpy warns of it
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.name, run_name="__main__")
