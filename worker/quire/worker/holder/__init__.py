"""The holder: a small process that keeps a worker's pool memory beyond the worker's death.

    holder.py       keeps one memory, and lends it to one worker at a time
    borrowing.py    the worker's side: asks for the memory
    __main__.py     `quire holder`

A memory is an anonymous file (memfd). The holder passes its descriptor over a unix socket. It knows the size of the
memory and an identity that it chose, and never looks into it. The memory is lent to a connection: the kernel closes
that when the worker is dead, and no earlier. Nothing here imports torch or gRPC.
"""
