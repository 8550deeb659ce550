"""Clients of others on docs/how-to/use-your-client.md, each in an environment of its own that is made once.

Programs in client_programs/ print "done" after their last check.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pages
import pytest
from conformance.foreign import BUILD_TIMEOUT_S, find
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, ROOT, Gateway
from gateway.test_docs import DEFAULT
from integration.protocol_client import await_that
from package_environments import environment
from pages import SHELL
from ports import free_port

pytestmark = pytest.mark.verify

PAGE = "docs/how-to/use-your-client.md"
PACKAGES = {
    "langchain": ("langchain-openai==1.7.3",),
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
    "aiperf": ("aiperf==0.13.0",),
    "litellm": ("litellm[proxy]==1.108.7",),
    "llamaindex": ("llama-index-llms-openai-like==0.8.1",),
    "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0",),
}
NODE_PACKAGES = (
    "openai@6.49.0",
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "zod@4.6.7",
)
PROGRAMS = ROOT / "tests/gateway/client_programs"
PROXY_KEY = f"sk-{hashlib.sha256(b'a key of the test').hexdigest()}"
PROXY = """model_list:
  - model_name: {model}
    litellm_params: {{model: hosted_vllm/{model}, api_base: "{url}/v1", api_key: none}}
"""
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
    said = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
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
        timeout=BUILD_TIMEOUT_S,
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
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert said.returncode == 0, (said.stdout + said.stderr)[-3000:]
    (export,) = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(export.read_text())
    assert figures["request_count"]["avg"] == 16
    assert not figures.get("error_summary")
    assert figures["time_to_first_token"]["avg"] > 0
    assert gateway.metric("vllm:generation_tokens_total") - before >= 16 * 16


@pytest.mark.parametrize(
    ("name", "program"),
    [("litellm", "litellm_sdk.py"), ("llamaindex", "llamaindex.py"), ("pydantic-ai", "pydantic_ai_agent.py")],
)
def test_packages_chat_stream_parse_and_call_tools(gateway: Gateway, name: str, program: str) -> None:
    assert_done(environment(name, *PACKAGES[name]) / "python", PROGRAMS / program, gateway.url, MODEL)


@pytest.fixture(scope="module")
def node_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which npm has installed the packages."""
    folder = tmp_path_factory.mktemp("node")
    npm = find("npm", for_what="clients for Node")
    command = [npm, "install", *NODE_PACKAGES, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(command, cwd=folder, check=True, timeout=BUILD_TIMEOUT_S)
    return folder


@pytest.mark.parametrize("program", ["openai_node.mjs", "vercel.mjs"])
def test_packages_of_node_chat_stream_parse_and_call_tools(gateway: Gateway, node_packages: Path, program: str) -> None:
    copy = node_packages / program  # Node looks for packages beside the program
    copy.write_text((PROGRAMS / program).read_text())
    assert_done(find("node", for_what="clients for Node"), copy, gateway.url, MODEL)


@pytest.fixture
def proxy(gateway: Gateway, tmp_path: Path) -> Iterator[str]:
    """The URL of LiteLLM's proxy before the gateway."""
    config, port = tmp_path / "config.yaml", free_port()
    config.write_text(PROXY.format(model=MODEL, url=gateway.url))
    program = environment("litellm", *PACKAGES["litellm"]) / "litellm"
    command = [program, "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    home = {"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "LITELLM_MASTER_KEY": PROXY_KEY}
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=home, cwd=tmp_path)
    try:
        await_that("the proxy answers", lambda: process.poll() is not None or is_success(f"{url}/health/liveliness"))
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        yield url
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_the_proxy_of_litellm_passes_chats_streams_and_tools_on(proxy: str) -> None:
    place = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "The weather?"}], "temperature": 0}
    tool = {"type": "function", "function": {"name": "weather", "parameters": place}}
    choice = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=PROXY_KEY, max_retries=0, timeout=DEADLINE_S) as client:
        said = client.chat.completions.create(**chat, max_tokens=8)
        assert said.usage.completion_tokens == 8
        stream = client.chat.completions.create(**chat, max_tokens=8, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert streamed == said.choices[0].message.content
        called = client.chat.completions.create(**chat, max_tokens=200, tools=[tool], tool_choice=choice)
        (call,) = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_the_calls_of_open_webui(gateway: Gateway) -> None:
    """Open WebUI lists models, streams a chat with its usage, and asks for a title with a ceiling of its own."""
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-Chat-Id": "c"}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    with gateway.client(headers=headers) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [MODEL]
        body = asked | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
        answer = client.post("/v1/chat/completions", json=body)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        assert json.loads(events[-1])["usage"]["completion_tokens"] == 8
        title = client.post("/v1/chat/completions", json=asked | {"stream": False, "max_completion_tokens": 1000})
        assert title.json()["choices"][0]["message"]["content"]


def assert_done(program: str | Path, *arguments: str | Path) -> None:
    """Run a program of a client to its end. Fails with what it wrote."""
    command = [program, *arguments]
    said = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert said.returncode == 0, (said.stdout + said.stderr)[-3000:]
    assert said.stdout.rstrip().endswith("done")


def is_success(url: str) -> bool:
    """Return whether a server answers a request with a success."""
    try:
        return httpx.get(url, timeout=DEADLINE_S).is_success
    except httpx.TransportError:
        return False


def test_the_page_names_the_versions_that_run_here() -> None:
    """And files of tests that are there, each of which holds its client's name."""
    rows = [line.split("|")[1:-1] for line in pages.read(PAGE).splitlines() if line.count("|") == 6][2:]
    text = "\n".join("|".join(row) for row in rows)
    pinned = [package for packages in PACKAGES.values() for package in packages if "transformers" not in package]
    for package in (*pinned, *(each for each in NODE_PACKAGES if "zod" not in each)):
        assert re.split("==|@", package)[-1] in text, package
    for row in rows:
        assert row[1].strip(), row
        for name in re.findall(r"`([\w/]+\.py)`", row[4]):
            path = ROOT / name if "/" in name else ROOT / "tests/gateway" / name
            client = row[0].split(",")[0].split()[0].strip().lower()
            assert re.search(client.replace("-", "[-_]?"), path.read_text().lower()), row
    assert len(rows) == 16


def logprob_of(client: httpx.Client, text: str, choice: str) -> float:
    """Return the log-probability of a choice after a text, from the gateway's `echo`."""
    request = {"prompt": text + choice, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", json=request).json()["choices"][0]["logprobs"]
    pairs = zip(answer["text_offset"], answer["token_logprobs"], strict=True)
    return sum(score for offset, score in list(pairs)[:-1] if offset >= len(text))
