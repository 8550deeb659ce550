"""Runs the script of a benchmark: python benchmarks/harness/run.py SCRIPT [FLAGS]...

`quire bench` starts this program. Python puts the folder of this file into sys.path, and this program the script's own
folder before it, so that a script can import both.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
