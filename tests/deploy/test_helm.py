"""The Helm chart, rendered by `helm template`: the same objects as kustomize makes, which test_kubernetes.py checks.

    make check-helm      builds Helm, which takes ten minutes the first time, and runs all of these tests
    python tests/deploy/test_helm.py     writes helm_rendered.json anew, after a change of the chart

helm_rendered.json has what Helm made of the chart's present files. So the comparison with kustomize needs no Helm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deadlines import DEADLINE_S
from deploy.test_kubernetes import KUBERNETES, is_custom, render
from deploy.tools import DEPLOY, ROOT, build_go_tool, parse_service

CHART = DEPLOY / "helm/quire"
TRY = DEPLOY / "helm/try.yaml"
RENDERED = Path(__file__).with_name("helm_rendered.json")
OVERLAYS = {
    "serve": ("--values", str(TRY)),
    "many-workers": ("--set=model=Qwen/Qwen3-0.6B", "--set=worker.replicas=3", "--set=gateway.enabled=false"),
}

Manifests = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> Path:
    """At the version of deploy/helm/tools/go.mod."""
    if os.environ.get("QUIRE_REQUIRE_HELM") != "1":
        pytest.skip("*** the chart is NOT rendered anew: make check-helm does it ***")
    return build_helm()


def build_helm() -> Path:
    """Build it; takes ten minutes the first time."""
    return build_go_tool(DEPLOY / "helm/tools", "helm.sh/helm/v4/cmd/helm", "helm")


def sources() -> str:
    """Return a digest of all that Helm reads."""
    files = sorted([TRY, *(path for path in CHART.rglob("*") if path.is_file())])
    parts = [f"{path.relative_to(DEPLOY)}\n{path.read_text()}" for path in files]
    return sha256("\n".join([*parts, repr(OVERLAYS["many-workers"])]).encode()).hexdigest()


def write_rendered() -> None:
    """Write helm_rendered.json."""
    helm = build_helm()
    texts = {overlay: run(helm, *arguments).stdout for overlay, arguments in OVERLAYS.items()}
    RENDERED.write_text(json.dumps({"sources": sources(), **texts}, indent=1) + "\n")


@pytest.fixture(scope="session")
def kustomize() -> Path:
    return build_go_tool(DEPLOY / "kubernetes/tools", "sigs.k8s.io/kustomize/kustomize/v5", "kustomize")


def run(helm: Path, *arguments: str, chart: Path = CHART, namespace: str = "quire") -> subprocess.CompletedProcess[str]:
    command = [helm, "template", "quire", chart, "--namespace", namespace, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def template(helm: Path, *arguments: str, chart: Path = CHART, namespace: str = "quire") -> Manifests:
    done = run(helm, *arguments, chart=chart, namespace=namespace)
    assert done.returncode == 0, done.stderr
    return by_name(list(filter(None, yaml.safe_load_all(done.stdout))))


def by_name(manifests: list[dict[str, Any]]) -> Manifests:
    """Return objects by kind and name. The model's ConfigMap has a hash in its name, by two different formulas."""
    text = re.sub(r"quire-model-\w+", "quire-model", yaml.safe_dump_all(manifests))
    named = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    assert len(named) == len(manifests)
    return named


def of_kustomize(kustomize: Path, overlay: str) -> Manifests:
    """Return an overlay's objects without the namespace, which Helm makes by --create-namespace."""
    manifests = by_name(render(kustomize, DEPLOY / "kubernetes", overlay).manifests)
    del manifests["Namespace", "quire"]
    return manifests


def test_the_rendered_chart_is_of_its_present_files() -> None:
    assert json.loads(RENDERED.read_text())["sources"] == sources(), "run: python tests/deploy/test_helm.py"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_rendered_chart_is_what_helm_makes(helm: Path, overlay: str) -> None:
    assert json.loads(RENDERED.read_text())[overlay] == run(helm, *OVERLAYS[overlay]).stdout


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_is_what_kustomize_makes(kustomize: Path, overlay: str) -> None:
    text = json.loads(RENDERED.read_text())[overlay]
    rendered, expected = by_name(list(filter(None, yaml.safe_load_all(text)))), of_kustomize(kustomize, overlay)
    assert rendered.keys() == expected.keys()
    for name, manifest in expected.items():
        assert rendered[name] == manifest, name


def test_a_changed_flag_is_noticed(helm: Path, kustomize: Path) -> None:
    rendered = template(helm, "--values", str(TRY), "--set=worker.args={--num-blocks=511}")
    expected = of_kustomize(kustomize, "serve")
    assert [name for name in expected if rendered[name] != expected[name]] == [("StatefulSet", "quire-worker")]


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_it_with_every_value(helm: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Another registry, tag and namespace, and further flags of each service."""
    further = {"cachemgr": "--eviction-policy=lru", "worker": "--block-size=32", "gateway": "--unknown-fields=ignore"}
    flags = [f"--set={service}.args={{{flag}}}" for service, flag in further.items()]
    images = ("--set=images.registry=registry.example.com/", "--set=images.tag=9.9.9")
    rendered = template(helm, "--set=model=some/model", *images, *flags, namespace="other")
    for manifest in rendered.values():
        assert manifest["metadata"]["namespace"] == "other"
        if not is_custom(manifest):
            kubernetes_validate.validate(manifest, version, strict=True)
    assert not re.search(r"\bquire\.svc\b", yaml.safe_dump_all(rendered.values()))
    for kind, service, command in (
        ("Deployment", "cachemgr", "cachemgr"),
        ("StatefulSet", "worker", "worker"),
        ("Deployment", "gateway", "serve"),
    ):
        (container,) = rendered[kind, f"quire-{service}"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"registry.example.com/quire-{service}:9.9.9"
        assert container["args"][-1] == further[service]
        arguments = [flag.replace("$(MODEL)", "m").replace("$(POD_NAME)", "pod") for flag in container["args"]]
        parse_service(command, arguments, {}, monkeypatch)


def test_a_chart_without_a_model_is_refused(helm: Path) -> None:
    done = run(helm)
    assert done.returncode == 1
    assert "model is empty: give a hub id" in done.stderr


def test_another_model_restarts_the_workers(helm: Path) -> None:
    texts = [run(helm, f"--set=model={model}").stdout for model in ("a/b", "a/c")]
    names = [set(re.findall(r"quire-model-\w+", text)) for text in texts]
    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1]


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert chart["version"] == chart["appVersion"]


if __name__ == "__main__":
    write_rendered()
