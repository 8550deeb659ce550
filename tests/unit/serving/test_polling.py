"""gRPC reads its sockets where its events are awaited: said in time, in words that it knows. In processes, since it
reads its environment once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from deadlines import DEADLINE_S

WITHOUT = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}


def run(code: str, **environment: str) -> tuple[str, str]:
    """Return the output of the code, on stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=WITHOUT | environment,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("others", ["", "-event_engine_nowhere"])
def test_grpc_knows_the_settings(others: str) -> None:
    """It logs those that it does not know, which a later version may not any more."""
    code = """
    import quire.serving.polling
    import asyncio, grpc

    async def main():
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await server.stop(None)

    asyncio.run(main())
    """
    told = run(code, **{"GRPC_EXPERIMENTS": others} if others else {})[1]
    assert ("Unknown experiment" in told) == (others != ""), told


@pytest.mark.parametrize(
    "program",
    [
        "import quire.cachemgr.__main__",
        "import quire.worker.__main__",
        "import quire.gateway.__main__",
        "import quire.cli; sys.argv = ['quire', 'stats', '--cachemgr', 'unix:nowhere']; quire.cli.main()",
    ],
)
def test_every_process_of_ours_says_so_before_it_imports_grpc_unless_its_environment_does(program: str) -> None:
    code = f"""
    import os, sys

    class Watch:
        def find_spec(self, name, path, target=None):
            if name == "grpc":
                print(os.environ.get("GRPC_EXPERIMENTS"), flush=True)
                os._exit(0)

    sys.meta_path.insert(0, Watch())
    {program}
    """
    assert run(code)[0] == "-event_engine_listener,-event_engine_client"
    assert run(code, GRPC_EXPERIMENTS="none")[0] == "none"
