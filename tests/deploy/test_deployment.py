"""What `deploy/` says of commands, ports, probes, variables and times is what the server has."""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
import typer

pytest.importorskip("starlette")

from jaxinfer.cli import app
from jaxinfer.http.config import ServerConfig
from jaxinfer.http.config_file import read_config
from jaxinfer.http.limits import Limits
from jaxinfer.http.metrics import ALIASES
from jaxinfer.http.process import LAST_SECONDS
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels
from jaxinfer.http.server import make_app
from tests.deploy.files import (
    DEPLOY,
    IMAGES,
    MANIFESTS,
    ROOT,
    dockerfile,
    entry_point,
    image_environment,
    manifest,
    of_kind,
    only_pod,
    pods,
    unit,
)
from tests.http.asgi import Client
from tests.test_dependencies import PROJECT
from tests.test_wheel import hatch

OTHERS = {
    "HF_HOME": "huggingface_hub's folder",
    "NVIDIA_DRIVER_CAPABILITIES": "of the NVIDIA container toolkit",
    "NVIDIA_VISIBLE_DEVICES": "of the NVIDIA container toolkit",
    "PATH": "has the image's Python",
    "PYTHONUNBUFFERED": "Python's",
}
"""Variables that our code does not read."""

PICKER_READS = {
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}
"""The metrics that the endpoint picker of the Gateway API Inference Extension reads by default."""


def config_of(name, folder):
    """The server's config in a manifest."""
    (document,) = of_kind(manifest(name), "ConfigMap")
    (folder / "serve.toml").write_text(document["data"]["serve.toml"])
    return read_config(folder / "serve.toml")


def commands():
    """The command of each file that starts a server."""
    (started,) = unit()["ExecStart"]
    yield "systemd", shlex.split(started)
    for name in IMAGES.values():
        yield name, [*entry_point(name), *json.loads(dockerfile(name)["CMD"])]
    for name in MANIFESTS:
        _, container = only_pod(name)
        yield name, [*entry_point(IMAGES[container["image"]]), *container["args"]]


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in commands()])
def test_the_command_line_takes_each_command(name, command):
    program, subcommand, *arguments = command
    assert (program.rpartition("/")[2], subcommand) == ("jaxinfer", "serve")
    serve = typer.main.get_command(app).commands["serve"]
    if arguments == ["--help"]:
        with pytest.raises(typer.Exit):
            serve.make_context("serve", arguments)
    else:
        assert list(map(str, serve.make_context("serve", arguments).params["model"])) == ["/etc/jaxinfer/serve.toml"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_ports_fit(name, tmp_path):
    config, (_, container) = config_of(name, tmp_path), only_pod(name)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.host == "0.0.0.0"
    assert ports.pop("http") == config.port == int(dockerfile(IMAGES[container["image"]])["EXPOSE"])
    for service in of_kind(manifest(name), "Service"):
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    for pool in of_kind(manifest(name), "InferencePool"):
        assert pool["spec"]["targetPorts"] == [{"number": config.port}]
    events = config.kv_events
    addresses = () if events is None else (events.endpoint, events.replay_endpoint)
    assert [*ports.values()] == [int(address.rpartition(":")[2]) for address in addresses]


@pytest.mark.parametrize("name", MANIFESTS)
def test_probes_are_answered_without_a_key(name):
    limits = Limits(api_keys=("key",), admin_keys=("admin",))
    client = Client(make_app(ServedModels([ServedModel("loading", lambda: None)]), limits))
    _, container = only_pod(name)
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["port"] for probe in probes} == {"http"}
    statuses = [asyncio.run(status(client, probe["path"])) for probe in probes]
    assert statuses == [503, 503, 200]  # a server that loads its model lives, and is not ready


async def status(client, path):
    return (await client.get(path)).status


@pytest.mark.parametrize("name", IMAGES.values())
def test_an_image_knows_whether_it_lives(name):
    check = dockerfile(name)["HEALTHCHECK"]
    (address,) = re.findall(r"http://127.0.0.1:(\d+)(/\w+)", check)
    assert address == (dockerfile(name)["EXPOSE"], "/health")
    command = json.loads(check[check.index("[") :])
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 1  # nothing listens there
    assert "Connection refused" in done.stderr


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_may_drain(name, tmp_path):
    pod, container = only_pod(name)
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = before + config_of(name, tmp_path).drain_timeout + LAST_SECONDS
    assert pod["spec"]["terminationGracePeriodSeconds"] >= needed + 5


