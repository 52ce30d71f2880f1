"""Chat templates: Jinja templates of a model directory that write a conversation as text, as transformers 5 does.

They are code from the checkpoint's author, so they run in Jinja's sandbox and are given JSON alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from msgspec import Meta

from jaxinfer.checkpoints import list_files, read_file
from jaxinfer.fields import check, shown
from jaxinfer.sandbox.templates import MAX_CHARACTERS, render

Messages = list[dict[str, Any]]
Renderer = Callable[[str, dict[str, Any]], str]
"""A function like `sandbox.templates.render`."""

_Messages = Annotated[
    list[dict[str, Any]], Meta(min_length=1, description='a list of messages such as {"role": "user", "content": "Hi"}')
]
_Tools = Annotated[list[dict[str, Any]], Meta(description="a list of functions as JSON schemas (dicts)")]
_Documents = Annotated[list[dict[str, Any]], Meta(description="a list of dicts such as {title, text}")]
_Arguments = Annotated[dict[str, Any], Meta(description="a dict of arguments by name")]
_Templates = str | dict[str, str] | list[dict[str, str]] | None

_OWN_ARGUMENTS = {"messages", "tools", "documents", "add_generation_prompt"}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the field with a model's reasoning
_MEDIA = ("image", "video", "audio")  # in the type or in a field of a part of a message
_END = "END_OF_THE_LAST_MESSAGE "  # ends in a blank, which is missing where a template trims a message


class ChatOptions(TypedDict, total=False):
    """Options of writing a conversation as text.

    Attributes:
      tools: functions that the model may call, as JSON schemas; None: none.
      documents: sources for the answer, for templates that take them; None: none.
      chat_template: the name of one of the model's templates, or the text of another; None: "tool_use" if there are
        tools and such a template, or else "default".
      chat_template_kwargs: further arguments of the template, such as {"enable_thinking": False}.
      add_generation_prompt: whether to begin the assistant's next message; default True.
      continue_final_message: whether the last message is left open for the model to continue; it then needs
        add_generation_prompt=False.
    """

    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


class ChatTemplates:
    """The templates of a model directory, by name.

    They are read from `chat_template.jinja` and `additional_chat_templates/NAME.jinja`; without these from
    `chat_template.json`; without it from `chat_template` in `tokenizer_config.json`: one, or a list of
    {name, template}.

    Raises ValueError for files that hold something else.
    """

    def __init__(self, folder: Path):
        config = _read_json(folder, "tokenizer_config.json")
        self._templates = (
            _separate_files(folder)
            or _by_name(folder / "chat_template.json", _read_json(folder, "chat_template.json"))
            or _by_name(folder / "tokenizer_config.json", config)
        )
        self._special_tokens = _special_tokens(config, _read_json(folder, "special_tokens_map.json"))

    @property
    def names(self) -> list[str]:
        """The names of the templates; none for a model that has none."""
        return sorted(self._templates)

    def use(self, text: str) -> None:
        """Make a template the default, in place of the model's own."""
        self._templates = {name: template for name, template in self._templates.items() if name != "tool_use"}
        self._templates["default"] = text

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        renderer: Renderer = render,
    ) -> str:
        """Render a conversation as text; see `ChatOptions`. renderer: renders a template, given its text.

        Raises ValueError for an invalid conversation, or options of the wrong type; if there is no such template; and
        if the template refuses the conversation.
        """
        messages = [_prepared(message) for message in check_messages(messages)]
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            check(name, value, bool)
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message leaves the last message open, and add_generation_prompt begins another: give "
                "add_generation_prompt=False."
            )
        arguments = {
            "messages": messages,
            "tools": _check_json("tools", tools, _Tools | None),
            "documents": _check_json("documents", documents, _Documents | None),
            "add_generation_prompt": add_generation_prompt,
        }
        arguments |= self._special_tokens | check_arguments(chat_template_kwargs)
        template = self.text_of(check("chat_template", chat_template, str | None), has_tools=tools is not None)
        if continue_final_message:
            return _without_end(messages, lambda: renderer(template, arguments))
        return renderer(template, arguments)

    def is_text(self, chat_template: object) -> bool:
        """Return whether the option is the text of a template, and not the name of one of the model's."""
        return isinstance(chat_template, str) and chat_template not in self._templates and "{" in chat_template

    def text_of(self, name: str | None = None, *, has_tools: bool = False) -> str:
        """The template of this name; without a name, the default for conversations with or without tools.

        Raises ValueError if there is none.
        """
        known = ", ".join(self.names) or "none"
        if name is not None:
            if name not in self._templates and not self.is_text(name):
                raise ValueError(f"chat_template={shown(name)} is no template of this model; it has: {known}.")
            return self._templates.get(name, name)
        if not self._templates:
            raise ValueError("The model directory has no chat template (chat_template.jinja): send a prompt instead.")
        for usual in ("tool_use", "default") if has_tools else ("default",):
            if usual in self._templates:
                return self._templates[usual]
        raise ValueError(f"None of the model's chat templates is the default one: give chat_template, one of {known}.")


