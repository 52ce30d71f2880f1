"""Checkers of Dockerfiles, of Kubernetes' resources and of PromQL take the files of `deploy/`."""

import json
import re

import pytest

from tests.deploy.files import DEPLOY, IMAGES, MANIFESTS
from tests.deploy.test_dashboard import expressions

DEFINED_ELSEWHERE = {"HTTPRoute", "InferencePool", "LeaderWorkerSet"}
"""Kinds that a cluster gets with the projects that define them, of which the checker has no schema."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", IMAGES.values())
def test_a_checker_of_dockerfiles(name, tool):
    assert tool("hadolint", DEPLOY / "docker" / name) == ""


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_checker_of_resources(name, tool):
    said = tool("kubernetes-validate", "--strict", DEPLOY / "kubernetes" / name)
    unknown = set(re.findall(r"find schema for kind (\w+)", said))
    assert unknown <= DEFINED_ELSEWHERE
    assert "passed for resource" in said


def test_a_parser_of_promql(tool):
    queries = [re.sub(r"\$__rate_interval", "5m", expression) for expression in expressions()]
    script = "import json, promql_parser, sys; print(len([promql_parser.parse(q) for q in json.loads(sys.argv[1])]))"
    assert int(tool("python", "-c", script, json.dumps(queries))) == len(queries) > 30
