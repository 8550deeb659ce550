"""The holder: a small process that keeps a worker's pool memory beyond the worker's death.

    holder.py       keeps one memory, and lends it to one worker at a time
    borrowing.py    the worker's side: asks for the memory
    __main__.py     `quire holder`

A memory is an anonymous file (memfd), and on a GPU also the descriptor of memory that the worker made there: the
deposit. The holder passes the descriptors over a unix socket. It knows the size of the memory and an identity that it
chose, and never looks into it; it has no context on the GPU. The memory is lent to a connection: the kernel closes that
when the worker is dead, and no earlier. Nothing here imports torch or gRPC.
"""
