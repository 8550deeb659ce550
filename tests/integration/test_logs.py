"""Log lines of calls, and content that is never logged, seen from outside of real processes."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from google.protobuf.wrappers_pb2 import StringValue
from integration.protocol_client import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    RefusedError,
    StandInWorker,
    await_that,
)

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
SERVICE = "/quire.test.StandIn"
ID = ("x-request-id", "of-the-caller")


def lines_of(server: ServiceProcess) -> list[str]:
    assert server.log_path is not None
    return server.log_path.read_text().splitlines()


def await_lines(server: ServiceProcess, sign: str, *, count: int = 1) -> list[str]:
    """The lines with this in them, once there are so many: a call's line may come after its answer."""
    await_that(sign, lambda: len([line for line in lines_of(server) if sign in line]) >= count)
    lines = [line for line in lines_of(server) if sign in line]
    assert len(lines) == count
    return lines


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[ServiceProcess, grpc.Channel]]]:
    """Starts a stand-in with flags."""
    made: list[tuple[ServiceProcess, grpc.Channel]] = []

    def start(*flags: str) -> tuple[ServiceProcess, grpc.Channel]:
        folder = tmp_path_factory.mktemp("q")
        address = f"unix:{folder}/s"
        server = ServiceProcess(
            "stand-in",
            target=STAND_IN,
            arguments=("--listen", address, *flags),
            address=address,
            log_path=folder / "log",
        )
        server.start()
        server.wait_serving(DEADLINE_S)
        made.append((server, grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))))
        return made[-1]

    yield start
    for server, channel in made:
        channel.close()
        server.kill()


CODING = (StringValue.SerializeToString, StringValue.FromString)


def echo(channel: grpc.Channel, text: str, *metadata: tuple[str, str]) -> str:
    """Calls Echo; returns the request id of the answer, or of the refusal."""
    stub = channel.unary_unary(f"{SERVICE}/Echo", *CODING)
    try:
        _, call = stub.with_call(StringValue(value=text), timeout=DEADLINE_S, metadata=metadata)
    except grpc.RpcError as error:
        call = error
    return dict(call.trailing_metadata())["x-request-id"]


def echo_stream(channel: grpc.Channel, method: str, texts: list[str], *metadata: tuple[str, str]) -> str:
    """As echo, for a stream."""
    stub: Any = channel.stream_stream(f"{SERVICE}/{method}", *CODING)
    call = stub((StringValue(value=text) for text in texts), timeout=DEADLINE_S, metadata=metadata)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return dict(call.trailing_metadata())["x-request-id"]


@pytest.mark.parametrize("text", ["fine", "refuse", "defect"])
def test_an_answer_has_the_request_id_of_its_caller_or_one_of_the_server(start: Any, text: str) -> None:
    _, channel = start()
    assert echo(channel, text, ID) == ID[1]
    drawn = {echo(channel, text) for _ in range(3)} | {echo(channel, text, ("x-request-id", "no id"))}
    assert len(drawn) == 4
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in drawn)
    for method in ("EchoStream", "EchoWrites"):
        assert echo_stream(channel, method, ["fine", text], ID) == ID[1]
        assert re.fullmatch("[0-9a-f]{16}", echo_stream(channel, method, ["fine", text]))


def test_a_refused_call_is_one_line_that_says_who_what_why_and_how_long(start: Any) -> None:
    server, channel = start()
    echo(channel, "fine", ID)
    echo(channel, "refuse", ID)
    (line,) = await_lines(server, "request_id=")
    assert re.fullmatch(
        rf"\S+ INFO quire\.serving\.interceptor refused method={SERVICE}/Echo reason=POOL_NOT_FOUND code=NOT_FOUND "
        r"caller= peer=unix:\S* duration_ms=\d+\.\d{3} request_id=of-the-caller",
        line,
    )
    echo_stream(channel, "EchoStream", ["fine", "refuse"])
    await_lines(server, f"refused method={SERVICE}/EchoStream reason=POOL_NOT_FOUND code=")


