"""A cachemgr on a machine with a clock that was set back by a day."""

import time

now_ns = time.time_ns
time.time_ns = lambda: now_ns() - 86_400 * 10**9

from quire.cachemgr.__main__ import main  # noqa: E402

main(prog_name="quire cachemgr")
