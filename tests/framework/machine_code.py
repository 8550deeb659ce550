"""Kernels compiled for five GPUs on a machine without one, and what their machine code says.

Launchers run as they are, on tensors of the meta device, with a stand-in for the GPU's driver and with the limits of
the GPU in question: they choose the tiles and Triton specialises the arguments as on that GPU, and what Triton would
compile is recorded instead of launched. So a test compiles what would run, and counts what would compile.

    launches = recorded(lambda: paged_decode(...), H100)    what would be launched there, in order
    code = compile_launch(launches[0])                      registers, spills, shared memory, instructions, loops
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource

from quire.kernels import launching
from quire.kernels.launching import DeviceLimits

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SM_REGISTERS = 65_536


@dataclass(frozen=True, slots=True)
class GPU:
    """A kind of GPU: what launchers know of it, and the warps that one of its multiprocessors can hold.

    The figures are those of CUDA's programming guide, table "Technical Specifications per Compute Capability".
    """

    name: str
    limits: DeviceLimits
    sm_warps: int

    @property
    def arch(self) -> str:
        """sm_90 and the like."""
        major, minor = self.limits.capability
        return f"sm_{major}{minor}"

    @property
    def target(self) -> GPUTarget:
        major, minor = self.limits.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    @property
    def sm_shared_bytes(self) -> int:
        return self.limits.shared_memory_bytes + 1024


def _gpu(name: str, capability: tuple[int, int], num_multiprocessors: int, shared_kib: int, sm_warps: int) -> GPU:
    return GPU(name, DeviceLimits(capability, num_multiprocessors, shared_kib << 10), sm_warps)


A100 = _gpu("A100", (8, 0), 108, 163, 64)
L4 = _gpu("L4", (8, 9), 58, 99, 48)
H100 = _gpu("H100", (9, 0), 132, 227, 64)
B200 = _gpu("B200", (10, 0), 148, 227, 64)
RTX_5090 = _gpu("RTX 5090", (12, 0), 170, 99, 48)
GPUS = (A100, L4, H100, B200, RTX_5090)


class StandInDriver(DriverBase):
    """Enough of a driver for Triton to specialise a launch; nothing can be launched with it."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(f"nothing is launched here, also not with {ty}")

    def get_current_target(self) -> GPUTarget:
        return self._gpu.target

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError("there is no device here")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing can be timed here")

    def get_current_device(self) -> str:
        """Not a number, so that Triton keeps its records of real devices apart."""
        return self._gpu.arch

    def get_current_stream(self, device: str) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A kernel specialised for its arguments. Triton compiles once for each key."""

    name: str
    key: str
    kernel: Any = field(compare=False, repr=False)
    signature: dict[str, str] = field(compare=False, repr=False)
    constants: dict[tuple[int, ...], Any] = field(compare=False, repr=False)
    attributes: dict[tuple[int, ...], Any] = field(compare=False, repr=False)
    options: dict[str, Any] = field(compare=False, repr=False)
    gpu: GPU = field(compare=False)

    def constant(self, name: str) -> Any:
        """The value of a constexpr parameter. Raises KeyError if there is none of that name."""
        return self.constants[(self.kernel.arg_names.index(name),)]


def recorded(work: Callable[[], object], gpu: GPU = H100) -> list[Launch]:
    """Record the launches of `work` on that GPU, in order; a GPU with an empty cache would compile each key once."""
    launches: list[Launch] = []

    def record(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(
            Launch(
                name=fn.name,
                key=f"{fn.name} {key}",
                kernel=fn.jit_function,
                signature=compile["signature"],
                constants=compile["constants"],
                attributes=compile["configs"][0],
                options=_options(compile["specialization_data"]),
                gpu=gpu,
            )
        )
        return True  # skips the compilation, and with it the launch

    with _driver(gpu), _cache_hook(record), launching.chosen_for(gpu.limits):
        work()
    return launches


def _options(specialization_data: str) -> dict[str, Any]:
    """num_warps, num_stages and the others, with the tuples that JSON has no word for."""
    options = json.loads(specialization_data)["options"]
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


@contextmanager
def _driver(gpu: GPU) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(StandInDriver(gpu))
    try:
        yield
    finally:
        config._active = before


@contextmanager
def _cache_hook(hook: Callable[..., bool]) -> Iterator[None]:
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    opcode: str
    """With modifiers: LDGSTS.E.BYPASS.128."""
    operands: str


@dataclass(frozen=True, slots=True)
class Loop:
    """The instructions from the target of a jump backwards to the jump, both included."""

    instructions: tuple[Instruction, ...]

    def count(self, pattern: str) -> int:
        return count(self.instructions, pattern)

    @property
    def copies_outstanding(self) -> int | None:
        """Groups of asynchronous copies that the loop lets run on at each of its waits, or None if it never waits."""
        waits = [
            int(depth, 16)
            for each in self.instructions
            if each.opcode.startswith("DEPBAR.LE") and (depth := each.operands.rpartition("0x")[2])
        ]
        return min(waits) if waits else None


@dataclass(frozen=True, slots=True)
class MachineCode:
    gpu: GPU
    registers: int
    shared_bytes: int
    num_warps: int
    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    """Innermost ones, in order."""
    ir: str
    """Triton's own, before it is optimised for a GPU."""
    ptx: str

    def count(self, pattern: str) -> int:
        """Instructions with an opcode that starts with the regular expression."""
        return count(self.instructions, pattern)

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from local memory."""
        return self.count(r"(LDL|STL)\b")

    @property
    def programs_per_multiprocessor(self) -> int:
        by_shared = self.gpu.sm_shared_bytes // (self.shared_bytes + 1024)
        registers = -(-max(self.registers, 1) // 8) * 8  # given out in eights
        by_registers = SM_REGISTERS // (registers * 32 * self.num_warps)
        return min(by_shared, by_registers, self.gpu.sm_warps // self.num_warps)

    @property
    def copy_loops(self) -> tuple[Loop, ...]:
        """Those that copy from global to shared memory while they compute."""
        return tuple(loop for loop in self.loops if loop.count("LDGSTS"))

    def summary(self) -> str:
        """One line of figures."""
        waits = [loop.copies_outstanding for loop in self.copy_loops]
        return (
            f"{self.gpu.arch}: {self.registers} registers, {self.shared_bytes / 1024:.1f} KiB shared, "
            f"{self.spills} spills, "
            f"{self.programs_per_multiprocessor} programs/SM, LDGSTS {self.count('LDGSTS')}, "
            f"HMMA {self.count('HMMA')}, HGMMA {self.count('HGMMA')}, copies outstanding {waits}"
        )


def count(instructions: tuple[Instruction, ...], pattern: str) -> int:
    matcher = re.compile(pattern)
    return sum(1 for each in instructions if matcher.match(each.opcode))


def loads_before(instructions: tuple[Instruction, ...], pattern: str) -> int:
    """Loads from global memory that wait for one another before the first instruction of that opcode has its operands.

    Read in the order of addresses, without jumps: a register holds what was written to it last, shared memory whatever
    was written anywhere in it.
    """
    depths: dict[str, int] = {}
    for each in instructions:
        named = re.findall(r"\bU?[RP]\d+\b", each.operands)
        if re.match(pattern, each.opcode):
            return max((depths.get(name, 0) for name in named), default=0)
        if re.match(r"STS", each.opcode):
            depths["shared"] = max(depths.get(name, 0) for name in ("shared", *named))
        if re.match(r"(ST|BAR|BRA|RED)", each.opcode) or not named:
            continue
        sources = [*named[1:], *(["shared"] if each.opcode.startswith("LDS") else [])]
        depth = max((depths.get(name, 0) for name in sources), default=0) + bool(re.match(r"LDG\b", each.opcode))
        kind, number = re.findall(r"\D+|\d+", named[0])
        width = 4 if ".128" in each.opcode else 2 if re.search(r"\.64|WIDE", each.opcode) else 1
        depths |= {f"{kind}{int(number) + offset}": depth for offset in range(width)}
    raise ValueError(f"no instruction like {pattern}")


def compile_launch(launch: Launch) -> MachineCode:
    """Compile for the launch's GPU, and read the machine code, once. Half a second to several; Triton caches it too."""
    known = (launch.gpu.arch, launch.key)
    if known not in _compiled:
        _compiled[known] = _compile(launch)
    return _compiled[known]


