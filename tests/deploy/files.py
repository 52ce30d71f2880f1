"""The files of `deploy/`, read."""

import json
import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = {"jaxinfer:latest": "Dockerfile", "jaxinfer:cuda": "Dockerfile.cuda"}
MANIFESTS = sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml"))


def dockerfile(name):
    """The instructions of a Dockerfile, each with its arguments; of its last stage where a name is used again."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "docker" / name).read_text(), flags=re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line]
    return {instruction: arguments.strip() for instruction, arguments in lines}


def image_environment(name):
    return dict(word.split("=", 1) for word in shlex.split(dockerfile(name)["ENV"]))


def entry_point(name):
    return json.loads(dockerfile(name)["ENTRYPOINT"])


def manifest(name):
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def of_kind(documents, *kinds):
    return [document for document in documents if document["kind"] in kinds]


def pods(documents):
    """The templates of all pods."""
    for document in documents:
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]
        elif document["kind"] == "LeaderWorkerSet":
            yield document["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def only_pod(name):
    """The template of a manifest's only pod, and its only container."""
    (pod,) = pods(manifest(name))
    (container,) = pod["spec"]["containers"]
    return pod, container


def unit():
    """The settings of the systemd unit, each with its values."""
    settings = {}
    for line in (DEPLOY / "systemd/jaxinfer.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings
