"""Weights on their way: one read and one transfer; nothing that is still used is ever overwritten or deleted."""

import os
import shutil
import threading

import jax
import numpy as np
import pytest

from jaxinfer.checkpoints import layer_files, stores
from jaxinfer.checkpoints.stores import Staging
from jaxinfer.experts.errors import LoadError
from jaxinfer.experts.execution import loader as loader_module
from jaxinfer.experts.execution.kinds import kind_of
from jaxinfer.experts.execution.loader import ExpertLoader, OpenedExpert, file_bytes, write_expert
from jaxinfer.experts.execution.place import Place
from jaxinfer.experts.scheduling.request import Eviction, Load
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from tests.experts.boards import CLASSIFIERS

CPU = jax.devices("cpu")[0]


def poison(buffer):
    buffer.fill(255)


def find_in(folder, mesh=None):
    def find(name):
        opened = open_model(folder / name, mesh=mesh)
        return OpenedExpert(name=name, opened=opened, kind=kind_of(opened))

    return find


def make(folder, devices=(CPU,), keep=0, **options):
    places = [Place((device,)) for device in devices]
    return ExpertLoader(find_in(folder), places, staging=Staging(keep=keep, on_release=poison), **options)


def load(loader, name, pool=0, tier="disk", source=None, evictions=(), dropped=()):
    left = tuple(Eviction(expert=expert, to_host=to_host) for expert, to_host in evictions)
    action = Load(executor=0, pool=pool, expert=name, tier=tier, source=source, evictions=left, dropped=dropped)
    loader.prepare(action)()


@pytest.fixture
def is_right(board):
    truth = {name: list(open_model(board / name).read().values()) for name in CLASSIFIERS}

    def check(loader, name, pool=0):
        leaves = loader.leaves(pool, name)
        return all(np.array_equal(leaf, wanted) for leaf, wanted in zip(leaves, truth[name], strict=True))

    return check


@pytest.fixture
def copied(board, tmp_path, monkeypatch):
    """A folder with one expert, and the file of its weights."""
    monkeypatch.setattr(layer_files, "FIRST_DELAY", 1e-3)
    shutil.copytree(board / "c0", tmp_path / "c0")
    return tmp_path, write_expert(open_model(tmp_path / "c0")) / "layer-00000.bin"


def test_one_read_and_one_transfer(board, is_right, monkeypatch):
    reads, transfers, device_put = [], [], jax.device_put

    def preadv(handle, buffers, offset):
        reads.append(offset)
        return os.preadv(handle, buffers, offset)

    write_expert(open_model(board / "c1"))
    loader = make(board, preadv=preadv)
    load(loader, "c0")
    monkeypatch.setattr(jax, "device_put", lambda *args, **options: transfers.append(args) or device_put(*args))
    reads.clear()
    load(loader, "c1", evictions=[("c0", False)])
    assert (len(reads), len(transfers)) == (1, 1)
    assert is_right(loader, "c1")
    loader.close()


def test_a_buffer_serves_the_next_expert(board, monkeypatch):
    made, aligned_buffer = [], stores.aligned_buffer
    monkeypatch.setattr(stores, "aligned_buffer", lambda size: made.append(size) or aligned_buffer(size))
    size = file_bytes(open_model(board / "c0"))
    loader = make(board, keep=size)
    load(loader, "c0")
    for before, name in zip("0123", "1234", strict=True):
        load(loader, f"c{name}", evictions=[(f"c{before}", False)])
    assert made == [size]
    loader.close()


def test_copies_on_the_host_survive_the_buffers(board, is_right):
    loader = make(board, keep=1 << 20)
    load(loader, "c0")
    load(loader, "c1", evictions=[("c0", True)])
    load(loader, "c2", evictions=[("c1", True)])
    load(loader, "c0", tier="host", evictions=[("c2", False)])
    assert is_right(loader, "c0")
    load(loader, "c1", tier="host", evictions=[("c0", True)])
    assert is_right(loader, "c1")
    load(loader, "c3", evictions=[("c1", False)], dropped=["c0"])
    assert is_right(loader, "c3")
    loader.close()


def test_a_copy_of_another_pools_expert_is_its_own(board, is_right):
    """Even where both pools are on one device: JAX would have them share memory."""
    loader = make(board, [CPU, CPU, jax.devices("cpu")[1]], keep=1 << 20)
    load(loader, "c0")
    load(loader, "c0", pool=1, tier="host", source=0)
    load(loader, "c0", pool=2, tier="host", source=0)
    load(loader, "c1", evictions=[("c0", False)])
    load(loader, "c2", evictions=[("c1", True)])
    assert is_right(loader, "c0", pool=1)
    assert is_right(loader, "c0", pool=2)
    load(loader, "c1", pool=1, tier="host", evictions=[("c0", False)])
    assert is_right(loader, "c0", pool=2)
    assert loader.leaves(2, "c0")[0].devices() == {jax.devices("cpu")[1]}
    loader.close()


