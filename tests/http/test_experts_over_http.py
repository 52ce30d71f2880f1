"""A system of experts behind the server: what it judges, and what it refuses."""

import asyncio
import contextlib
import io
import json
import os
import random
import struct
import threading
import zlib

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("starlette")
pytest.importorskip("python_multipart")

from PIL import Image

from jaxinfer import http
from jaxinfer.experts import System
from jaxinfer.http.config_file import read_config
from jaxinfer.http.limits import Limits
from jaxinfer.http.served_models import ServedModels
from jaxinfer.http.server import make_app
from jaxinfer.http.vision.loading import vision_of
from jaxinfer.http.vision.served import ServedSystem
from tests.experts.boards import SIZE, AnyProfiles, config
from tests.http.asgi import Client
from tests.http.pictures import base64_of, form, picture, png
from tests.http.test_fuzzed_bodies import VALUES, damaged, places, replaced

INFER = "/v1/experts/infer"
NAMES = ("c0", "d0", "c1", "e0")


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


async def ask(client, body, path=INFER, **options):
    answer = await client.post(path, body, **options)
    return answer.status, await answer.json()


def made(board, **changes):
    """A system in which d0 follows each verdict of c0."""
    rules = [("c0", verdict, "d0") for verdict in ("ok", "defect")]
    return System(config(board, NAMES, slots=16, rules=rules, **changes), profiles=AnyProfiles())


