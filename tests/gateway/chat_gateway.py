"""A model that can chat, and `quire serve` for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, Gateway

from quire.cli.launch import LocalServices

__all__ = ["ARGUMENTS", "MODEL", "save_chat_model", "serve_chats", "start_chats"]

ARGUMENTS = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-num-seqs", "16")


def save_chat_model(folder: Path, template: str) -> Path:
    """Write a model with a tokenizer and a chat template, and return its folder."""
    from text_model import END, save  # imports torch

    save(folder)
    config = {"eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def start_chats(model: Path, *, num_blocks: int = 2_000) -> LocalServices:
    """Start both services with a model that can chat."""
    return LocalServices.start(model=model, num_blocks=num_blocks, extra_worker_args=ARGUMENTS)


@contextmanager
def serve_chats(services: LocalServices, *arguments: str, log: Path) -> Iterator[openai.OpenAI]:
    """Serve a model's chats; the value is a client of them."""
    gateway = Gateway(services.cachemgr_address, *arguments, log=log)
    try:
        url = f"{gateway.url}/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=DEADLINE_S) as client:
            yield client
    finally:
        gateway.close()
