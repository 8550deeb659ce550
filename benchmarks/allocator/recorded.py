"""The targets, and the peers' recorded figures for machines on which they can't run."""

from __future__ import annotations

SIZES = (1_000, 10_000, 100_000, 1_000_000)

TITLES = {
    "fresh": "admit a fresh 2,048-token prompt",
    "cached": "the same, all cached",
    "extend": "extend 256 sequences: slots",
    "extend_and_publish": "extend 256: tokens appended, full blocks published",
    "full": "admit with the pool full of cached blocks",
    "release": "release a 2,048-token sequence",
    "fork": "fork three samples, first copy-on-write included",
    "empty_step": "empty step: plan and settle",
    "release_in_flight": "release, a step in flight",
    "release_in_flight_settled": "release, a step in flight, both settled",
    "message_fresh: all": "message: fresh prompt, in all",
    "message_extend: all": "message: extend 256, in all",
}

TO_REACH_US = {
    "fresh": 85.0,
    "cached": 80.0,
    "extend": 30.0,
    "extend_and_publish": 60.0,
    "full": 120.0,
    "release": 10.0,
    "fork": 15.0,
}
"""Microseconds, on the machine of the recorded figures; admissions with SHA-256 identities."""

METADATA_TO_REACH_BYTES = 200
POOL_GROWTH_TO_REACH, EVICTION_GROWTH_TO_REACH = 1.2, 3.0
"""Cost at a million blocks over that at 10,000."""
WORST_CALL_TO_REACH_MS = 5.0

PEERS = ("vllm", "sglang", "transformers", "tokenspeed", "nano-vllm")
"""Of tokenspeed nothing is recorded."""

RECORDED_US: dict[str, dict[str, tuple[float, ...]]] = {
    "vllm": {
        "fresh": (302, 317, 318, 318),
        "cached": (276, 284, 282, 284),
        "extend": (543, 1138, 1154, 1149),
        "release": (12, 13, 13, 14),
        "full": (342, 362, 405, 427),
        "fork": (814, 814, 814, 814),
    },
    "sglang": {
        "fresh": (287, 387, 303, 306),
        "cached": (151, 154, 154, 290),
        "extend": (50, 60, 61, 61),
        "release": (42, 45, 45, 46),
        "full": (217, 235, 315, 1565),
        "fork": (514, 514, 514, 514),
    },
    "transformers": {
        "fresh": (219, 224, 228, 229),
        "cached": (151, 150, 148, 150),
        "extend": (215, 511, 674, 660),
        "release": (12, 12, 12, 13),
        "full": (252, 3705, 60701, 1792718),
        "fork": (35, 35, 35, 35),
    },
    "nano-vllm": {
        "fresh": (178, 190, 186, 180),
        "cached": (1158, 8740, 85131, 887524),
        "extend": (63, 160, 146, 147),
        "release": (14, 17, 15, 14),
        "full": (200, 263, 243, 253),
    },
}
"""Recorded on one machine (2 cores of an AMD EPYC, CPython 3.11), one figure per size of SIZES; of a range the middle.
nano-vllm: cached, but not in use."""

RECORDED_METADATA_BYTES = {"vllm": 292.0, "sglang": 281.0, "transformers": 550.0, "nano-vllm": 192.0}


def recorded_us(peer: str, row: str, num_blocks: int, *, scale: float) -> float | None:
    """A recorded figure at the nearest size that was recorded, times this machine's slowness; None if there is none."""
    figures = RECORDED_US.get(peer, {}).get(row)
    if figures is None:
        return None
    nearest = min(range(len(SIZES)), key=lambda index: abs(SIZES[index] - num_blocks))
    return figures[nearest] * scale
