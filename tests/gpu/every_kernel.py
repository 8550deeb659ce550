"""Every kernel once, small, on a GPU: the program for the sanitizer.

    compute-sanitizer python tests/gpu/every_kernel.py

Caching of memory must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1), or an access past a tensor hits its neighbour.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in (".", "framework"))

from kernel_batch import LAYOUTS, Batch, Shape

SMALL = {"hidden": 384, "intermediate": 640, "vocab_size": 5000}


def shapes() -> Iterator[Shape]:
    for layout in LAYOUTS:
        yield Shape(8, 2, 128, layout=layout, **SMALL)
    yield Shape(7, 1, 64, kv_dtype=torch.float8_e4m3fn, block_size=64, **SMALL)
    yield Shape(4, 4, 80, window=40, softcap=30.0, has_sinks=True, **SMALL)
    yield Shape(4, 2, 256, chunk=64, has_alibi=True, dtype=torch.float16, **SMALL)
    yield Shape(2, 2, 32, dtype=torch.float32, block_size=128, has_qk_norm=True, **SMALL)


def run(shape: Shape, device: torch.device) -> None:
    decode = Batch(shape, (1,) * 5, (1, 16, 17, 130, 300), device)
    decode.decode(decode.plan())
    decode.decode(decode.plan(fixed_split=64))
    few = Batch(shape, (3, 1, 2), (3, 40, 100), device)
    few.decode(few.plan())
    prompts = Batch(shape, (70, 5, 1), (70, 200, 33), device)
    for num_splits in (None, 1, 3):
        prompts.prefill(num_splits=num_splits)
    for batch in (decode, prompts):
        batch.prologue()
        batch.write()
        batch.norm()
        batch.activation()
        batch.merge()
        batch.update()
        batch.sample()
        batch.draw()
        batch.draw(filtered=False)
    decode.copy([1, 2], [3, 4])
    decode.offload(list(range(1, decode.num_blocks)))
    torch.cuda.synchronize()


if __name__ == "__main__":
    for each in shapes():
        run(each, torch.device("cuda"))
    print("every kernel ran")
