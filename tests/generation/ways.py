"""One model and the ways to run it: engines that all tests of a way share, compared with one device."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.compiled import Costs
from jaxinfer.compiled.costs import Cost
from jaxinfer.generation.engine.speculation import TRIES
from jaxinfer.sharding import MeshConfig
from tests.generation.few_programs import few_programs
from tests.generation.sampled import SIZES, next_of_last, only_even
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, TWO_WIDTHS, save_tiny

THREE, FIVE = (dataclasses.replace(TWO_WIDTHS, layers=layers) for layers in (3, 5))
"""Layers of two kinds with different pages, which no number of stages divides evenly."""
MODELS = {"whole": THREE, "bfloat16": THREE, "five layers": FIVE, "equal pages": dataclasses.replace(CONFIG, layers=3)}
"""The models of the engines on one device that others are compared with; slices take layers with equal pages."""
WAYS = {
    "whole": {},
    "mesh": {"mesh": MeshConfig(tensor=4)},  # two KV heads and 257 tokens are fitted
    "lanes": {"mesh": MeshConfig(data=2)},
    "stages": {"mesh": MeshConfig(pipeline=2)},
    "streamed": {"weights": "disk", "num_speculative_tokens": 4},
}
"""What a way adds to the options of one device. Speculation is what makes streaming pay.

Their engines have few programs; those of `RARE_WAYS` have programs of all sizes.
"""
RARE_WAYS = {
    "lanes of two": {"mesh": MeshConfig(data=2, tensor=2)},
    "five layers": {},
    "equal pages": {},
    "four stages": {"mesh": MeshConfig(pipeline=4), "max_batch": 4},
    "stages of two": {"mesh": MeshConfig(pipeline=2, tensor=2)},
    "stages of four": {"mesh": MeshConfig(pipeline=2, tensor=4)},
    "four stages of two": {"mesh": MeshConfig(pipeline=4, tensor=2)},
    "lanes in stages": {"mesh": MeshConfig(data=2, pipeline=2)},
    "lanes in four stages": {"mesh": MeshConfig(data=2, pipeline=4)},
    "lanes in stages of two": {"mesh": MeshConfig(data=2, pipeline=2, tensor=2)},
    "streamed in slices": {"weights": "disk", "num_speculative_tokens": 4, "kv_offload": "1MiB", "cache_bytes": 60_000},
    "bfloat16": {"dtype": "bfloat16"},
    "streamed in bfloat16": {"weights": "disk", "num_speculative_tokens": 4, "dtype": "bfloat16"},
}


class Ways:
    """The engines of `WAYS` by name, each made when a test first asks for it; `folder` has their model."""

    def __init__(self, folder):
        self._models = folder
        self.folder = self._model("whole")
        processors = {"even": only_even, "next": next_of_last}
        self.options = {"logits_processors": processors, "adapters": save_adapters(folder / "adapters"), **SIZES}
        self._engines, self._results = {}, {}

    def __getitem__(self, name):
        if name not in self._engines:
            few = few_programs() if name in WAYS else contextlib.nullcontext()
            with few:
                self._engines[name] = self.make(whole_of(name), **(WAYS | RARE_WAYS)[name])
        return self._engines[name]

    def _model(self, name):
        folder = self._models / name
        return folder if folder.exists() else save_tiny(folder, config=MODELS[name])

    def make(self, whole="whole", **options):
        """Another engine of these options, with what all ways have; whole: one with its model."""
        folder, options = self._model(whole), self.options | options
        if "weights" in options:
            return with_speculation(folder, **options)
        options = {"max_decode_passes": 4, **options}
        if (mesh := options.get("mesh")) is None or mesh.pipeline == 1:
            return LLM(folder, **options)
        return in_stages(folder, **{**options, "token_budget": 32})  # four chunks a step, by the same program

    def expected(self, name, feature):
        """What a feature gives on one device."""
        whole = whole_of(name)
        if (whole, feature) not in self._results:
            self._results[whole, feature] = feature(self[whole])
        return self._results[whole, feature]


def whole_of(name):
    """The engine on one device that a way is compared with, which has its model and its dtype."""
    if "four stages" in name or name == "five layers":
        return "five layers"
    if name in ("streamed in slices", "equal pages"):
        return "equal pages"
    return "bfloat16" if name.endswith("bfloat16") else "whole"


def save_adapters(folder):
    """Adapters of layers of both stages; of matrices whose outputs or inputs a mesh splits."""
    rng = np.random.default_rng(0)
    width, heads = CONFIG.embed, CONFIG.layer(0).attention.q_heads * CONFIG.layer(0).attention.head_dim
    hidden = CONFIG.layer(0).mlp.hidden
    shapes = {
        "a": {"layers.0.self_attn.q_proj": (heads, width), "layers.0.self_attn.v_proj": (heads // 2, width)},
        "b": {"layers.1.mlp.gate_proj": (hidden, width), "layers.1.mlp.down_proj": (width, hidden)},
        "c": {"layers.2.self_attn.q_proj": (heads, width), "layers.2.self_attn.o_proj": (width, heads)},
    }
    return {
        name: save_adapter(
            folder / name, {f"model.{module}": random_pair(*shape, 3, rng) for module, shape in of.items()}
        )
        for name, of in shapes.items()
    }


def in_stages(path, *, mesh, quick=None, **options):
    """An engine; quick: the number of micro-batches that rows go in, one for each stage by default."""
    return with_costs(costs_of(mesh.pipeline, quick=quick or mesh.pipeline), path, mesh=mesh, **options)


def with_speculation(path, **options):
    """A streamed engine; speculation pays, however busy the machine is."""
    rows, most = options["max_batch"], options["num_speculative_tokens"]
    sizes = [(("chunks", 0), ("batch", rows), ("speculative", count), ("pages", 8)) for count in (0, most)]
    return with_costs(Costs.fixed({("pass", bucket): 0.001 for bucket in sizes}), path, **options)


def with_costs(costs, path, **options):
    """An engine that knows these costs, and learns no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.generation.api.loading.engine_costs", lambda *key, **options: costs)
        return LLM(path, **options)


def costs_of(stages, *, quick):
    """A record by which rows go through the stages in so many micro-batches the fastest."""
    known = {}
    for rows, count in ((rows, count) for rows in range(1, 9) for count in (1, stages) if rows % count == 0):
        sizes = {"chunks": 0, "batch": rows, "speculative": 0, "micro_batches": count}
        cost = known["ring", tuple(sizes.items())] = Cost()
        for _ in range(TRIES):
            seconds = 1e-9 if count == quick else 1e-3
            cost.add(seconds, 1, seconds)
    return Costs(known, learns=False)


def layout_of(llm):
    """Where each array of an engine lives."""
    return [x.sharding for x in jax.tree.leaves(llm.engine.executor.state.arrays)]
