"""docs/reference/models.md is of the families that the tests run."""

import re
from pathlib import Path

import model_zoo as zoo

PAGE = (Path(__file__).parents[3] / "docs/reference/models.md").read_text()


def test_every_family_is_there_and_equal() -> None:
    ran, refused = PAGE.split("## The run")[1].split("## Refused models")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .* \| ([^|]+) \|$", ran, re.M)
    assert [name for name, _, _ in rows] == [*zoo.FAMILIES, *zoo.CACHED, *zoo.STATEFUL]
    pinned = {"llama_dynamic_rope", "phi3_longrope"}
    assert {name: outcome for name, _, outcome in rows if outcome != "equal"} == dict.fromkeys(
        pinned, "equal, rope pinned"
    )
    assert re.findall(r"^\| `(\w+)` \|", refused, re.M) == [name for name in zoo.REFUSED if name != "t5"]


def test_how_a_family_runs_is_what_its_place_says() -> None:
    for name, runs, shares in re.findall(
        r"^\| `(\w+)` \| \w+ \| ([^|]+) \| .* \| (yes|no) \| equal[^|]* \|$", PAGE, re.M
    ):
        kinds = {"packed": zoo.FAMILIES, "packed, latents": zoo.FAMILIES, "cache": zoo.CACHED}
        assert name in kinds.get(runs, zoo.STATEFUL)
        assert (shares == "no") == (name in zoo.STATEFUL)
