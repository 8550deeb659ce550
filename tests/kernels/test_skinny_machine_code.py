"""ptxas's code of products of few rows, without a GPU: spills, wide loads, weights in front of what depends, copies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from machine_code import A100, B200, GPU, H100, Launch, MachineCode, compile_launch, recorded
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.launching import chosen_for
from quire.kernels.skinny_linear import SkinnyWorkspace, skinny_linear
from quire.kernels.skinny_tiling import Form

META = torch.device("meta")
WEIGHT_LOAD = r"LDG\.E\.EF"
"""Of what leaves the cache first."""


@dataclass(frozen=True, slots=True)
class Case:
    """A product of a model: rows, outputs and inputs, and what stands beside it."""

    form: Form
    num_rows: int
    num_outputs: int
    num_inputs: int
    has_norm: bool = False
    has_residual: bool = False
    gated: bool = False
    activation: Activation | None = None
    dtype: torch.dtype = torch.bfloat16

    def compiled(self, gpu: GPU) -> tuple[Launch, MachineCode]:
        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=META)

        def work() -> None:
            skinny_linear(
                tensor(self.num_rows, self.num_inputs),
                tensor(self.num_outputs * (1 + self.gated), self.num_inputs),
                form=self.form,
                norm_weight=tensor(self.num_inputs) if self.has_norm else None,
                residual=tensor(self.num_rows, self.num_outputs) if self.has_residual else None,
                gated=self.gated,
                activation=self.activation,
                workspace=workspace,
            )

        with chosen_for(gpu.limits):
            workspace = SkinnyWorkspace.allocate(META)
        (launch,) = recorded(work, gpu)
        return launch, compile_launch(launch)


QKV_06B = Case("gemv", 1, 4096, 1024, has_norm=True)
QKV_8B = Case("gemv", 2, 6144, 4096, has_norm=True)
GATE_UP_8B = Case("gemv", 8, 14336, 4096, has_norm=True, gated=True)
DOWN_06B = Case("gemv", 2, 1024, 3072, has_residual=True)
DOWN_8B = Case("gemv", 1, 4096, 14336, has_residual=True)
GATE_UP_GEMMA = Case("gemv", 2, 9216, 2304, has_norm=True, gated=True, activation="gelu_tanh")
FC1_GPT2 = Case("gemv", 4, 3072, 768, activation="gelu")
GEMV = (QKV_06B, QKV_8B, GATE_UP_8B, DOWN_06B, DOWN_8B, GATE_UP_GEMMA, FC1_GPT2)
DOT = (
    Case("dot", 16, 1024, 2048, has_residual=True),
    Case("dot", 32, 14336, 4096, gated=True),
    Case("dot", 64, 4096, 14336, has_residual=True),
    Case("dot", 32, 9216, 2304, gated=True, activation="gelu_tanh"),
    Case("dot", 64, 3072, 768, activation="gelu"),
    Case("dot", 128, 1024, 3072, has_residual=True),
)
OTHER_GPUS = [(case, gpu) for gpu in (A100, B200) for case in (GATE_UP_8B, DOT[1], DOT[-1])]
ON_H100 = [(case, H100) for case in (*GEMV, *DOT)]
FLOAT32 = [(Case("gemv", 8, 3072, 1024, has_norm=True, gated=True, dtype=torch.float32), H100)]


def check(code: MachineCode) -> None:
    print(code.summary())
    assert code.spills == 0, code.summary()
    assert code.shared_bytes <= code.gpu.limits.shared_memory_bytes
    assert code.count(WEIGHT_LOAD) == code.count(WEIGHT_LOAD + r".*\.128"), "weights are loaded in narrow pieces"


@pytest.mark.parametrize(("case", "gpu"), [each for each in ON_H100 + OTHER_GPUS + FLOAT32 if each[0].form == "gemv"])
def test_gemv_has_its_first_weights_in_flight_at_once_and_in_registers(case: Case, gpu: GPU) -> None:
    """Before it waits for anything: so these loads can stand in front of a wait for the kernel before."""
    launch, code = case.compiled(gpu)
    check(code)
    opcodes = [each.opcode for each in code.instructions]
    barrier = next(index for index, opcode in enumerate(opcodes) if opcode.startswith("BAR"))
    threads, per_thread = 32 * launch.options["num_warps"], 16 // case.dtype.itemsize
    tile = launch.constant("OUTPUTS") * launch.constant("INPUTS") * (1 + case.gated)
    in_front = sum(1 for opcode in opcodes[:barrier] if opcode.startswith("LDG.E.EF"))
    assert in_front >= tile // (threads * per_thread) >= 2
    assert code.shared_bytes <= 1024, "weights pass through shared memory"


@pytest.mark.parametrize(("case", "gpu"), [each for each in ON_H100 + OTHER_GPUS if each[0].form == "dot"])
def test_dot_keeps_copies_in_flight_and_uses_matrix_instructions(case: Case, gpu: GPU) -> None:
    _, code = case.compiled(gpu)
    check(code)
    assert code.count("LDGSTS") == code.count(r"LDGSTS.*\.128") > 0
    if gpu is B200 and case.num_rows >= 64:
        assert code.count("UTCHMMA") > 0
        return  # it waits at barriers in memory
    assert code.copy_loops
    for loop in code.copy_loops:
        assert (loop.copies_outstanding or 0) >= 4, code.summary()
        assert loop.count("HGMMA" if case.num_rows >= 64 and gpu is H100 else "HMMA") > 0
