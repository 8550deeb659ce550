"""What a serving process asks of the interpreter: that its garbage collector does not hold up calls.

Objects without cycles are freed at once, with or without a collector; it only looks for cycles, and the time for a look
grows with what it walks through. So what lasts is taken out of its sight at the start, and it looks seldom.

Later nothing is frozen: calls that are open hold cycles that end with them, and would stay for good. Nor is there a
need to: a pool's books are in the core, where the collector does not look. Of one with a million blocks and 1,000
sequences of 4,096 tokens it sees 23 objects.
"""

import gc

THRESHOLDS = (10_000, 10, 10)
"""Container objects made and not freed again before the youngest are looked through, and how many such looks make one
at the next generation. Steps free what they make, so that even the first is reached by growth and cycles alone."""


def tune_garbage_collector() -> None:
    """Collects once, freezes what lives, sets THRESHOLDS. For the start, before calls are answered: tens of ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