def test_a_defect_has_the_id_of_its_call_and_no_second_line(start: Any) -> None:
    server, channel = start()
    echo(channel, "defect", ID)
    echo(channel, "refuse", ("x-request-id", "of-the-next"))
    await_lines(server, "of-the-next")
    (line,) = await_lines(server, "of-the-caller")
    assert " ERROR " in line
    assert f"handler failed method={SERVICE}/Echo error=KeyError at" in line


def test_calls_that_succeed_are_lines_for_who_debugs(start: Any) -> None:
    server, channel = start("--log-level", "debug")
    echo(channel, "fine", ID)
    (line,) = await_lines(server, "of-the-caller")
    assert f"DEBUG quire.serving.interceptor ended method={SERVICE}/Echo caller= duration_ms=" in line


def test_every_line_of_json_is_an_object(start: Any) -> None:
    server, channel = start("--log-format", "json", "--log-level", "debug")
    echo(channel, "refuse", ID)
    await_lines(server, "of-the-caller")
    server.terminate()
    contents = [json.loads(line) for line in lines_of(server)]
    assert all({"time", "level", "logger", "event"} <= content.keys() for content in contents)
    (refused,) = [content for content in contents if content["event"] == "refused"]
    assert refused.pop("duration_ms") > 0
    assert refused.pop("peer").startswith("unix:")
    del refused["time"]
    assert refused == {
        "level": "INFO",
        "logger": "quire.serving.interceptor",
        "event": "refused",
        "method": f"{SERVICE}/Echo",
        "reason": "POOL_NOT_FOUND",
        "code": "NOT_FOUND",
        "caller": "",
        "request_id": "of-the-caller",
    }
    assert [content["signal"] for content in contents if content["event"] == "draining"] == ["SIGTERM"]


