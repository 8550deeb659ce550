"""`transformers serve` with continuous batching, in its own environment: the peer of `quire bench serving door`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from environments import PeerUnavailable, install, last_line

NAME = "transformers serve"
REQUIREMENTS = Path(__file__).with_name("transformers_serve_requirements.txt")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_SERVING = re.compile(r"Uvicorn running on (http://\S+)")
_POLL_S = 0.1


@contextlib.contextmanager
def transformers_serve(
    model: Path, log: Path, *, num_blocks: int, block_size: int, max_step_tokens: int
) -> Iterator[str]:
    """Within the block it serves a model on the CPU in float32; yields its URL.

    model  folder with a checkpoint and a tokenizer. Its path is the model's name in requests
    log    file that gets its output

    Raises PeerUnavailable if its packages can't be installed, or if it does not start.
    """
    command = [str(install("transformers_serve", REQUIREMENTS)), "-m", "transformers.cli.transformers", "serve"]
    command += [str(model), "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    command += ["--continuous-batching", "--cb-num-blocks", str(num_blocks), "--cb-block-size", str(block_size)]
    command += ["--cb-max-batch-tokens", str(max_step_tokens), "--log-level", "error"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
    try:
        yield _await_url(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if found := _SERVING.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(_POLL_S)
    how = "did not start in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise PeerUnavailable(f"{NAME} {how}: {last_line(log.read_text(errors='replace'))}")