def check_messages(messages: object) -> Messages:
    """Return a copy of a conversation. Raises ValueError for anything else."""
    copied: Messages = _check_json("messages", messages, _Messages)
    for index, message in enumerate(copied):
        if not isinstance(message.get("role"), str):
            raise ValueError(f'messages[{index}] must have a role, such as "user", got {shown(message)}.')
    return copied


def require_text(messages: Messages) -> None:
    """Raise ValueError for a part of a message that is no text, which a template may drop or write as a mark."""
    for index, message in enumerate(messages):
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else []
        for place, part in enumerate(parts):
            named = [part.get("type"), *part] if isinstance(part, dict) else []
            if any(medium in str(name) for name in named for medium in _MEDIA):
                raise ValueError(f"messages[{index}].content[{place}] is {shown(part)}; models here take text alone.")


def check_options(options: ChatOptions) -> ChatOptions:
    """Return a copy of a conversation's options. Raises TypeError for unknown ones, ValueError for non-JSON."""
    if unknown := options.keys() - ChatOptions.__annotations__.keys():
        raise TypeError(f"chat has no option {', '.join(unknown)}; known: {', '.join(ChatOptions.__annotations__)}.")
    return cast(ChatOptions, {name: _check_json(name, value, Any) for name, value in options.items()})


def check_arguments(arguments: object) -> dict[str, Any]:
    """Return a copy of `chat_template_kwargs`, empty for None.

    Raises ValueError for what is no dict of JSON, or holds what `ChatTemplates.render` has by another name.
    """
    copied: dict[str, Any] = _check_json("chat_template_kwargs", arguments, _Arguments | None) or {}
    if taken := sorted(copied.keys() & _OWN_ARGUMENTS):
        raise ValueError(f"chat_template_kwargs holds {', '.join(taken)}: give it as an argument of its own.")
    return copied


def _check_json(name: str, value: object, kind: Any) -> Any:
    """Check a value like `check`, and that it is JSON throughout: an object could do more in a template than it may."""
    checked = check(name, value, kind)
    try:
        size = len(json.dumps(checked, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON: {error}.") from None
    if size > MAX_CHARACTERS:
        raise ValueError(f"{name} has {size:,} characters as JSON, at most {MAX_CHARACTERS:,}.")
    return checked


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that are None, since templates test for presence, and give the reasoning under all its names."""
    message = {name: value for name, value in message.items() if value is not None}
    if names := [name for name in _REASONING if name in message]:
        reasoning = message[names[0]]
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _without_end(messages: Messages, render: Callable[[], str]) -> str:
    """Render up to where the content of the last message ends."""
    content = messages[-1].get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else [messages[-1]]
    key = "text" if isinstance(content, list) else "content"
    part = next((part for part in reversed(parts) if isinstance(part.get(key), str)), None)
    if part is None:
        raise ValueError("continue_final_message needs a text in the last message to go on with.")
    last, part[key] = part[key], part[key] + _END
    text = render()
    end = text.rfind(_END.strip())
    if end < 0 or last.strip() not in text:
        raise ValueError("The chat template does not write the last message as it is, so that it cannot be continued.")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


# Files


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a file's JSON object; empty without the file. Raises ValueError naming a file that holds none."""
    if (content := read_file(folder, name)) is None:
        return {}
    try:
        return check(str(folder / name), json.loads(content), dict[str, Any])
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / name} is not JSON: {error}; fetch it again.") from error


def _separate_files(folder: Path) -> dict[str, str]:
    files = {
        Path(name).stem: name for name in list_files(folder, "additional_chat_templates") if name.endswith(".jinja")
    }
    contents = {name: read_file(folder, file) for name, file in files.items()}
    if (default := read_file(folder, "chat_template.jinja")) is not None:
        contents["default"] = default
    return {name: content.decode() for name, content in contents.items() if content is not None}


def _by_name(path: Path, content: dict[str, Any]) -> dict[str, str]:
    """The templates under `chat_template` in a file's content."""
    match check(f"{path}: chat_template", content.get("chat_template"), _Templates):
        case None:
            return {}
        case str(text):
            return {"default": text}
        case dict(named):
            return named
        case entries:
            if any(not {"name", "template"} <= entry.keys() for entry in entries):
                raise ValueError(f"{path}: chat_template: each entry must have a name and a template.")
            return {entry["name"]: entry["template"] for entry in entries}


def _special_tokens(config: dict[str, Any], legacy: dict[str, Any]) -> dict[str, str]:
    """The tokens that templates know by name (bos_token and the like).

    legacy: special_tokens_map.json, from when tokenizer_config.json did not have all tokens; it overrides the config.
    """
    values = config if "added_tokens_decoder" in config else config | legacy
    named = {name: value for name, value in values.items() if name.endswith("_token")}
    if isinstance(further := values.get("extra_special_tokens"), dict):
        named |= further
    # A token is written as a string or as {"content": ...}.
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
