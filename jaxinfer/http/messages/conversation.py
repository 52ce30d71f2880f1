"""Makes the chat that all APIs share of a body of the Messages API."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxinfer.fields import shown
from jaxinfer.http.bodies import convert_at
from jaxinfer.http.chats import Chat
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.messages.bodies import (
    Block,
    BlockToolChoice,
    CountTokensBody,
    CustomTool,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jaxinfer.http.tools import Function, FunctionName, NamedTool, Tool, ToolChoice, Tools

BILLING_HEADER = "x-anthropic-billing-header:"
"""How the line begins that coding agents put first into the system prompt, and change with each request."""

_ANSWERS = (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)
_BLOCKS = {"user": (TextBlock, ToolResultBlock), "assistant": _ANSWERS, "system": (TextBlock,)}
"""The blocks that a message of each role takes."""
_EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates know low, medium and high


def chat_of(body: CountTokensBody, *, keep_billing_header: bool = False) -> Chat:
    """Convert a body. Raises BadRequestError, naming the field.

    Args:
      keep_billing_header: whether the system prompt keeps the line that would defeat the prefix cache.
    """
    messages = _conversation(body, keep_billing_header=keep_billing_header)
    template: dict[str, Any] = {"chat_template_kwargs": _switches(body.thinking)}
    if messages and messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise BadRequestError(
                "messages: the last one calls tools, so a user's message with a tool_result of each must follow.",
                param="messages",
            )
        template |= {"add_generation_prompt": False, "continue_final_message": True}
    effort = body.output_config and body.output_config.effort
    return Chat(
        messages=messages,
        tools=_tools(body.tools or [], body.tool_choice),
        sampling=body.params() if isinstance(body, MessagesBody) else {},
        template=template,
        reasoning_effort=effort and _EFFORTS.get(effort, effort),
        thinking_token_budget=body.thinking and body.thinking.budget_tokens,
    )


def _switches(thinking: Thinking | None) -> dict[str, Any]:
    """The arguments of chat templates that turn reasoning on and off; other templates ignore them."""
    return {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}


def _conversation(body: CountTokensBody, *, keep_billing_header: bool) -> list[dict[str, Any]]:
    """The messages of a chat; those of one role that follow each other are one."""
    blocks = [("system", block) for block in _blocks("system", body.system or [], (TextBlock,))]
    for index, message in enumerate(body.messages):
        kinds = _BLOCKS[message.role]
        blocks += [(message.role, block) for block in _blocks(f"messages[{index}].content", message.content, kinds)]
    made = list[dict[str, Any]]()
    for role, group in itertools.groupby(blocks, key=lambda each: each[0]):
        of_role = [block for _, block in group]
        if role == "system":
            made += _system(of_role, keep_billing_header=keep_billing_header)
        else:
            made += _user(of_role) if role == "user" else _assistant(of_role)
    return made


def _blocks(place: str, content: str | list[dict[str, Any]], kinds: Sequence[type[Block]]) -> list[Block]:
    """The blocks of a content, checked. Raises BadRequestError for those of other kinds."""
    if isinstance(content, str):
        return [TextBlock(text=content)]
    known = {kind.__struct_config__.tag: kind for kind in kinds}
    made = list[Block]()
    for index, block in enumerate(content):
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in known:
            raise BadRequestError(
                f"{place}[{index}] is of type {shown(kind)}; blocks here are {', '.join(map(str, known))}.",
                param=f"{place}[{index}]",
            )
        converted = convert_at(f"{place}[{index}]", block, known[kind])
        if isinstance(converted, ToolResultBlock):
            parts = _blocks(f"{place}[{index}].content", converted.content or [], (TextBlock,))
            converted.content = "\n".join(_texts(parts))
        made.append(converted)
    return made


def _texts(blocks: Sequence[Block]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The results of calls, each a message, and then the text."""
    results = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": f"Error: {block.content}" if block.is_error else block.content,
        }
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    texts = _texts(blocks)
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts else [])


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """One message with all text, reasoning and calls."""
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(_texts(blocks))}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return [message]


def _system(blocks: Sequence[Block], *, keep_billing_header: bool) -> list[dict[str, Any]]:
    """One message with all text; none without text."""
    texts = _texts(blocks)
    if not keep_billing_header:
        texts = [text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text for text in texts]
    text = "\n".join(filter(None, texts))
    return [{"role": "system", "content": text}] if text else []


def _tools(tools: Sequence[dict[str, Any]], choice: BlockToolChoice | None) -> Tools:
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    offered = [Tool(type="function", function=function) for function in functions]
    parallel = choice is None or not choice.disable_parallel_tool_use
    return Tools(offered, choice and _choice(choice), parallel=parallel)


def _function(place: str, tool: dict[str, Any]) -> Function:
    """A function of a tool. Raises BadRequestError for tools that Anthropic's servers run, or have the schemas of."""
    if (kind := tool.get("type")) not in (None, "custom"):
        raise BadRequestError(
            f'{place} is of type {shown(kind)}, which is not implemented; tools here are of type "custom", with an '
            "input_schema.",
            param=place,
        )
    custom = convert_at(place, tool, CustomTool)
    return Function(name=custom.name, description=custom.description, parameters=custom.input_schema)


def _choice(choice: BlockToolChoice) -> ToolChoice:
    """The choice as the OpenAI API writes it."""
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise BadRequestError("tool_choice.name is missing: name a tool.", param="tool_choice")
            return NamedTool(type="function", function=FunctionName(name=choice.name))
