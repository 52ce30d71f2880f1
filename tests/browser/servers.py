"""A server for the page: a model that answers from a script, one that never ends, and one without a chat template."""

import contextlib
import dataclasses
import json
import re

from tests.conformance.conftest import ROOT, free_port, serving

KEY = "secret"  # also in pages.py, which runs in another environment
ANSWERS = (
    "<think>The user asks for the memory of a KV cache. It holds keys and values of each layer, head and token.</think>"
    "Each token keeps a **key** and a **value** in every layer. A cache in `bfloat16` takes the product of\n\n"
    "- 2, for the key and the value\n- layers, KV heads and the size of a head\n- 2 bytes\n\n"
    "```python\ndef kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int) -> int:\n"
    '    """Bytes of a cache in bfloat16."""\n    return 2 * layers * kv_heads * head_dim * tokens * 2\n\n\n'
    'print(kv_bytes(28, 8, 128, 4096) / 2**20, "MiB")\n```\n\n'
    "With 28 layers, 8 heads of 128 and 4096 tokens it takes 448 MiB.",
    '<think>Ask the tool.</think><tool_call>{"name":"weather", "arguments": {"city":"Rome"}}</tool_call>',
    "It rains in Rome, at 14 degrees. Take an umbrella.",
    '<img src=x onerror="window.ran=1"><script>window.ran=2</script> [a](javascript:window.ran=3)',
)


def pieces_of(texts):
    """Divide texts into pieces of a word or more, none of which comes twice in all of them."""
    known, divided = set(), []
    for text in texts:
        pieces, piece = [], ""
        for word in re.findall(r"\s*\S+", text):
            piece += word
            if piece not in known:
                known.add(piece)
                pieces.append(piece)
                piece = ""
        divided.append([*pieces[:-1], pieces[-1] + piece])
    return divided


def save_endless(path):
    """A model that writes random text until its context is full."""
    from jaxinfer.models.files.loading import save_model
    from tests.tiny import CHAT_TEMPLATE, ONE_KIND, byte_tokenizer, random_model

    files = {
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": CHAT_TEMPLATE}).encode(),
    }
    model = random_model(dataclasses.replace(ONE_KIND, context=4096, layers=1))
    save_model(path, model, family="tiny", tokenizer=files, eos_ids=())
    return path


@contextlib.contextmanager
def serving_the_page(folder):
    """A server that needs KEY and lets each model have one request at a time."""
    from tests.scripted import save_scripted

    models = [save_scripted(folder / "assistant", pieces_of(ANSWERS)), save_endless(folder / "endless")]
    models.append(ROOT / "examples/demo_model")
    with serving(models, folder / "log", "--max-requests", "1", "--max-batch", "2", key=KEY) as server:
        yield server
    assert "Traceback" not in (folder / "log").read_text(), (folder / "log").read_text()


@contextlib.contextmanager
def serving_a_board(folder):
    """A server of the experts of examples/board that needs KEY."""
    config, port = folder / "serve.toml", free_port()
    board = json.dumps(str(ROOT / "examples/board/board.toml"))
    config.write_text(f"port = {port}\n[experts.board]\nconfig = {board}\n")
    with serving([], folder / "log", str(config), port=port, key=KEY) as server:
        yield server
