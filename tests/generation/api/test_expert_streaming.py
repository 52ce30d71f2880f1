"""A mixture whose experts come and go generates what it generates when all are there."""

import dataclasses
import re

import numpy as np
import pytest

from jaxinfer import LLM, FinishReason, SamplingParams
from jaxinfer.generation.execution.programs.experts import mlp_kind
from jaxinfer.models.config import MoeConfig, RouterConfig, SharedMix
from jaxinfer.models.files.loading import open_model
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.layer_folders import layer_folder, write_layer_files
from tests.tiny import CONFIG, ONE_KIND, TWO_WIDTHS, save_tiny

ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8, "context": 32, "page_size": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(1, 13))


def moe(**options):
    """The tiny model's MLP, eight times, of which a token takes two."""
    return dataclasses.replace(
        CONFIG.layer(0).mlp, moe=MoeConfig(router=RouterConfig(experts=8, experts_per_token=2), **options)
    )


CONFIGS = {
    "every layer": ONE_KIND.with_mlps((moe(),)),
    "every other layer, shared": CONFIG.with_mlps(
        (CONFIG.layer(0).mlp, moe(shared_hidden=24, shared_mix=SharedMix.GATED))
    ),
    "pages of two widths": TWO_WIDTHS.with_mlps((moe(),)),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "mixture", config=CONFIGS["every layer"])


def tokens(llm):
    (output,) = llm.generate([PROMPT], GREEDY)
    return output.outputs[0].token_ids


def test_layers_share_programs_of_experts_if_their_weights_have_equal_shapes():
    windows, widths = (dataclasses.replace(config, layers=4).with_mlps((moe(),)) for config in (CONFIG, TWO_WIDTHS))
    assert [mlp_kind(windows, layer) for layer in range(4)] == [0, 0, 0, 0]
    assert [mlp_kind(widths, layer) for layer in range(4)] == [0, 1, 0, 1]


def least_memory(model, **options):
    """The least device memory that works, as the error says that comes with less."""
    with pytest.raises(MemoryError, match=r"4 experts of .* raise device_memory above") as error:
        LLM(model, weights="disk", device_memory=1, **options, **ONE)
    weights = int(re.search(r"above .*?\((\d+) bytes\)", str(error.value))[1])
    with pytest.raises(MemoryError, match=r"4 experts of .* raise device_memory to at least") as error:
        LLM(model, weights="disk", device_memory=weights + 1, **options, **ONE)
    return int(re.search(r"at least .*?\((\d+) bytes\)", str(error.value))[1])


@pytest.mark.slow
def test_all_stay_where_there_is_room(mixture):
    llm = LLM(mixture, weights="disk", **ONE)
    assert tokens(llm) == tokens(LLM(mixture, **ONE))
    placement = llm.placement.experts
    assert (placement.tier, placement.count) == ("disk", 16)
    assert set(llm.placement.tiers) == {"device"}
    assert llm.streaming.expert_fetches <= 16


def test_tokens_are_the_same_where_few_stay(mixture):
    want = tokens(LLM(mixture, **ONE))
    tight = LLM(mixture, weights="disk", device_memory=least_memory(mixture), **ONE)
    assert tight.placement.experts.slots == 4
    assert tokens(tight) == want
    assert tight.streaming.expert_fetches > 16
    assert tight.streaming.expert_bytes == tight.streaming.expert_fetches * tight.placement.experts.bytes
    again = tight.streaming.expert_fetches
    assert tokens(tight) == want  # with most of the prompt's keys from the cache
    assert tight.streaming.expert_fetches > again


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_same_in_every_format(tmp_path, name, quantize):
    model = save_tiny(tmp_path / "model", config=CONFIGS[name])
    want = tokens(LLM(model, quantize=quantize, **ONE))
    memory = least_memory(model, quantize=quantize)
    assert tokens(LLM(model, weights="disk", device_memory=memory, quantize=quantize, **ONE)) == want
    assert tokens(LLM(model, weights="host", quantize=quantize, **ONE)) == want


@pytest.mark.slow
def test_speculation_and_batches(mixture):
    options = ONE | {"max_batch": 3}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [PROMPT, [5, 6, 5, 6, 5, 6], [9]]

    def all_tokens(**others):
        return [o.outputs[0].token_ids for o in LLM(mixture, **options, **others).generate(prompts, params)]

    want = all_tokens()
    assert all_tokens(weights="disk") == want
    assert all_tokens(weights="disk", num_speculative_tokens=3) == want
    assert all_tokens(weights="disk", kv_offload="1MiB", cache_bytes=50_000) == want  # pages of one of the prompts


def test_each_expert_has_a_file_and_is_read_by_itself(mixture, tmp_path):
    opened = open_model(mixture)
    folder = write_layer_files(opened, tmp_path)
    files = sorted(file.name for file in folder.glob("*.bin"))
    assert files == [f"expert-{layer:05}-{expert:05}.bin" for layer in range(2) for expert in range(8)] + [
        "layer-00000.bin",
        "layer-00001.bin",
    ]
    names = {"layers.1.mlp.experts.down.weight"}
    whole = opened.read(names.__contains__)
    for expert in range(8):
        part = opened.read(names.__contains__, expert=expert)
        np.testing.assert_array_equal(part[f"layers.1.mlp.experts.down.weight@{expert}"], whole[min(names)][expert])


def test_a_damaged_expert_ends_the_request_by_name_and_the_next_one_goes_on(mixture, tmp_path):
    llm = LLM(mixture, weights="disk", layer_files=tmp_path, **ONE)
    want = tokens(llm)
    llm.engine.executor.restart()  # as an abort does: nothing is there any more
    files = sorted(layer_folder(open_model(mixture), tmp_path).glob("expert-00001-*.bin"))
    kept = {file: file.read_bytes() for file in files}
    for file, content in kept.items():
        file.write_bytes(b"\1" * len(content))
    (output,) = llm.generate([PROMPT], GREEDY)
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert re.search(r"layer 1, expert \d: .*expert-00001-0000\d.bin, .* is damaged", output.outputs[0].error)
    for file, content in kept.items():
        file.write_bytes(content)
    assert tokens(llm) == want


@pytest.mark.parametrize("weights", ["host", "disk"])
def test_experts_are_not_streamed_to_several_devices(mixture, weights):
    message = rf"mixture: streaming the experts of a mixture to 2 devices is not implemented, and weights='{weights}'"
    with pytest.raises(ValueError, match=message):
        LLM(mixture, weights=weights, mesh=MeshConfig(expert=2), **ONE)