def test_every_line_of_both_services_is_an_object_with_fields(model_dir: Path, tmp_path: Path) -> None:
    """Through start, attachment, refusals, a restart and the drain. What varies is in fields, not in the event."""
    folder = tmp_path / "run"
    json_flags = ("--log-format", "json", "--log-level", "debug")
    state = ("--state-dir", str(tmp_path / "state"))
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=(*json_flags, *state),
        extra_worker_args=(*WORKER_ARGS, *json_flags),
        runtime_dir=folder,
    ) as services:
        pair = Pair(services)
        pair.await_attached()
        for told in ({"pool": "a/b"}, {"pool": "a", "highest_term": 2**62}):
            with pytest.raises(RefusedError):
                StandInWorker(pair).register(**told)
        StandInWorker(pair).register("a", attached_term=3)
        run_on_the_worker(pair)
        services.cachemgr.kill()
        services.cachemgr.start()
        services.cachemgr.wait_serving(DEADLINE_S)
        pair.await_attached()
        pair.close()
    second = subprocess.run(
        [sys.executable, "-m", "quire.cachemgr", *json_flags, "--state-dir", str(model_dir / "config.json" / "state")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    logs = [(folder / f"{name}.log").read_text() for name in ("cachemgr", "worker")]
    contents = [json.loads(line) for text in (*logs, second.stderr) for line in text.splitlines()]
    events = {content["event"] for content in contents}
    assert {"serving", "security", "worker attached", "attached", "attachment refused", "pool recovered"} <= events
    assert {"new epoch required", "draining", "stopped"} <= events
    assert any(event.startswith("can't start: state directory") for event in events)
    assert [event for event in events if re.search(r"\b\w+=", event)] == []


# -- what is never logged -----------------------------------------------------------------------------------------

VOCAB_SIZE = 2_000_000_000
FIRST_TOKEN, PLANNED, SAMPLED, TOO_LARGE = 1_111_111_111, 1_222_222_222, 1_333_333_333, 2_111_111_111


@pytest.fixture(scope="module")
def talkative(model_dir: Path) -> Iterator[Pair]:
    """Both processes, logging all they can, one of them as JSON."""
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=("--log-level", "debug"),
        extra_worker_args=(*WORKER_ARGS, "--log-level", "debug", "--log-format", "json"),
    ) as services:
        pair = Pair(services)
        yield pair
        pair.close()


def run_with_tokens_that_stand_out(pair: Pair) -> str:
    """Plans and reports with large token ids, good and bad ones. Returns the lease's id."""
    worker = StandInWorker(pair)
    worker.register("large", vocabulary_size=VOCAB_SIZE)
    lease = worker.create_lease(pair, "large")
    prompts = {1: [FIRST_TOKEN] * BLOCK_SIZE, 2: [TOO_LARGE]}
    admissions = [cache_service_pb2.Admission(sequence_id=each, token_ids=prompts[each]) for each in prompts]
    (refusal,) = lease.plan(admissions=admissions).refusals
    assert refusal.error.reason == "TOKEN_OUT_OF_RANGE"
    with pytest.raises(RefusedError, match="EPOCH_CHANGED"):
        lease.plan(epoch=7, admissions=admissions)
    plans = [cache_service_pb2.PlanStepsRequest(plan=lease.plan_request(epoch=7, admissions=admissions))]
    (answer,) = pair.cache.PlanSteps(iter(plans), timeout=DEADLINE_S)
    assert answer.error.reason == "EPOCH_CHANGED"
    worker.say(step_report=report(lease, 1, SAMPLED))
    lease.await_settled()
    lease.extend(1)
    worker.say(step_report=report(lease, 2, TOO_LARGE))
    with pytest.raises(RefusedError, match="INVALID_ARGUMENT"):
        list(iter(worker.hear, None))
    lease.delete()
    return lease.lease_id


def report(lease: LeaseHolder, number: int, sampled: int) -> attach_pb2.StepReport:
    """The report of a step that computed all tokens of sequence 1."""
    return attach_pb2.StepReport(
        report_number=number,
        lease_id=lease.lease_id,
        step_number=number,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=[1],
        computed_token_counts=[BLOCK_SIZE + number - 1],
        sampled_sequence_ids=[1],
        sampled_token_ids=[sampled],
    )


def run_on_the_worker(pair: Pair) -> str:
    """Steps of a real sequence, and refused ones. Returns the lease's id."""
    lease = LeaseHolder.create(pair)
    plan = lease.admit((1, [71] * 9))
    lease.run(plan)
    with pytest.raises(RefusedError, match="STEP_OUT_OF_ORDER"):
        lease.run(plan)
    other = lease.admit((2, [70] * 9))
    lease.tokens[2] = [71] * 9
    with pytest.raises(RefusedError, match="TOKENS_MISMATCH"):
        lease.run(other)
    lease.delete()
    return lease.lease_id


def test_no_line_has_a_token_or_a_whole_lease_id(talkative: Pair) -> None:
    lease_ids = run_with_tokens_that_stand_out(talkative), run_on_the_worker(talkative)
    cachemgr, worker = talkative.services.cachemgr, talkative.services.worker
    await_lines(worker, "TOKENS_MISMATCH")
    await_lines(cachemgr, "lease ended", count=len(lease_ids))
    text = "\n".join(lines_of(cachemgr) + lines_of(worker))
    for told in ("reason=EPOCH_CHANGED", "plan refused", "attachment refused", "STEP_OUT_OF_ORDER", "lease ended"):
        assert told in text, "the lines that could say too much are there"
    for token in (FIRST_TOKEN, PLANNED, SAMPLED, TOO_LARGE):
        assert str(token) not in text
    assert not re.search(r"\b71\D{1,3}71\b", text)
    for lease_id in lease_ids:
        assert lease_id[:8] in text
        assert lease_id[:9] not in text
