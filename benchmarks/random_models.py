"""Model directories of random weights, in our format alone."""

from pathlib import Path

from flax import nnx

from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.text.decoder import Decoder


def save_random(folder: Path, config: DecoderConfig) -> Decoder:
    """Write a model in float32, with a tokenizer whose tokens are t0, t1, ...; return it."""
    print(f"Writing a random model to {folder}", flush=True)
    model = Decoder(config, WeightFormat(), rngs=nnx.Rngs(0))
    save_model(folder, model, family="benchmark", tokenizer=_tokenizer(config.vocab))
    return model


def _tokenizer(vocab: int) -> dict[str, bytes]:
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0")
    return {"tokenizer.json": Tokenizer(words).to_str().encode()}
