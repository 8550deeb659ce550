"""Draw the pictures of the pages in docs/concepts.

    .venv/bin/python docs/images/make_concepts.py

Each picture is a card with a background of its own, so that it can be read on a light page and on a dark one.
Coordinates are pixels, from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
    text { font-family: "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 15px; fill: #1f2937; }
    .title { font-size: 17px; font-weight: 700; }
    .quiet { font-size: 13px; fill: #4b5563; }
    .code { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 14px; }
    .arrow { fill: none; stroke: #374151; stroke-width: 2; }
    .dashed { stroke-dasharray: 6 5; }
"""
# Fill, stroke.
BLUE, VIOLET = ("#e0f2fe", "#0284c7"), ("#ede9fe", "#7c3aed")
GREEN, AMBER = ("#dcfce7", "#16a34a"), ("#fef3c7", "#d97706")
RED, GRAY, WHITE = ("#fee2e2", "#dc2626"), ("#e5e7eb", "#6b7280"), ("#ffffff", "#6b7280")
Color = tuple[str, str]


class Picture:
    """A card of this size, with a title and a description for screen readers."""

    def __init__(self, width: int, height: int, *, title: str, description: str) -> None:
        self._size = (width, height)
        self._head = f'<title id="title">{escape(title)}</title>\n  <desc id="desc">{escape(description)}</desc>'
        self._body: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "middle") -> None:
        """Write a line. `y` is its base line."""
        self._body.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, color: Color, *lines: str, kind: str = "") -> None:
        """Draw a box with lines of text in its middle."""
        fill, stroke = color
        self._body.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}" '
            'stroke-width="2"/>'
        )
        first = y + height / 2 + 5 - 10 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 20 * number, line, kind)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through the points, with a head at the last one."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._body.append(f'<path class="arrow{" dashed" * dashed}" d="M{path}" marker-end="url(#head)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        self._body.append(f'<path class="arrow{" dashed" * dashed}" d="M{x1:g} {y1:g} L{x2:g} {y2:g}"/>')

    def svg(self) -> str:
        width, height = self._size
        body = "\n  ".join(self._body)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-labelledby="title desc">
  {self._head}
  <style>{STYLE}  </style>
  <defs>
    <marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">
      <path d="M0 0 L10 5 L0 10 z" fill="#374151"/>
    </marker>
  </defs>
  <rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="16" fill="#ffffff" stroke="#cbd5e1" stroke-width="2"/>
  {body}
</svg>
"""  # noqa: E501


def blocks_and_tables() -> Picture:
    picture = Picture(
        900,
        430,
        title="Two block tables that share two blocks",
        description="The table of sequence A has the blocks 3, 5 and 6, the table of sequence B the blocks 3, 5 and 9. "
        "Blocks 3 and 5 are shared and have two references. Block 0 is never handed out. All others are free.",
    )
    states = {0: (GRAY, "null"), 3: (GREEN, "2 refs"), 5: (GREEN, "2 refs"), 6: (BLUE, "1 ref"), 9: (VIOLET, "1 ref")}
    places = {block: 48 + 68 * block for block in range(12)}
    for block, x in places.items():
        color, words = states.get(block, (WHITE, "free"))
        picture.box(x, 185, 58, 58, color, str(block), words)
    picture.text(48, 175, "the pool: 12 blocks of 16 tokens", "quiet", anchor="start")
    for y, name, tokens, color, table in (
        (52, "A", "40 tokens", BLUE, (3, 5, 6)),
        (334, "B", "44 tokens", VIOLET, (3, 5, 9)),
    ):
        picture.text(48, y + 20, f"sequence {name}, {tokens}", "title", anchor="start")
        picture.text(48, y + 40, "its block table", "quiet", anchor="start")
        for index, block in enumerate(table):
            x = 290 + 76 * index
            picture.box(x, y, 66, 44, color, str(block))
            start = (x + 33, y + 44) if y < 185 else (x + 33, y)
            picture.arrow(start, (places[block] + 29, 183 if y < 185 else 247))
    picture.text(560, 68, "tokens 0 to 15, 16 to 31, 32 to 39", "quiet", anchor="start")
    picture.text(560, 88, "8 slots of block 6 are empty", "quiet", anchor="start")
    picture.text(560, 350, "the first 32 tokens are those of A", "quiet", anchor="start")
    picture.text(560, 370, "so B shares two blocks", "quiet", anchor="start")
    picture.text(450, 412, "A shared block is never written.", "quiet")
    return picture


def leases_and_fences() -> Picture:
    picture = Picture(
        900,
        400,
        title="From a client's death to free blocks",
        description="A client plans steps and dies. Its lease is not renewed and expires. cachemgr orders a fence. The "
        "worker refuses the lease's steps, finishes the step that runs, and answers. Only then are the blocks free.",
    )
    lanes = {"client": 75, "cachemgr": 175, "worker": 285}
    for name, y in lanes.items():
        picture.text(30, y + 5, name, "title", anchor="start")
        picture.line(130, y + 26, 870, y + 26, dashed=True)
    picture.box(140, 50, 190, 46, BLUE, "each plan renews")
    picture.box(342, 50, 110, 46, RED, "killed")
    picture.box(140, 150, 400, 46, GREEN, "lease open")
    picture.box(550, 150, 160, 46, AMBER, "fencing")
    picture.box(720, 150, 150, 46, GRAY, "blocks free")
    picture.box(140, 260, 440, 46, GREEN, "accepts the lease's steps")
    picture.box(590, 260, 160, 46, AMBER, "step ends")
    picture.arrow((200, 96), (200, 148))
    picture.arrow((310, 96), (310, 148))
    picture.text(425, 138, "ttl without a renewal", "quiet")
    picture.line(316, 144, 534, 144)
    picture.arrow((572, 196), (588, 258))
    picture.text(562, 232, "FenceLease", "code", anchor="end")
    picture.arrow((736, 258), (730, 198))
    picture.text(746, 232, "LeaseFenced", "code", anchor="start")
    picture.text(590, 328, "refuses new steps: LEASE_FENCED", "quiet", anchor="start")
    picture.arrow((140, 352), (868, 352))
    picture.text(150, 374, "time", "quiet", anchor="start")
    picture.text(868, 374, "No block is handed out while a step can still touch it.", "quiet", anchor="end")
    return picture


def grants() -> Picture:
    picture = Picture(
        900,
        450,
        title="The way of a grant",
        description="The client sends PlanStep to cachemgr and gets a signed grant. It relays the grant with token ids "
        "to the worker. The worker makes five checks, runs the step, and reports to cachemgr.",
    )
    picture.box(330, 30, 240, 62, BLUE, "client", "knows its requests")
    picture.box(40, 176, 240, 62, GREEN, "cachemgr", "owns the books and the key")
    picture.box(620, 176, 240, 62, AMBER, "worker", "owns the tensors")
    picture.arrow((360, 92), (190, 174))
    picture.text(262, 120, "1 PlanStep", "code", anchor="end")
    picture.arrow((230, 174), (400, 94))
    picture.text(330, 152, "2 grant", "code", anchor="start")
    picture.arrow((540, 92), (720, 174))
    picture.text(648, 120, "3 RunStep: grant, token ids", "code", anchor="start")
    picture.arrow((680, 174), (500, 94))
    picture.text(556, 152, "4 tokens", "code", anchor="end")
    picture.arrow((620, 222), (282, 222))
    picture.text(450, 212, "5 StepReport", "code")
    picture.box(40, 268, 380, 160, WHITE)
    picture.text(60, 294, "A grant says", "title", anchor="start")
    contents = (
        "pool · epoch · lease · step number",
        "ownership: table writes, copies, releases",
        "computation: the runs of this step",
        "a digest of the token ids that the client adds",
        "signature: HMAC-SHA256 over all of it",
    )
    for number, words in enumerate(contents):
        picture.text(60, 320 + 22 * number, words, anchor="start")
    picture.box(480, 268, 380, 160, WHITE)
    picture.text(500, 294, "The worker refuses it, unless", "title", anchor="start")
    checks = (
        "the bytes are a grant, of its pool and epoch",
        "it is attached, and the signature fits",
        "the lease is open",
        "the number is the lease's next",
        "the token ids fit the digest",
    )
    for number, words in enumerate(checks):
        picture.text(500, 320 + 22 * number, words, anchor="start")
    return picture


def prefix_cache() -> Picture:
    picture = Picture(
        900,
        400,
        title="A chain of prefix hashes",
        description="A root made of tenant, salt and model. Two blocks of a system prompt follow. Then the chain "
        "divides into the blocks of two chats. A new prompt finds three blocks and misses the fourth.",
    )
    picture.box(30, 120, 130, 66, GRAY, "root: tenant,", "salt, model")
    for x, name in ((205, "h1"), (345, "h2")):
        picture.box(x, 120, 100, 66, GREEN, name, "system")
    for x, name in ((505, "h3"), (645, "h4")):
        picture.box(x, 50, 100, 66, BLUE, name, "chat A")
    picture.box(505, 190, 100, 66, VIOLET, "h5", "chat B")
    picture.arrow((160, 153), (203, 153))
    picture.arrow((305, 153), (343, 153))
    picture.arrow((445, 143), (503, 88))
    picture.arrow((605, 83), (643, 83))
    picture.arrow((445, 163), (503, 218))
    picture.text(765, 78, "leaf: evicted", "quiet", anchor="start")
    picture.text(765, 96, "before h3", "quiet", anchor="start")
    picture.text(625, 228, "leaf", "quiet", anchor="start")
    picture.text(30, 40, "h2 = SHA-256(h1, the 16 tokens of the second block)", "code", anchor="start")
    picture.line(30, 285, 870, 285, dashed=True)
    picture.text(30, 335, "a new prompt", "title", anchor="start")
    picture.text(30, 355, "70 tokens, like chat A", "quiet", anchor="start")
    for x, words, color in (
        (205, "found", GREEN),
        (345, "found", GREEN),
        (505, "found", BLUE),
        (645, "miss", RED),
    ):
        picture.box(x, 308, 100, 52, color, words)
    picture.box(785, 308, 85, 52, WHITE, "6 tokens")
    picture.text(315, 383, "48 tokens: shared, not computed again", "quiet", anchor="start")
    picture.text(645, 383, "22 tokens: computed", "quiet", anchor="start")
    return picture


def host_tier() -> Picture:
    picture = Picture(
        900,
        370,
        title="Two ways to make room",
        description="A preempted sequence either releases its blocks and is computed again later, or is copied to the "
        "host tier and back. The engine chooses the way that costs less.",
    )
    picture.box(30, 60, 330, 180, WHITE)
    picture.text(195, 45, "the pool, in device memory", "title")
    picture.box(540, 60, 330, 180, WHITE)
    picture.text(705, 45, "the host tier, in host memory", "title")
    for index, color in enumerate((BLUE, BLUE, BLUE, BLUE, VIOLET, VIOLET, VIOLET, WHITE)):
        x, y = 52 + 75 * (index % 4), 82 + 76 * (index // 4)
        picture.box(x, y, 62, 60, color, *{BLUE: ("A",), VIOLET: ("B", "retired"), WHITE: ("free",)}[color])
    for index, color in enumerate((VIOLET, VIOLET, VIOLET, WHITE, WHITE, WHITE, WHITE, WHITE)):
        x, y = 562 + 75 * (index % 4), 82 + 76 * (index // 4)
        picture.box(x, y, 62, 60, color, "B" if color is VIOLET else "free")
    picture.arrow((362, 125), (538, 125))
    picture.text(450, 113, "offload: copy out", "quiet")
    picture.arrow((538, 185), (362, 185))
    picture.text(450, 173, "restore: copy back", "quiet")
    picture.arrow((110, 242), (110, 292))
    picture.text(122, 272, "release", "quiet", anchor="start")
    picture.arrow((240, 292), (240, 242))
    picture.text(252, 272, "admit again", "quiet", anchor="start")
    picture.box(30, 294, 330, 46, GRAY, "tokens wait; KV is computed again")
    picture.text(470, 300, "The engine measures tokens and bytes per second.", "quiet", anchor="start")
    picture.text(470, 320, "It takes the way that costs less, for each sequence.", "quiet", anchor="start")
    return picture


def tenants() -> Picture:
    picture = Picture(
        900,
        430,
        title="The share of a tenant, and its own prefix hashes",
        description="A bar of a pool with 1,000 blocks. Alice has a floor of 100 blocks, a quota of 400 and a limit of "
        "700. She holds 250 and caches 250 more. Below: equal prompts of two tenants have different hashes.",
    )
    left, width = 40, 820
    at = {blocks: left + width * blocks / 1000 for blocks in (0, 100, 250, 400, 500, 700, 1000)}
    picture.text(40, 40, "alice's share of a pool with 1,000 blocks", "title", anchor="start")
    picture.box(at[0], 96, at[250] - at[0], 50, BLUE, "alice holds 250")
    picture.box(at[250], 96, at[500] - at[250], 50, GREEN, "alice caches 250")
    picture.box(at[500], 96, at[1000] - at[500], 50, WHITE, "other tenants, and free blocks")
    for blocks, name in ((100, "floor 100"), (400, "quota 400"), (700, "limit 700")):
        picture.line(at[blocks], 76, at[blocks], 94)
        picture.line(at[blocks], 148, at[blocks], 166)
        picture.text(at[blocks], 70, name, "code")
    picture.text(at[100], 184, "others leave 100 to her", "quiet")
    picture.text(at[400], 184, "above: cached blocks are evicted first", "quiet")
    picture.text(at[700], 184, "she never holds more", "quiet")
    picture.line(40, 212, 860, 212, dashed=True)
    picture.text(40, 248, "equal prompts of two tenants", "title", anchor="start")
    for y, name, color, hashes in (
        (268, "alice", BLUE, ("a1", "a2", "a3")),
        (344, "bob", VIOLET, ("b1", "b2", "b3")),
    ):
        picture.box(40, y, 180, 52, color, f"root of {name}")
        for index, value in enumerate(hashes):
            x = 270 + 150 * index
            picture.arrow((x - 50, y + 26), (x - 2, y + 26))
            picture.box(x, y, 100, 52, color, value)
    picture.text(690, 325, "other root, other hashes:", "quiet", anchor="start")
    picture.text(690, 345, "no block is shared", "quiet", anchor="start")
    return picture


def layer_groups() -> Picture:
    picture = Picture(
        900,
        400,
        title="One table for each layer group",
        description="A sequence of 80 tokens in a model with two layer groups. The table of the full layers has five "
        "blocks. The table of the layers with a window of 40 tokens has the last three; its first two entries were let "
        "go and are the null block. All blocks are of one pool.",
    )
    picture.text(48, 40, "a sequence of 80 tokens, blocks of 16", "title", anchor="start")
    for index in range(5):
        picture.text(300 + 110 * index, 72, f"{16 * index} to {16 * index + 15}", "quiet")
    for y, name, words, color, table in (
        (90, "group 0", "full: all positions", BLUE, ("3", "5", "6", "9", "2")),
        (190, "group 1", "window of 40 positions", VIOLET, ("0", "0", "8", "4", "7")),
    ):
        picture.text(48, y + 24, name, "title", anchor="start")
        picture.text(48, y + 46, words, "quiet", anchor="start")
        for index, block in enumerate(table):
            is_held = block != "0"
            picture.box(
                250 + 110 * index, y, 100, 60, color if is_held else GRAY, block, *([] if is_held else ["let go"])
            )
    picture.line(526, 272, 790, 272)
    picture.text(660, 294, "what the next token sees", "quiet")
    picture.text(250, 294, "other sequences use these blocks", "quiet", anchor="start")
    picture.text(
        450, 340, "All blocks of a pool have the same size, so any group of any sequence can have any of them.", "quiet"
    )
    picture.text(450, 364, "Without groups the window's layers would keep all five places.", "quiet")
    return picture


PICTURES: Iterable[Callable[[], Picture]] = (
    blocks_and_tables,
    leases_and_fences,
    grants,
    prefix_cache,
    host_tier,
    tenants,
    layer_groups,
)


def pictures() -> dict[Path, str]:
    """Return the content of each file, by its path."""
    return {HERE / f"{draw.__name__.replace('_', '-')}.svg": draw().svg() for draw in PICTURES}


def main() -> None:
    for path, content in pictures().items():
        path.write_text(content)


if __name__ == "__main__":
    main()