@pytest.fixture(scope="module")
def system(board):
    with made(board) as system:
        yield system


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of images, next to things that no client may read."""
    inside = tmp_path_factory.mktemp("pictures") / "images"
    (inside / "deep").mkdir(parents=True)
    for place in ("one.png", "deep/two.png", "../secret.png"):
        (inside / place).write_bytes(png(picture(7)))
    (inside / "link.png").symlink_to(inside.parent / "secret.png")
    (inside / "inner.png").symlink_to(inside / "one.png")
    (inside / "circle.png").symlink_to(inside / "circle.png")
    os.mkfifo(inside / "pipe.png")
    (inside / "text.png").write_text("no image")
    return inside


def client_of(system, folder, **limits):
    return Client(http.app({}, experts={"board": system}, limits=Limits(**limits), image_folders=[folder]))


@pytest.fixture(scope="module")
def client(system, folder):
    return client_of(system, folder)


def image(pixels, kind="c0"):
    return {"kind": kind, "image": base64_of(png(pixels))}


def test_an_answer_is_that_of_the_system(client, system):
    inputs = [("c0", picture(1)), ("c1", picture(2)), ("e0", "hello")]
    body = {
        "model": "board",
        "inputs": [image(inputs[0][1]), image(inputs[1][1], "c1"), {"kind": "e0", "text": "hello"}],
    }
    status, answer = run(ask(client, body))
    assert status == 200
    assert (answer["object"], answer["model"]) == ("experts.results", "board")
    for (kind, value), result in zip(inputs, answer["results"], strict=True):
        expected = system.submit(kind, value).result()
        assert (result["kind"], result["verdict"]) == (kind, expected.verdict)
        assert [stage["expert"] for stage in result["stages"]] == [stage.expert for stage in expected.stages]
        assert result["seconds"] >= sum(stage["compute_seconds"] for stage in result["stages"]) > 0
    classified, detected = answer["results"][0]["stages"]
    stages = system.submit("c0", inputs[0][1]).result().stages
    scores = dict(zip(("ok", "defect"), stages[0].judgement.probabilities.tolist(), strict=True))
    assert classified["scores"] == pytest.approx(scores, abs=1e-5)
    assert classified["executor"] == "x0"
    assert (classified["batch"], classified["queue_seconds"] >= 0) == (1, True)
    assert len(detected["boxes"]) == len(stages[1].judgement.labels)
    assert answer["results"][2]["stages"][0]["vector"] == pytest.approx(
        system.submit("e0", "hello").result().stages[0].judgement.vector.tolist(), abs=1e-5
    )


def test_an_image_may_come_in_any_way(client, folder):
    pixels = picture(7)
    content = png(pixels)
    ways = [base64_of(content), "data:image/png;base64," + base64_of(content), "data:;base64," + base64_of(content)]
    ways += [
        {"file": name} for name in ("one.png", "deep/../one.png", "deep/two.png", "inner.png", f"{folder}/one.png")
    ]

    async def main():
        sent = await ask(client, {"inputs": [{"kind": "c0", "image": way} for way in ways]})
        body, headers = form(("kind", "c0"), ("image", content), ("image", content), ("deadline", "30"))
        return sent, await ask(client, body, headers=headers)

    (status, answer), (form_status, form_answer) = run(main())
    assert (status, form_status) == (200, 200)
    results = answer["results"] + form_answer["results"]
    assert len(results) == len(ways) + 2
    for result in results:
        assert result["stages"][0]["scores"] == pytest.approx(results[0]["stages"][0]["scores"], abs=1e-5)


def test_a_form_has_a_kind_for_each_image(client):
    first, second = png(picture(1)), png(picture(2))

    async def main():
        good, headers = form(("kind", "c0"), ("image", first), ("kind", "c1"), ("image", second), ("model", "board"))
        wrong, _ = form(("kind", "c0"), ("kind", "c0"), ("kind", "c0"), ("image", first), ("image", second))
        return await ask(client, good, headers=headers), await ask(client, wrong, headers=headers)

    (status, answer), (refused, error) = run(main())
    assert (status, [result["kind"] for result in answer["results"]]) == (200, ["c0", "c1"])
    assert (refused, error["error"]["param"]) == (400, "kind")


VARIANTS = {
    "grey": lambda image: image.convert("L"),
    "16 bits": lambda image: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8),
    "palette": lambda image: image.quantize(16),
    "alpha": lambda image: image.convert("RGBA"),
    "grey and alpha": lambda image: image.convert("LA"),
    "one bit": lambda image: image.convert("1"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pixels_are_those_of_load_image(client, system, tmp_path, variant):
    content = png(VARIANTS[variant](Image.fromarray(picture(3, 20, 48))))
    (tmp_path / "image.png").write_bytes(content)
    status, answer = run(ask(client, {"inputs": [{"kind": "c1", "image": base64_of(content)}]}))
    expected = system.submit("c1", system.load_image("c1", tmp_path / "image.png")).result()
    assert status == 200
    scores = answer["results"][0]["stages"][0]["scores"]
    assert list(scores.values()) == pytest.approx(expected.stages[0].judgement.probabilities.tolist(), abs=1e-5)


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_a_photo_is_turned_upright(client, system, turn):
    """By EXIF's orientation: so is what its boxes are in."""
    pixels = np.kron(picture(4, 3, 6), np.ones((8, 8, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = turn
    content = png(pixels, format="JPEG", quality=95, exif=exif)
    status, answer = run(ask(client, {"inputs": [{"kind": "d0", "image": base64_of(content)}]}))
    upright = {1: 0, 3: 2, 6: 3, 8: 1}[turn]
    decoded = np.asarray(Image.open(io.BytesIO(content)))
    expected = system.submit("d0", system.load_image("d0", np.ascontiguousarray(np.rot90(decoded, upright)))).result()
    assert status == 200
    boxes = answer["results"][0]["stages"][0]["boxes"]
    assert [box["score"] for box in boxes] == pytest.approx(expected.stages[0].judgement.scores.tolist(), abs=1e-4)


def test_boxes_are_in_the_pixels_of_the_image_that_was_sent(client, system):
    """A scaled image has scaled boxes, and the bars of the letterbox do not count."""
    small = picture(5, SIZE // 2, SIZE)
    large = np.kron(small, np.ones((4, 4, 1), np.uint8))
    judged = system.submit("d0", system.load_image("d0", small)).result().stages[0].judgement

    async def main():
        return [(await ask(client, {"inputs": [image(each, "d0")]}))[1]["results"][0] for each in (small, large)]

    of_small, of_large = run(main())
    boxes = np.array([box["box"] for box in of_small["stages"][0]["boxes"]])
    assert len(boxes) == len(judged.boxes) > 0
    moved = judged.boxes - [0, SIZE // 4, 0, SIZE // 4]  # the bar above
    np.testing.assert_allclose(boxes, np.clip(moved, 0, [SIZE, SIZE // 2] * 2), atol=1e-3)
    assert boxes.max() <= SIZE
    of_large = np.array([box["box"] for box in of_large["stages"][0]["boxes"]])
    assert of_large.max() > SIZE
    assert (of_large <= np.array([4 * SIZE, 2 * SIZE] * 2)).all()


def huge_png(width, height):
    """A PNG of a few bytes that says that it has this many pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


GOOD = png(picture(1))
BAD_IMAGES = {
    "truncated": (GOOD[: len(GOOD) // 2], 400),
    "damaged": (GOOD[:60] + bytes(40) + GOOD[100:], 400),
    "no image": (b"hello, this is no image", 400),
    "empty": (b"", 400),
    "a bomb": (huge_png(100_000, 100_000), 413),
    "a larger bomb": (huge_png(2**31 - 1, 2**31 - 1), 413),
    "a little too large": (huge_png(10_000, 5_001), 413),
    "gzip": (zlib.compress(bytes(100)), 400),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", 400),
}


@pytest.mark.parametrize("what", BAD_IMAGES)
def test_a_bad_image_is_named(client, what):
    content, expected = BAD_IMAGES[what]
    bad = {"kind": "c0", "image": base64_of(content)}

    async def main():
        body, headers = form(("kind", "c0"), ("image", content))
        alone, uploaded = await ask(client, {"inputs": [bad]}), await ask(client, body, headers=headers)
        return alone, uploaded, await ask(client, {"inputs": [image(picture(1)), bad, image(picture(2))]})

    (alone, error), (uploaded, upload_error), (among, answer) = run(main())
    assert (alone, uploaded, among) == (expected, expected, 200)
    assert error["error"]["param"] == "inputs[0].image"
    assert upload_error["error"]["param"] == "image[0]"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith("inputs[0].image: ")
    assert "0x" not in error["error"]["message"]
    first, failed, last = answer["results"]
    assert failed["error"]["param"] == "inputs[1].image"
    assert {"verdict", "stages"} <= first.keys() & last.keys()


ONE = {"kind": "c0", "image": base64_of(GOOD)}
BAD_BODIES = [
    ({"inputs": []}, "inputs"),
    ({}, "inputs"),
    ({"inputs": [ONE] * 65}, "inputs"),
    ({"inputs": [{"kind": "c0"}]}, "inputs[0]"),
    ({"inputs": [ONE | {"text": "a"}]}, "inputs[0]"),
    ({"inputs": [ONE, {"kind": "x", "image": ""}]}, "inputs[1].kind"),
    ({"inputs": [{"kind": "c0", "text": "a"}]}, "inputs[0].text"),
    ({"inputs": [{"kind": "e0", "image": base64_of(GOOD)}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": "http://127.0.0.1:1/a.png"}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": "file:///etc/passwd"}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": "data:image/png,abc"}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": "data:" + "a" * 100_000}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": "a" * 100_000 + "!"}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": "é"}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": 3}]}, "inputs[0].image"),
    ({"inputs": [{"kind": "c0", "image": {"file": 3}}]}, "inputs[0].image.file"),
    ({"inputs": [{"kind": "c0", "image": {"url": "http://a"}}]}, "inputs[0].image"),
    ({"inputs": [{"kind": 1e30, "image": ""}]}, "inputs[0].kind"),
    ({"inputs": "a"}, "inputs"),
    ({"inputs": [3]}, "inputs[0]"),
    ({"inputs": [ONE], "deadline": "1"}, "deadline"),
    ({"inputs": [ONE], "deadline": -1}, "deadline"),
    ({"inputs": [ONE], "deadline": 1e300}, "deadline"),
    ({"inputs": [ONE], "deadline": True}, "deadline"),
    ({"inputs": [ONE], "deadlin": 1}, "deadlin"),
    ({"inputs": [ONE], "model": 3}, "model"),
    (b'{"inputs": [{"kind": "c0", "image": ""}], "deadline": NaN}', None),
    (b"\xff", None),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
def test_a_bad_body_is_refused_by_the_name_of_its_field(client, body, param):
    status, answer = run(ask(client, body))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert (answer["error"]["param"] or "").startswith(param or "")
    assert len(answer["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([("kind", "c0")], "image"),
        ([("image", GOOD)], "kind"),
        ([("kind", "c0"), ("image", "text")], "image"),
        ([("kind", "c0"), ("photo", GOOD)], "photo"),
        ([("kind", "c0"), ("image", GOOD), ("deadline", "nan")], "deadline"),
        ([("kind", "c0"), ("image", GOOD), ("deadline", "1e300")], "deadline"),
        ([("kind", "c0"), ("image", GOOD), ("deadline", "soon")], "deadline"),
        ([("kind", "c0"), ("image", GOOD), ("deadline", "1"), ("deadline", "2")], "deadline"),
        ([("kind", "c0"), ("image", GOOD), ("color", "red")], "color"),
        ([("kind", "x"), ("image", GOOD)], "kind"),
        ([("kind", "c0"), *[("image", GOOD)] * 65], None),
        ([*[("kind", "c0")] * 500, ("image", GOOD)], None),
    ],
)
def test_a_bad_form_is_refused_by_the_name_of_its_field(client, parts, param):
    body, headers = form(*parts)
    status, answer = run(ask(client, body, headers=headers))
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"--edge", b"--edge\r\n\r\n\r\n--edge--", b"nothing", b"\xff" * 1000])
@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=edge", "multipart/form-data"])
def test_a_form_that_is_none_is_refused(client, body, kind):
    status, answer = run(ask(client, body, headers={"content-type": kind}))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.png", "is in no folder of images"),
        ("deep/../../secret.png", "is in no folder of images"),
        ("{outside}/secret.png", "is in no folder of images"),
        ("/etc/passwd", "is in no folder of images"),
        ("link.png", "is in no folder of images"),
        ("circle.png", "is in no folder of images"),
        ("", "is in no folder of images"),
        ("one.png\x00", "is in no folder of images"),
        ("x" * 5000, "no such file"),
        ("none.png", "no such file"),
        ("deep", "no such file"),
        ("pipe.png", "no such file"),
        ("text.png", "not an image that can be read"),
    ],
)
def test_files_come_from_the_folders_only(client, folder, path, message):
    given = {"file": path.format(outside=folder.parent)}
    status, answer = run(ask(client, {"inputs": [{"kind": "c0", "image": given}]}))
    assert (status, answer["error"]["param"]) == (400, "inputs[0].image")
    assert message in answer["error"]["message"]
    if not path.startswith("{"):
        assert str(folder.parent) not in answer["error"]["message"]


def test_without_folders_no_file_is_read(system):
    status, answer = run(
        ask(Client(http.app({}, experts={"board": system})), {"inputs": [{"kind": "c0", "image": {"file": "one.png"}}]})
    )
    assert status == 403
    assert "image_folders" in answer["error"]["message"]


def test_bodies_and_images_have_limits(system, folder):
    client = client_of(system, folder, max_body_bytes=10_000, max_inputs=2, max_image_pixels=SIZE * SIZE)

    async def main():
        sizes = [await ask(client, {"inputs": [image(picture(1, height, SIZE))]}) for height in (SIZE, SIZE + 1)]
        large = await ask(client, {"inputs": [ONE | {"image": "a" * 20_000}]})
        body, headers = form(("kind", "c0"), ("image", bytes(20_000)))
        many = {"inputs": [{"kind": "c0", "image": "a"}] * 3}
        return sizes, large, await ask(client, body, headers=headers), await ask(client, many)

    sizes, large, uploaded, many = run(main())
    assert [status for status, _ in sizes] == [200, 413]
    assert sizes[1][1]["error"]["code"] == "image_too_large"
    assert (large[0], uploaded[0], many[0]) == (413, 413, 400)


def test_bodies_with_anything_in_any_field_are_answered_or_refused(client):
    dice, statuses = random.Random(0), set()
    valid = {"model": "board", "inputs": [ONE, {"kind": "e0", "text": "a"}, ONE | {"image": {"file": "one.png"}}]}
    bodies = [replaced(valid, place, value) for place in places(valid) for value in dice.sample(VALUES, 12)]
    bodies += [damaged(dice, json.dumps(valid | {"deadline": 5}).encode()) for _ in range(60)]
    form_body, headers = form(("kind", "c0"), ("image", GOOD), ("deadline", "5"))
    forms = [damaged(dice, form_body) for _ in range(60)]

    async def main():
        for body, options in [(body, {}) for body in bodies] + [(body, {"headers": headers}) for body in forms]:
            status, answer = await ask(client, body, **options)
            statuses.add(status)
            assert (status == 200) == ("results" in answer), (body, answer)
            assert status in (200, 400, 404, 408, 413), (body, answer)

    run(main())
    assert statuses >= {200, 400}


def test_systems_are_listed(client, system):
    async def main():
        return await (await client.get("/v1/experts")).json(), [
            (await client.get(path)).status for path in ("/ready", "/health")
        ]

    listed, statuses = run(main())
    assert statuses == [200, 200]
    (board,) = listed["data"]
    assert (board["id"], board["object"], board["state"]) == ("board", "experts", "running")
    assert board["inputs"] == list(NAMES)
    assert board["executors"] == ["x0"]
    kinds = {expert["name"]: expert["kind"] for expert in board["experts"]}
    assert kinds == {"c0": "classifier", "d0": "detector", "c1": "classifier", "e0": "encoder"}
    assert board["experts"][0]["labels"] == ["ok", "defect"]


def test_a_system_is_chosen_by_its_name(system, folder):
    client = Client(http.app({}, experts={"a": system, "b": system}))

    async def main():
        return [await ask(client, {"inputs": [ONE], "model": name}) for name in ("a", "b", "c", "", "../a")]

    answers = run(main())
    assert [status for status, _ in answers] == [200, 200, 404, 400, 404]
    assert [answer["model"] for status, answer in answers if status == 200] == ["a", "b"]


def test_a_deadline_that_has_passed(client):
    status, answer = run(ask(client, {"inputs": [ONE], "deadline": 0}))
    assert (status, answer["error"]["code"]) == (408, "timeout")


@pytest.fixture
def stuck(board, monkeypatch):
    """A system whose batches wait until `go` is set."""
    system, go = made(board, max_waiting=4), threading.Event()
    system.go = go
    judge = system._runner.judge
    monkeypatch.setattr(system._runner, "judge", lambda *given: (go.wait(60), judge(*given))[1])
    yield system
    go.set()
    system.close(drain=False, timeout=30)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_too_many_inputs_are_refused_with_when_to_try_again(stuck):
    client = Client(http.app({}, experts={"board": stuck}))

    async def main():
        left = asyncio.Event()
        asked = [asyncio.ensure_future(client.post(INFER, {"inputs": [ONE]}, left=left)) for _ in range(20)]
        (refused, *_), waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        left.set()
        for each in waiting:
            with contextlib.suppress(OSError):
                await (await each).task
        answer = await refused
        return answer.status, answer.headers, (await answer.json())["error"]

    status, headers, error = run(main())
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
    assert int(headers["retry-after"]) >= 1


def test_a_client_that_leaves_gives_its_inputs_up(stuck):
    client = Client(http.app({}, experts={"board": stuck}))

    async def main():
        left = asyncio.Event()
        asking = asyncio.ensure_future(client.post(INFER, {"inputs": [ONE] * 3}, left=left))
        await until(lambda: stuck.num_requests == 3)
        left.set()
        with contextlib.suppress(OSError):
            await (await asking).task
        await until(lambda: stuck.stats().cancelled >= 1)

    run(main())


def test_a_system_that_is_closed_meanwhile(stuck):
    client = Client(http.app({}, experts={"board": stuck}))

    async def main():
        asking = asyncio.ensure_future(ask(client, {"inputs": [ONE] * 3}))
        await until(lambda: stuck.num_requests == 3)
        closing = asyncio.ensure_future(asyncio.to_thread(stuck.close, drain=False, timeout=60))
        await until(lambda: not stuck.is_running)
        after = await ask(client, {"inputs": [ONE]})
        stuck.go.set()
        await closing
        return await asking, after, (await client.get("/ready")).status

    (status, answer), (after, _), ready = run(main())
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert (after, ready) == (503, 503)


def test_a_system_that_is_being_loaded(system):
    served = ServedSystem("board", lambda: system)
    client = Client(make_app(ServedModels([]), Limits(), systems=[served]))

    async def main():
        before = [(await client.get(path)).status for path in ("/ready", "/health", "/v1/experts", "/metrics")]
        refused, _ = await ask(client, {"inputs": [ONE]})
        served.load()
        after = (await client.get("/ready")).status
        return before, refused, after, (await ask(client, {"inputs": [ONE]}))[0]

    assert run(main()) == ([503, 200, 200, 200], 503, 200, 200)


def test_metrics_count_inputs_and_memory(client, system):
    async def main():
        await ask(client, {"inputs": [ONE]})
        await ask(client, {"inputs": []})
        return (await (await client.get("/metrics")).body()).decode()

    text = run(main())
    lines, stats = text.splitlines(), system.stats()
    assert f'jaxinfer_experts_inputs_ended_total{{model="board",outcome="answered"}} {float(stats.answered)}' in lines
    assert f'jaxinfer_experts_batches_total{{model="board"}} {float(stats.batches)}' in lines
    assert f'jaxinfer_experts_loads_total{{model="board",source="disk"}} {float(stats.loads["disk"])}' in lines
    assert 'jaxinfer_experts_inputs_waiting{model="board"} 0.0' in lines
    assert any(line.startswith('jaxinfer_experts_usage{expert="c0",model="board"}') for line in lines)
    assert any(
        line.startswith('jaxinfer_http_responses_total{endpoint="/v1/experts/infer",model="board"') for line in lines
    )
    assert any(
        line.startswith('jaxinfer_http_responses_total{endpoint="/v1/experts/infer",model="",') for line in lines
    )
    reserved = [line for line in lines if line.startswith('jaxinfer_memory_reserved_bytes{memory="the host"')]
    assert sum(float(line.split()[-1]) for line in reserved) == sum(
        holding.bytes for budget in [*system.budgets.values()] for holding in budget.holdings
    )
    assert any(line.startswith('jaxinfer_memory_capacity_bytes{memory="the host"}') for line in lines)


def test_the_access_log_has_the_number_of_inputs(system):
    log = io.StringIO()
    run(ask(Client(http.app({}, experts={"board": system}, access_log=log)), {"inputs": [ONE] * 2}))
    line = json.loads(log.getvalue())
    assert (line["model"], line["inputs"], line["status"]) == ("board", 2, 200)


def test_a_system_comes_from_a_file(board, tmp_path):
    (tmp_path / "board.toml").write_text(
        f'[experts.c0]\ncheckpoint = "{board}/c0"\n[[inputs]]\nkind = "resistor"\nexpert = "c0"\n'
        '[[executors]]\nexpert_memory = "1MiB"\n'
    )
    (tmp_path / "serve.toml").write_text('[experts.board]\nconfig = "board.toml"\n[experts.no]\nconfig = "no.toml"\n')
    (good, bad), services = vision_of(read_config(tmp_path / "serve.toml"))
    good.load()
    try:
        assert (good.system.graph.first("resistor"), services) == ("c0", [])
    finally:
        good.close(drain=True)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/serve.toml: experts.no: .*no.toml"):
        bad.load()
