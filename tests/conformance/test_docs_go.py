"""The Go programs of docs/how-to/inspection.md and docs/reference/engine-service.md do what their pages say."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pages
import pytest
from conformance.foreign import BUILD_TIMEOUT_S, ROOT, find
from deadlines import DEADLINE_S

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.client import CacheClient, Engine, SamplingParams

THIS = "tests/conformance/test_docs_go.py"
# Ends the watch behind the snapshot, which is the answer with the first cursor, and writes the ids of the blocks.
PROGRAM = """package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/quire-kv/quire/client/go/quire"
	cachev1 "github.com/quire-kv/quire/client/go/quire/cache/v1"
)

%s
type service struct{ cachev1.CacheServiceClient }

func (s service) WatchBlocks(ctx context.Context, request *cachev1.WatchBlocksRequest, options ...grpc.CallOption) (
	grpc.ServerStreamingClient[cachev1.WatchBlocksResponse], error) {
	answers, err := s.CacheServiceClient.WatchBlocks(ctx, request, options...)
	return &snapshot{ServerStreamingClient: answers}, err
}

type snapshot struct {
	grpc.ServerStreamingClient[cachev1.WatchBlocksResponse]
	isOver bool
}

func (s *snapshot) Recv() (*cachev1.WatchBlocksResponse, error) {
	if s.isOver {
		return nil, io.EOF
	}
	answer, err := s.ServerStreamingClient.Recv()
	s.isOver = err == nil && answer.Cursor != ""
	return answer, err
}

func main() {
	client, err := quire.Dial(os.Args[1])
	if err != nil {
		panic(err)
	}
	defer client.Close()
	client.Service = service{client.Service}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	blocks := map[int32]*cachev1.Block{}
	cursor, err := Keep(ctx, client, "", "", blocks)
	if err != io.EOF || cursor == "" {
		panic(err)
	}
	json.NewEncoder(os.Stdout).Encode(slices.Sorted(maps.Keys(blocks)))
}
"""

TEXT_PROGRAM = """package main

import (
	"context"
	"fmt"
	"log"

	"github.com/quire-kv/quire/client/go/quire"
	enginev1 "github.com/quire-kv/quire/client/go/quire/engine/v1"
)

func main() {
	ctx := context.Background()
	%s
}
"""
GATEWAY = "quire.gateway"
SOCKET = "unix:/run/quire/engine.sock"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The function as a program."""
    return build(PROGRAM % pages.block("docs/how-to/inspection.md", test=THIS).text, tmp_path)


def build(source: str, folder: Path) -> Path:
    """A program of this source."""
    go = find("go", for_what="the pages with Go")
    written, built = folder / "main.go", folder / "program"
    written.write_text(source)
    command = [go, "build", "-o", str(built), str(written)]
    done = subprocess.run(
        command, cwd=ROOT / "client/go", capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return built


def test_it_holds_what_is_listed(program: Path) -> None:
    async def not_free(address: str) -> list[int]:
        async with Engine.connect(address) as engine:
            await engine.complete(["Each thread holds a lock while it reads"], SamplingParams(max_tokens=40))
        cache = CacheClient(address)
        try:
            return sorted(each.block_id for each in await cache.list_blocks() if each.state != pb.BLOCK_STATE_FREE)
        finally:
            await cache.close()

    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=32) as services:
        expected = asyncio.run(not_free(services.cachemgr_address))
        command = [str(program), services.cachemgr_address]
        said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    assert expected
    assert json.loads(said) == expected


def test_the_ten_lines_write_what_the_engine_generates(tmp_path: Path) -> None:
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=8) as services:
        address = f"unix:{services.runtime_dir}/engine.sock"
        lines = pages.block("docs/reference/engine-service.md", test=THIS).text
        assert SOCKET in lines
        program = build(TEXT_PROGRAM % lines.replace(SOCKET, address), tmp_path)
        flags = ("--cachemgr", services.cachemgr_address, "--listen", "127.0.0.1:0", "--grpc-listen", address)
        log = services.runtime_dir / "engine.log"
        gateway = ServiceProcess("engine", target=GATEWAY, arguments=flags, address=address, log_path=log)
        gateway.start()
        try:
            gateway.wait_serving(DEADLINE_S)
            done = subprocess.run([str(program)], capture_output=True, text=True, timeout=DEADLINE_S)
        finally:
            gateway.terminate()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
