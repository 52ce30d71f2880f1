"""What a user of the `openai` client does with the Responses API: `openai_responses.py URL MODEL`.

It fails by an exception. The model calls functions when it must. The environment is that of `make conformance`.
"""

import json
import sys
from typing import Literal

import openai
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
ASK = {"model": MODEL, "input": "hi", "extra_body": {"seed": 1}}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
NOW = {"type": "function", "name": "now", "parameters": NOTHING, "strict": True}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def checked(response):
    """A response, which has the types of the client's models."""
    Response.model_validate_json(response.to_json(warnings=False))
    assert None not in (response.usage, response.output, response.status, response.text)
    return response


def streamed(**options):
    """The response of a stream, whose events have the types and the order that the client wants."""
    with client.responses.stream(**ASK | options) as stream:
        for number, event in enumerate(stream):
            EVENT.validate_json(event.to_json(warnings=False))
            assert event.sequence_number == number
            if event.type == "response.output_item.done":
                assert event.item.status == "completed"
        return checked(stream.get_final_response())


def texts():
    whole = checked(client.responses.create(**ASK))
    assert (whole.status, whole.output_text) == ("completed", "Hi.")
    assert streamed().output_text == whole.output_text
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert client.responses.create(**ASK | {"input": messages}).usage.input_tokens > whole.usage.input_tokens


def tools():
    for choice in ("required", {"type": "function", "name": "weather"}):
        options = {"tools": [WEATHER, NOW], "tool_choice": choice}
        for response in (checked(client.responses.create(**ASK, **options)), streamed(**options)):
            calls = [item for item in response.output if item.type == "function_call"]
            assert calls == response.output
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"} for call in calls]
            stateless = [{"role": "user", "content": "hi"}, *response.output, *results]
            sent = client.responses.create(**ASK | {"input": stateless}, tools=[WEATHER, NOW], store=False)
            stored = ASK | {"input": results, "previous_response_id": response.id}
            kept = client.responses.create(**stored, tools=[WEATHER, NOW])
            assert sent.usage.input_tokens == kept.usage.input_tokens


class Answer(pydantic.BaseModel):
    """A form of answers."""

    kind: Literal["yes", "no"]
    count: Literal[1, 2]


def forms():
    assert isinstance(client.responses.parse(**ASK, text_format=Answer).output_parsed, Answer)
    assert isinstance(streamed(text_format=Answer).output_parsed, Answer)


def stored():
    response = client.responses.create(**ASK, metadata={"a": "b"})
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        try:
            call(response.id)
        except openai.NotFoundError as error:
            assert error.param == "response_id"  # noqa: PT017
        else:
            raise AssertionError("it was deleted")


def ends():
    cut = client.responses.create(**ASK, max_output_tokens=1, tools=[WEATHER], tool_choice="required")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    try:
        client.responses.create(**ASK, background=True)
    except openai.BadRequestError as error:
        assert error.param == "background"  # noqa: PT017
        return
    raise AssertionError("an error expected")


for check in (texts, tools, forms, stored, ends):
    check()
    print(check.__name__, flush=True)
