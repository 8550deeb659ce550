"""A worker of two ranks as torchrun starts it on one machine; arguments are the worker's."""

from __future__ import annotations

import sys

from torch.distributed.run import main

if __name__ == "__main__":
    main(["--standalone", "--nproc-per-node", "2", "-m", "quire.worker", *sys.argv[1:]])
