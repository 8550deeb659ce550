"""Products of MKL, the library of float32 products on x86, with the same bits wherever their operands lie in memory."""

from __future__ import annotations

import os

VARIABLE = "MKL_CBWR"


def fix_product_order() -> None:
    """Have MKL add in an order that does not depend on the alignment of operands.

    MKL reads this when it is first used, so call it before the first product of the process. A value that the
    environment has already is kept.
    """
    os.environ.setdefault(VARIABLE, "AUTO")
