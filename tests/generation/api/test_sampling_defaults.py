"""Options that are left out are those that the model's files name, from `generation_config.json` to the tokens."""

import asyncio
import contextlib
import json
import pathlib
import shutil

import pytest
import tokenizers

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.generation.api import async_llm
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs

GOLDEN = pathlib.Path(__file__).parents[2] / "goldens" / "llama_llama3"
NAMED = {"temperature": 0.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
ENDS = (3, 5)
MESSAGES = [{"role": "user", "content": "w7 w8"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face directory whose config and tokenizer name different ends of a text, as ChatML models have them."""
    copy = tmp_path_factory.mktemp("hf") / "named"
    shutil.copytree(GOLDEN, copy)
    vocab = {"<unk>": 0} | {f"w{i}": i for i in range(1, 64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(copy / "tokenizer.json"))
    template = "{{ messages[-1].content }}"
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w5", "chat_template": template}))
    fields = NAMED | {"do_sample": False, "eos_token_id": 3}
    (copy / "generation_config.json").write_text(json.dumps(fields))
    return copy


@pytest.fixture(scope="module")
def llm(folder):
    with few_programs():
        return LLM(folder, **PLAIN)


def test_params_that_are_left_out_are_the_models(llm, folder):
    named = SamplingParams(**NAMED)
    assert llm.prepare("w1").sampling == SamplingParams.from_model(folder) == SamplingParams.from_model(llm) == named
    assert SamplingParams.from_model(folder, chat=True) == SamplingParams(**NAMED, max_tokens=512)
    changed = SamplingParams.from_model(folder, temperature=0.5, max_tokens=3, chat=True)
    assert changed == SamplingParams(**NAMED | {"temperature": 0.5}, max_tokens=3)


def test_params_that_are_given_are_neutral(llm):
    assert llm.prepare("w1", SamplingParams()).sampling == SamplingParams()


def test_a_model_that_names_none_has_neutral_defaults(model_dir):
    assert SamplingParams.from_model(model_dir) == SamplingParams()
    assert SamplingParams.from_model(model_dir, chat=True) == SamplingParams(max_tokens=512)


def test_every_way_to_generate_uses_them(llm, folder, monkeypatch):
    """Greedy, as the model's temperature of 0 says, and penalised; for a chat with more tokens."""
    expected = [
        llm.generate("w7 w8", SamplingParams(**NAMED, max_tokens=count))[0].outputs[0].token_ids for count in (128, 512)
    ]
    assert llm.generate("w7 w8")[0].outputs[0].token_ids == expected[0]
    assert list(llm.stream("w7 w8"))[-1].outputs[0].token_ids == expected[0]
    assert llm.chat(MESSAGES).outputs[0].token_ids == expected[1]
    monkeypatch.setattr(async_llm, "load_engine", lambda path, **options: llm._loaded)
    monkeypatch.setattr(llm.engine, "close", lambda: None)  # other tests use it
    with contextlib.closing(AsyncLLM(folder)) as served:

        async def main():
            return await served.generate("w7 w8").final(), await served.chat(MESSAGES).final()

        outputs = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("end", ENDS)
def test_the_ends_that_config_and_tokenizer_name_end_a_chat(llm, end):
    params = SamplingParams(temperature=0, logit_bias={end: 1000.0})
    for output in (llm.chat(MESSAGES, params), llm.generate("w7 w8", params)[0]):
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([end], "stop")


def test_wrong_options_are_refused(folder):
    with pytest.raises(TypeError, match="SamplingParams has no option max_new_tokens: use max_tokens"):
        SamplingParams.from_model(folder, max_new_tokens=3)
    with pytest.raises(TypeError, match="LLM has no option generation_config: give SamplingParams"):
        LLM(folder, generation_config="vllm")
