"""LoRA adapters that clients load and unload: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

import asyncio

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.fields import shown
from jaxinfer.generation.lora.adapter_info import CONFIG
from jaxinfer.generation.lora.peft import WEIGHTS
from jaxinfer.http.bodies import Body
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.folders import find_inside
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels

MAX_NAME = 256
"""Characters of an adapter's name."""


class LoadAdapterBody(Body, kw_only=True):
    """The body of `/v1/load_lora_adapter`.

    Attributes:
      lora_name: the name by which clients will ask for it.
      lora_path: its folder, in one of the model's adapter folders: from there, or absolute.
      load_inplace: whether it may take the place of the adapter that has this name.
    """

    model: str = ""
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(Body, kw_only=True):
    """The body of `/v1/unload_lora_adapter`."""

    model: str = ""
    lora_name: str
    lora_int_id: int | None = None  # vLLM's: it changes nothing


async def load_adapter(models: ServedModels, model: ServedModel, body: LoadAdapterBody) -> None:
    """Load an adapter: read it in a thread, and give it its name. Raises BadRequestError."""
    _check_name(models, model, body)
    if not model.adapter_folders:
        raise BadRequestError(
            f"the model {model.name!r} loads no adapters: start the server with --adapter-folder DIR.",
            status=403,
            code="adapters_not_allowed",
        )
    adapters = model.llm.engine.adapters
    if adapters is None:
        raise BadRequestError(f"the model {model.name!r} has no room for adapters: set its max_adapters.")
    async with model.loads_adapter:  # one at a time: each takes memory
        name = await asyncio.to_thread(_register, model, body)
    _check_name(models, model, body)  # another request may have taken it meanwhile
    model.adapters[body.lora_name] = name


def unload_adapter(model: ServedModel, body: UnloadAdapterBody) -> None:
    """Unload an adapter: new requests do not find it; running ones keep it. Raises BadRequestError."""
    if model.adapters.pop(body.lora_name, None) is None:
        raise BadRequestError(
            f"the model {model.name!r} has no adapter {shown(body.lora_name)}.",
            param="lora_name",
            status=404,
            code="model_not_found",
        )


def _check_name(models: ServedModels, model: ServedModel, body: LoadAdapterBody) -> None:
    """Raise BadRequestError for a name that is taken, or that cannot be shown."""
    name = body.lora_name
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise BadRequestError(f"lora_name must be 1 to {MAX_NAME} printable characters.", param="lora_name")
    if name in model.adapters:
        if not body.load_inplace:
            raise BadRequestError(
                f"an adapter {name!r} has already been loaded; unload it first, or set load_inplace.",
                param="lora_name",
            )
    elif name in models.names:
        raise BadRequestError(f"{name!r} is the name of another model; choose another.", param="lora_name")


def _register(model: ServedModel, body: LoadAdapterBody) -> str:
    """Read and register an adapter; return its name in the engine. Raises BadRequestError."""
    adapters = model.llm.engine.adapters
    assert adapters is not None
    folder = find_inside(model.adapter_folders, body.lora_path, "lora_path", "adapters", (CONFIG, WEIGHTS))
    try:
        return adapters.register_checked(body.lora_name, folder)
    except CheckpointError as error:  # the client knows its folder by its own path only
        message = str(error).replace(str(folder), body.lora_path)
    except OSError as error:
        message = f"lora_path: {shown(body.lora_path)}: {error.strerror}."
    raise BadRequestError(message, param="lora_path")
