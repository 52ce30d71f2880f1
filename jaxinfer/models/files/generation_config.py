"""`generation_config.json`: which fields are read, which change no text here, and which are not supported.

As in vLLM, sampling values are defaults whatever `do_sample` says. A field that would change texts, but is not
supported, is named in a warning when the model is converted.
"""

import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxinfer.checkpoints import CheckpointError

log = logging.getLogger(__name__)

GENERATION = "generation_config.json"

READ: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields that are defaults -> their names in `SamplingParams`."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id")
"""Fields that are read with those of `config.json`."""

HARMLESS = frozenset(
    (
        # Lengths and how a text is drawn: SamplingParams decides.
        *("do_sample", "max_length"),
        # Options of what is not supported, which is named itself.
        *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),
        *("xtc_threshold", "mirostat_tau", "mirostat_eta"),
        # Scores stay the same: they are normalised and finite anyway.
        *("renormalize_logits", "remove_invalid_values"),
        # What is computed how, and which values are returned.
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        # Speculation: it never changes what may be drawn, or needs a second model.
        *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        # Padding, the decoder of an encoder-decoder, and who wrote the file.
        *("pad_token_id", "decoder_start_token_id", "_from_model_config", "_commit_hash", "transformers_version"),
    )
)
"""Fields that change no text here."""

UNSUPPORTED: Mapping[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "top_h": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "token_healing": False,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    # llama.cpp's, in the metadata of GGUF files
    "xtc_probability": 0.0,
    "mirostat": 0,
    "penalty_last_n": None,
    "sequence": None,
}
"""Fields that would change texts -> the value with which they do not; null, false, 0 and empty do not either."""


class SamplingDefaults(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The values that a model's files name for `SamplingParams`, by its names; None: they name none."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The values that are named."""
        return msgspec.to_builtins(self)


def read_sampling(file: str | os.PathLike[str], fields: Mapping[str, Any]) -> SamplingDefaults:
    """Read the sampling defaults among the fields of `generation_config.json`.

    Warns of fields that would change texts and are not supported. Raises CheckpointError that names a wrong value.
    """
    if ignored := [f"{name}={value!r:.60}" for name, value in fields.items() if _is_ignored(name, value)]:
        log.warning("%s: not supported, so texts are generated without: %s.", file, ", ".join(ignored))
    named: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in READ or value is None:
            continue
        named[READ[name]] = 0 if name == "top_k" and value == -1 else value  # -1: all, to vLLM
        try:
            msgspec.convert(named, SamplingDefaults)
        except msgspec.ValidationError as error:
            expected = str(error).partition(" - at")[0].lower()
            raise CheckpointError(f"{file}: {name}={value!r}: {expected}; correct it, or remove it.") from error
    return msgspec.convert(named, SamplingDefaults)


def _is_ignored(name: str, value: Any) -> bool:
    if name in READ or name in SPECIAL_TOKENS or name in HARMLESS:
        return False
    return bool(value) and value != UNSUPPORTED.get(name)
