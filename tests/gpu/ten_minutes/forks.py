"""Work in a fork of this process: what it imports and changes is gone afterwards."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def succeeds(name: str, work: Callable[[], object]) -> bool:
    """Run `work` in a fork, and print its error with the name, if there is one."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    status = 1
    try:
        work()
        status = 0
    except SystemExit as error:
        status = int(bool(error.code))
    except BaseException:
        print(f"{name}:", traceback.format_exc(), flush=True)
    os._exit(status)
