"""`quire lab`: requests in virtual time over the real books, scheduler and routers; see docs/how-to/lab.md.

From a notebook:

    from quire.lab import compare, read_config, run
    outcome = run(read_config("lab.toml"))
    print(outcome.metrics["first_token_p50_s"])
"""

from quire.cachemgr.eviction import EvictionPolicy
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
