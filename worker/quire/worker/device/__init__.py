"""The device under all rooms: which one it is, transfers to it, captures, compilations, traces.

    devices.py          the device of a --device flag
    reproducible.py     products with the same bits wherever operands lie in memory
    transfer.py         integers there, sampled tokens back, without a sync
    capture.py          CUDA graphs: the stream, and the cause of a failed capture
    compilations.py     the kernels that Triton compiles in this process
    profiling.py        a Chrome trace of some steps
    rounding.py         the difference that rounding makes

No file of this room knows a block.
"""
