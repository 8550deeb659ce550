"""Run by boot_systemd.py in the sandbox of a unit: what can be done there, as one JSON object of names and outcomes."""

import ctypes
import errno
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("TRITON_CACHE_DIR", "/nonexistent"))


def compile_c() -> int:
    """Compiles as Triton does before a first launch, with another source."""
    CACHE.mkdir(exist_ok=True)
    (CACHE / "a.c").write_text("int f(void) { return 7; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", CACHE / "a.so", CACHE / "a.c"], check=True)
    return int(ctypes.CDLL(str(CACHE / "a.so")).f())


def compile_kernel() -> bool:
    """From Triton to machine code of a GPU that need not be here."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit  # type: ignore[untyped-decorator]
    def fill(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        tl.store(x + tl.arange(0, SIZE), 1.0)

    source = ASTSource(fill, {"x": "*fp32"}, {"SIZE": 128})
    return bool(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


def write(folder: str) -> None:
    """A file that is gone again at once."""
    (Path(folder) / "probe").write_text("x")
    (Path(folder) / "probe").unlink()


def send(host: str) -> None:
    """Sends one datagram without a receiver."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", (host, 9))


def unshare_user() -> None:
    """os.unshare, which Python has from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")


PROBES: dict[str, Callable[[], object]] = {
    "writable and executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC).close(),
    "compile C": compile_c,
    "compile a kernel": compile_kernel,
    "write /etc": lambda: write("/etc"),
    "write /run/quire": lambda: write("/run/quire"),
    "write /run/quire-worker": lambda: write("/run/quire-worker"),
    "write /run/quire-gateway": lambda: write("/run/quire-gateway"),
    "read cachemgr's files": lambda: os.listdir("/etc/quire/cachemgr"),
    "read worker's files": lambda: os.listdir("/etc/quire/worker"),
    "read gateway's files": lambda: os.listdir("/etc/quire/gateway"),
    "see /root": lambda: os.listdir("/root"),
    "see other processes": lambda: Path("/proc/1/cmdline").read_bytes(),
    "read /proc/meminfo": lambda: Path("/proc/meminfo").read_bytes(),
    "read /proc/stat": lambda: Path("/proc/stat").read_bytes(),
    "open a device": lambda: Path("/srv/fuse").open("rb").close(),
    "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
    "netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
    "send to loopback": lambda: send("127.0.0.1"),
    "send to others": lambda: send(sys.argv[1]),
    "new namespace": unshare_user,
}


def outcome(probe: Callable[[], object]) -> str:
    """ "ok", or why not: the name of the errno or of the exception."""
    try:
        probe()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except Exception as error:
        return repr(error)
    return "ok"


if __name__ == "__main__":
    print(json.dumps({name: outcome(probe) for name, probe in PROBES.items()}))
