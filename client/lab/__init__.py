"""`quire lab`: requests in virtual time over the real books, scheduler and routers; see docs/how-to/lab.md.

From a notebook:

    from quire.client.lab import compare, read_config, run
    outcome = run(read_config("lab.toml"))
    print(outcome.metrics["first_token_p50_s"])
"""

from quire.cachemgr.eviction import EvictionPolicy
from quire.client.lab.config import LabConfig, read_config
from quire.client.lab.errors import ConfigError
from quire.client.lab.experiment import compare, run
from quire.client.lab.measures import Outcome
from quire.client.lab.report import write_report
from quire.client.lab.routers import Arrival, PoolState, Router
from quire.client.lab.step_times import PRESETS, StepTime, calibrate

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
