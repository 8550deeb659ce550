"""The JavaScript of docs/reference/engine-service.md, run by Node with the packages that the page installs."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pages
import pytest
from conformance.foreign import BUILD_TIMEOUT_S, ROOT, find
from deadlines import DEADLINE_S

from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.client import LLM, SamplingParams

THIS, PAGE = "tests/conformance/test_javascript.py", "docs/reference/engine-service.md"
GATEWAY = "quire.gateway"
SOCKET = "unix:/run/quire/engine.sock"


@pytest.mark.verify
def test_the_page_writes_what_the_engine_generates(tmp_path: Path) -> None:
    node, npm = (find(program, for_what="the JavaScript example") for program in ("node", "npm"))
    [install] = pages.block(PAGE, test=THIS, language="bash").commands()
    words = [npm, *shlex.split(install)[1:], "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=BUILD_TIMEOUT_S)
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=64) as services:
        prompt, params = "The default value of this parameter", SamplingParams(max_tokens=32, temperature=0)
        with LLM(services.cachemgr_address) as llm:
            [expected] = llm.generate(prompt, params)
        address = f"unix:{services.runtime_dir}/engine.sock"
        source = pages.block(PAGE, test=THIS, language="js").text
        assert SOCKET in source
        (tmp_path / "main.js").write_text(source.replace(SOCKET, address))
        flags = ("--cachemgr", services.cachemgr_address, "--listen", "127.0.0.1:0", "--grpc-listen", address)
        log = services.runtime_dir / "engine.log"
        gateway = ServiceProcess("engine", target=GATEWAY, arguments=flags, address=address, log_path=log)
        gateway.start()
        try:
            gateway.wait_serving(DEADLINE_S)
            done = subprocess.run([node, "main.js"], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
        finally:
            gateway.terminate()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{expected.text}\n{len(expected.token_ids)} tokens\n"
