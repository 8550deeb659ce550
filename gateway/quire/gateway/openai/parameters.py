"""Sampling, grammar and cache parameters of a JSON body, as all endpoints that generate share them. Pure.

Ranges are those of SamplingParams, CacheParams and Grammar, which raise InvalidRequest with the field's name. Only
types that JSON has and these would misread, and names that differ, are looked at here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.client.engine.caching import CacheParams, CacheUse
from quire.client.engine.grammar import Grammar
from quire.client.engine.sampling import MAX_STOP_STRINGS, SamplingParams
from quire.compute.v1.sampling_ranges import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
)
from quire.gateway.chat.cache_fields import KeptEnds
from quire.gateway.chat.json_schemas import closed, with_options
from quire.gateway.errors import HttpError, invalid, made_at, make
from quire.gateway.fields import MAX_INT32, Fields, array_of, integer_of, text_of
from quire.gateway.limits import MAX_TOKEN_IDS
from quire.gateway.openai.hints import read_envelope, read_hints

# Fields that SamplingParams has under the same name and with the same meaning.
_AS_THEY_ARE = (
    *("n", "temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("skip_special_tokens", "include_stop_str_in_output", "speculative"),
)
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# The fields of Grammar for structured_outputs; "grammar" is handled separately.
_KINDS = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice"}
_JSON_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
# OpenAI's fields that say something of bookkeeping, or of services that are not here, and nothing of the text.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
)


# Fields of vLLM and others that are not supported, with their values that change nothing, which clients send.
_NO_OPS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "length_penalty": ((1, 1.0), "it is for beam search"),
    "early_stopping": ((False,), "it is for beam search"),
    "return_tokens_as_token_ids": ((False,), "give return_token_ids"),
    "truncate_prompt_tokens": ((-1,), "a prompt that is too long is refused"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides"),
    "detokenize": ((True,), "answers are text"),
    "logits_processors": (([],), "the gateway runs no code of callers"),
    "mm_processor_kwargs": (({},), "prompts are text"),
    "kv_transfer_params": (({},), "the cache manager moves the cache"),
    "vllm_xargs": (({},), "there are no further parameters"),
}


def _accept_no_ops(fields: Fields) -> None:
    for name, (values, why) in _NO_OPS.items():
        fields.refuse(name, why, unless=values)
    fields.string("session_id")  # the pool is chosen by the prefix that it has
    fields.string("request_id")  # the header X-Request-Id has the one of the log
    fields.boolean("include_reasoning")  # what the model writes is in the answer, reasoning included


def sampling_of(fields: Fields, **given: Any) -> SamplingParams:
    """Return the sampling parameters of a body; `given` are parameters that the endpoint reads under other names.

    Raises HttpError: 400 with the field's path.
    """
    _accept_no_ops(fields)
    values = {name: value for name in _AS_THEY_ARE if (value := fields.take(name)) is not None}
    if (top_k := fields.integer("top_k", low=-1)) is not None:
        values["top_k"] = max(0, top_k)  # vLLM's -1 is all tokens, as 0 is
    if (priority := fields.integer("priority", low=-MAX_INT32)) is not None:
        values["priority"] = -priority  # vLLM serves the lower number first, the engine the higher one
    if fields.has("stop"):
        values["stop"] = strings_of(fields, "stop", max_length=MAX_STOP_STRINGS)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if fields.has(name):
            values[name] = tuple(_token_ids(fields.path_of(name), fields.array(name, max_length=MAX_TOKEN_IDS)))
    if fields.has("bad_words"):
        values["bad_words"] = _bad_words(fields)
    if fields.has("logit_bias"):
        values["logit_bias"] = _biases(fields)
    if (grammar := grammar_of(fields)) is not None:
        values["grammar"] = grammar
    return make(SamplingParams, **values, **{name: value for name, value in given.items() if value is not None})


def grammar_of(fields: Fields) -> Grammar | None:
    """Return the grammar of response_format, structured_outputs or a guided_ field; None if there is none.

    Raises HttpError: 400 with the field's path, also if there are several.
    """
    found = [each for each in (_response_format(fields), _structured_outputs(fields), *_guided(fields)) if each]
    if len(found) > 1:
        names = " and ".join(path for path, _ in found)
        raise HttpError(400, f"{names} are given, must be at most one of them", code="invalid_value", param=found[1][0])
    if not found:
        return None
    [(path, values)] = found
    fields.aliases["grammar"] = path
    return _grammar(path, values)


def _grammar(path: str, values: Mapping[str, Any]) -> Grammar:
    try:
        return make(Grammar, **values)
    except HttpError as error:
        error.param = path
        raise


def _response_format(fields: Fields) -> tuple[str, Mapping[str, Any]] | None:
    asked = fields.object("response_format")
    if asked is None:
        return None
    kind = asked.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        asked.require("type")
    schema = asked.object("json_schema") if kind == "json_schema" else None
    asked.end()
    if kind == "json_object":
        return asked.path_of("type"), {"json_object": True}
    if kind == "text":
        return None
    if schema is None:
        asked.require("json_schema")
        raise AssertionError("require returned")
    schema.ignore("name", "description")
    is_strict, wanted = schema.boolean("strict", True), schema.mapping("schema")
    schema.end()
    wanted = {} if wanted is None else wanted
    return schema.path_of("schema"), {"json_schema": closed(wanted) if is_strict else wanted}


def _structured_outputs(fields: Fields) -> tuple[str, Mapping[str, Any]] | None:
    asked = fields.object("structured_outputs")
    if asked is None:
        return None
    values = {ours: value for name, ours in _KINDS.items() if (value := asked.take(name)) is not None}
    if values.get("json_object") is False:
        del values["json_object"]
    values |= _text_grammar(asked, "grammar")
    values = _with_json_options(asked, values)
    asked.refuse("structural_tag", "give json, regex, choice or grammar")
    asked.end()
    if not values:
        path = fields.path_of("structured_outputs")
        limit = "json, json_object, regex, choice or grammar"
        raise HttpError(400, f"{path} is empty, must have one of {limit}", code="missing_field", param=path)
    _check_choices(asked.path_of("choice"), values)
    return fields.path_of("structured_outputs"), values


def _with_json_options(asked: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Take vLLM's options of JSON out of structured_outputs, and return its grammar with them."""
    options: dict[str, Any] = {}
    if asked.has("disable_any_whitespace"):
        options["whitespace_flexible"] = not asked.boolean("disable_any_whitespace")
    if (pattern := asked.string("whitespace_pattern")) is not None:
        options["whitespace_pattern"] = pattern
    is_closed = asked.boolean("disable_additional_properties")
    if not (options or is_closed):
        return values
    if values.pop("json_object", None):
        return values | {"json_schema": with_options({"type": "object"}, options)}
    schema = values.get("json_schema")
    if not isinstance(schema, Mapping):
        limit = "given with json_object, or with json that is an object"
        path = asked.path_of(next(name for name in _JSON_OPTIONS if asked.has(name)))
        raise HttpError(400, f"{path} must be {limit}", code="invalid_value", param=path)
    return values | {"json_schema": with_options(closed(schema) if is_closed else schema, options)}


