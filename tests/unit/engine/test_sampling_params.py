"""SamplingParams refuses what no sampler can do, naming field, value and limit."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest

from quire.client.engine.grammar import Grammar
from quire.client.engine.sampling import SamplingParams
from quire.client.errors import InvalidRequest
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import (
    LOGIT_BIAS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    RANGES,
)

PROTO = Path(__file__).parents[3] / "protos/quire/compute/v1/worker_service.proto"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("temperature", -0.1),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 0.5),
        ("top_p", 0.0),
        ("top_p", 1e-46),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("presence_penalty", -2.1),
        ("presence_penalty", 50),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {1: 100.1}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: "much"}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {0.5: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("logit_bias", [5]),
        ("logit_bias", (1, 2)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", 5),
        ("bad_words", ("",)),
        ("bad_words", ((),)),
        ("bad_words", "word"),
        ("bad_words", 5),
        ("bad_words", (5,)),
        ("bad_words", ((-1,),)),
        ("bad_words", ((1,) * 17,)),
        ("bad_words", ((1,),) * 1025),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("min_tokens", 129),
        ("min_tokens", 1.0),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", None),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("stop", 5),
        ("stop", ("x",) * 65),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", 1.0),
        ("n", 0),
        ("n", -1),
        ("n", 1025),
        ("n", True),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("priority", 0.5),
    ],
)
def test_refuses_and_says_why(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.reason == "INVALID_ARGUMENT"
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["limit"]
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": None},
        {"temperature": 0},
        {"temperature": 3.4e38},
        {"temperature": 1e-46},
        {"top_p": 1},
        {"top_p": 1 + 1e-9},
        {"min_p": 1},
        {"repetition_penalty": 1e-45},
        {"presence_penalty": -2},
        {"presence_penalty": 2 + 1e-9},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"logprobs": 0},
        {"n": 1024},
        {"stop": ["a", "b"], "stop_token_ids": [0, 7]},
        {"frequency_penalty": -2, "logit_bias": {0: -100, 2**31 - 1: 100}},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"bad_words": ["a", [1, 2]], "allowed_token_ids": [3]},
        {"bad_words": [(1,) * 16] * 1024},
        {"min_tokens": 128},
        {"min_tokens": 2**31 - 1, "max_tokens": None},
        {"prompt_logprobs": 0},
    ],
)
def test_accepts_the_limits_themselves(params: dict[str, object]) -> None:
    SamplingParams(**params)  # type: ignore[arg-type]


def test_a_field_has_the_range_that_the_contract_says() -> None:
    """The comments of the .proto are the source; sampling_ranges has them for both sides."""
    said, numbers = {}, set()
    (body,) = re.findall(r"^message SamplingParameters \{\n(.*?)^\}", PROTO.read_text(), re.DOTALL | re.MULTILINE)
    for comment, name in re.findall(r"((?: *//.*\n)+) *(?:optional |repeated )?(?:map<.*>|\w+) (\w+) = ", body):
        text = " ".join(line.strip(" /") for line in comment.splitlines())
        numbers.add(name)
        if interval := re.search(r"\bIn ([\[(][^\])]*[\])])", text):
            said[name] = interval[1]
    assert said == {name: allowed.text for name, allowed in RANGES.items()} | {"logit_bias": LOGIT_BIAS.text}
    descriptor = worker_service_pb2.SamplingParameters.DESCRIPTOR
    assert numbers == {field.name for field in descriptor.fields}
    # Any value of a seed is taken; GetModel and the pool's geometry say the limits of the others.
    lists = {
        "prompt_token_ids",
        "output_token_ids",
        "allowed_token_ids",
        "bad_words",
        "last_token_ids",
        "end_token_ids",
    }
    assert numbers - said.keys() == {"seed", "logprob_count", "grammar", "output_begins_at", *lists}
    for most in (MAX_LOGIT_BIASES, MAX_BAD_WORDS):
        assert f"At most {most:,}" in body
    assert f"at most {MAX_BAD_WORD_TOKENS - 1}." in body
    assert f"1 to {MAX_BAD_WORD_TOKENS} tokens." in PROTO.read_text()
    for field in descriptor.fields:
        if field.name in RANGES:
            assert RANGES[field.name].is_float == (field.cpp_type == field.CPPTYPE_FLOAT)


def test_numbers_of_other_kinds_become_plain_ones() -> None:
    params = SamplingParams(temperature=Fraction(1, 2), top_k=numpy.int64(3), n=numpy.int32(2))  # type: ignore[arg-type]
    assert [(type(value), value) for value in (params.temperature, params.top_k, params.n)] == [
        (float, 0.5),
        (int, 3),
        (int, 2),
    ]


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_values_are_values() -> None:
    assert SamplingParams(seed=3) == SamplingParams(seed=3)
    assert len({SamplingParams(), SamplingParams(), SamplingParams(n=2)}) == 2
    with pytest.raises(AttributeError):
        SamplingParams().n = 3  # type: ignore[misc]


def test_only_penalties_need_the_tokens_before() -> None:
    assert not SamplingParams(temperature=2, top_k=3).has_penalty
    assert SamplingParams(repetition_penalty=1.1).has_penalty
    assert SamplingParams(presence_penalty=-1).has_penalty
    assert SamplingParams(frequency_penalty=-1).has_penalty


def test_a_mapping_of_biases_becomes_a_value() -> None:
    params = SamplingParams(logit_bias={7: 1, 3: -2.5})
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert SamplingParams(logit_bias=params.logit_bias) == params
    assert len({params, SamplingParams(logit_bias={3: -2.5, 7: 1.0})}) == 1


@pytest.mark.parametrize(
    "beside", [{"min_tokens": 1}, {"allowed_token_ids": (1,)}, {"bad_words": ("x",)}, {"ignore_eos": True}]
)
def test_a_grammar_is_refused_beside_what_could_leave_no_token(beside: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        SamplingParams(grammar=Grammar(regex="x"), **beside)
