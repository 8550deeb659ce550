"""`quire events`, a consumer of its batches, and prompts that share prefixes.

EventsProcess   the process, and where it publishes
Index           a consumer: a prefix index as a router keeps it, and the numbers that it has missed
draw_prompt     tokens of a few blocks, each one of two: prompts share prefixes of every length
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from deadlines import DEADLINE_S
from integration.protocol_client import await_that

TAG = "dynamo-cache-salt:"
END = b"\xff" * 8


def draw_prompt(draw: random.Random, *, block_size: int, max_blocks: int) -> list[int]:
    """Return the tokens of full blocks and of a part of one."""
    names = [draw.randrange(1, 3) for _ in range(draw.randint(1, max_blocks))]
    return [name for name in names for _ in range(block_size)] + [9] * draw.randrange(block_size)


class EventsProcess:
    """A process, from the constructor to `kill`. `prefix` is a command that runs it."""

    def __init__(self, folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.log_path = folder / "events.log"
        self._lines: list[str] = []
        command = [*prefix, sys.executable, "-P", "-m", "quire.integrations.kv_events", *arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def log(self) -> str:
        return self.log_path.read_text()

    def await_pool(self, pool: str) -> tuple[str, str]:
        """Return where a pool is published, and where its batches are replayed, "" if nowhere."""
        pattern = re.compile(rf"publishing pool {re.escape(pool)} at (\S+?)(?:, replays at (\S+))?\n")

        def find() -> tuple[str, str] | None:
            assert self.process.poll() is None, self.log()
            found = [match for match in map(pattern.fullmatch, list(self._lines)) if match]
            return (found[-1][1], found[-1][2] or "") if found else None

        address: tuple[str, str] = await_that(f"pool {pool} is published", find)
        return address

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """End it, if it runs. Idempotent."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)


class Index:
    """A consumer on a thread of its own, from `follow` to `close`. It checks that each batch fits to those before."""

    def __init__(self, address: str, *, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.setsockopt(zmq.RCVTIMEO, 50)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._is_closing = False
        self.topics: set[bytes] = set()
        self.sequences: list[int] = []
        self.batches: list[list[Any]] = []
        self.wrong: list[str] = []
        self._parents: dict[int, int | None] = {}
        self._children: dict[tuple[int | None, str, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(DEADLINE_S)
        self._context.destroy(linger=0)

    def match(self, tokens: Sequence[int], *, namespace: str = "", block_size: int) -> int:
        """Return how many tokens of a prompt are found."""
        with self._lock:
            parent: int | None = None
            for start in range(0, len(tokens) - block_size + 1, block_size):
                key = (parent, namespace, tuple(tokens[start : start + block_size]))
                if (child := self._children.get(key)) is None:
                    return start
                parent = child
            return len(tokens) // block_size * block_size

    @property
    def num_blocks(self) -> int:
        with self._lock:
            return len(self._keys)

    def _follow(self) -> None:
        while not self._is_closing:
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                continue
            with self._lock:
                self.apply(frames)

    def apply(self, frames: list[bytes]) -> None:
        """Apply a batch. Batches that come before everything is published are about blocks that nobody knows here."""
        topic, sequence, payload = frames
        self.topics.add(topic)
        number = int.from_bytes(sequence, "big")
        if self.sequences and number != self.sequences[-1] + 1:
            self.wrong.append(f"{number} after {self.sequences[-1]}")
        self.sequences.append(number)
        _, events, rank = msgspec.msgpack.decode(payload)
        if not self.batches and events[0] != ["AllBlocksCleared"]:
            return
        self.batches.append(events)
        if rank != 0:
            self.wrong.append(f"rank {rank}")
        for event in events:
            self._apply(event)

    def _apply(self, event: list[Any]) -> None:
        match event:
            case ["AllBlocksCleared"]:
                self._parents.clear()
                self._children.clear()
                self._keys.clear()
            case ["BlockStored", hashes, parent, tokens, block_size, None, "GPU", None, keys]:
                tag = keys[0][0] if keys else TAG
                if not tag.startswith(TAG) or len(tokens) != block_size * len(hashes):
                    self.wrong.append(f"stored {event}")
                for number, block_hash in enumerate(hashes):
                    self._store(block_hash, parent, tag.removeprefix(TAG), tokens[number * block_size :][:block_size])
                    parent = block_hash
            case ["BlockRemoved", hashes, "GPU"]:
                for block_hash in hashes:
                    if block_hash not in self._keys or block_hash in self._parents.values():
                        self.wrong.append(f"removed {block_hash}")
                    self._parents.pop(block_hash, None)
                    self._children.pop(self._keys.pop(block_hash, (None, "", ())), None)
            case _:
                self.wrong.append(f"event {event}")

    def _store(self, block_hash: int, parent: int | None, namespace: str, tokens: list[int]) -> None:
        if block_hash in self._keys or (parent is not None and parent not in self._keys):
            self.wrong.append(f"stored {block_hash} behind {parent}")
        key = (parent, namespace, tuple(tokens))
        self._keys[block_hash], self._children[key], self._parents[block_hash] = key, block_hash, parent


def replay(address: str, start: int) -> list[tuple[int, bytes]]:
    """Ask for the batches from a number on, as consumers do."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        socket.connect(address)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while (frames := socket.recv_multipart())[1] != END:
            batches.append((int.from_bytes(frames[1], "big"), frames[2]))
        assert frames == [b"", END, b""]
        return batches