def _guided(fields: Fields) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name in _GUIDED:
        if not fields.has(name):
            continue
        values: dict[str, Any] = (
            _text_grammar(fields, name)
            if name == "guided_grammar"
            else {_KINDS[name.removeprefix("guided_")]: fields.take(name)}
        )
        _check_choices(fields.path_of(name), values)
        found.append((fields.path_of(name), values))
    return found


def _check_choices(path: str, values: Mapping[str, Any]) -> None:
    if "choice" in values:
        array_of(path, values["choice"], max_length=MAX_CHOICES)


def _text_grammar(fields: Fields, name: str) -> dict[str, Any]:
    """Return a grammar that is a text: GBNF if a rule has ::=, else Lark, as in vLLM."""
    text = fields.string(name)
    return {} if text is None else {"ebnf" if "::=" in text else "lark": text}


def with_grammar(params: SamplingParams, path: str, **wanted: Any) -> SamplingParams:
    """Return parameters with a grammar that a field of this path asks for. Raises HttpError, also if there is one."""
    if params.grammar is not None:
        raise HttpError(400, f"{path} is given, and so is another grammar", code="invalid_value", param=path)
    changed: SamplingParams = make(partial(replace, params), grammar=_grammar(path, wanted))
    return changed


def cache_of(fields: Fields, kept: KeptEnds, *, explains_miss: bool = False) -> CacheParams | None:
    """Return the cache parameters of a body; None if it has none. The pool separates tenants with any salt.

    kept are the ends of prefixes to keep that were found in it. Their places are known when the prompt is.

    Raises HttpError: 400 with the field's path.
    """
    values: dict[str, Any] = {}
    paths = {"salt": fields.path_of("cache_salt")}
    if (salt := fields.string("cache_salt")) is not None:
        if not salt:
            raise invalid(paths["salt"], salt, "a string that is not empty")
        values["salt"] = salt.encode()
    if (hints := fields.object("cache_hints")) is not None:
        values |= read_hints(hints)
        paths |= {"retention": hints.path_of("retention"), "retention.num_tokens": hints.path_of("retention")}
    values |= read_envelope(fields)
    if not kept.uses_cache:
        values["cache_use"] = CacheUse.NONE
    if explains_miss or kept.options.compared_with is not None:
        values["explain_miss"] = True
    return made_at(paths, CacheParams, **values) if values else None


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """The places of `usage` in a stream: a last event of its own, each event."""

    at_end: bool = False
    in_each: bool = False


