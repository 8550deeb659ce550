"""The manifests for KServe: fields that its resources have, a pod that Kubernetes takes, and a command that serves."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from deadlines import DEADLINE_S
from deploy.test_containers import of_kind, stages
from deploy.test_kubernetes import KUBERNETES
from deploy.tools import DEPLOY, ROOT
from integration.protocol_client import await_that
from ports import free_port

RUNTIME: dict[str, Any] = yaml.safe_load((DEPLOY / "kserve/serving-runtime.yaml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((DEPLOY / "kserve/inference-service.yaml").read_text())
(CONTAINER,) = RUNTIME["spec"]["containers"]
# What we use of serving.kserve.io: Kubernetes has no schema of custom resources.
RUNTIME_SPEC = {
    "required": ["supportedModelFormats", "containers"],
    "additionalProperties": False,
    "properties": {
        "multiModel": {"const": False},
        "containers": {"type": "array", "minItems": 1, "items": {"required": ["name", "image"]}},
        "volumes": {"type": "array"},
        "supportedModelFormats": {
            "items": {
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "version": {"type": "string"},
                    "autoSelect": {"type": "boolean"},
                },
            }
        },
    },
}
SERVICE_SPEC = {
    "required": ["predictor"],
    "additionalProperties": False,
    "properties": {
        "predictor": {
            "additionalProperties": False,
            "properties": {
                "model": {
                    "required": ["modelFormat", "runtime", "storageUri"],
                    "additionalProperties": False,
                    "properties": {
                        "runtime": {"type": "string"},
                        "modelFormat": {
                            "required": ["name"],
                            "additionalProperties": False,
                            "properties": {"name": {}},
                        },
                        "storageUri": {"type": "string", "pattern": "^(hf|s3|gs|pvc)://"},
                    },
                }
            },
        }
    },
}


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the pod that KServe makes of a runtime."""
    pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "qwen"}, "spec": pod}


def test_the_resources_are_as_we_know_them() -> None:
    jsonschema.validate(RUNTIME["spec"], RUNTIME_SPEC)
    jsonschema.validate(SERVICE["spec"], SERVICE_SPEC)
    assert (RUNTIME["apiVersion"], RUNTIME["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    model = SERVICE["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]]


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_pod(version: str) -> None:
    pod = pod_of(RUNTIME["spec"])
    kubernetes_validate.validate(pod, version, strict=True)
    pod["spec"]["containers"] = [CONTAINER | {"prots": []}]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_image_is_the_workers_with_all_extras() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    text = (DEPLOY / "containers/worker.Containerfile").read_text()
    assert f"EXTRA=all and --tag {CONTAINER['image']}" in text
    assert CONTAINER["image"] == f"quire-up:{version}"
    *_, last = stages("worker")
    assert of_kind(last, "USER") == ["64321:64321"]
    security = CONTAINER["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (64321, 64321)
    assert CONTAINER["name"] == "kserve-container"


def test_what_kserve_starts_serves() -> None:
    """The very arguments, with a model, a port and a device of this machine: the probes' paths and the model's name."""
    program, command = CONTAINER["command"]
    assert program == "/opt/quire/bin/quire"
    (exposed,) = CONTAINER["ports"]
    assert f"--port={exposed['containerPort']}" in CONTAINER["args"]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        here = {
            "/mnt/models": str(DEPLOY / "demo/model"),
            "--served-model-name={{.Name}}": "--served-model-name=qwen",
            "--host=0.0.0.0": "--host=127.0.0.1",
            f"--port={exposed['containerPort']}": f"--port={port}",
            "--runtime-dir=/tmp/quire": f"--runtime-dir={folder}/run",
            "--device=cuda": "--device=cpu",
        }
        assert here.keys() <= set(CONTAINER["args"])
        arguments = [here.get(each, each) for each in CONTAINER["args"]]
        line = [sys.executable, "-P", "-m", "quire.cli", command, *arguments, "--num-blocks=64"]
        environment = {name: value for name, value in os.environ.items() if name != "QUIRE_UP_NO_HTTP"}
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)
        try:
            ready = CONTAINER["readinessProbe"]["httpGet"]["path"]
            await_that("it is ready", lambda: process.poll() is not None or is_success(port, ready))
            with open(f"{folder}/log") as log_text:
                assert process.poll() is None, log_text.read()[-3000:]
            assert is_success(port, CONTAINER["livenessProbe"]["httpGet"]["path"])
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"Host": "qwen.example.com"})
            assert [each["id"] for each in models.json()["data"]] == ["qwen"]
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()


def is_success(port: int, path: str) -> bool:
    """Return whether a probe over HTTP succeeds."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S, trust_env=False).is_success
    except httpx.TransportError:
        return False
