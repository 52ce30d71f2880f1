"""Systems whose executors use all devices of a mesh: the answers of one device, with parts of experts on each."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.compiled import Costs
from jaxinfer.experts import ConfigError, OpenedSystem
from jaxinfer.experts.config import ExecutorOptions
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from tests.experts.boards import COSTS, config, expert_bytes, image, probabilities

LANES = MeshConfig(data=2)
PARTS = MeshConfig(data=2, tensor=2)


def bytes_on(folder, mesh):
    return open_model(folder, mesh=mesh).bytes_per_device()


def test_convolutional_networks_in_lanes(board, start):
    """Two executors with a pool each, from which the other one copies; three experts, room for one in each pool."""
    names = ("c0", "c1", "c2")
    costs = dataclasses.replace(COSTS, max_batch=4, latency={2: 2e-3, 4: 3e-3})
    policy = {"share_pools": False}
    system = start(*names, mesh=LANES, slots=1, host=4, executors=2, policy=policy, costs=costs)
    given = [(names[number // 5 % 3], image(number)) for number in range(45)]
    for (name, value), result in zip(given, system.run(given), strict=True):
        wanted = probabilities(board / name, value)
        np.testing.assert_allclose(result.stages[0].judgement.probabilities, wanted, atol=1e-5)
    assert system.stats().loads["host"] > 0
    assert system.opened.compiled == 2  # one input in each lane, or two


def test_transformers_in_parts(board, start):
    memory = max(bytes_on(board / name, PARTS) for name in ("v0", "e0"))
    system = start("v0", "e0", mesh=PARTS, memory=memory, host=8 * memory)
    assert system.graph.experts["v0"].bytes == bytes_on(board / "v0", PARTS) < expert_bytes(board / "v0")
    alone = start("e0", slots=20)
    for number, text in enumerate(("abc", "xyz", "abc")):
        judged = system.submit("v0", image(number)).result().stages[0].judgement
        np.testing.assert_allclose(judged.probabilities, probabilities(board / "v0", image(number)), atol=1e-5)
        vector, wanted = (x.submit("e0", text).result().stages[0].judgement.vector for x in (system, alone))
        np.testing.assert_allclose(vector, wanted, atol=1e-5)
    assert system.stats().loads["host"] > 0


def test_budgets_count_every_device(board, start):
    memory = expert_bytes(board / "c0")
    system = start("c0", "c1", mesh=LANES, slots=1, host=6, activation=1000)
    budget = system.budgets["the host"]
    list(system.run([("c0", image(0)), ("c1", image(0)), ("c0", image(0))]))
    sizes = {held.tenant: held for held in budget.holdings if held.owner == "System of experts"}
    assert sizes["experts"].bytes == 2 * memory
    assert sizes["activations"].bytes == 2 * 1000
    assert sizes["host cache"].bytes == 2 * 2 * memory  # of both experts
    assert sizes["inputs that wait"].bytes == (10_000 + 2 * 2) * image(0).nbytes  # batches of 2 in each lane
    assert sizes["experts"].offer.bytes == 0, "there is room for one"
    assert sizes["host cache"].offer.bytes == 2 * 2 * memory


def test_costs_are_those_of_the_mesh(board, monkeypatch):
    keys, open_costs = [], Costs.open
    monkeypatch.setattr(Costs, "open", lambda **options: keys.append(options["model"]) or open_costs(**options))
    opened = OpenedSystem(config(board, ["c0"], mesh=LANES, max_batch=1))
    ((_, processor), measured), *others = opened.measured().items()
    assert processor == "cpu data=2"
    assert not others
    assert [key["mesh"] for key in keys] == ["data=2"]
    assert measured.workspace.keys() == {2, 4}
    assert measured.profile.max_batch == 2
    assert measured.profile.padded(1) == 2
    opened.release()


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("c0", PARTS, "expert 'c0': .*mesh data=2, tensor=2: a convolutional network .* use MeshConfig"),
        ("v0", MeshConfig(pipeline=2), "expert 'v0': .*mesh pipeline=2: only decoders run in stages"),
        ("v0", MeshConfig(data=3, tensor=3), "mesh data=3, tensor=3 needs 9 devices, and there are 8"),
        ("v0", {"data": 2}, r"mesh must be a MeshConfig, such as MeshConfig\(data=2\), or None; got {'data': 2}"),
    ],
)
def test_meshes_that_cannot_be(board, name, mesh, message):
    with pytest.raises(ConfigError, match=message):
        OpenedSystem(config(board, [name], mesh=mesh))


def test_an_executor_has_a_device_or_the_mesh(board):
    executor = ExecutorOptions(name="x", device="cpu:1", expert_memory=10**6)
    with pytest.raises(ConfigError, match=r"executors.x.device='cpu:1': with a mesh every executor uses all of its"):
        config(board, ["c0"], mesh=LANES, executors_given=(executor,))
