"""A conversation with a model: its turns, and the commands that change it."""

import dataclasses
import json
from pathlib import Path
from typing import Unpack

from jaxinfer.cli.answers import AnswerPrinter
from jaxinfer.cli.common import compile_for, length_note, note, read_text
from jaxinfer.disk_cache import write_atomically
from jaxinfer.generation import LLM, FinishReason, Request, SamplingParams
from jaxinfer.text import encode_chat
from jaxinfer.text.chat_template import ChatOptions, Messages, check_messages
from jaxinfer.text.parsing import TAIL_TOKENS, AnswerFormat

HELP = """\
/help             show this list
/clear            forget the conversation, keep the system prompt
/system TEXT      set the system prompt and forget the conversation; without TEXT: remove it
/undo             remove the last turn
/retry            answer the last turn again
/save FILE        write the conversation as JSON
/load FILE        read a conversation
/set NAME VALUE   set a sampling option, such as temperature 0.2; without NAME: show changed options
/exit             exit, as Ctrl-D does; Ctrl-C stops an answer"""


class Conversation:
    """A conversation with a model: its messages, and the options of its answers.

    Args:
      llm: the model.
      params: how to answer.
      system: the system prompt, or None.
      hide_thinking: whether a model's reasoning is not printed; in a terminal it is dimmed otherwise.
      options: how the conversation is written as text.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        hide_thinking: bool = False,
        **options: Unpack[ChatOptions],
    ):
        assert llm.tokenizer is not None, "the model chats"
        self._tokenizer, template = llm.tokenizer, options.get("chat_template")
        self._form = AnswerFormat.of_template(llm.tokenizer.chat_templates.text_of(template))
        if self._form.reasoning and self._form.has_special_markers(llm.tokenizer):
            params = dataclasses.replace(params, skip_special_tokens=False)
        self._llm, self._params, self._hides, self._options = llm, params, hide_thinking, options
        self._context = llm.engine.config.context
        self.messages: Messages = []
        self.system(system or "")

    def take(self, line: str) -> bool:
        """Do what a line says; returns whether the conversation goes on."""
        if not line.startswith("/"):
            if line.strip():
                self._answer([*self.messages, {"role": "user", "content": line}])
            return True
        name, _, rest = line[1:].partition(" ")
        if name == "exit":
            return False
        commands = {
            "help": lambda: print(HELP),
            "clear": self.clear,
            "system": lambda: self.system(rest),
            "undo": self.undo,
            "retry": self.retry,
            "save": lambda: self.save(_file(name, rest)),
            "load": lambda: self.load(_file(name, rest)),
            "set": lambda: self.set(rest),
        }
        if name not in commands:
            raise ValueError(f"/{name} is not a command; known: {', '.join(f'/{known}' for known in commands)}, /exit.")
        commands[name]()
        return True

    # Commands

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def system(self, text: str) -> None:
        """Begin anew with this system prompt; empty: none."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def undo(self) -> None:
        """Take the last turn back, with its answer. Raises ValueError if there is none."""
        del self.messages[self._last_turn() :]

    def retry(self) -> None:
        """Answer the last turn again. Raises ValueError if there is none."""
        self._answer(self.messages[: self._last_turn() + 1])

    def save(self, file: Path) -> None:
        """Write the messages as JSON."""
        write_atomically(file, (json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n").encode())
        note(f"[{len(self.messages)} messages written to {file}]")

    def load(self, file: Path) -> None:
        """Read messages. Raises ValueError for a file that holds something else."""
        try:
            self.messages = check_messages(json.loads(read_text("/load", file)))
        except ValueError as error:
            raise ValueError(f"/load {file}: {error}") from error
        note(f"[{len(self.messages)} messages read from {file}]")

    def set(self, text: str) -> None:
        """Set an option of the answers; without one, show those that are not the default."""
        name, _, value = text.partition(" ")
        known = [field.name for field in dataclasses.fields(self._params)]
        if not name:
            usual = SamplingParams()
            chosen = {name: value for name in known if (value := getattr(self._params, name)) != getattr(usual, name)}
            print("\n".join(f"{name} {value}" for name, value in chosen.items()))
            return
        if name not in known:
            raise ValueError(f"/set {name}: not a sampling option; known: {', '.join(known)}.")
        if not value:
            raise ValueError(f"/set {name}: the value is missing; write for example `/set temperature 0.2`.")
        try:
            decoded = json.loads(value)
        except ValueError:
            decoded = value
        self._params = dataclasses.replace(self._params, **{name: decoded})

    # Turns

    def _last_turn(self) -> int:
        turns = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            raise ValueError("The conversation has no turn yet.")
        return turns[-1]

    def _answer(self, messages: Messages) -> None:
        """Stream the answer to a conversation, and keep both; if Ctrl-C stops it, with what has come.

        If nothing has come, or it cannot be answered, the conversation stays as it was.
        """
        messages, request = self._request(messages)
        compile_for(self._llm, request)
        output, text = None, ""
        printer = AnswerPrinter(self._form.parser(opened=self._opens_reasoning(request)), hide=self._hides)
        stream = self._llm.stream([request])
        try:
            for output in stream:
                text = output.outputs[0].text
                printer.show(text)
        except KeyboardInterrupt:
            stream.close()
            if text:
                printer.end()
                self.messages = [*messages, self._message(text, printer)]
            raise
        printer.end()
        assert output is not None, "a prepared request yields at least once"
        if (error := output.outputs[0].error) is not None:
            raise ValueError(error)
        self.messages = [*messages, self._message(text, printer)]
        ended = length_note(output, self._params, self._context)
        if ended != FinishReason.STOP:
            note(f"[{ended}; /set max_tokens allows more]" if ended == FinishReason.LENGTH else f"[{ended}]")

    def _request(self, messages: Messages) -> tuple[Messages, Request]:
        """Return the conversation and its request, without the oldest turns if all leave too little room to answer."""
        room, dropped = min(self._params.max_tokens or self._context, self._context // 4), 0
        while len(ids := self._encode(messages)) + room > self._context:
            turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
            if len(turns) < 2:
                break
            messages, dropped = messages[: turns[0]] + messages[turns[1] :], dropped + 1
        request = self._llm.prepare(ids, self._params)
        if dropped:
            turns = "turn is" if dropped == 1 else f"{dropped} turns are"
            note(f"[the oldest {turns} forgotten: the context has {self._context} tokens]")
        return messages, request

    def _encode(self, messages: Messages) -> list[int]:
        return encode_chat(self._llm.tokenizer, messages, **self._options)

    def _opens_reasoning(self, request: Request) -> bool:
        """Return whether the template has begun the answer with reasoning."""
        last = list(request.prompt_token_ids[-TAIL_TOKENS:])
        return self._form.opens_reasoning(self._tokenizer.decode(last, skip_special_tokens=False))

    def _message(self, text: str, printer: AnswerPrinter) -> dict[str, str]:
        """The message of an answer. The template decides what the model sees of reasoning; of channels it takes one."""
        return {"role": "assistant", "content": printer.content if self._form.has_channels else text}


def _file(command: str, text: str) -> Path:
    if not text.strip():
        raise ValueError(f"/{command}: the file name is missing.")
    return Path(text.strip())
