"""The environment every test runs in, also when pytest is called without make."""

import os

DEFAULTS = {
    "QUIRE_VERIFY": "1",  # check_invariants after each mutation
    "HF_HUB_OFFLINE": "1",
    # OpenMP threads that spin while they wait take the cores of the other processes of a test.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "GRPC_VERBOSITY": "NONE",
}

# Before anything imports torch or grpc.
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
