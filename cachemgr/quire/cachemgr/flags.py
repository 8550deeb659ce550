"""cachemgr's own flags, which a worker does not have. `quire up` has them, too."""

from pathlib import Path

import click

from quire.cachemgr._core import DEFAULT_POLICY, POLICIES
from quire.cachemgr.bounds import MAX_LEASES
from quire.serving.flags import FILE, Flag, option

OWN_FLAGS: list[Flag] = [
    option(
        "--eviction-policy",
        type=click.Choice(POLICIES),
        default=DEFAULT_POLICY,
        help="The order of eviction: by the learned retention time of each class of prefix, or "
        "least recently used first.",
    ),
    option(
        "--max-leases",
        type=click.IntRange(min=1),
        default=MAX_LEASES,
        metavar="NUMBER",
        help="Most leases at one time, of all tenants together.",
    ),
    option(
        "--tenants",
        type=FILE,
        metavar="FILE",
        help="The tenants' shares of the pools' blocks, TOML. Read again when it changes.",
    ),
    option(
        "--keep-share",
        type=click.FloatRange(0, 1),
        default=0.25,
        metavar="FRACTION",
        help="The share of a pool's blocks that the breakpoints of one tenant's prompts may keep, unless the tenants "
        "file has its keep_limit.",
    ),
    option(
        "--keep-tokens/--no-keep-tokens",
        default=True,
        help="Keep the tokens of cached blocks for watchers with the role content, such as `quire events`: 4 bytes a "
        "token of the pool.",
    ),
    option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Folder for a log of every change. A restart continues with the same leases, blocks and prefixes. "
        "It is made if it is missing. Without a folder, a restart makes every worker begin a new epoch.",
    ),
]
