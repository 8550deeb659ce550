"""The manifests as kustomize renders them: valid for Kubernetes, and as docs/how-to/deployment.md promises."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from deadlines import DEADLINE_S
from deploy.cert_manager import make_secrets
from deploy.tools import DEPLOY, ROOT, build_go_tool, parse_service
from integration.protocol_client import await_that
from package_environments import SMG, environment
from ports import free_port

from quire.cli.service_process import ServiceProcess
from quire.engine.v1 import engine_service_pb2, engine_service_pb2_grpc
from quire.serving.addresses import is_local

OVERLAYS = sorted(path.parent.name for path in (DEPLOY / "kubernetes/overlays").glob("*/kustomization.yaml"))
# The oldest that has all fields in use, and the newest that the validator knows.
KUBERNETES = ("1.31", kubernetes_validate.latest_version())
DRAIN_MARGIN_S = 10
WORKLOADS = {"Deployment", "StatefulSet"}
# Kubernetes has no schema of custom resources. How many of cert-manager's there are in each overlay, one more with a
# gateway, two with Shepherd Model Gateway, and what we use of them and of LeaderWorkerSet. The pods of the latter are
# checked by themselves:
NUM_CUSTOM_RESOURCES = 7
# Overlays that fetch nothing.
OFFLINE = {"serve", "try"}
GATEWAY = "quire://gateway"
SHEPHERD = "quire://shepherd"
# The secret that its owner makes, with the file `keys`.
KEYS_SECRET = "quire-gateway-keys"
KEY = "a-key-of-the-test"
NAMES = {"type": "array", "minItems": 1, "items": {"type": "string"}}
ISSUER_REF = {
    "type": "object",
    "required": ["name", "kind"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["Issuer", "ClusterIssuer"]}},
}
CUSTOM_SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            {"required": ["selfSigned"], "properties": {"selfSigned": {"const": {}}}, "additionalProperties": False},
            {
                "required": ["ca"],
                "additionalProperties": False,
                "properties": {
                    "ca": {
                        "required": ["secretName"],
                        "properties": {"secretName": {"type": "string"}},
                        "additionalProperties": False,
                    }
                },
            },
        ]
    },
    ("cert-manager.io/v1", "Certificate"): {
        "required": ["secretName", "issuerRef"],
        "additionalProperties": False,
        "properties": {
            "secretName": {"type": "string"},
            "commonName": {"type": "string", "maxLength": 64},
            "isCA": {"type": "boolean"},
            "duration": {"type": "string", "pattern": r"^\d+h$"},
            "renewBefore": {"type": "string", "pattern": r"^\d+h$"},
            "privateKey": {
                "additionalProperties": False,
                "properties": {
                    "algorithm": {"const": "ECDSA"},
                    "size": {"enum": [256, 384, 521]},
                    "rotationPolicy": {"enum": ["Always", "Never"]},
                },
            },
            "usages": {"items": {"enum": ["digital signature", "server auth", "client auth"]}},
            "uris": NAMES,
            "dnsNames": NAMES,
            "issuerRef": ISSUER_REF,
        },
    },
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "type": "object",
        "required": ["leaderWorkerTemplate"],
        "additionalProperties": False,
        "properties": {
            "replicas": {"type": "integer", "minimum": 0},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "networkConfig": {
                "required": ["subdomainPolicy"],
                "additionalProperties": False,
                "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
            },
            "rolloutStrategy": {
                "required": ["type"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "RollingUpdate"},
                    "rollingUpdateConfiguration": {
                        "additionalProperties": False,
                        "properties": {
                            "partition": {"type": "integer", "minimum": 0},
                            "maxUnavailable": {"type": ["integer", "string"]},
                            "maxSurge": {"type": ["integer", "string"]},
                        },
                    },
                },
            },
            "leaderWorkerTemplate": {
                "required": ["workerTemplate"],
                "additionalProperties": False,
                "properties": {
                    "leaderTemplate": {"type": "object"},
                    "workerTemplate": {"type": "object"},
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                },
            },
        },
    },
}
# Variables of every container of a group's first pod, as LeaderWorkerSet's controller sets them.
GROUP_VARIABLES = {
    "LWS_LEADER_ADDRESS": "quire-worker-0.quire-worker.quire",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "0",
}
TORCHRUN = "/opt/quire/bin/torchrun"
TORCHRUN_END_S = 30
"""That torchrun gives its ranks to end after SIGTERM."""

DEMO_MODEL = DEPLOY / "demo" / "model"
# The command, without `quire`, of a container by its name.
COMMANDS = {"cachemgr": "cachemgr", "worker": "worker", "gateway": "serve", "shepherd": "serve"}
MODULES = {
    "cachemgr": "quire.cachemgr",
    "worker": "quire.worker",
    "gateway": "quire.gateway",
    "shepherd": "quire.gateway",
}
# Container files by container, where they have another name.
CONTAINER_FILES = {"shepherd": "gateway"}

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects of an overlay."""

    overlay: str
    manifests: list[Manifest]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def workloads(self) -> list[Manifest]:
        return self.of_kind(*WORKLOADS)

    def containers(self) -> Iterator[tuple[Manifest, Manifest]]:
        """Each with its pod."""
        for workload in self.workloads():
            pod = workload["spec"]["template"]["spec"]
            assert "initContainers" not in pod
            for container in pod["containers"]:
                yield pod, container

    def own_containers(self) -> Iterator[tuple[Manifest, Manifest]]:
        """Those that run Quire, each with its pod."""
        return ((pod, container) for pod, container in self.containers() if container["name"] in COMMANDS)

    def container(self, name: str) -> Manifest | None:
        return next((container for _, container in self.containers() if container["name"] == name), None)

    def pods_of(self, selector: dict[str, str]) -> list[Manifest]:
        """Pod templates that a selector by labels finds."""
        templates = [workload["spec"]["template"] for workload in self.workloads()]
        return [template for template in templates if selector.items() <= template["metadata"]["labels"].items()]

    def names(self, kind: str) -> set[str]:
        return {manifest["metadata"]["name"] for manifest in self.of_kind(kind)}

    @property
    def has_gateway(self) -> bool:
        return self.container("gateway") is not None

    @property
    def has_shepherd(self) -> bool:
        return self.container("shepherd") is not None


