"""Elastic services behind the server: queries with latencies, and tasks that are registered while it runs."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("starlette")
pytest.importorskip("python_multipart")

from PIL import Image

from jaxinfer import http
from jaxinfer.elastic import Service
from jaxinfer.http.limits import Limits
from jaxinfer.http.served_models import ServedModels
from jaxinfer.http.server import make_app
from jaxinfer.http.vision.served import ServedService
from tests.elastic.vits import SIZE, stripes
from tests.http.asgi import Client
from tests.http.pictures import base64_of, form, picture, png

QUERY, TASKS = "/v1/elastic/query", "/v1/elastic/tasks"
GOOD = base64_of(png(picture(1, SIZE, SIZE)))
ONE = {"task": "stripes", "images": [GOOD], "latency": 30}
QUICK = {"steps": 20, "prompts": [2]}


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


async def ask(client, path, body, **options):
    answer = await client.post(path, body, **options)
    return answer.status, await answer.json()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def service(vit, registered, service_options):
    with Service.from_checkpoint(vit, repository=registered, **service_options) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    return Client(http.app({}, elastic={"vit": service}))


def test_an_answer_is_that_of_the_service(client, service):
    images = stripes(4, seed=1).images

    async def main():
        body, headers = form(("task", "stripes"), ("latency", "30"), *(("image", png(image)) for image in images))
        sent = {"task": "stripes", "images": [base64_of(png(image)) for image in images], "latency": 30, "utility": 2}
        return await ask(client, QUERY, sent), await ask(client, QUERY, body, headers=headers)

    for status, answer in run(main()):
        assert status == 200
        assert (answer["object"], answer["model"], answer["task"]) == ("elastic.answers", "vit", "stripes")
        for image, result in zip(images, answer["results"], strict=True):
            expected = service.classify(image, "stripes", result["level"])[0]
            assert result["label"] == expected.label
            assert list(result["probabilities"]) == ["rows", "columns"]
            np.testing.assert_allclose(list(result["probabilities"].values()), expected.probabilities, atol=1e-4)
            assert result["in_time"]
            assert result["compute_seconds"] > 0 <= result["queue_seconds"]


def test_an_image_of_any_size_is_resized(client, service, tmp_path):
    from jaxinfer.elastic import load_image

    (tmp_path / "image.png").write_bytes(png(Image.fromarray(picture(3, 20, 50)).convert("LA")))
    sent = {**ONE, "images": [base64_of((tmp_path / "image.png").read_bytes())]}
    status, answer = run(ask(client, QUERY, sent))
    resized = load_image(tmp_path / "image.png", SIZE, service.config.preprocessing)
    (result,) = answer["results"]
    expected = service.classify(resized, "stripes", result["level"])[0].probabilities
    assert status == 200
    np.testing.assert_allclose(list(result["probabilities"].values()), expected, atol=1e-4)


def test_an_answer_that_would_be_late_is_shed(client, service):
    shed = service.stats().shed
    status, answer = run(ask(client, QUERY, ONE | {"latency": 0}))
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (408, "timeout_error", "shed")
    assert service.stats().shed == shed + 1


def test_a_bad_image_concerns_no_other(client):
    status, answer = run(ask(client, QUERY, ONE | {"images": [GOOD, base64_of(b"no image"), GOOD]}))
    assert status == 200
    assert [result.get("error", {}).get("param") for result in answer["results"]] == [None, "images[1]", None]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (ONE | {"images": []}, 400, "images"),
        (ONE | {"images": [GOOD] * 65}, 400, "images"),
        (ONE | {"images": GOOD}, 400, "images"),
        (ONE | {"images": ["http://127.0.0.1/a.png"]}, 400, "images[0]"),
        (ONE | {"images": [{"file": "/etc/passwd"}]}, 403, "images[0]"),
        (ONE | {"images": [GOOD[:50]]}, 400, "images[0]"),
        (ONE | {"task": "none"}, 404, "task"),
        (ONE | {"task": "../stripes"}, 404, "task"),
        (ONE | {"task": 3}, 400, "task"),
        (ONE | {"latency": None}, 400, "latency"),
        (ONE | {"latency": -1}, 400, "latency"),
        (ONE | {"latency": 1e300}, 400, "latency"),
        (ONE | {"latency": "1"}, 400, "latency"),
        (ONE | {"utility": -1}, 400, "utility"),
        (ONE | {"utility": True}, 400, "utility"),
        (ONE | {"model": "other"}, 404, "model"),
        (ONE | {"level": 0}, 400, "level"),
        (b'{"task": "stripes", "images": [], "latency": Infinity}', 400, None),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(client, body, status, param):
    actual, answer = run(ask(client, QUERY, body))
    assert (actual, answer["error"]["param"]) == (status, param)
    assert len(answer["error"]["message"]) < 300


def test_a_client_that_leaves_gives_its_queries_up(client, service, monkeypatch):
    loop, go, cancelled = service._serving_loop, threading.Event(), service.stats().cancelled
    collect = loop._decider._collect
    monkeypatch.setattr(loop._decider, "_collect", lambda batch: (go.wait(60), collect(batch))[1])

    async def main():
        left = asyncio.Event()
        asking = asyncio.ensure_future(client.post(QUERY, ONE | {"images": [GOOD] * 8}, left=left))
        await until(lambda: service.num_requests == 8)
        left.set()
        with contextlib.suppress(OSError):
            await (await asking).task
        go.set()
        await until(lambda: not service.num_requests)

    run(main())
    assert service.stats().cancelled > cancelled


def test_tasks_are_listed(client, service):
    listed = run(get(client, TASKS))
    (task,) = listed["data"]
    assert (task["id"], task["model"], task["classes"]) == ("stripes", "vit", ["rows", "columns"])
    levels = {level["level"]: level for level in task["levels"]}
    assert levels.keys() == {-4, 0, 2}
    assert levels[0]["accuracy"] == service.accuracy("stripes", 0).accuracy
    assert levels[-4]["batch_seconds"]["2"]["p95"] == service.latency.seconds(-4, 2).p95


async def get(client, path, **options):
    return await (await client.get(path, **options)).json()


def test_metrics_count_queries(client, service):
    run(ask(client, QUERY, ONE))
    lines = run(_text(client)).splitlines()
    stats = service.stats()
    assert f'jaxinfer_elastic_queries_ended_total{{model="vit",outcome="shed"}} {float(stats.shed)}' in lines
    assert f'jaxinfer_elastic_utility_total{{model="vit"}} {stats.utility}' in lines
    assert 'jaxinfer_elastic_queries_waiting{model="vit"} 0.0' in lines
    answers = [line for line in lines if line.startswith("jaxinfer_elastic_answers_total")]
    assert sum(float(line.split()[-1]) for line in answers) == stats.answered


async def _text(client):
    return (await (await client.get("/metrics")).body()).decode()


# Registration


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of data sets, next to things that no client may read."""
    inside = tmp_path_factory.mktemp("data") / "sets"
    for folder in (inside / "good", inside.parent / "secret"):
        write_dataset(folder)
    (inside / "link").symlink_to(inside.parent / "secret")
    write_dataset(inside / "inner")
    (inside / "inner/rows/leak.png").symlink_to(inside.parent / "secret/rows/0.png")
    write_dataset(inside / "classes")
    (inside / "classes/leak").symlink_to(inside.parent / "secret/rows")
    (inside / "one/rows").mkdir(parents=True)
    (inside / "one/rows/0.png").write_bytes(png(picture(1)))
    write_dataset(inside / "torn")
    (inside / "torn/rows/torn.png").write_bytes(b"torn")
    return inside