def test_on_a_mesh_parts_of_an_expert_come_to_their_devices(board):
    mesh = MeshConfig(data=2, tensor=2).build()
    opened = open_model(board / "v0", mesh=mesh)
    wanted = list(opened.read().values())
    staging = Staging(keep=1 << 20, on_release=poison)
    loader = ExpertLoader(find_in(board, mesh), [Place.on_mesh(mesh)] * 2, staging=staging)

    def check(pool):
        for leaf, right in zip(loader.leaves(pool, "v0"), wanted, strict=True):
            assert leaf.sharding == right.sharding
            np.testing.assert_array_equal(leaf, right)

    load(loader, "v0")
    check(0)
    load(loader, "v0", pool=1, tier="host", source=0)
    load(loader, "e0", evictions=[("v0", True)])
    check(1)
    load(loader, "v0", tier="host", evictions=[("e0", False)])
    check(0)
    loader.close()
    file = write_expert(opened) / "layer-00000.bin"
    assert file.stat().st_size == file_bytes(opened) > file_bytes(open_model(board / "v0"))


def test_a_load_from_the_host_waits_for_the_copy(board, is_right):
    """The scheduler knows of a copy as soon as it has decided to make it; another thread may ask for it first."""
    loader = make(board, [CPU, CPU])
    load(loader, "c0")
    evicting = loader.begin_eviction(0, [Eviction(expert="c0", to_host=True)], ())
    loading = loader.prepare(Load(executor=1, pool=1, expert="c0", tier="host"))
    thread = threading.Thread(target=loading)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    evicting()
    thread.join(5)
    assert is_right(loader, "c0", pool=1)
    loader.close()


def test_copies_to_the_host_are_timed(board):
    loader, seen = make(board), []
    load(loader, "c0")
    load(loader, "c1")
    left = Eviction(expert="c0", to_host=True), Eviction(expert="c1", to_host=False)
    loader.begin_eviction(0, left, (), lambda name, seconds: seen.append((name, seconds > 0)))()
    assert seen == [("c0", True)]
    loader.close()


def test_evictions_of_a_pool_keep_their_order(board):
    loader, ended = make(board), []
    load(loader, "c0")
    load(loader, "c1")
    first = loader.begin_eviction(0, [Eviction(expert="c0", to_host=False)], ())
    second = loader.begin_eviction(0, [Eviction(expert="c1", to_host=False)], ())
    thread = threading.Thread(target=lambda: (second(), ended.append("second")))
    thread.start()
    thread.join(0.05)
    assert not ended
    first()
    thread.join(5)
    assert ended == ["second"]


def test_where_the_host_has_no_memory_experts_come_from_disk(board, is_right, monkeypatch):
    loader, device_put = make(board), jax.device_put
    load(loader, "c0")

    def full(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(loader_module.jax, "device_put", full)
    loader.begin_eviction(0, [Eviction(expert="c0", to_host=True)], ())()
    monkeypatch.setattr(loader_module.jax, "device_put", device_put)
    load(loader, "c0", tier="host")
    assert is_right(loader, "c0")
    loader.close()


def test_an_expert_that_cannot_be_copied_leaves_alone(board, is_right, monkeypatch):
    """Whatever happens to it, its memory is free, and the one that comes in its place comes."""
    loader, block = make(board), jax.block_until_ready
    load(loader, "c0")

    def broken(leaves):
        raise OSError("broken")

    monkeypatch.setattr(loader_module.jax, "block_until_ready", broken)
    loader.begin_eviction(0, [Eviction(expert="c0", to_host=True)], ())()
    monkeypatch.setattr(loader_module.jax, "block_until_ready", block)
    load(loader, "c1")
    load(loader, "c0", tier="host")
    assert is_right(loader, "c1")
    assert is_right(loader, "c0")
    loader.close()


def test_damage_ends_in_an_error_until_it_is_repaired(copied, is_right):
    folder, file = copied
    content = file.read_bytes()
    loader = make(folder)
    for damaged in (bytes([content[0] ^ 1]) + content[1:], content[:-4096]):
        file.write_bytes(damaged)
        with pytest.raises(LoadError, match=r"c0.*(damaged|instead of|ends after)"):
            load(loader, "c0")
    shutil.rmtree(file.parent)  # as the error says; it is written again
    load(loader, "c0")
    assert is_right(loader, "c0")
    loader.close()


def test_any_order_keeps_the_right_weights(board, is_right):
    """Random moves between disk, pools on the same and on another device, and the host."""
    rng = np.random.default_rng(0)
    loader = make(board, [CPU, CPU, jax.devices("cpu")[1]], keep=1 << 20)
    pools, host = [[], [], []], []
    for _ in range(60):
        pool = int(rng.integers(3))
        name = str(rng.choice([name for name in CLASSIFIERS if name not in pools[pool]]))
        evictions = []
        while len(pools[pool]) > 1:
            victim = pools[pool].pop(0)
            evictions.append((victim, victim not in host and bool(rng.integers(2))))
        host += [victim for victim, to_host in evictions if to_host]
        dropped = [victim for victim in host[:-2] if victim != name]
        host = [other for other in host if other not in dropped]
        source = next((x for x in range(3) if x != pool and name in pools[x]), None)
        if source is not None and rng.integers(2):
            load(loader, name, pool, "host", source, evictions, dropped)
        elif name in host:
            host.remove(name)
            load(loader, name, pool, "host", None, evictions, dropped)
        else:
            load(loader, name, pool, "disk", None, evictions, dropped)
        pools[pool].append(name)
        assert all(is_right(loader, expert, x) for x in range(3) for expert in pools[x])
    loader.close()
