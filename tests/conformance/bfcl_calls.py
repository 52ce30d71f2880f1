"""Calls of a constrained model in the eyes of the checker of BFCL: `bfcl_calls.py URL MODEL`.

The parameters may only have values that BFCL takes for right, so that a right server gives right calls.
"""

import collections
import json
import sys
import types
from pathlib import Path

import openai

# The checker wants one flag of each model, from a module that imports the client of every vendor.
NO_MODEL = types.SimpleNamespace(underscore_to_dot=False)
config = types.ModuleType("bfcl_eval.constants.model_config")
config.MODEL_CONFIG_MAPPING = collections.defaultdict(lambda: NO_MODEL)
sys.modules[config.__name__] = config

import bfcl_eval  # noqa: E402
from bfcl_eval.constants.enums import Language  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402

URL, MODEL = sys.argv[1:]
COUNT = 40  # of each kind
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
(THINKS,) = client.post(f"{URL}/tokenize", cast_to=dict, body={"prompt": "<"})["tokens"]
"""The token with which reasoning would begin, which is free, and which a random model does not end."""


def lines(path):
    file = Path(bfcl_eval.__file__).parent / "data" / path
    return [json.loads(line) for line in file.read_text().splitlines()[:COUNT]]


def standard(schema):
    """A schema of BFCL as a JSON Schema."""
    if isinstance(schema, list):
        return [standard(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: standard(value) for key, value in schema.items()}
    if isinstance(kind := made.get("type"), str):
        made["type"] = TYPES.get(kind, kind)
    return made


def tool(function, right):
    """A tool whose parameters are right. right: the values of each; "" stands for one that is left out."""
    parameters = standard(function["parameters"])
    if right is not None:
        properties = {
            name: {"enum": [value for value in right[name] if value != ""]}
            for name in parameters["properties"]
            if any(value != "" for value in right.get(name, ()))
        }
        given = parameters.get("required", ())
        required = [name for name in properties if "" not in right[name] or name in given]
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    function = {"name": function["name"], "description": function["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def typed(value, schema):
    """A value in its type: in JSON 1 is 1.0, and for BFCL it is not."""
    if isinstance(value, list):
        return [typed(each, schema.get("items", {})) for each in value]
    return float(value) if schema.get("type") == "number" and isinstance(value, int) else value


def flat(value):
    """Whether a right value is written as it is: of nested ones BFCL lists the values of each field."""
    return not isinstance(value, dict) and not (isinstance(value, list) and any(isinstance(x, dict) for x in value))


def check(kind):
    """Ask every question of a kind; return how many were asked."""
    asked = 0
    file = f"BFCL_v4_{kind}.json"
    for question, answer in zip(lines(file), lines(f"possible_answer/{file}"), strict=True):
        ((name, right),) = answer["ground_truth"][0].items()
        if not all(flat(value) for values in right.values() for value in values):
            continue
        tools = [tool(each, right if each["name"] == name else None) for each in question["function"]]
        choice = "required" if len(tools) == 1 else {"type": "function", "function": {"name": name}}
        options = {
            "logit_bias": {THINKS: -100},
            "parallel_tool_calls": False,
            "tools": tools,
            "tool_choice": choice,
            "temperature": 1,
            "seed": 1,
            "max_tokens": 400,
        }
        (message,) = question["question"]
        message = client.chat.completions.create(model=MODEL, messages=message[:1], **options).choices[0].message
        (call,) = message.tool_calls
        schemas = tool(next(each for each in question["function"] if each["name"] == call.function.name), None)
        schemas = schemas["function"]["parameters"]["properties"]
        arguments = json.loads(call.function.arguments)
        calls = [{call.function.name: {key: typed(value, schemas[key]) for key, value in arguments.items()}}]
        found = ast_checker(question["function"], calls, answer["ground_truth"], Language.PYTHON, kind, "none")
        assert found["valid"], (question["id"], calls, found)
        asked += 1
    return asked


for kind in ("simple_python", "multiple"):
    print(kind, check(kind), flush=True)