def write_dataset(folder):
    dataset = stripes(40, seed=6)
    for place, (image, label) in enumerate(zip(dataset.images, dataset.labels, strict=True)):
        file = folder / dataset.names[label] / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))


@pytest.fixture
def empty(vit, tmp_path, service_options):
    """A service without tasks."""
    with Service.from_checkpoint(vit, repository=tmp_path / "tasks", **service_options) as service:
        yield service


@pytest.fixture(autouse=True)
def one_penalty(monkeypatch):
    """Fit a head twice instead of five times."""
    monkeypatch.setattr("jaxinfer.elastic.tasks.training._PENALTIES", (1e-2,))


def test_a_task_is_registered_and_answers(empty, data):
    client = Client(http.app({}, elastic={"vit": empty}, dataset_folders=[data]))

    async def main():
        before = await ask(client, QUERY, ONE)
        made = await ask(client, TASKS, {"task": "stripes", "data": "good", **QUICK})
        again = await ask(client, TASKS, {"task": "stripes", "data": "good", **QUICK})
        asked = [base64_of(png(image)) for image in stripes(8, seed=3).images]
        return before, made, again, await ask(client, QUERY, ONE | {"images": asked}), await get(client, TASKS)

    before, made, again, (status, answer), listed = run(main())
    assert before[0] == 404
    assert (made[0], made[1]["classes"]) == (200, ["columns", "rows"])
    assert listed["data"] == [made[1]]
    assert (again[0], again[1]["error"]["code"]) == (409, "task_exists")
    assert status == 200
    labels = ["rows" if label == 0 else "columns" for label in stripes(8, seed=3).labels]
    assert sum(a["label"] == b for a, b in zip(answer["results"], labels, strict=True)) >= 6


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"data": "../secret"}, "data", "is in no folder of data sets"),
        ({"data": "link"}, "data", "is in no folder of data sets"),
        ({"data": "inner"}, "data", "is in no folder of data sets"),
        ({"data": "classes"}, "data", "is in no folder of data sets"),
        ({"data": "/etc"}, "data", "is in no folder of data sets"),
        ({"data": "."}, "data", "is in no folder of data sets"),
        ({"data": "none"}, "data", "no such folder"),
        ({"data": "good/rows/0.png"}, "data", "no such folder"),
        ({"data": "one"}, "data", "at least two classes"),
        ({"data": "torn"}, "data", "torn/rows/torn.png: not an image that can be read"),
        ({"task": "../x"}, None, "a task's name has letters"),
        ({"prompts": ["a"]}, "prompts[0]", "Expected `int`"),
        ({"prompts": [0]}, None, "prompts must be a list of integers >= 1"),
        ({"prompts": [2**40]}, None, "prompts must be a list of integers >= 1"),
        ({"steps": 0}, "steps", ">= 1"),
        ({"seed": -1}, "seed", ">= 0"),
        ({"test_share": 1.5}, None, "test_share must be a number in [0, 1)"),
        ({"test_share": 1e30}, None, "test_share must be a number in [0, 1)"),
        ({"division": {}}, "division", "is not a field"),
    ],
)
def test_a_registration_that_cannot_be_is_refused(client_of_data, data, body, param, message):
    sent = {"task": "other", "data": "good", **QUICK, **body}
    status, answer = run(ask(client_of_data, TASKS, sent))
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]
    assert str(data.parent) not in answer["error"]["message"]
    assert [task["id"] for task in run(get(client_of_data, TASKS))["data"]] == ["stripes"]


