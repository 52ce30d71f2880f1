"""`jaxinfer experts run` and `jaxinfer elastic run` with a server's URL, over a real connection."""

import json
import socket
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.elastic import Service
from jaxinfer.experts import System
from tests.elastic.vits import stripes
from tests.experts.boards import AnyProfiles, config
from tests.http.pictures import picture, png

pytest.importorskip("PIL")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")


@pytest.fixture(scope="module")
def system(board):
    with System(config(board, ("c0", "c1"), slots=2), profiles=AnyProfiles()) as system:
        yield system


@pytest.fixture(scope="module")
def url(system, vit, registered, service_options):
    """A server of a system and a service on a loopback port, with a key."""
    import uvicorn

    from jaxinfer import http

    with Service.from_checkpoint(vit, repository=registered, **service_options) as service:
        limits = http.Limits(api_keys=("secret",))
        made = http.app({}, experts={"board": system}, elastic={"vit": service}, limits=limits)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(made, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("JAXINFER_API_KEY", "secret")


def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def images(tmp_path):
    for seed, name in enumerate(("c0/a.png", "c0/b.npy", "c1/c.png")):
        file = tmp_path / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, picture(seed)) if file.suffix == ".npy" else file.write_bytes(png(picture(seed)))
    return tmp_path / "images"


def test_a_server_judges_the_images_of_a_folder(url, system, images):
    lines = [
        json.loads(line)
        for line in run("experts", "run", f"{url}/v1", "--images", images, "--json").stdout.splitlines()
    ]
    assert [line["input"] for line in lines] == ["c0/a.png", "c0/b.npy", "c1/c.png"]
    for seed, line in enumerate(lines):
        assert line["verdict"] == system.submit(line["kind"], picture(seed)).result().verdict
        assert line["stages"][0]["executor"] == "x0"
    output = run("experts", "run", url, "--images", images, "--name", "board").stdout
    assert "3 inputs in" in output
    assert "0 failed." in output


def test_an_image_that_the_server_refuses_fails_alone(url, images):
    content = (images / "c0/a.png").read_bytes()
    (images / "c0/a.png").write_bytes(content[: len(content) // 2])
    output = run("experts", "run", url, "--images", images, code=1).stdout
    assert "c0/a.png  failed: HTTP 400: inputs[0].image: not an image that can be read" in output
    assert "2 inputs in" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("experts", "run", "{url}", "--random", 3), "--random has no effect with a server's URL"),
        (("experts", "run", "{url}", "--images", "{images}", "--mode", "best"), "--mode has no effect"),
        (("experts", "run", "{url}", "--images", "{images}", "--seed", 1), "--seed has no effect"),
        (("experts", "run", "{url}"), "give --images"),
        (("experts", "run", "board.toml", "--images", "{images}", "--name", "a"), "--name has no effect without"),
        (("experts", "run", "{url}", "--images", "{images}", "--name", "no"), "systems: board"),
        (("experts", "run", "http://127.0.0.1:1", "--images", "{images}"), "http://127.0.0.1:1/v1/experts: "),
        (("elastic", "run", "{url}", "--policy", "pets"), "--policy has no effect with a server's URL"),
        (("elastic", "run", "{url}", "--max-batch", 8), "--max-batch has no effect"),
        (("elastic", "run", "{url}", "--repository", "a"), "--repository has no effect"),
        (("elastic", "run", "{url}", "--device-memory", "1GiB"), "--device-memory has no effect"),
        (("elastic", "run", "vit", "--name", "a"), "--name has no effect without"),
        (("elastic", "run", "{url}", "--task", "no"), "the server has no task 'no'; tasks: stripes"),
        (("elastic", "run", "{url}", "--name", "no"), "services with tasks: vit"),
        (("elastic", "run", "{url}", "--data", "no=digits"), "the task 'no' is not queried"),
        (("elastic", "run", "{url}", "--load", 0), "--load must be > 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(url, images, arguments, message):
    given = [str(argument).format(url=url, images=images) for argument in arguments]
    assert message in " ".join(run(*given, code=2).stderr.split())


def test_a_wrong_key_is_told(url, images, monkeypatch):
    monkeypatch.setenv("JAXINFER_API_KEY", "wrong")
    assert "HTTP 401: the API key is missing or wrong" in run("experts", "run", url, "--images", images, code=2).stderr


def test_queries_are_sent_to_a_server(url, tmp_path):
    dataset = stripes(20, seed=2)
    for place, (image, label) in enumerate(zip(dataset.images, dataset.labels, strict=True)):
        file = tmp_path / "data" / dataset.names[label] / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))
    arguments = ("--data", f"stripes={tmp_path}/data", "--seconds", 0.3, "--load", 0.02, "--arrivals", "poisson")
    output = run("elastic", "run", url, *arguments, "--out", tmp_path / "runs").stdout
    assert "server" in output
    assert "queries/s at level 0" in output
    (file,) = (tmp_path / "runs").glob("*.jsonl")
    assert "Wrote" in output
    header, *queries = map(json.loads, file.read_text().splitlines())
    assert (header["policy"], len(queries) > 0) == ("server", True)
