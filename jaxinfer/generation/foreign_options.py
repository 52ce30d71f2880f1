"""Names that users of vLLM, transformers and llama.cpp know, and what to use here in their place."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_BEAMS = "use LLM.beam_search with BeamSearchParams"
_STRUCTURED = "use structured_outputs=StructuredOutputsParams(json=, regex=, grammar= or choice=)"
_NONE_FASTER = "leave it out, all programs are compiled"

SAMPLING: Mapping[str, str] = {
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "max_length": "use max_tokens, which does not count the prompt",
    "min_new_tokens": "use min_tokens",
    "min_length": "use min_tokens, which does not count the prompt",
    "do_sample": "use temperature, where 0 is greedy",
    "num_return_sequences": "use n",
    "best_of": "use n",
    "num_beams": _BEAMS,
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "beam_width": _BEAMS,
    "stop_strings": "use stop",
    "stop_sequences": "use stop",
    "stopping_criteria": "use stop or stop_token_ids",
    "eos_token_id": "use stop_token_ids",
    "suppress_tokens": "use logit_bias, where -inf bans a token",
    "no_repeat_ngram_size": "use repetition_penalty, frequency_penalty or logits_processors",
    "repeat_penalty": "use repetition_penalty",
    "logits_processor": "use logits_processors, by the names given to LLM",
    "guided_decoding": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "response_format": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "top_logprobs": "use logprobs",
    "output_scores": "use logprobs",
    "random_seed": "use seed",
    "lora_request": "use adapter, a name of LLM's adapters",
    "output_kind": "use LLM.stream, or OutputStream.deltas or final of AsyncLLM",
    "detokenize": "leave it out, outputs have text and token_ids",
    "truncate_prompt_tokens": "shorten the prompt",
}
"""Options of `SamplingParams`."""

BEAM_SEARCH: Mapping[str, str] = {
    "num_beams": "use beam_width",
    "max_new_tokens": "use max_tokens",
    "num_return_sequences": "use n",
    "eos_token_id": "use stop_token_ids",
    "temperature": "leave it out, beams are not drawn",
    "include_stop_str_in_output": "read token_ids, which have a beam's stop token",
}
"""Options of `BeamSearchParams`."""

MODEL: Mapping[str, str] = {
    "model": "use path, the first argument",
    "model_id": "use path, the first argument",
    "model_path": "use path, the first argument",
    "pretrained_model_name_or_path": "use path, the first argument",
    "revision": "write it behind the name, as in 'ORG/NAME@REVISION'",
    "download_dir": "set HF_HOME in the environment",
    "tokenizer": "leave it out, the model directory has its tokenizer",
    "tokenizer_mode": "leave it out, the model directory has its tokenizer",
    "skip_tokenizer_init": "leave it out, prompts may be token ids",
    "trust_remote_code": "leave it out, no code of a model's files ever runs",
    "max_model_len": "use context",
    "max_seq_len": "use context",
    "n_ctx": "use context",
    "max_num_seqs": "use max_batch",
    "max_num_batched_tokens": "use token_budget",
    "enable_chunked_prefill": "leave it out, prompts always go in chunks of chunk_size",
    "enable_prefix_caching": "use prefix_caching",
    "block_size": "use page_size",
    "num_gpu_blocks_override": "use cache_bytes",
    "kv_cache_memory_bytes": "use cache_bytes",
    "kv_cache_dtype": "use kv_dtype",
    "gpu_memory_utilization": "use device_memory, in bytes or such as '12GiB'",
    "max_memory": "use device_memory, in bytes or such as '12GiB'",
    "swap_space": "use host_kv, such as '8GiB'",
    "cpu_offload_gb": "use weights='auto' with device_memory",
    "device_map": "use mesh, or weights='auto' with device_memory",
    "n_gpu_layers": "use weights='auto' with device_memory",
    "device": "use mesh, or the environment's JAX_PLATFORMS",
    "tensor_parallel_size": "use mesh=MeshConfig(tensor=...)",
    "data_parallel_size": "use mesh=MeshConfig(data=...)",
    "pipeline_parallel_size": "use mesh=MeshConfig(pipeline=...)",
    "distributed_executor_backend": "use mesh",
    "torch_dtype": "use dtype",
    "quantization": "use quantize='int8', 'int4' or 'fp8'",
    "quantization_config": "use quantize='int8', 'int4' or 'fp8'",
    "load_in_8bit": "use quantize='int8'",
    "load_in_4bit": "use quantize='int4'",
    "enforce_eager": _NONE_FASTER,
    "compilation_config": _NONE_FASTER,
    "attn_implementation": "use kernels, True or False",
    "speculative_config": "use num_speculative_tokens, for n-gram proposals",
    "speculative_model": "use num_speculative_tokens, for n-gram proposals",
    "enable_lora": "use adapters, a dict of folders by name",
    "lora_modules": "use adapters, a dict of folders by name",
    "max_loras": "use max_adapters",
    "max_cpu_loras": "use adapter_bytes",
    "chat_template": "give it to chat",
    "seed": "use SamplingParams(seed=...)",
    "generation_config": "give SamplingParams(), which is neutral, to leave out what the model names",
    "override_generation_config": "give SamplingParams.from_model(model, ...)",
    "disable_log_stats": "use the method stats",
    "task": "use Embedder for vectors, LLM for text",
    "runner": "use Embedder for vectors, LLM for text",
}
"""Options of `LLM`, `AsyncLLM` and `Embedder`."""


def refuses[C](others: Mapping[str, str]) -> Callable[[type[C]], type[C]]:
    """Make a class refuse these names of options by a TypeError that says what to use, and list its own for others."""

    def decorate(cls: type[C]) -> type[C]:
        init, parameters = cls.__init__, inspect.signature(cls.__init__).parameters
        closed = not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

        @functools.wraps(init)
        def checked(self: C, *args: Any, **given: Any) -> None:
            unknown = [name for name in given if name not in parameters]
            for name in unknown:
                if name in others:
                    raise TypeError(f"{cls.__name__} has no option {name}: {others[name]}.")
            if unknown and closed:
                raise unknown_options(cls.__name__, unknown, list(parameters)[1:])
            init(self, *args, **given)

        cls.__init__ = checked
        return cls

    return decorate


def unknown_options(owner: str, unknown: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error of options that nobody knows."""
    return TypeError(f"{owner} has no option {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}.")