@pytest.fixture(scope="module")
def client_of_data(service, data):
    return Client(http.app({}, elastic={"vit": service}, dataset_folders=[data]))


def test_registering_needs_folders_and_an_admin_key(service, client, data):
    limits = Limits(api_keys=("key",), admin_keys=("admin",))
    guarded = Client(http.app({}, elastic={"vit": service}, dataset_folders=[data], limits=limits))
    body = {"task": "stripes", "data": "good"}

    async def main():
        statuses = [(await client.post(TASKS, body)).status]
        for key in (None, "key", "admin"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            statuses.append((await guarded.post(TASKS, body, headers=headers)).status)
            statuses.append((await guarded.get(TASKS, headers=headers)).status)
        return statuses

    assert run(main()) == [403, 401, 401, 403, 200, 409, 200]


def test_queries_go_on_while_a_task_is_registered(service, data, monkeypatch):
    client = Client(http.app({}, elastic={"vit": service}, dataset_folders=[data]))
    began, go = threading.Event(), threading.Event()

    def register(*_, **__):
        began.set()
        assert go.wait(60)
        raise ValueError("it was not meant to be")

    monkeypatch.setattr(service, "register_task", register)

    async def main():
        registering = asyncio.ensure_future(ask(client, TASKS, {"task": "other", "data": "good"}))
        await until(began.is_set)
        answered = await ask(client, QUERY, ONE)
        go.set()
        return answered[0], await registering

    answered, (status, error) = run(main())
    assert (answered, status) == (200, 400)
    assert error["error"]["message"] == "it was not meant to be"


def test_a_service_that_is_being_loaded_or_closed(vit, registered, service_options):
    service = Service.from_checkpoint(vit, repository=registered, **service_options)
    served = ServedService("vit", lambda: service)
    client = Client(make_app(ServedModels([]), Limits(), services=[served]))

    async def main():
        statuses = [(await ask(client, QUERY, ONE))[0], (await client.get("/ready")).status]
        served.load()
        statuses += [(await ask(client, QUERY, ONE))[0], (await client.get("/ready")).status]
        served.close(drain=True)
        statuses += [(await ask(client, QUERY, ONE))[0], (await client.get("/ready")).status]
        return statuses

    assert run(main()) == [503, 503, 200, 200, 503, 503]