@pytest.fixture(scope="session")
def kustomize() -> Path:
    """At the version of deploy/kubernetes/tools/go.mod; takes minutes the first time."""
    return build_go_tool(DEPLOY / "kubernetes/tools", "sigs.k8s.io/kustomize/kustomize/v5", "kustomize")


@pytest.fixture(scope="session", params=OVERLAYS)
def rendered(request: pytest.FixtureRequest, kustomize: Path) -> Rendered:
    return render(kustomize, DEPLOY / "kubernetes", request.param)


def render(kustomize: Path, folder: Path, overlay: str) -> Rendered:
    """Offline: nothing here refers to another place."""
    command = [str(kustomize), "build", str(folder / "overlays" / overlay)]
    environment = os.environ | {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return Rendered(overlay, list(yaml.safe_load_all(done.stdout)))


def is_custom(manifest: Manifest) -> bool:
    return (manifest["apiVersion"], manifest["kind"]) in CUSTOM_SPECS


def value_of(container: Manifest, variable: str) -> str:
    """The value of a variable in a container's flags."""
    return ({"POD_NAME": "quire-worker-0", "MODEL": "some/model"} | GROUP_VARIABLES)[variable]


def flags_of(container: Manifest) -> list[str]:
    """A container's flags with its variables put in; fails on one that it does not declare."""
    declared = {variable["name"] for variable in container.get("env", [])}
    if is_in_group(container):
        declared |= GROUP_VARIABLES.keys()

    def put_in(match: re.Match[str]) -> str:
        assert match[1] in declared
        return value_of(container, match[1])

    return [re.sub(r"\$\((\w+)\)", put_in, flag) for flag in container["args"]]


def is_in_group(container: Manifest) -> bool:
    """True if torchrun starts the worker of a container."""
    return container.get("command") == [TORCHRUN]


def values_of(container: Manifest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    flags = read_torchrun(container).training_script_args if is_in_group(container) else flags_of(container)
    return parse_service(COMMANDS[container["name"]], flags, {}, monkeypatch)


def read_torchrun(container: Manifest) -> Any:
    """torchrun's flags as its own parser reads them."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(flags_of(container))


class Cluster:
    """Containers of an overlay as processes of this machine: other ports, and files in a folder."""

    def __init__(self, rendered: Rendered, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, int] = {}
        self._secrets: dict[str, str] = {}
        self._started: list[ServiceProcess] = []
        self._foreign: list[subprocess.Popen[bytes]] = []
        make_secrets([_of_this_machine(each) for each in rendered.of_kind("Certificate")], folder)
        for manifest in rendered.of_kind("ConfigMap"):
            for name, text in manifest["data"].items():
                (folder / name).write_text(text)
        (folder / "keys").write_text(f"alice client {hashlib.sha256(KEY.encode()).hexdigest()}\n")

    def start(self, pod: Manifest, container: Manifest) -> ServiceProcess:
        """Start a container's process. `wait_ready` polls its health as the kubelet does."""
        flags = [self._here(flag, tls_secret(pod, container)) for flag in flags_of(container)]
        health = "".join(
            flag.partition("=")[2] for flag in flags if flag.startswith(("--health-listen=", "--shepherd="))
        )
        name = container["name"]
        log_path = self._folder / f"{name}.log"
        process = ServiceProcess(name, target=MODULES[name], arguments=flags, address=health, log_path=log_path)
        self._started.append(process)
        process.start()
        return process

    def start_smg(self, pod: Manifest, container: Manifest) -> None:
        """Start the real one, with the first worker alone: this machine has no other one."""
        program, *arguments = container["command"]
        others = re.compile(r"//quire-worker-[1-9]")
        flags = [self._here(flag, tls_secret(pod, container)) for flag in container["args"] if not others.search(flag)]
        command = [environment("smg", SMG) / program, *arguments, *flags]
        with (self._folder / "smg.log").open("wb") as log:
            home = os.environ | {"HOME": str(self._folder)}
            self._foreign.append(subprocess.Popen(command, stdout=log, stderr=log, env=home))

    def wait_ready(self, process: ServiceProcess, container: Manifest) -> None:
        """Wait until its readiness probe succeeds."""
        probe = container["readinessProbe"]
        if "grpc" in probe:
            process.wait_serving(DEADLINE_S)
            return
        await_that("the gateway is ready", lambda: not process.is_running or self.is_ready(container))
        assert process.is_running, process.log_tail()

    def is_ready(self, container: Manifest) -> bool:
        """Return whether its readiness probe over HTTP succeeds."""
        probe = container["readinessProbe"]["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == probe["port"]]
        url = f"{probe['scheme'].lower()}://localhost:{self._port(str(port))}{probe['path']}"
        with httpx.Client(verify=False, trust_env=False, timeout=DEADLINE_S) as kubelet:
            return _is_success(kubelet, url)

    def http(self, port: int) -> httpx.Client:
        """An HTTP client that trusts the authority of the certificates; it shows none."""
        context = ssl.create_default_context(cafile=self._folder / "quire-client-tls" / "ca.crt")
        base_url = f"https://localhost:{self._port(str(port))}"
        return httpx.Client(base_url=base_url, verify=context, trust_env=False, timeout=DEADLINE_S)

    def url(self, port: int) -> str:
        """The metrics of the port of this name in the manifests, in plain text."""
        return f"http://localhost:{self._port(str(port))}/metrics"

    def dial(self, port: int, secret: str | None, name: str) -> grpc.Channel:
        """A client's channel to the port of this name in the manifests, of a server of this name."""
        options = (("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0))
        pair = (None, None) if secret is None else tuple(self._read(secret, file) for file in ("tls.key", "tls.crt"))
        credentials = grpc.ssl_channel_credentials(self._read("quire-client-tls", "ca.crt"), *pair)
        return grpc.secure_channel(f"127.0.0.1:{self._port(str(port))}", credentials, options=options)

    def close(self) -> None:
        for smg in self._foreign:
            smg.kill()
            smg.wait(DEADLINE_S)
        for process in self._started:
            process.kill()

    def _read(self, secret: str, file: str) -> bytes:
        return (self._folder / secret / file).read_bytes()

    def _here(self, flag: str, secret: str) -> str:
        flag = flag.replace("/etc/quire/tls/", f"{self._folder}/{secret}/")
        flag = flag.replace("/etc/quire/callers/", f"{self._folder}/")
        flag = flag.replace("/etc/quire/keys/", f"{self._folder}/")
        flag = flag.replace("/run/quire-cachemgr", f"{self._folder}/state")
        flag = flag.replace("--model=some/model", f"--model={DEMO_MODEL}").replace("=cuda", "=cpu")
        flag = re.sub(r"(=|//)(0\.0\.0\.0|[\w.-]+\.quire\.svc):", r"\1localhost:", flag)
        flag = flag.replace("host=0.0.0.0", "host=127.0.0.1")
        return re.sub(r"(:|port=)(\d+)$", lambda match: f"{match[1]}{self._port(match[2])}", flag)

    def _port(self, port: str) -> int:
        if port not in self._ports:
            self._ports[port] = free_port()
        return self._ports[port]


def tls_secret(pod: Manifest, container: Manifest) -> str:
    """The name of the secret with a container's certificate."""
    (secret,) = [
        volume["secret"]["secretName"]
        for mount in container["volumeMounts"]
        for volume in pod["volumes"]
        if volume["name"] == mount["name"] and "secret" in volume and mount["mountPath"] == "/etc/quire/tls"
    ]
    return str(secret)


def _of_this_machine(certificate: Manifest) -> Manifest:
    """The certificate, also for the name by which processes find one another here."""
    spec = certificate["spec"]
    if "dnsNames" not in spec:
        return certificate
    return {**certificate, "spec": {**spec, "dnsNames": [*spec["dnsNames"], "localhost"]}}


def _is_success(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def cluster(rendered: Rendered) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        made = Cluster(rendered, Path(folder))
        yield made
        made.close()


def call(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """The status of a call with an empty request."""
    try:
        channel.unary_unary(method)(b"", timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_what_is_rendered_serves(rendered: Rendered, cluster: Cluster) -> None:
    """All services with these flags and certificates: the worker attaches, and the roles are the expected ones."""
    processes = [cluster.start(pod, container) for pod, container in rendered.own_containers()]
    for process, (_, container) in zip(processes, rendered.own_containers(), strict=True):
        cluster.wait_ready(process, container)
    list_pools, get_model = "/quire.cache.v1.CacheService/ListPools", "/quire.compute.v1.WorkerService/GetModel"
    worker_name = "quire-worker-0.quire-worker.quire.svc"
    with cluster.dial(7070, "quire-operator-tls", "quire-cachemgr") as channel:
        assert call(channel, list_pools) is grpc.StatusCode.OK
    with cluster.dial(7071, "quire-client-tls", worker_name) as channel:
        assert call(channel, get_model) is grpc.StatusCode.OK
    with cluster.dial(7070, "quire-client-tls", "quire-cachemgr") as channel:
        attach = channel.stream_stream("/quire.cache.v1.CacheService/AttachPool")
        with pytest.raises(grpc.RpcError) as refused:
            list(attach(iter([b""]), timeout=DEADLINE_S))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with cluster.dial(7070, None, "quire-cachemgr") as channel:
        assert call(channel, list_pools) is grpc.StatusCode.UNAVAILABLE
    if rendered.has_gateway:
        check_gateway(cluster)
    if rendered.has_shepherd:
        check_smg(rendered, cluster)
    for process in processes:
        assert process.terminate() == 0


def check_gateway(cluster: Cluster) -> None:
    """Get a completion over HTTPS, one over gRPC by the generated client, and the metrics."""
    with cluster.http(8000) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        (model,) = client.get("/v1/models").raise_for_status().json()["data"]
        body = {"model": model["id"], "prompt": "The default value is", "max_tokens": 4, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
    with cluster.dial(8001, None, "quire-gateway.quire.svc") as channel:
        stub = engine_service_pb2_grpc.EngineServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListModels(engine_service_pb2.ListModelsRequest(), timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        request = engine_service_pb2.GenerateRequest(model=model["id"])
        request.prompt.text = body["prompt"]
        request.parameters.max_tokens = 4
        request.parameters.ignore_eos = True
        key = (("authorization", f"Bearer {KEY}"),)
        *_, last = stub.Generate(request, timeout=DEADLINE_S, metadata=key)
        assert last.summary.generated_token_count == 4
    with cluster.http(9403) as client:
        assert f'vllm:generation_tokens_total{{model_name="{model["id"]}"}} 8.0' in client.get("/metrics").text


def check_smg(rendered: Rendered, cluster: Cluster) -> None:
    """Get a completion over HTTPS through the real smg, and its metrics."""
    ((pod, container),) = [each for each in rendered.containers() if each[1]["name"] == "smg"]
    cluster.start_smg(pod, container)
    await_that("smg is ready", lambda: cluster.is_ready(container))
    with cluster.http(30000) as client:
        (model,) = client.get("/v1/models").raise_for_status().json()["data"]
        body = {"model": model["id"], "prompt": "The default value is", "max_tokens": 4, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as prometheus:
        assert "smg_kv_event_subscriptions_total{" in prometheus.get(cluster.url(29000)).text
        assert "vllm:num_requests_waiting{" in prometheus.get(cluster.url(9404)).text


def test_these_are_the_overlays() -> None:
    assert OVERLAYS == ["many-workers", "one-gpu", "serve", "shepherd", "try"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_it(rendered: Rendered, version: str) -> None:
    for manifest in rendered.manifests:
        if not is_custom(manifest):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_finds_faults(kustomize: Path) -> None:
    (deployment,) = render(kustomize, DEPLOY / "kubernetes", "try").of_kind("Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["grpc"]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES[0], strict=True)


def test_custom_resources_are_as_we_know_them(rendered: Rendered) -> None:
    custom = [manifest for manifest in rendered.manifests if is_custom(manifest)]
    assert len(custom) == NUM_CUSTOM_RESOURCES + rendered.has_gateway + 2 * rendered.has_shepherd
    for manifest in custom:
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(manifest["spec"], CUSTOM_SPECS[manifest["apiVersion"], manifest["kind"]])


def test_everything_is_in_one_namespace(rendered: Rendered) -> None:
    (namespace,) = rendered.of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [manifest for manifest in rendered.manifests if manifest["kind"] != "Namespace"]
    assert {manifest["metadata"]["namespace"] for manifest in others} == {namespace["metadata"]["name"]}
    named = Counter((manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered.manifests)
    assert set(named.values()) == {1}


def test_our_parsers_take_every_flag(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in rendered.own_containers():
        values = values_of(container, monkeypatch)
        if container["name"] == "shepherd":  # smg has no certificate for its workers
            assert (values["tls_cert"], values["api_keys"], values["pool"]) == (None, None, "quire-worker-0")
            continue
        assert values["tls_cert"] is not None
        assert not values["allow_plaintext"]
        assert values["api_keys" if container["name"] == "gateway" else "token_file"] is not None
        # HTTP's callers have keys, and the kubelet has neither a key nor a certificate.
        assert (values["tls_client_ca"] is None) == (container["name"] == "gateway")


def test_ports_are_those_served(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in rendered.own_containers():
        values = values_of(container, monkeypatch)
        (listen,) = values["listen"]
        served = {"metrics": values["metrics_listen"].port}
        if container["name"] == "shepherd":
            assert is_local(listen)
            served["grpc"] = values["shepherd"].port
        elif container["name"] == "gateway":
            (grpc_listen,) = values["grpc_listen"]
            served |= {"http": listen.port, "grpc": grpc_listen.port}
        else:
            served |= {"grpc": listen.port, "health": values["health_listen"].port}
        assert {port["name"].partition("-")[2]: port["containerPort"] for port in container["ports"]} == served
    for workload in rendered.workloads():
        containers = workload["spec"]["template"]["spec"]["containers"]
        ports = Counter(port[key] for c in containers for port in c["ports"] for key in ("name", "containerPort"))
        assert set(ports.values()) == {1}


START_BUDGETS_S = {"cachemgr": 60, "worker": 300, "gateway": 60, "shepherd": 60}


def test_liveness_is_about_nobody_else(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, container in rendered.own_containers():
        startup, live, ready = (container[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
        if container["name"] == "gateway":
            # test_probes.py: /health is 200 without any peer, /ready only while the services serve.
            asked = {"scheme": "HTTPS", "port": "gateway-http"}
            assert startup["httpGet"] == live["httpGet"] == asked | {"path": "/health"}
            assert ready["httpGet"] == asked | {"path": "/ready"}
        else:
            values = values_of(container, monkeypatch)
            health_port = values["shepherd" if container["name"] == "shepherd" else "health_listen"].port
            # test_probes.py: "liveness" is SERVING without any peer, the whole server only once a worker is attached.
            assert startup["grpc"] == live["grpc"] == {"port": health_port, "service": "liveness"}
            assert ready["grpc"] == {"port": health_port}
        assert startup["failureThreshold"] * startup["periodSeconds"] >= START_BUDGETS_S[container["name"]]
        assert live["failureThreshold"] * live["periodSeconds"] >= 30


def test_the_name_that_liveness_asks_for_is_ours() -> None:
    from quire.serving.server import LIVENESS

    assert LIVENESS == "liveness"


def test_an_update_never_has_two_of_them(rendered: Rendered) -> None:
    for workload in rendered.workloads():
        spec = workload["spec"]
        if container_named(workload, "gateway") or container_named(workload, "smg"):
            assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
            assert spec["replicas"] == (2 if container_named(workload, "gateway") else 1)
        elif workload["kind"] == "Deployment":
            assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
        else:  # which takes a pod away before it makes the next
            assert spec["updateStrategy"]["type"] == "RollingUpdate"
    managers = [workload for workload in rendered.workloads() if container_named(workload, "cachemgr")]
    assert [workload["spec"]["replicas"] for workload in managers] == [1]


def container_named(workload: Manifest, name: str) -> Manifest | None:
    containers = workload["spec"]["template"]["spec"]["containers"]
    return next((container for container in containers if container["name"] == name), None)


def test_a_pod_is_given_time_to_drain(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod, container in rendered.own_containers():
        drain_s = values_of(container, monkeypatch)["drain_timeout"]
        before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"] if "lifecycle" in container else 0
        assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + DRAIN_MARGIN_S


def test_containers_are_confined(rendered: Rendered) -> None:
    for pod, container in rendered.containers():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_a_gpu_is_asked_for_where_one_is_used(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod, container in rendered.containers():
        is_on_gpu = container["name"] == "worker" and rendered.overlay not in OFFLINE
        assert container["resources"]["limits"].get("nvidia.com/gpu") == ("1" if is_on_gpu else None)
        if container["name"] == "worker":
            assert values_of(container, monkeypatch)["device"] == ("cuda" if is_on_gpu else "cpu")
            assert any(t["key"] == "nvidia.com/gpu" for t in pod.get("tolerations", [])) == is_on_gpu


def test_files_in_flags_are_mounted(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    """And mounts are of volumes that are there, of secrets that a certificate makes, of ConfigMaps of ours."""
    secrets = {certificate["spec"]["secretName"] for certificate in rendered.of_kind("Certificate")}
    maps = {manifest["metadata"]["name"]: manifest for manifest in rendered.of_kind("ConfigMap")}
    for workload in rendered.workloads():
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        assert len(volumes) == len(pod["volumes"])
        mounted_anywhere = set()
        for container in pod["containers"]:
            files: set[str] = set()
            for mount in container["volumeMounts"]:
                mounted_anywhere.add(mount["name"])
                volume = volumes.get(mount["name"])
                if volume is None:
                    assert mount["name"] in claims
                elif "secret" in volume and volume["secret"]["secretName"] == KEYS_SECRET:
                    files.add(f"{mount['mountPath']}/keys")
                elif "secret" in volume:
                    assert volume["secret"]["secretName"] in secrets
                    assert volume["secret"]["defaultMode"] == 0o440
                    files |= {f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
                elif "configMap" in volume:
                    files |= {f"{mount['mountPath']}/{name}" for name in maps[volume["configMap"]["name"]]["data"]}
            assert files_in_flags(container, monkeypatch) <= files
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("configMapKeyRef"):
                    assert reference["key"] in maps[reference["name"]]["data"]
        assert set(volumes) | claims == mounted_anywhere


def files_in_flags(container: Manifest, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    if container["name"] not in COMMANDS:
        return {flag.partition("=")[2] for flag in container["args"] if flag.startswith("--tls-")}
    return {str(value) for name, value in values_of(container, monkeypatch).items() if is_file(name, value)}


def is_file(name: str, value: object) -> bool:
    return value is not None and name != "api_key" and name.endswith(("_cert", "_key", "_ca", "_file", "_keys"))


def test_images_are_of_this_version_and_have_container_files(rendered: Rendered) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, container in rendered.own_containers():
        name = container["name"]
        assert container["image"] == f"quire-{name}:{version}"
        assert (DEPLOY / "containers" / f"{CONTAINER_FILES.get(name, name)}.Containerfile").exists()
    foreign = {container["image"] for _, container in rendered.containers() if container["name"] not in COMMANDS}
    assert foreign == ({SMG.replace("==", ":")} if rendered.has_shepherd else set())


def test_services_and_budgets_find_their_pods(rendered: Rendered) -> None:
    for service in rendered.of_kind("Service"):
        (pod,) = rendered.pods_of(service["spec"]["selector"])
        ports = {port["name"]: port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
            assert not port["targetPort"].endswith("-health")
    budgets = rendered.of_kind("PodDisruptionBudget")
    for budget in budgets:
        assert len(rendered.pods_of(budget["spec"]["selector"]["matchLabels"])) == 1
        assert budget["spec"]["maxUnavailable"] == 1
    assert len(budgets) == len(rendered.workloads())
    accounts = {pod["serviceAccountName"] for pod, _ in rendered.containers()}
    assert accounts == rendered.names("ServiceAccount")


def test_a_gateway_dials_a_cachemgr_that_is_there(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    certified = {each["metadata"]["name"]: each["spec"] for each in rendered.of_kind("Certificate")}
    for workload in rendered.workloads():
        if gateway := container_named(workload, "gateway"):
            values = values_of(gateway, monkeypatch)
            assert values["cachemgr"] == "quire-cachemgr.quire.svc:7070"
            assert "quire-cachemgr.quire.svc" in certified["quire-cachemgr"]["dnsNames"]
            assert "quire-gateway.quire.svc" in certified["quire-gateway"]["dnsNames"]
            assert {"server auth", "client auth"} <= set(certified["quire-gateway"]["usages"])
            assert workload["spec"]["template"]["metadata"]["labels"]["quire.dev/client"] == "true"


def test_a_worker_dials_a_cachemgr_that_is_there(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    (namespace,) = rendered.names("Namespace")
    certified = {
        certificate["metadata"]["name"]: certificate["spec"].get("dnsNames", [])
        for certificate in rendered.of_kind("Certificate")
    }
    for workload in rendered.workloads():
        worker = container_named(workload, "worker")
        if worker is None:
            continue
        values = values_of(worker, monkeypatch)
        dialed, advertised = values["cachemgr"], values["advertise"]
        is_beside = container_named(workload, "cachemgr") is not None
        assert dialed.host == ("localhost" if is_beside else f"quire-cachemgr.{namespace}.svc")
        assert dialed.port == 7070
        assert dialed.host in certified["quire-cachemgr"]
        # Its pod's name, under the headless service, in the certificate by a wildcard.
        pod, _, rest = advertised.host.partition(".")
        assert pod == values["pool"] == "quire-worker-0"
        assert workload["spec"]["serviceName"] == rest.partition(".")[0]
        assert f"*.{rest}" in certified["quire-worker"]
        assert advertised.port == values["listen"][0].port


def test_callers_are_those_certificates_name(rendered: Rendered, tmp_path: Path) -> None:
    from quire.serving.access import ROLES_WITHOUT_FILE, Role, read_token_file

    (text,) = [m["data"]["callers"] for m in rendered.of_kind("ConfigMap") if m["metadata"]["name"] == "quire-callers"]
    (tmp_path / "callers").write_text(text)
    roles = read_token_file(tmp_path / "callers").certificates
    named = {
        certificate["spec"]["uris"][0]: set(certificate["spec"]["usages"])
        for certificate in rendered.of_kind("Certificate")
        if "uris" in certificate["spec"]
    }
    # The lines for gateways are there without them too: then no certificate has their names.
    assert set(roles) == set(named) | {GATEWAY, SHEPHERD}
    assert (GATEWAY in named) == rendered.has_gateway
    assert (SHEPHERD in named) == rendered.has_shepherd
    assert all("client auth" in usages for usages in named.values())
    assert roles["quire://worker"] == frozenset({Role.WORKER})
    assert roles["quire://client"] == ROLES_WITHOUT_FILE
    assert roles[GATEWAY] == {Role.CLIENT, Role.GATEWAY}
    assert roles[SHEPHERD] == {Role.CLIENT, Role.CONTENT}  # no operator: that one sees the blocks of all tenants
    issuers = rendered.names("Issuer")
    assert all(c["spec"]["issuerRef"]["name"] in issuers for c in rendered.of_kind("Certificate"))


def test_policies_admit_what_is_used_and_no_more(rendered: Rendered) -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in rendered.of_kind("NetworkPolicy")}
    assert policies.pop("quire-nothing") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    admitted: Counter[str] = Counter()
    for spec in policies.values():
        (pod,) = rendered.pods_of(spec["podSelector"]["matchLabels"])
        named = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        for rule in spec["ingress"]:
            assert rule["from"], "a rule without from admits everybody"
            for port in rule["ports"]:
                assert port["port"] in named
                admitted[port["port"]] += 1
    expected = {f"{kind}-{what}" for kind in ("cache", "worker") for what in ("grpc", "metrics")}
    if rendered.has_gateway:
        expected |= {"gateway-http", "gateway-grpc", "gateway-metrics"}
    if rendered.has_shepherd:
        expected |= {"shepherd-grpc", "shepherd-metrics", "smg-http", "smg-metrics"}
    assert admitted == Counter(expected)
    fetched = set() if rendered.overlay in OFFLINE else {"443"}
    assert ports_out(policies["quire-worker"]) == {"cache-grpc", "53"} | fetched
    assert "egress" not in policies["quire-cachemgr"]
    if rendered.has_gateway:
        assert ports_out(policies["quire-gateway"]) == {"cache-grpc", "worker-grpc", "53"} | fetched
    if rendered.has_shepherd:
        assert ports_out(policies["quire-smg"]) == {"shepherd-grpc", "53", "443"}
        (let_in,) = [rule["from"] for rule in policies["quire-shepherd"]["ingress"] if "grpc" in str(rule["ports"])]
        assert let_in == [{"podSelector": policies["quire-smg"]["podSelector"]}]


def ports_out(policy: Manifest) -> set[str]:
    return {str(port["port"]) for rule in policy["egress"] for port in rule["ports"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_is_added_to_any_overlay(kustomize: Path, tmp_path: Path, overlay: str) -> None:
    """As docs/how-to/deployment.md says, also with an autoscaler. Its policy then leads to the pods of this overlay."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    components = ["../../components/gateway"] if overlay != "serve" else []
    components.append("../../components/autoscaled-gateway")
    (folder / "overlays/mine").mkdir()
    mine = {"resources": [f"../{overlay}"], "components": components, "namespace": "quire"}
    (folder / "overlays/mine/kustomization.yaml").write_text(yaml.safe_dump(mine))
    rendered = render(kustomize, folder, "mine")
    for manifest in rendered.manifests:
        if not is_custom(manifest):
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)
    (autoscaler,) = rendered.of_kind("HorizontalPodAutoscaler")
    (gateway,) = [each for each in rendered.workloads() if container_named(each, "gateway")]
    target = autoscaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (gateway["kind"], gateway["metadata"]["name"])
    assert "replicas" not in gateway["spec"]
    (policy,) = [each for each in rendered.of_kind("NetworkPolicy") if each["metadata"]["name"] == "quire-gateway"]
    (names,) = policy["spec"]["egress"][0]["to"][0]["podSelector"]["matchExpressions"]
    pods = [pod for name in names["values"] for pod in rendered.pods_of({names["key"]: name})]
    named = {port["name"] for pod in pods for container in pod["spec"]["containers"] for port in container["ports"]}
    assert {"cache-grpc", "worker-grpc"} <= named


@pytest.mark.parametrize("overlay", ["shepherd", "try"])
def test_smg_has_every_worker(kustomize: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlay: str) -> None:
    """As many as there are replicas, by names that lead to pods that are not ready: one container calls the other."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    (folder / "overlays/mine").mkdir()
    components = [] if overlay == "shepherd" else ["../../components/shepherd"]
    mine = {"resources": [f"../{overlay}"], "components": components, "namespace": "quire"}
    (folder / "overlays/mine/kustomization.yaml").write_text(yaml.safe_dump(mine))
    rendered = render(kustomize, folder, "mine")
    (workers,) = [each for each in rendered.workloads() if container_named(each, "shepherd")]
    service, shepherd, smg = workers["spec"]["serviceName"], rendered.container("shepherd"), rendered.container("smg")
    assert shepherd is not None
    assert smg is not None
    port = values_of(shepherd, monkeypatch)["shepherd"].port
    pods = [f"{workers['metadata']['name']}-{number}" for number in range(workers["spec"]["replicas"])]
    after = smg["args"][smg["args"].index("--worker-urls") + 1 :]
    assert after == [f"grpc://{pod}.{service}.quire.svc:{port}" for pod in pods]
    (headless,) = [each["spec"] for each in rendered.of_kind("Service") if each["metadata"]["name"] == service]
    assert headless["publishNotReadyAddresses"] is True
    flags = dict(flag.split("=", 1) for flag in smg["args"] if "=" in flag)
    ports = {each["name"]: str(each["containerPort"]) for each in smg["ports"]}
    assert (flags["--port"], flags["--prometheus-port"]) == (ports["smg-http"], ports["smg-metrics"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = "/readiness" if probe == "readinessProbe" else "/liveness"
        assert smg[probe]["httpGet"] == {"scheme": "HTTPS", "port": "smg-http", "path": path}


def test_workers_are_scaled_by_metrics_that_are_made(kustomize: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    (folder / "overlays/mine").mkdir()
    components = ["../../components/gateway", "../../components/autoscaled-workers"]
    mine = {"resources": ["../many-workers"], "components": components, "namespace": "quire"}
    (folder / "overlays/mine/kustomization.yaml").write_text(yaml.safe_dump(mine))
    rendered = render(kustomize, folder, "mine")
    (autoscaler,) = rendered.of_kind("HorizontalPodAutoscaler")
    for version in KUBERNETES:
        kubernetes_validate.validate(autoscaler, version, strict=True)
    (worker,) = [each for each in rendered.workloads() if container_named(each, "worker")]
    target = autoscaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (worker["kind"], worker["metadata"]["name"])
    assert "replicas" not in worker["spec"]
    wanted = {metric["external"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]}
    made = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text())["externalRules"]
    assert wanted == {rule["name"]["as"] for rule in made}


def test_a_group_of_machines(kustomize: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlay of docs/how-to/larger-models.md."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    (folder / "overlays/mine").mkdir()
    page = (ROOT / "docs/how-to/larger-models.md").read_text()
    (overlay,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (folder / "overlays/mine/kustomization.yaml").write_text(overlay)
    rendered = render(kustomize, folder, "mine")
    for manifest in rendered.manifests:
        if not is_custom(manifest):
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)
    (group,) = rendered.of_kind("LeaderWorkerSet")
    jsonschema.validate(group["spec"], CUSTOM_SPECS[group["apiVersion"], group["kind"]])
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    for pod in pods:
        for version in KUBERNETES:
            as_resource = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
            kubernetes_validate.validate(as_resource, version, strict=True)
    # For checks of every pod: the sets that the controller makes of the templates.
    others = [manifest for manifest in rendered.manifests if manifest is not group]
    sets = [{"kind": "StatefulSet", "metadata": group["metadata"], "spec": {"template": pod}} for pod in pods]
    made = Rendered("mine", [*others, *sets])
    test_containers_are_confined(made)
    test_files_in_flags_are_mounted(made, monkeypatch)
    test_images_are_of_this_version_and_have_container_files(made)
    leader, follower = (pod["spec"]["containers"][0] for pod in pods)
    check_leader(leader, pods[0]["spec"], monkeypatch)
    assert template["size"] == int(GROUP_VARIABLES["LWS_GROUP_SIZE"])
    shared = follower.keys() & leader.keys()
    assert {name: follower[name] for name in shared} == {name: leader[name] for name in shared}
    assert leader.keys() - shared == {"ports", "startupProbe", "livenessProbe", "readinessProbe"}
    assert pods[0]["spec"]["volumes"] == pods[1]["spec"]["volumes"]
    check_group_policy(rendered, pods)


def check_leader(leader: Manifest, pod: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun, values = read_torchrun(leader), values_of(leader, monkeypatch)
    assert (torchrun.module, torchrun.training_script) == (True, MODULES["worker"])
    num_machines, num_gpus = int(torchrun.nnodes), int(torchrun.nproc_per_node)
    assert values["tensor_parallel_size"] == num_machines * num_gpus
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == str(num_gpus)
    assert (torchrun.node_rank, torchrun.rdzv_backend) == (0, "static")
    assert f"{torchrun.master_addr}.svc" == values["advertise"].host
    assert values["drain_timeout"] < TORCHRUN_END_S <= pod["terminationGracePeriodSeconds"] - DRAIN_MARGIN_S
    assert leader["readinessProbe"]["grpc"]["port"] == values["health_listen"].port
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert ports["worker-grpc"] == values["listen"][0].port == values["advertise"].port


def check_group_policy(rendered: Rendered, pods: list[Manifest]) -> None:
    """The pods of a group reach one another on every port, and no other pod reaches them on more than two."""
    (policy,) = [
        each["spec"] for each in rendered.of_kind("NetworkPolicy") if each["metadata"]["name"] == "quire-worker"
    ]
    own = {"podSelector": policy["podSelector"]}
    for pod in pods:
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [rule for rule in policy["ingress"] if "ports" not in rule] == [{"from": [own]}]
    assert [rule for rule in policy["egress"] if "ports" not in rule] == [{"to": [own]}]


def test_a_renamed_flag_is_noticed(kustomize: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    path = folder / "components/cachemgr/container.yaml"
    path.write_text(path.read_text().replace("--drain-timeout", "--drain-seconds"))
    with pytest.raises(Exception, match="drain-seconds"):
        test_our_parsers_take_every_flag(render(kustomize, folder, "try"), monkeypatch)
