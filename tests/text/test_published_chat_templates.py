"""Chat templates of published models, as far as packages of the peers' environment ship them: never kept here."""

import json
import os
import pathlib
import subprocess

import pytest

from jaxinfer.text.chat_template import ChatTemplates
from tests.goldens.make_chat_goldens import CONVERSATIONS, TOOLS

PEERS = pathlib.Path(os.environ.get("JAXINFER_PEERS") or pathlib.Path(__file__).parents[2] / ".venv-peers/bin/python")

RENDER = """
import ast, importlib.util, json, pathlib, sys
import jinja2, tokenizers, transformers

asked = json.load(sys.stdin)
found = importlib.util.find_spec(asked["package"])
folder = pathlib.Path(found.origin).parent if found else None
texts = {}
for file in sorted(folder.rglob("*.py") if folder else ()):
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)) if "{%" in source else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "{%" in node.value and "messages" in node.value and "{{" in node.value and ">>>" not in node.value:
                texts[node.value] = file.name
backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
rendered = []
for text, file in texts.items():
    for talk, messages in asked["conversations"].items():
        for tools in asked["tools"]:
            for begun in (True, False):
                given = {"tools": tools, "add_generation_prompt": begun, "chat_template": text, "tokenize": False}
                try:
                    result = tokenizer.apply_chat_template(messages, **given)
                except Exception as error:
                    result = None
                rendered.append([file, text, talk, tools, begun, result])
print(json.dumps(rendered))
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["transformers", "llama_cpp"])
def test_published_templates_render_as_transformers_does(package, tmp_path):
    if not PEERS.exists():
        pytest.skip(f"no interpreter of the peers at {PEERS}: run `make peers`, or set JAXINFER_PEERS")
    asked = json.dumps({"package": package, "conversations": CONVERSATIONS, "tools": list(TOOLS.values())})
    # -I: this test's folder and environment are not the peers'.
    process = subprocess.run([PEERS, "-I", "-c", RENDER], input=asked, capture_output=True, text=True, check=True)
    if not (rendered := json.loads(process.stdout)):
        pytest.skip(f"{package} is not installed beside {PEERS}, or ships no chat template any more")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    templates, different = ChatTemplates(tmp_path), []
    for file, text, talk, tools, begun, expected in rendered:
        try:
            found = templates.render(CONVERSATIONS[talk], tools=tools, add_generation_prompt=begun, chat_template=text)
        except ValueError:
            found = None
        if found != expected:
            different.append((file, text[:60], talk, bool(tools), begun))
    assert different == []
    assert any(expected for *_, expected in rendered)
