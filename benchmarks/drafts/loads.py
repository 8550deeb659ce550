"""The loads of `quire bench drafts`: prompts, and the answers to them.

    edited code      a function of the prompt, with one name changed
    quoted text      a text of the prompt
    repeated JSON    records with the same keys, other values; the prompt has none of them
    agents           sessions of three turns, each prompt with all before it: a file is read, and a call of a tool
                     replaces one of its lines
    asked again      the same seeded requests as in the round before: recent answers have the drafts
    open text        other seeds in each round, after random tokens: next to no guess comes true

A grammar allows nothing but the answers of the first four, so they do not depend on what the model can do. Their drafts
come from the request alone (`ngram`); those of the other two from recent answers as well (`suffix`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.client import Grammar, SamplingParams

Prompt = str | list[int]
Turns = list[tuple[Prompt, SamplingParams]]
"""The requests of a session, one after the other."""
_NUM_RANDOM = 48
"""Tokens of a prompt without a text."""
_LEAST_VOCABULARY = 500
_NAMES = ("width", "height", "depth", "price", "count", "weight", "length", "offset", "volume", "amount")
_WORDS = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "is",
    "it",
    "was",
    "by",
    "on",
    "for",
    "with",
    "as",
    "from",
    "at",
    "that",
    "this",
    "one",
    "two",
    "three",
    "first",
    "last",
    "new",
    "old",
]


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of work.

    make       (number of a session, round, most tokens of an answer) to its turns
    method     of the drafts
    to_reach   times the tokens a second without drafts: at batch 1, and where nothing is copied in any batch
    """

    make: Callable[[int, int, int], Turns]
    method: str
    to_reach: float


def _written(prompt: str, answer: str, num_new: int) -> tuple[Prompt, SamplingParams]:
    return prompt, SamplingParams(max_tokens=num_new, temperature=0.0, grammar=Grammar(choice=(answer,)))


def _function(generator: random.Random) -> tuple[str, str, str]:
    """Return the text of a function, and two names of its parameters."""
    name, first, second = generator.sample(_NAMES, 3)
    text = (
        f"def {name}_of({first}, {second}):\n    if {first} < 0 or {second} < 0:\n        raise ValueError({first})\n"
        f"    total = {first} * {second}\n    print(total)\n    return total\n"
    )
    return text, first, second


def _edited(session: int, round_number: int, num_new: int) -> Turns:
    code, first, _ = _function(random.Random(session))
    return [_written(f"{session}: {code}# {first} is now size:\n", code.replace(first, "size"), num_new)]


def _quoted(session: int, round_number: int, num_new: int) -> Turns:
    text = " ".join(random.Random(session).choices(_WORDS, k=60)) + "."
    return [_written(f"{session}: {text}\n", text, num_new)]


def _records(session: int, round_number: int, num_new: int) -> Turns:
    generator = random.Random(session)
    records = [
        {"name": generator.choice(_NAMES), "size": generator.randrange(1000), "is_open": generator.random() < 0.5}
        for _ in range(6)
    ]
    return [_written(f"{session}: ", json.dumps(records), num_new)]


def _agent(session: int, round_number: int, num_new: int) -> Turns:
    generator = random.Random(session)
    talk = f"{session}: Rename what is unclear, one line at a time.\n"
    turns: Turns = []
    for turn in range(3):
        code, first, second = _function(generator)
        path = f"src/part{turn}.py"
        line = code.splitlines()[3].strip()
        edit = {"path": path, "old": line, "new": line.replace("total", f"{first}_{second}")}
        answer = json.dumps({"tool": "replace_line", "arguments": edit})
        talk += f"{path}:\n{code}"
        turns.append(_written(talk, answer, num_new))
        talk += f"{answer}\nDone.\n"
    return turns


def _seeded(session: int, round_number: int, num_new: int) -> Turns:
    prompt = random.Random(session).choices(range(1, _LEAST_VOCABULARY), k=_NUM_RANDOM)
    return [(prompt, SamplingParams(max_tokens=num_new, seed=1000 * round_number + session, ignore_eos=True))]


def _again(session: int, round_number: int, num_new: int) -> Turns:
    return _seeded(session, 0, num_new)


LOADS: dict[str, Load] = {
    "edited code": Load(_edited, "ngram", 1.5),
    "quoted text": Load(_quoted, "ngram", 1.5),
    "repeated JSON": Load(_records, "ngram", 1.5),
    "agents": Load(_agent, "ngram", 1.5),
    "asked again": Load(_again, "suffix", 1.5),
    "open text": Load(_seeded, "suffix", 0.97),
}


def sessions_of(load: str, count: int, round_number: int, num_new: int) -> Sequence[Turns]:
    """Return so many sessions, all different."""
    return [LOADS[load].make(session, round_number, num_new) for session in range(count)]
