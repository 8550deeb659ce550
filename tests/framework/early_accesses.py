"""The accesses to memory that a compiled kernel makes before it waits for earlier kernels, by the kernel's arguments.

Triton's intermediate code names each value once. So a load is traced back, through all values that it is made of, to
the pointers among the kernel's arguments.
"""

from __future__ import annotations

import re

WAIT = "griddepcontrol.wait"

_VALUE = re.compile(r"%[\w.$-]+")
_ACCESS = re.compile(r"\b(tt\.load|tt\.store|tt\.atomic_\w+|tt\.descriptor_\w+)\b|\b(prefetch)\.global\b")
_LOCATION = re.compile(r"\s*loc\(.*$")
_MACHINE_ACCESS = r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UBLKCP|UTMALDG|UTMASTG)\b|CCTL\.E\.PF2"
_MACHINE_WAIT = "ACQBULK"


class NoWait(AssertionError):
    """A kernel does not wait exactly once, where each of its programs comes by."""


def early_accesses(ir: str) -> dict[str, set[str]]:
    """The operations on memory in front of the wait: their names, and the pointer arguments that they depend on.

    Raises NoWait if there is not one wait, or it stands in a branch, a loop or behind a return.
    """
    lines = [_LOCATION.sub("", line) for line in ir.splitlines()]
    waits = [i for i, line in enumerate(lines) if WAIT in line]
    if len(waits) != 1:
        raise NoWait(f"it waits {len(waits)} times")
    (start,) = (i for i, line in enumerate(lines) if "tt.func public" in line)
    pointers = set(re.findall(r"(%[\w.$-]+): !tt\.ptr", lines[start]))
    made_of: dict[str, set[str]] = {}
    open_results: list[set[str]] = []
    found: dict[str, set[str]] = {}
    for line in lines[start + 1 : waits[0]]:
        if re.search(r"\bcf\.|^\s*\^bb|tt\.return", line):
            raise NoWait("a program may end or branch off before it waits")
        left, _, right = line.partition(" = ") if " = " in line else ("", "", line)
        results = {value.partition(":")[0] for value in _VALUE.findall(left)}
        operands = {value.partition("#")[0] for value in _VALUE.findall(right)}
        for result in results:
            made_of[result] = operands
        if access := _ACCESS.search(line):
            found.setdefault(access[1] or access[2], set()).update(_sources(operands, made_of) & pointers)
        if re.search(r"\b(scf|tt\.reduce|tt\.scan)\S*\.?yield|\bscf\.yield", line) and open_results:
            for result in open_results[-1]:
                made_of[result] = made_of[result] | operands
        for _ in range(line.count("}") - line.count("{")):
            open_results.pop()
        for _ in range(line.count("{") - line.count("}")):
            open_results.append(results)
    if open_results:
        raise NoWait("the wait stands in a branch or a loop")
    return found


def _sources(values: set[str], made_of: dict[str, set[str]]) -> set[str]:
    """The values, and all that they are made of."""
    known: set[str] = set()
    left = set(values)
    while left:
        value = left.pop()
        known.add(value)
        left |= made_of.get(value, set()) - known
    return known


def machine_accesses(opcodes: list[str]) -> list[str]:
    """The machine's instructions in front of the wait that access global memory. Raises NoWait as early_accesses."""
    waits = [i for i, opcode in enumerate(opcodes) if opcode.startswith(_MACHINE_WAIT)]
    if len(waits) != 1:
        raise NoWait(f"its machine code waits {len(waits)} times")
    return [opcode for opcode in opcodes[: waits[0]] if re.match(_MACHINE_ACCESS, opcode)]