def stream_usage_of(fields: Fields, *, is_stream: bool) -> StreamUsage:
    """Return stream_options' wishes for usage. Raises HttpError: 400, also if the answer is not streamed."""
    options = fields.object("stream_options")
    if options is None:
        return StreamUsage()
    path = fields.path_of("stream_options")
    if not is_stream:
        raise HttpError(
            400, f"{path} is given, must be left out unless stream is true", code="invalid_value", param=path
        )
    usage = StreamUsage(options.boolean("include_usage"), options.boolean("continuous_usage_stats"))
    options.ignore("include_obfuscation")
    options.end()
    return usage


def strings_of(fields: Fields, name: str, *, max_length: int) -> tuple[str, ...]:
    """Return a field's string or strings. Raises HttpError: 400 with the field's path."""
    path, value = fields.path_of(name), fields.take(name)
    if isinstance(value, str):
        return (text_of(path, value),)
    if not isinstance(value, list):
        raise invalid(path, value, "a string or a list of strings")
    return tuple(text_of(f"{path}[{i}]", each) for i, each in enumerate(array_of(path, value, max_length=max_length)))


def _token_ids(path: str, values: list[Any] | None) -> list[int]:
    return [integer_of(f"{path}[{i}]", each, low=0, high=MAX_INT32) for i, each in enumerate(values or ())]


def _bad_words(fields: Fields) -> tuple[Any, ...]:
    path, words = fields.path_of("bad_words"), fields.array("bad_words", max_length=MAX_BAD_WORDS) or []
    return tuple(_bad_word(f"{path}[{i}]", word) for i, word in enumerate(words))


def _bad_word(path: str, word: Any) -> str | tuple[int, ...]:
    if isinstance(word, str):
        return text_of(path, word)
    if not isinstance(word, list):
        raise invalid(path, word, "a string or a list of token ids")
    return tuple(_token_ids(path, array_of(path, word, max_length=MAX_BAD_WORD_TOKENS)))


def _biases(fields: Fields) -> dict[int, Any]:
    """Return the biases by token id; JSON's keys are strings."""
    path, given = fields.path_of("logit_bias"), fields.mapping("logit_bias") or {}
    if len(given) > MAX_LOGIT_BIASES:
        raise invalid(path, f"{len(given)} tokens", f"at most {MAX_LOGIT_BIASES} tokens")
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid(path, key, "an object with token ids as keys")
    return {int(key): bias for key, bias in given.items()}


def replace_max_tokens(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """Return parameters with this limit. Raises HttpError: 400 if min_tokens is above it."""
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise invalid("min_tokens", params.min_tokens, f"at most max_tokens, {max_tokens}")
    return replace(params, max_tokens=max_tokens)


def ignore_bookkeeping(fields: Fields) -> None:
    """Let fields be given that say nothing of the text."""
    fields.ignore(*IGNORED)
