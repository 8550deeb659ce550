"""cachemgr is started again after its machine's clock was set back: its term may be lower, and it still rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import NUM_BLOCKS, WORKER_ARGS, LeaseHolder, Pair, draw_tokens

from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess

CLOCK_SET_BACK = str(Path(__file__).with_name("clock_set_back.py"))
PROMPT = draw_tokens(21, seed=1)


@pytest.mark.parametrize("has_state", [False, True], ids=["without a state directory", "with one"])
def test_a_worker_is_ruled_again_after_the_clock_was_set_back(
    has_state: bool, model_dir: Path, tmp_path: Path, generate: Callable[[list[int], int], list[int]]
) -> None:
    state = ("--state-dir", str(tmp_path / "state")) if has_state else ()
    with LocalServices.start(
        model=model_dir, num_blocks=NUM_BLOCKS, extra_cachemgr_args=state, extra_worker_args=WORKER_ARGS
    ) as services:
        pair = Pair(services)
        pair.await_attached()
        first = pair.pool()
        behind = ServiceProcess(
            "cachemgr",
            target=CLOCK_SET_BACK,
            arguments=("--listen", services.cachemgr_address, *state),
            address=services.cachemgr_address,
            log_path=tmp_path / "cachemgr.log",
        )
        services.cachemgr.kill()
        try:
            behind.start()
            behind.wait_serving(DEADLINE_S)
            pair.await_attached()
            second = pair.pool()
            assert second.term > first.term
            assert (second.epoch == first.epoch) is has_state
            lease = LeaseHolder.create(pair)
            lease.run(lease.admit((1, PROMPT)))
            lease.go_on(1, num_steps=3)
            assert lease.tokens[1] == PROMPT + generate(PROMPT, 4)
        finally:
            behind.kill()
        services.cachemgr.start()
        services.cachemgr.wait_serving(DEADLINE_S)
        pair.await_attached()
        assert pair.pool().term > second.term
        pair.close()
