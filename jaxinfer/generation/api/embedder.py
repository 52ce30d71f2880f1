"""`Embedder`: vectors of texts from an encoder or a decoder, of images from a vision transformer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np

from jaxinfer.generation.api.build import ModelOptions
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.api.holder import EngineHolder
from jaxinfer.generation.api.loading import load_engine, load_image_embedder
from jaxinfer.generation.execution.images import ImageEngine
from jaxinfer.generation.foreign_options import MODEL, refuses
from jaxinfer.hub import resolve
from jaxinfer.models.devices import AnyMesh
from jaxinfer.models.files.description import Description
from jaxinfer.models.vision.image_files import AnyImage, is_pillow
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.sharding import ShardingRules
from jaxinfer.text import Prompt


@refuses(MODEL)
class Embedder(EngineHolder):
    """A model, ready to embed texts: an encoder or a decoder, with the pooling that its files name, else by the mean of
    its hidden vectors.

    Or a vision transformer, ready to embed images: by the vector that its head of classes takes, in a backbone without
    one the class token after the last norm, or SigLIP's pooling.

    Args:
      path: a model directory, or what stands for one, as in `LLM`.
      mesh: how to split the model over devices, as in `LLM`.
      dtype: as in `LLM`.
      quantize: as in `LLM`.
      rules: as in `LLM`.
      max_batch: how many texts, or images, can run at once.
      context: how many tokens a text can have; None: the model's own.
      progress: as in `LLM`.
      options: those of `LLM` for a decoder. An encoder takes `MemoryOptions`, and of `EngineOptions` token_budget,
        overlap, kernels and level. A vision transformer takes kernels and level.

    Raises as `LLM` does.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mesh: AnyMesh = None,
        dtype: str | None = None,
        quantize: str | None = None,
        rules: ShardingRules | None = None,
        max_batch: int = 32,
        context: int | None = None,
        progress: ProgressOption = None,
        **options: Unpack[ModelOptions],
    ):
        with showing(progress), long_work(f"loading {path}"):
            folder = resolve(path)
            reads_images = Description.read(folder).kind == "vision_transformer"
            load = load_image_embedder if reads_images else load_engine
            loaded = load(
                folder,
                owner="Embedder",
                mesh=mesh,
                dtype=dtype,
                quantize=quantize,
                rules=rules,
                max_batch=max_batch,
                context=context,
                **options,
            )
        super().__init__(loaded)

    def embed(
        self,
        inputs: Prompt | AnyImage | Sequence[Prompt] | Sequence[AnyImage],
        *,
        adapter: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
    ) -> np.ndarray:
        """Embed one or several texts or images: float32 [inputs, D].

        Vectors have length 1, unless the model's `modules.json` has no Normalize.

        Args:
          inputs: texts or token ids; for a vision transformer images: uint8 [H, W, 3] (RGB) of any size, images of
            Pillow, or files. They are resized and cropped as the model says, which needs the extra `images`.
          adapter: a LoRA adapter; for texts alone.
          prompt: the name of one of the model's prompts, such as "query", or a text, to put before each text; None: the
            model's default prompt if it has one; "": nothing. For texts alone.
          truncate: whether texts of more tokens than the model takes are cut; False: they are refused. Token ids are
            never cut. For texts alone.

        Raises ValueError for an invalid text, naming it, before anything runs; for an invalid image when it is reached.
        """
        with self._call():
            if not isinstance(engine := self._loaded.engine, ImageEngine):
                size = self.model.transformer.output_width
                texts = cast("Prompt | Sequence[Prompt]", inputs)
                return embed(engine, texts, size=size, adapter=adapter, prompt=prompt, truncate=truncate)
            for_texts = {"adapter": adapter, "prompt": prompt, "truncate": None if truncate else truncate}
            for name, given in for_texts.items():
                if given is not None:
                    raise ValueError(f"{name}={given!r} is not supported for an image model; leave it out.")
            return engine.embed(_images(inputs))


def _images(inputs: Any) -> Sequence[AnyImage]:
    """A list of images, of one or several."""
    if isinstance(inputs, str | Path) or is_pillow(inputs) or getattr(inputs, "ndim", 4) == 3:
        return [inputs]
    return inputs