def test_a_unit_may_drain():
    assert int(unit()["TimeoutStopSec"][0]) >= ServerConfig.drain_timeout + LAST_SECONDS + 5
    assert (unit()["KillSignal"], unit()["KillMode"]) == (["SIGTERM"], ["mixed"])
    assert all(dockerfile(name)["STOPSIGNAL"] == "SIGTERM" for name in IMAGES.values())


def variables():
    for name in IMAGES.values():
        yield from image_environment(name)
    for text in unit()["Environment"]:
        yield from (word.split("=")[0] for word in shlex.split(text))
    yield from re.findall(r"^#   (\w+)=", (DEPLOY / "systemd/jaxinfer.service").read_text(), re.MULTILINE)
    for name in MANIFESTS:
        yield from (variable["name"] for variable in only_pod(name)[1]["env"])


def test_variables_are_those_that_the_code_reads():
    named = set(variables())
    assert named >= {"JAXINFER_API_KEY", "JAXINFER_ADMIN_KEY", "JAXINFER_CACHE", "POD_IP"}
    sources = "".join(file.read_text() for file in (ROOT / "jaxinfer").rglob("*.py"))
    assert {name for name in named - OTHERS.keys() if f'"{name}"' not in sources} == set()
    assert OTHERS.keys() <= named


@pytest.mark.parametrize("name", MANIFESTS)
def test_keys_are_secrets(name):
    _, container = only_pod(name)
    keys = {
        each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"].endswith("KEY")
    }
    assert keys == {
        "JAXINFER_API_KEY": {"name": "jaxinfer-keys", "key": "api-key"},
        "JAXINFER_ADMIN_KEY": {"name": "jaxinfer-keys", "key": "admin-key"},
    }
    for document in of_kind(manifest("single.yaml"), "ConfigMap"):
        assert "key" not in document["data"]["serve.toml"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_volumes_and_labels_fit(name):
    documents, (pod, container) = manifest(name), only_pod(name)
    image, volumes = dockerfile(IMAGES[container["image"]]), {volume["name"] for volume in pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes
    assert mounts["cache"] == image["VOLUME"] == image_environment(IMAGES[container["image"]])["JAXINFER_CACHE"]
    assert pod["spec"]["securityContext"]["runAsUser"] == int(image["USER"])
    made = {(each["kind"], each["metadata"]["name"]) for file in MANIFESTS for each in manifest(file)}
    for volume in pod["spec"]["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in made
        if "persistentVolumeClaim" in volume:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in made
    labels = pod["metadata"]["labels"]
    for each in of_kind(documents, "Deployment", "InferencePool"):
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for service in of_kind(documents, "Service"):
        of_set = {f"leaderworkerset.sigs.k8s.io/{key}" for key in ("name", "worker-index")}
        selector = service["spec"]["selector"]
        assert selector.keys() == of_set or selector.items() <= labels.items()
    for route in of_kind(documents, "HTTPRoute"):
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert (backend["kind"], backend["name"]) in made


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_can_do_nothing_else(name):
    (pod,) = pods(manifest(name))
    (container,) = pod["spec"]["containers"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_endpoint_picker_finds_its_metrics():
    assert ALIASES.keys() >= PICKER_READS


@pytest.mark.parametrize("name", IMAGES.values())
def test_an_image_has_extras_that_there_are(name):
    text = (DEPLOY / "docker" / name).read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert {"serve", "kv-events"} <= set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    compiled = re.findall(r"python -m (jaxinfer\S+);", text)
    assert compiled == (["jaxinfer.compiled.cpu_build"] if name == "Dockerfile" else [])
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in compiled)


@pytest.mark.slow
def test_a_wheel_is_built_from_what_an_image_is_sent(tmp_path):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line.removeprefix("!") for line in lines if line.startswith("!")]
    for name in sent:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name, **({"symlinks": True} if (ROOT / name).is_dir() else {}))
    assert (tmp_path / "constraints.txt").exists()
    wheels = [hatch(folder, "wheel", tmp_path / out) for folder, out in ((ROOT, "whole"), (tmp_path, "sent"))]
    whole, from_sent = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels)
    assert whole == from_sent


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path):
    file = tmp_path / "jaxinfer.service"
    text = (DEPLOY / "systemd/jaxinfer.service").read_text()
    file.write_text(text.replace("/opt/jaxinfer/bin/jaxinfer", shutil.which("true")))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
