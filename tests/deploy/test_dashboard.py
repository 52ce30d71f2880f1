"""The dashboard asks for metrics, and labels, that a server exports."""

import asyncio
import contextlib
import json
import re

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import AsyncLLM, http
from tests.deploy.files import DEPLOY
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs
from tests.http.asgi import Client

DASHBOARD = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
FROM_PROMETHEUS = {"job", "instance"}
"""Labels that each sample gets when it is read."""


def expressions():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            (inside,) = re.fullmatch(r"label_values\((.*)\)", variable["query"]["query"]).groups()
            metric, label = inside.rsplit(", ", 1)
            yield f"sum by ({label}) ({metric})"


def metrics_and_labels(expression):
    """The names of metrics in a PromQL expression, and of the labels."""
    labels = set(re.findall(r"[{,]\s*(\w+)\s*(?==|!=)", expression))
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", "", expression)
    for group in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", bare):
        labels |= {label.strip() for label in group.split(",")}
    bare = re.sub(r"\b(?:by|without|on)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)), labels


@pytest.fixture(scope="module")
def exported(model_dir):
    """The labels of each sample that a server exports after a request."""
    with few_programs(), contextlib.closing(AsyncLLM(model_dir, **PLAIN)) as llm:

        async def scrape():
            client = Client(http.app(llm, name="tiny"))
            answer = await client.post("/v1/completions", {"prompt": "ab", "max_tokens": 2})
            assert answer.status == 200
            await answer.body()
            return (await (await client.get("/metrics")).body()).decode()

        families = list(text_string_to_metric_families(asyncio.run(scrape())))
    return {sample.name: {*sample.labels} for family in families for sample in family.samples}


def test_names_are_found_in_an_expression():
    expression = 'sum by (le, a) (rate(x_bucket{m=~"$m", n="1"}[5m])) / on (b) max_over_time(y:z[1h] offset 5m) > 1e3'
    names, labels = metrics_and_labels(expression.replace(" offset 5m", "").replace("1e3", "1"))
    assert names == {"x_bucket", "y:z"}
    assert labels == {"le", "a", "m", "n", "b"}


def test_each_metric_is_exported(exported):
    asked = list(expressions())
    assert len(asked) > 30
    for expression in asked:
        names, labels = metrics_and_labels(expression)
        assert names, expression
        assert names - exported.keys() == set(), expression
        assert labels - FROM_PROMETHEUS <= set.intersection(*(exported[name] for name in names)), expression


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
