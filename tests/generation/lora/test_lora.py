"""Requests with LoRA adapters, against models whose weights have the adapter merged into them."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.lora.peft import read_adapter
from jaxinfer.models import DecoderConfig
from jaxinfer.models.abstract import leaf_name
from jaxinfer.models.files.loading import LoadedModel, load_model
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.generation.few_programs import few_programs
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG

LENGTH = 64  # all sequences of these tests are shorter
PROMPT = list(b"def add(first, second):")
OUTPUTS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
ADAPTERS = {  # name -> rank and the projections it changes
    "all": (4, tuple(OUTPUTS)),
    "thin": (1, ("self_attn.q_proj", "self_attn.v_proj")),
    "mlp": (2, ("mlp.gate_proj", "mlp.down_proj")),
    "out": (3, ("self_attn.o_proj",)),
    "keys": (2, ("self_attn.k_proj", "mlp.up_proj")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The adapters, as PEFT writes them."""
    base, rng = tmp_path_factory.mktemp("adapters"), np.random.default_rng(0)
    return {
        name: save_adapter(
            base / name,
            {
                f"model.layers.{layer}.{module}": random_pair(*OUTPUTS[module], rank, rng)
                for layer in range(CONFIG.layers)
                for module in modules
            },
        )
        for name, (rank, modules) in ADAPTERS.items()
    }


@pytest.fixture(scope="module")
def adapted(model_dir, folders):
    """Room for three of the five adapters, and for one in host memory; prompts go in pieces of 16 tokens."""
    sizes = {"max_batch": 4, "token_budget": 16, "chunk_size": 16, "max_adapters": 3, "adapter_bytes": 1}
    with few_programs():
        return LLM(model_dir, adapters=folders, **sizes)


def merged(model: LoadedModel, folder) -> nnx.State:
    """The model's state with an adapter added to its weights."""
    assert isinstance(model.config, DecoderConfig)
    layers = read_adapter(folder, "tiny", model.config).layers if folder else {}
    state = dict(nnx.to_flat_state(model.state))
    for path, variable in state.items():
        name = leaf_name(path).removesuffix(".weight")
        if name in layers:
            state[path] = variable.replace(variable[...] + layers[name].b @ layers[name].a)
    return nnx.from_flat_state(state)


@jax.jit(static_argnums=0)
def log_probabilities(graphdef, state, ids):
    """[T] -> [T, V], of the token after each one, without a cache."""
    decoder = nnx.merge(graphdef, state)
    hidden, _ = decoder(ids[None], jnp.arange(len(ids))[None])
    return jax.nn.log_softmax(decoder.logits(hidden[0]))


@pytest.fixture(scope="module")
def reference(model_dir, folders):
    """Log probabilities [tokens, V] at an output's tokens, of the model with an adapter merged into it, with errors.

    The errors [tokens] are the largest changes if each weight changes by a rounding: attention magnifies those of some
    tokens a hundred times.
    """
    model = load_model(model_dir)
    states = {name: merged(model, folder) for name, folder in {None: None, **folders}.items()}

    def rows(output, adapter):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        padded = np.pad(ids, (0, LENGTH - len(ids)))
        state, here = states[adapter], slice(len(output.prompt_token_ids) - 1, len(ids) - 1)
        right, *others = (
            np.asarray(log_probabilities(model.graphdef, changed, padded))[here]
            for changed in (state, *(jax.tree.map(functools.partial(rounded, seed), state) for seed in range(3)))
        )
        return right, np.max([abs(other - right) for other in others], axis=(0, 2))

    return rows


def rounded(seed, weight):
    """Weights that each are a unit in the last place larger, or smaller, or neither."""
    steps = np.random.default_rng(seed).integers(-1, 2, weight.shape)
    return weight * (1 + np.finfo(np.float32).eps * steps.astype(np.float32))


@pytest.fixture(scope="module")
def check(reference):
    """Asserts that an output is the greedy text of the model with an adapter merged into it, or with none."""

    def check(output, adapter):
        (rows, errors), completion = reference(output, adapter), output.outputs[0]
        np.testing.assert_array_equal(rows.argmax(axis=1), completion.token_ids)
        assert (abs(logprobs(output) - rows.max(axis=1)) <= 4 * errors).all()

    return check


def logprobs(output):
    return [entry.logprob for entry in output.outputs[0].logprobs]


def greedy(adapter, max_tokens=8):
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, adapter=adapter)


def generate(llm, names, prompts=None):
    """One batch, a request for each name."""
    prompts = prompts or [[*PROMPT, index] for index in range(len(names))]
    outputs = llm.generate(prompts, [greedy(name) for name in names])
    llm.engine.scheduler.check_integrity()
    return outputs


def test_adapters_share_a_batch_with_each_other_and_with_none(adapted, check):
    names = ["all", None, "thin", "mlp"]
    outputs = generate(adapted, names)
    for output, name in zip(outputs, names, strict=True):
        check(output, name)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 4


