"""The items of a conversation as the messages of a chat."""

from collections.abc import Iterable
from typing import Any

from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.responses.bodies import InputItem, ItemPart
from jaxinfer.http.tools import decode_arguments

PLAIN = "plain:"
"""How `encrypted_content` begins, which is the reasoning itself: clients that send back nothing else keep it so."""


def to_messages(
    items: Iterable[InputItem], *, instructions: str | None = None, num_stored: int = 0
) -> list[dict[str, Any]]:
    """Make messages of items. What the model said in one turn is one message.

    Args:
      items: the conversation, without references.
      instructions: the first system message.
      num_stored: how many of the items an earlier request had, which errors do not count.

    Raises BadRequestError, naming the item.
    """
    messages = list[dict[str, Any]]()
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items, -num_stored):
        _add(messages, f"input[{index}]", item)
    return messages


def _add(messages: list[dict[str, Any]], place: str, item: InputItem) -> None:
    """Add an item to the messages."""
    match item.kind:
        case "message":
            role, text = _given(place, "role", item.role), _text(f"{place}.content", item.content)
            if role == "assistant":
                _turn(messages, "content", "tool_calls")["content"] = text
            else:
                _add_text(messages, "system" if role == "developer" else role, text)
        case "reasoning":
            _turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = _reasoning(place, item)
        case "function_call":
            call = {
                "id": _given(place, "call_id", item.call_id),
                "type": "function",
                "function": {"name": _given(place, "name", item.name), "arguments": _arguments(place, item)},
            }
            _turn(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = _text(f"{place}.output", item.output)
            messages.append({"role": "tool", "tool_call_id": _given(place, "call_id", item.call_id), "content": text})


def _add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    """Add a message. Templates take one system message, at the beginning, so those there become one."""
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": role, "content": text})


def _turn(messages: list[dict[str, Any]], *lacking: str) -> dict[str, Any]:
    """The model's message at the end, if it lacks these fields; else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(map(messages[-1].get, lacking)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(place: str, item: InputItem) -> str:
    """The text of reasoning; empty if another server has encrypted it."""
    if item.content is None and item.encrypted_content is not None:
        text = item.encrypted_content
        return text.removeprefix(PLAIN) if text.startswith(PLAIN) else ""
    return "" if item.content is None else _text(f"{place}.content", item.content)


def _arguments(place: str, item: InputItem) -> dict[str, Any]:
    """The arguments of a call, as chat templates want them."""
    place, text = f"{place}.arguments", _given(place, "arguments", item.arguments) or "{}"
    return decode_arguments(place, text, param=place)


def _text(place: str, content: str | list[ItemPart] | None) -> str:
    """The text of contents, of parts one a line."""
    if isinstance(content, str):
        return content
    if content is None:
        raise BadRequestError(f"{place} is missing.", param=place)
    return "\n".join(part.text or part.refusal or "" for part in content)


def _given(place: str, field: str, value: str | None) -> str:
    if value is None:
        raise BadRequestError(f"{place}.{field} is missing.", param=f"{place}.{field}")
    return value
