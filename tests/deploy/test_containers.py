"""The container files against the manifests and the command line. check_images.py builds and starts the images."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from deploy.tools import DEPLOY, pod_of

COMMANDS = {"cachemgr": "cachemgr", "worker": "worker", "gateway": "serve"}


def stages(service: str) -> list[list[str]]:
    """A file's instructions by stage; lines that go on are one."""
    text = (DEPLOY / "containers" / f"{service}.Containerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[str]] = []
    for line in filter(None, text.splitlines()):
        if line.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(re.sub(r"\s+", " ", line))
    return found


def of_kind(instructions: list[str], kind: str) -> list[str]:
    return [line.partition(" ")[2] for line in instructions if line.startswith(f"{kind} ")]


@pytest.mark.parametrize("service", COMMANDS)
def test_an_image_runs_its_service_as_the_manifests_expect(service: str) -> None:
    *_, last = stages(service)
    (entrypoint,), (user,), (exposed,) = (of_kind(last, kind) for kind in ("ENTRYPOINT", "USER", "EXPOSE"))
    assert json.loads(entrypoint) == ["/opt/quire/bin/quire", COMMANDS[service]]
    pod = pod_of(service)
    (container,) = pod["containers"]
    assert container["name"] == service
    assert "command" not in container
    assert sorted(map(int, exposed.split())) == sorted(port["containerPort"] for port in container["ports"])
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user


@pytest.mark.parametrize("service", COMMANDS)
def test_an_image_has_its_extra_alone(service: str) -> None:
    *earlier, last = stages(service)
    lines = [line for stage in earlier for line in of_kind(stage, "RUN")]
    defaults = dict(line.split("=", 1) for stage in earlier for line in of_kind(stage, "ARG"))
    extras = [extra for line in lines for extra in re.findall(r"quire-kv\[([^]]+)\]", line)]
    assert [defaults.get(extra.strip("${}"), extra) for extra in extras] == [service]
    assert ("torch" in " ".join(lines + last)) == (service == "worker")
    # The compiler and the sources stay behind; of the build there is the environment.
    (copied,) = of_kind(last, "COPY")
    assert copied.endswith(" /opt/quire /opt/quire")


def test_one_wheel_is_built_for_all_images() -> None:
    """The first steps are the same ones, so an engine that keeps layers compiles Rust once."""
    beginnings = {tuple(stages(service)[0][:5]) for service in COMMANDS}
    assert len(beginnings) == 1
    assert "build --outdir /dist /src" in beginnings.pop()[-1]


@pytest.mark.parametrize(
    ("service", "names"),
    [("worker", ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")), ("gateway", ("HOME", "HF_HOME"))],
)
def test_what_a_service_writes_is_on_the_volume(service: str, names: tuple[str, ...]) -> None:
    *_, last = stages(service)
    (container,) = pod_of(service)["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    variables = dict(word.split("=", 1) for line in of_kind(last, "ENV") for word in line.split())
    for name in names:
        assert any(variables[name].startswith(mount) for mount in mounts)


@pytest.mark.parametrize(
    ("service", "copied"),
    [("worker", "cp -R /src/model {}"), ("gateway", "cp /src/deploy/demo/model/*.json {}/")],
)
def test_the_model_to_try_it_with_is_in_the_image(service: str, copied: str) -> None:
    """The gateway needs its tokenizer, at the path that the worker names."""
    *earlier, _ = stages(service)
    overlay = yaml.safe_load((DEPLOY / "kubernetes/overlays/try/kustomization.yaml").read_text())
    (literal,) = overlay["configMapGenerator"][0]["literals"]
    path = literal.removeprefix("model=")
    assert any(copied.format(path) in line for stage in earlier for line in of_kind(stage, "RUN"))


def test_a_build_does_not_wait_for_what_it_does_not_need() -> None:
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "docs", "tests", "cachemgr/core/target", "**/*.so"} <= set(ignored)
    needed = ("cachemgr", "protos", "deploy/demo/model", "requirements.lock", "pyproject.toml", "LICENSE", "README.md")
    assert not set(needed) & set(ignored)