_compiled: dict[tuple[str, str], MachineCode] = {}


def _compile(launch: Launch) -> MachineCode:
    source = ASTSource(
        fn=launch.kernel, signature=launch.signature, constexprs=launch.constants, attrs=launch.attributes
    )
    compiled = triton.compile(source, target=launch.gpu.target, options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("-res-usage", cubin.name)
        sass = _cuobjdump("-sass", cubin.name)
    instructions = tuple(read_instructions(sass))
    found = re.search(r"REG:(\d+)", usage)
    if found is None or not instructions:
        raise ValueError(f"cuobjdump says nothing of {launch.name}: {usage}")
    return MachineCode(
        gpu=launch.gpu,
        registers=int(found[1]),
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        instructions=instructions,
        loops=tuple(innermost_loops(instructions)),
        ir=compiled.asm["ttir"],
        ptx=compiled.asm["ptx"],
    )


def _cuobjdump(option: str, path: str) -> str:
    command = [NVIDIA_TOOLS / "cuobjdump", option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# /*0a10*/   @!P0 BRA 0x7f0 ;
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


def read_instructions(sass: str) -> Iterator[Instruction]:
    for line in sass.splitlines():
        if found := LINE.match(line):
            yield Instruction(int(found[1], 16), found[2], found[3].strip())


def innermost_loops(instructions: tuple[Instruction, ...]) -> Iterator[Loop]:
    """Jumps backwards, without those that have another one inside, and without the trap that ends every kernel."""
    spans: dict[int, int] = {}
    for each in instructions:
        target = re.search(r"(0x[0-9a-f]+)\s*$", each.operands)
        if each.opcode.startswith("BRA") and target and (start := int(target[1], 16)) < each.address:
            spans[start] = max(each.address, spans.get(start, 0))
    for start, end in sorted(spans.items()):
        inside = ((a, b) for a, b in spans.items() if (a, b) != (start, end))
        if not any(start <= a and b <= end for a, b in inside):
            yield Loop(tuple(each for each in instructions if start <= each.address <= end))
