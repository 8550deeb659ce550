"""`quire lab`: requests in virtual time over the real books, scheduler and routers; see docs/how-to/lab.md.

From a notebook:

    from quire.lab import compare, read_config, run
    outcome = run(read_config("lab.toml"))
    print(outcome.metrics["first_token_p50_s"])

    __main__.py       the commands
    config.py         an experiment, from TOML
    experiment.py     runs with seeds, and their comparison; processes.py runs several at a time
    load.py           the requests of a run: traces.py, sessions.py; requests.py and tokens.py are their values
    simulation.py     one run: a queue of events in virtual time
    routers.py        the choice of a pool for a request
    pool.py           a pool: cachemgr's books, an engine's scheduler, and a worker; step_times.py: its times
    disk.py           the worker's disk
    measures.py       the results; report.py writes them
    eviction.py       judges an eviction policy: eviction_loads.py, replay.py, eviction_report.py
    policy_files.py   policies of the user, from files; errors.py: errors of the input
"""

from quire.cachemgr.eviction_interface import EvictionPolicy
from quire.lab.config import LabConfig, read_config
from quire.lab.errors import ConfigError
from quire.lab.experiment import compare, run
from quire.lab.measures import Outcome
from quire.lab.report import write_report
from quire.lab.routers import Arrival, PoolState, Router
from quire.lab.step_times import PRESETS, StepTime, calibrate

__all__ = [
    "PRESETS",
    "Arrival",
    "ConfigError",
    "EvictionPolicy",
    "LabConfig",
    "Outcome",
    "PoolState",
    "Router",
    "StepTime",
    "calibrate",
    "compare",
    "read_config",
    "run",
    "write_report",
]
