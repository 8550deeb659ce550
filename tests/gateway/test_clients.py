"""Clients of others on docs/how-to/use-your-client.md, each in an environment of its own that is made once."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import httpx
import pages
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, ROOT, Gateway
from gateway.test_docs import DEFAULT
from package_environments import environment
from pages import SHELL

pytestmark = pytest.mark.verify

PAGE = "docs/how-to/use-your-client.md"
PACKAGES = {
    "langchain": ("langchain-openai==1.7.3",),
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
    "aiperf": ("aiperf==0.13.0",),
}
SNIPPET, COMMAND, PROFILE = (block for block in pages.blocks(PAGE) if block.test == "tests/gateway/test_clients.py")
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{best}}"
metric_list:
  - metric: acc
"""
UNTIL = """output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
"""


def test_langchain_invokes_and_streams(gateway: Gateway, tmp_path: Path) -> None:
    assert SNIPPET.language not in SHELL
    program = tmp_path / "program.py"
    program.write_text(SNIPPET.text.replace(DEFAULT, gateway.url).replace('model="model"', f'model="{MODEL}"'))
    command = [environment("langchain", *PACKAGES["langchain"]) / "python", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (said.returncode, said.stderr) == (0, "")
    assert len(said.stdout) > 40


def test_lm_eval_compares_log_probabilities_and_generates(gateway: Gateway, tmp_path: Path) -> None:
    """The best of two choices is that with the larger log-probability by the gateway itself."""
    rows = [("The input tensor", " must have the same shape", " zebra banana"), ("By default", " zebra", ", the value")]
    documents = []
    with gateway.client() as client:
        for text, *choices in rows:
            scores = [logprob_of(client, text, choice) for choice in choices]
            documents.append({"text": text, "choices": choices, "best": scores.index(max(scores))})
    assert {document["best"] for document in documents} == {0, 1}
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    for name, rest in (("choice", CHOICE), ("until", UNTIL)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=f"quire_{name}", data=data) + rest)
    (command,) = COMMAND.commands()
    command = command.replace(DEFAULT, gateway.url).replace("model=model", f"model={MODEL}")
    command = command.replace("hellaswag", f"quire_choice,quire_until --include_path {tmp_path}")
    said = subprocess.run(
        f"{environment('lm-eval', *PACKAGES['lm-eval'])}/{command}",
        shell=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    accuracy = re.search(r"quire_choice.*\|acc\s*\|[^|]*\|\s*([\d.]+)", said.stdout)
    assert accuracy is not None, said.stdout
    assert float(accuracy[1]) == 1.0, said.stdout
    assert re.search(r"quire_until.*\|exact_match", said.stdout), said.stdout


def test_aiperf_measures_a_stream_of_each_request(gateway: Gateway, tmp_path: Path) -> None:
    (command,) = PROFILE.commands()
    command = command.replace(DEFAULT, gateway.url).replace("--model model", f"--model {MODEL}")
    before = gateway.metric("vllm:generation_tokens_total")
    said = subprocess.run(
        f"{environment('aiperf', *PACKAGES['aiperf'])}/{command} --output-tokens-mean 16 "
        f"--extra-inputs ignore_eos:true --ui none --artifact-dir {tmp_path}",
        shell=True,
        cwd=ROOT,
        # Not HF_HUB_OFFLINE: aiperf then takes no tokenizer of a folder.
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert said.returncode == 0, (said.stdout + said.stderr)[-3000:]
    (export,) = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(export.read_text())
    assert figures["request_count"]["avg"] == 16
    assert not figures.get("error_summary")
    assert figures["time_to_first_token"]["avg"] > 0
    assert gateway.metric("vllm:generation_tokens_total") - before >= 16 * 16


def logprob_of(client: httpx.Client, text: str, choice: str) -> float:
    """Return the log-probability of a choice after a text, from the gateway's `echo`."""
    request = {"prompt": text + choice, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", json=request).json()["choices"][0]["logprobs"]
    pairs = zip(answer["text_offset"], answer["token_logprobs"], strict=True)
    return sum(score for offset, score in list(pairs)[:-1] if offset >= len(text))
