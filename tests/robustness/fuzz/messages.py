"""Message k of a seed: which method it is for, and its bytes. A function of its Origin alone.

1:48213          drawn from seed 1 and number 48213
1:48213<3021     one that changes message 3021 of the same seed, which was answered in a new way; and so on
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from conformance import golden
from robustness.fuzz import large, names, wire
from robustness.fuzz.surface import SHEPHERD, WORKER, Method, methods
from robustness.fuzz.wire import Writer
from smg_grpc_proto.generated import vllm_engine_pb2

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.compute.v1 import worker_service_pb2
from quire.engine.v1 import engine_service_pb2

GUIDED_SHARE = 0.25
LARGE_SHARE = 0.01
"""Messages near the bounds of their method: they cost a hundred times as much as others."""
RECENT = 64
"""Messages with a new kind of answer; the last ones are changed more often."""

# How often a method is drawn, by its path or its name; 1 if it is not here.
# Plans and steps have the most to get wrong, and cost the least.
WEIGHTS: Mapping[str, float] = {
    "PlanSteps": 20,
    "PlanStep": 3,
    "RunSteps": 8,
    "RunStep": 3,
    "AttachPool": 3,
    "WatchBlocks": 0.5,
    "WatchPools": 0.2,
    "GetModel": 0.3,
    "/vllm.grpc.engine.VllmEngine/Generate": 30,
}


def weight_of(method: Method) -> float:
    return WEIGHTS.get(method.path, WEIGHTS.get(method.name, 1))


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a message: a seed, and the numbers of it and of those that it was made from, newest first."""

    seed: int
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.seed}:{'<'.join(map(str, self.numbers))}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises ValueError."""
        seed, _, numbers = text.partition(":")
        return cls(int(seed), tuple(map(int, numbers.split("<"))))


@dataclass(frozen=True, slots=True)
class Message:
    """One message to send.

    twist   a byte to change after the stand-ins were replaced, which breaks signed content; of the worker's methods
    """

    origin: Origin
    method: Method
    data: bytes
    twist: int | None = None

    def sent(self, bindings: names.Bindings) -> bytes:
        """The bytes that go to the server."""
        data = bindings.bind(names.confine(self.method, self.data))
        if self.twist is None or not data:
            return data
        at = self.twist % len(data)
        return data[:at] + bytes([data[at] ^ 1 << self.twist % 8]) + data[at + 1 :]


class Generator:
    """All messages of a seed to the methods of some processes.

    grant_bytes   how long a signed grant is
    """

    def __init__(self, seed: int, *processes: str, grant_bytes: int = 100) -> None:
        self.seed = seed
        self.methods = methods(*processes)
        self._ends = list(accumulate(weight_of(method) for method in self.methods))
        self._templates = {method: templates(method, grant_bytes) for method in self.methods}
        wire.GRANT_BYTES[0] = grant_bytes

    def method(self, number: int) -> Method:
        """Which one message `number` is for."""
        return self._draw_method(self._rng(number))

    def message(self, number: int, kept: Mapping[Method, Sequence[Message]] | None = None) -> Message:
        """Message `number`; changing one of those `kept` of its method, if it is one that changes others."""
        rng = self._rng(number)
        method = self._draw_method(rng)
        parents = (kept or {}).get(method, ())
        if rng.random() >= GUIDED_SHARE or not parents:
            return self._drawn(rng, method, number)
        last = parents[-RECENT:] if rng.random() < 0.5 else parents
        return self._changed(number, method, random.Random(rng.random()).choice(last))

    def again(self, origin: Origin) -> Message:
        """The message that has this origin."""
        *numbers, first = origin.numbers
        rng = self._rng(first)
        message = self._drawn_first(rng, first)
        for number in reversed(numbers):
            message = self._changed(number, message.method, message)
        return message

    def _drawn_first(self, rng: random.Random, number: int) -> Message:
        method = self._draw_method(rng)
        rng.random()
        return self._drawn(rng, method, number)

    def _drawn(self, rng: random.Random, method: Method, number: int) -> Message:
        writer = Writer(rng, rng.choice((0.0, 0.02, 0.1, 0.1, 0.3, 0.9)))
        kind = rng.random()
        if method.name in large.LARGE and rng.random() < LARGE_SHARE:
            data = large.request(method, rng)
        elif kind < (0.1 if method.process == WORKER else 0.45):
            data = writer.message(method.request)
        elif kind < 0.85:
            data = writer.mutate(method.request, rng.choice(self._templates[method]))
        elif kind < 0.9:
            other = rng.choice(self._templates[rng.choice(self.methods)])
            data = writer.mutate(method.request, other)
        elif kind < 0.95:
            data = rng.choice(self._templates[method])
            data = data[: rng.randrange(len(data) + 1)] + rng.choice(self._templates[method])
        else:
            data = rng.randbytes(rng.choice((0, 1, 2, 3, 5, 8, 13, 50, 200, 3_000)))
        return Message(Origin(self.seed, (number,)), method, data, self._twist(rng, method, data))

    def _changed(self, number: int, method: Method, parent: Message) -> Message:
        rng = random.Random(-1 - (self.seed << 40 | number))
        data = Writer(rng, rng.choice((0.02, 0.1, 0.5))).mutate(method.request, parent.data)
        twist = self._twist(rng, method, data)
        return Message(Origin(self.seed, (number, *parent.origin.numbers)), method, data, twist)

    @staticmethod
    def _twist(rng: random.Random, method: Method, data: bytes) -> int | None:
        has_grant = method.process == WORKER and names.NEXT * 16 in data
        return rng.randrange(2**20) if has_grant and rng.random() < 0.2 else None

    def _rng(self, number: int) -> random.Random:
        return random.Random(self.seed << 40 | number)

    def _draw_method(self, rng: random.Random) -> Method:
        return self.methods[bisect(self._ends, rng.random() * self._ends[-1])]


# -- requests that could be real ----------------------------------------------------------------------------------


def templates(method: Method, grant_bytes: int) -> list[bytes]:
    """Requests of a method: those written here, and the one of the golden messages."""
    if method.process == SHEPHERD:
        return [message.SerializeToString() for message in OF_SHEPHERD.get(method.name, [method.request_class()])]
    written = [message.SerializeToString() for message in REAL.get(method.name, [])]
    if method.process == WORKER:
        written += steps(method, grant_bytes)
    return written + [entry.wire for entry in golden.read() if entry.name == method.request.full_name]


def steps(method: Method, grant_bytes: int) -> list[bytes]:
    """A step that may run, with this and that beside it."""
    step = worker_service_pb2.RunStepRequest
    if method.request is not step.DESCRIPTOR and method.name != "RunSteps":
        return []
    made = []
    for sampling in SAMPLINGS:
        one = step(inputs=[{"sequence_id": 1, "token_ids": names.TOKENS, "sampling": sampling}])
        made.append(one.SerializeToString())
    asked = {"prompt_logprob_count": 2, "next_token_ids": names.TOKENS[1:]}
    made.append(step(inputs=[{"sequence_id": 1, "token_ids": names.TOKENS, **asked}]).SerializeToString())
    made.append(step(skip=True).SerializeToString())
    kinds = (names.NEXT, names.NEXT, names.NEXT, names.RAN, names.FENCED)
    grants = [wire.signed_grant(kind, grant_bytes) for kind in kinds]
    whole = [wire.tag(1, wire.BYTES) + names.varint(len(grant)) + grant + rest for grant in grants for rest in made]
    if method.name == "RunSteps":
        return [wire.tag(1, wire.BYTES) + names.varint(len(each)) + each for each in whole]
    return whole


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "logprob_count": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "prompt_token_ids": [1, 2], "output_token_ids": [3]},
    {
        "frequency_penalty": 0.5,
        "output_token_ids": [3, 3],
        "logit_bias": {5: -1.5, 9: 100.0},
        "allowed_token_ids": [5, 9],
    },
    {
        "bad_words": [{"token_ids": [7]}, {"token_ids": [1, 2, 3]}],
        "last_token_ids": [1, 2],
        "min_sequence_token_count": 40,
        "end_token_ids": [0, 1],
    },
)

_TTL = {"seconds": 60}
_PLAN = {"lease_id": names.OWN_LEASES[0], "epoch": names.OWN_EPOCH}


def _plans() -> list[cache_service_pb2.PlanStepRequest]:
    items: list[dict[str, Any]] = [
        {},
        {"admissions": [{"sequence_id": 1, "token_ids": names.TOKENS}], "request_id": "again"},
        {
            "admissions": [
                {
                    "sequence_id": 2,
                    "token_ids": names.TOKENS * 3,
                    "max_compute_token_count": 4,
                    "salt": b"salt",
                    "retention": [{"token_count": 4, "priority": 9, "ttl": _TTL}, {"priority": 1}],
                    "resumed": True,
                },
                {"sequence_id": 3, "token_ids": names.TOKENS, "reserved_token_count": 12},
            ],
            "admission_token_budget": 30,
            "admission_reserve_block_count": 2,
            "host_copy_use": 2,
        },
        {"extends": {"sequence_ids": [1, 2, 3], "token_counts": [1, 1, 1]}},
        {
            "trim_sequence_ids": [1],
            "trim_token_counts": [4],
            "extends": {
                "sequence_ids": [1],
                "token_counts": [2],
                "append_token_counts": [2],
                "append_token_ids": [7, 8],
            },
        },
        {"forks": [{"parent_sequence_id": 1, "child_sequence_ids": [4, 5], "token_count": 4}]},
        {
            "release_sequence_ids": [1, 2],
            "return_hints": [{"sequence_id": 1, "expected_in": _TTL}, {"sequence_id": 2, "not_expected": True}],
        },
        {"expected_prompts": [{"token_ids": names.TOKENS, "salt": b"s", "tenant": "", "expected_in": _TTL}]},
    ]
    plans = [cache_service_pb2.PlanStepRequest(**_PLAN | item) for item in items]
    canary = [cache_service_pb2.PlanStepRequest(lease_id=names.CANARY_LEASE, epoch=names.CANARY_EPOCH, **items[2])]
    others = [cache_service_pb2.PlanStepRequest(**_PLAN | items[1] | {"lease_id": each}) for each in names.OWN_LEASES]
    return plans + others + canary


def _attachments() -> list[attach_pb2.AttachPoolRequest]:
    geometry = {
        "block_size_tokens": 4,
        "block_count": 9,
        "block_bytes": 1024,
        "max_sequence_count": 4,
        "max_sequence_tokens": 24,
        "vocabulary_size": names.VOCABULARY,
        "model": "none",
        "model_fingerprint": "none",
    }
    registrations = [
        {"pool": pool, "epoch": epoch, "highest_term": 0, "attached_term": term, "geometry": geometry}
        for pool, epoch, term in (("fuzz-a", 3, 0), ("fuzz-b", 4, 5), (names.OWN_POOL, 9, 0), (names.CANARY_POOL, 9, 0))
    ]
    report = {
        "report_number": 1,
        "lease_id": names.OWN_LEASES[0],
        "step_number": 1,
        "outcome": 1,
        "sequence_ids": [1, 2],
        "computed_token_counts": [5, 5],
        "sampled_sequence_ids": [1],
        "sampled_token_ids": [3],
    }
    return [
        *(attach_pb2.AttachPoolRequest(register_pool=registration) for registration in registrations * 4),
        attach_pb2.AttachPoolRequest(step_report=report),
        *(attach_pb2.AttachPoolRequest(lease_opened={"lease_id": lease}) for lease in names.LEASES),
        *(attach_pb2.AttachPoolRequest(lease_fenced={"lease_id": lease}) for lease in names.LEASES),
    ]


_GENERATE: dict[str, Any] = {"prompt": {"token_ids": {"token_ids": names.TOKENS}}, "parameters": {"max_tokens": 2}}
INT32 = 2**31 - 1
_GENERATES = [
    engine_service_pb2.GenerateRequest(**_GENERATE),
    engine_service_pb2.GenerateRequest(prompt={"text": "The"}, parameters={"max_tokens": 3, "temperature": 0, "n": 2}),
    engine_service_pb2.GenerateRequest(
        **_GENERATE | {"parameters": {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "stop": ["a"], "seed": 3}},
        cache={"salt": b"salt", "retention": [{"token_count": 4, "priority": 9, "ttl": _TTL}], "expected_in": _TTL},
    ),
    engine_service_pb2.GenerateRequest(
        **_GENERATE
        | {"parameters": {"max_tokens": 2, "bad_words": [{"text": "a"}], "logit_bias": {3: 1.5}, "timeout": _TTL}}
    ),
    engine_service_pb2.GenerateRequest(
        **_GENERATE | {"parameters": {"max_tokens": 4, "grammar": {"choice": {"texts": ["the", "a"]}}}}
    ),
    # Each number is in its range, and a sum with the prompt, or with the samples, is not.
    engine_service_pb2.GenerateRequest(**_GENERATE | {"parameters": {"max_tokens": 2, "seed": 2**63 - 1, "n": 2}}),
    engine_service_pb2.GenerateRequest(**_GENERATE | {"parameters": {"min_tokens": 2**31 - 6}}),
    engine_service_pb2.GenerateRequest(
        **_GENERATE | {"parameters": {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1}}
    ),
    engine_service_pb2.GenerateRequest(
        **_GENERATE, cache={"retention": [{"token_count": 2**31 - 1, "priority": 9}, {"token_count": 2**31 - 1}]}
    ),
]
_POOLED = {"pool": names.OWN_POOL}
_PREFIX = {"token_ids": names.TOKENS * 3, "salt": b"salt"}
# By method. One that is not here has its golden message.
REAL: Mapping[str, Sequence[Any]] = {
    "CreateLease": [cache_service_pb2.CreateLeaseRequest(**_POOLED, ttl=_TTL, request_id="again")],
    "RenewLease": [cache_service_pb2.RenewLeaseRequest(lease_id=lease) for lease in names.LEASES],
    "DeleteLease": [cache_service_pb2.DeleteLeaseRequest(lease_id=lease) for lease in names.LEASES],
    "PlanStep": _plans(),
    "PlanSteps": [cache_service_pb2.PlanStepsRequest(plan=plan) for plan in _plans()],
    "AttachPool": _attachments(),
    "GetPool": [cache_service_pb2.GetPoolRequest(**_POOLED)],
    "ListLeases": [cache_service_pb2.ListLeasesRequest(**_POOLED, page_size=1, state=1)],
    "GetSequence": [cache_service_pb2.GetSequenceRequest(lease_id=lease, sequence_id=1) for lease in names.LEASES],
    "ListSequences": [
        cache_service_pb2.ListSequencesRequest(**_POOLED, lease_id=names.OWN_LEASES[0], page_size=1),
        cache_service_pb2.ListSequencesRequest(pool=names.CANARY_POOL, page_token="0" * 24 + ".0000000001"),
    ],
    "ListBlocks": [
        cache_service_pb2.ListBlocksRequest(**_POOLED, state=3, page_size=3, page_token="2", tenant=""),
        cache_service_pb2.ListBlocksRequest(pool=names.CANARY_POOL, lease_id=names.CANARY_LEASE),
    ],
    "ListTenants": [cache_service_pb2.ListTenantsRequest(**_POOLED, page_size=1, page_token="n00")],
    "WatchPools": [cache_service_pb2.WatchPoolsRequest()],
    "WatchBlocks": [
        cache_service_pb2.WatchBlocksRequest(**_POOLED),
        cache_service_pb2.WatchBlocksRequest(**_POOLED, cursor="0" * 15 + "7" + "0" * 16, include_content=True),
        cache_service_pb2.WatchBlocksRequest(**_POOLED, copy_media=[2, 3]),
    ],
    "LookupPrefix": [cache_service_pb2.LookupPrefixRequest(**_POOLED, **_PREFIX)],
    "ExplainPrefix": [cache_service_pb2.ExplainPrefixRequest(**_POOLED, **_PREFIX)],
    "CheckAdmission": [
        cache_service_pb2.CheckAdmissionRequest(
            **_POOLED, admission={"token_ids": names.TOKENS, "reserved_token_count": 12}
        )
    ],
    "PinPrefix": [cache_service_pb2.PinPrefixRequest(**_POOLED, **_PREFIX, ttl=_TTL)],
    "UnpinPrefix": [cache_service_pb2.UnpinPrefixRequest(**_POOLED, pin_id="0" * 32)],
    "ListPins": [cache_service_pb2.ListPinsRequest(**_POOLED, page_size=1, page_token="0" * 32)],
    "ResetPrefixCache": [cache_service_pb2.ResetPrefixCacheRequest(**_POOLED)],
    "AuditPool": [cache_service_pb2.AuditPoolRequest(**_POOLED)],
    "Generate": _GENERATES,
    "GenerateBatch": [
        engine_service_pb2.GenerateBatchRequest(requests=_GENERATES[:count]) for count in range(1, len(_GENERATES) + 1)
    ],
    "Tokenize": [engine_service_pb2.TokenizeRequest(text="The default", add_special_tokens=False)],
    "Detokenize": [engine_service_pb2.DetokenizeRequest(token_ids=names.TOKENS, skip_special_tokens=False)],
    "ListModels": [engine_service_pb2.ListModelsRequest(page_size=1)],
    "ChecksumBlocks": [worker_service_pb2.ChecksumBlocksRequest(block_ids=[0, 1, 2, 3])],
}

_SMG_PROMPT: dict[str, Any] = {"request_id": "again", "tokenized": {"input_ids": names.TOKENS}}
_SMG_PARAMETERS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 2},
    {"max_tokens": 3, "temperature": 0.0, "n": 2, "seed": 2**31 - 1, "top_k": 2**32 - 1},
    {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "stop": ["a"], "stop_token_ids": [2**32 - 1]},
    {"max_tokens": 2**32 - 1, "min_tokens": 2**32 - 1},
    {"min_tokens": 2**31 - 6, "logit_bias": {5: 1.5, -1: 3e38}},
    {"max_tokens": 4, "choice": {"choices": ["the", "a"]}},
    {"max_tokens": 4, "json_schema": '{"type": "integer"}'},
    {"max_tokens": 4, "regex": "[a-c]{2}"},
)
OF_SHEPHERD: Mapping[str, Sequence[Any]] = {
    "Generate": [
        *(
            vllm_engine_pb2.GenerateRequest(**_SMG_PROMPT, sampling_params=parameters, stream=is_stream)
            for parameters in _SMG_PARAMETERS
            for is_stream in (True, False)
        ),
        vllm_engine_pb2.GenerateRequest(text="The", sampling_params={"max_tokens": 2}),
    ],
    "Abort": [vllm_engine_pb2.AbortRequest(request_ids=["again", ""])],
}
"""As REAL, of the methods of VllmEngine."""