def test_more_adapters_than_slots(adapted, check):
    cache = adapted.engine.adapters
    names = [*ADAPTERS, None, *reversed(ADAPTERS), *ADAPTERS]
    for output, name in zip(generate(adapted, names), names, strict=True):
        check(output, name)
    assert not cache.take_uploads()
    assert cache.size < len(ADAPTERS)  # so that some were evicted, and loaded again


def test_equal_prompts_with_different_adapters_share_no_pages(adapted, check):
    prompt = list(b"the same beginning, longer than two pages of it")
    cached = []
    for name in ("all", "thin", None, "all", "thin", None):
        (output,) = generate(adapted, [name], [prompt])
        check(output, name)
        cached.append(output.num_cached_tokens)
    assert cached == [0] * 3 + [len(prompt) - 1] * 3


def test_an_adapter_whose_file_is_damaged_ends_its_requests_alone(adapted, folders, tmp_path, check):
    folder = shutil.copytree(folders["thin"], tmp_path / "damaged")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    adapted.engine.adapters.register("damaged", folder)
    damaged, sound = generate(adapted, ["damaged", "all"])
    check(sound, "all")
    assert damaged.outputs[0].finish_reason == "error"
    assert "damaged/adapter_model.safetensors: truncated or corrupt" in str(damaged.outputs[0].error)


def test_an_adapter_that_was_replaced_is_refused_when_it_is_read_again(adapted, folders, tmp_path, check):
    """Its cached prefixes are of the old one, which runs as long as it is there."""
    folder, prompt = (
        shutil.copytree(folders["mlp"], tmp_path / "retrained"),
        list(b"longer than two pages of 16 tokens"),
    )
    file = folder / "adapter_model.safetensors"
    adapted.engine.adapters.register("retrained", folder)
    (first,) = generate(adapted, ["retrained"], [prompt])
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file)
    (resident,) = generate(adapted, ["retrained"], [prompt])
    assert (first.num_cached_tokens, resident.num_cached_tokens) == (0, len(prompt) - 1)
    others = [generate(adapted, [name], [prompt])[0] for name in ("all", "thin", "out")]  # evict it
    changed, sound = generate(adapted, ["retrained", "all"], [prompt, prompt])
    assert changed.outputs[0].finish_reason == "error"
    assert "retrained: has changed since adapter 'retrained' was first read" in str(changed.outputs[0].error)
    shutil.copy(folders["mlp"] / file.name, file)
    (restored,) = generate(adapted, ["retrained"], [prompt])
    for output in (first, resident, restored):
        check(output, "mlp")
    for output, name in zip([*others, sound], ("all", "thin", "out", "all"), strict=True):
        check(output, name)


@pytest.mark.slow
def test_an_adapter_over_int8_weights(model_dir, folders, reference):
    """Log probabilities stay near those of the float model with the adapter, far from those of the one without."""
    llm = LLM(model_dir, max_batch=2, token_budget=16, chunk_size=16, quantize="int8", adapters={"all": folders["all"]})

    def error(output, name):
        tokens = output.outputs[0].token_ids
        return np.abs(reference(output, name)[0][np.arange(len(tokens)), tokens] - logprobs(output)).mean()

    adapted, plain = generate(llm, ["all", None])
    assert error(adapted, "all") < 0.5  # 0.28, of log probabilities down to -30
    assert error(plain, None) < 0.5  # 0.13
    assert error(adapted, None) > 2  # 7.2


@pytest.mark.slow
def test_a_mesh_and_rules_of_its_own_change_no_token(model_dir, folders, check):
    llm = LLM(
        model_dir,
        max_batch=2,
        token_budget=16,
        chunk_size=16,
        mesh=MeshConfig(tensor=2),
        rules=ShardingRules(vocab=None),
        adapters=folders,
        max_adapters=3,
    )
    names = ["all", None, "thin", "mlp"]
    for output, name in zip(generate(llm, names), names, strict=True):
        check(output, name)
    assert llm.engine.executor.state.adapters is not None
    stack = llm.engine.executor.state.adapters[0]
    assert stack.qkv.b.addressable_shards[0].data.shape[0] == stack.qkv.b.shape[0] // 2


def test_what_no_engine_can_serve_is_refused(model_dir, folders, adapted, llm):
    with pytest.raises(ValueError, match=r"Prompt 1: unknown adapter 'other'; known: all, .*keys"):
        adapted.generate([PROMPT, PROMPT], [greedy("all"), greedy("other")])
    with pytest.raises(ValueError, match="adapter is 'all', but the engine has no room for adapters"):
        llm.generate(PROMPT, greedy("all"))
    with pytest.raises(ValueError, match="rank 4 is more than the 2 that are reserved; raise max_lora_rank to 4"):
        LLM(model_dir, adapters=folders, max_lora_rank=2)
    with pytest.raises(ValueError, match="max_adapters=0, but adapters are passed"):
        LLM(model_dir, adapters=folders, max_adapters=0)
    with pytest.raises(ValueError, match=r"elsewhere/adapter_config\.json: no such file"):
        LLM(model_dir, adapters={"all": "elsewhere"})
