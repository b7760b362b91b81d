# SPDX-License-Identifier: Apache-2.0
"""Prompts as the model sees them: one function renders a conversation for training, evaluation and diagnosis."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

FLAG = "--chat_template_kwargs"
"""The template's arguments, in every command that renders prompts."""
APPLY = "--data.apply_chat_template"
"""OpenRLHF's flag that has a training render its prompts."""
INPUT_TEMPLATE = "input_template"
"""Among the arguments of a template: a text with {}, for the prompt, which replaces the chat template."""
INPUT_TEMPLATES = "a text with {} once, where the prompt goes; other braces are doubled: {{ and }}"
TEXT_FLAG = "--input-template"
EVALUATION_FLAGS = (FLAG, TEXT_FLAG)
"""Flags of ``ngrpo eval`` and ``ngrpo diagnose`` that say how prompts are rendered."""
PICTURES = "chat messages with pictures"
ANSWERED = "chat messages that end with the assistant's text"
PROMPT = 'A prompt is a text, or a list of chat messages: {"role": "user", "content": "…"}.'
TOOLS = "tools"
"""The column with the tools of a row, and the name of the template's argument."""
FIXES = {ANSWERED: "Leave the last message out: the model writes the response that would follow."}
"""How to mend what :func:`fault` says, where :data:`PROMPT` does not tell."""
_SET_HERE = (TOOLS, INPUT_TEMPLATE, "messages", "conversation", "add_generation_prompt", "tokenize", "chat_template")
_UNREAD_PARTS = ("{'type': 'text'", '{"type": "text"')  # of a template that takes texts alone

Messages = Sequence[Mapping[str, Any]]


def fault(prompt: object) -> str:
    """What a prompt is that no chat template can render, in words; empty for a text and for chat messages.

    Each message has a role and a text, or tool calls instead of the text; the last message has a text and is not the
    assistant's. Messages with pictures are :data:`PICTURES`, which only an image model's training takes.
    """
    if isinstance(prompt, str):
        return "" if prompt.strip() else "empty"
    if not isinstance(prompt, (list, tuple)):
        return "neither a text nor a list"
    if not prompt or not all(isinstance(message, dict) and "role" in message for message in prompt):
        return "a list"
    calls = [call for message in prompt for call in message.get("tool_calls") or ()]
    if not all(isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls):
        return "chat messages with tool calls that are no objects"
    content = None
    for message in normalised(prompt):
        content = message["content"]
        if isinstance(content, list):
            pictures = all(isinstance(part, dict) and "type" in part for part in content)
            return PICTURES if pictures else "chat messages with content in unknown parts"
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            return "chat messages without content"
    if not str(content or "").strip():
        return "chat messages that end without a text"
    return ANSWERED if prompt[-1]["role"] == "assistant" else ""


def normalised(messages: Messages, *, in_parts: bool = False, as_text: bool = False) -> list[dict[str, Any]]:
    """Chat messages in one form, whoever read the file.

    Parts of text become one text, a line each, or with ``in_parts`` one part; a message without content has None. Tool
    calls' arguments in JSON are read, or written with ``as_text``. A value that is null goes: `datasets` fills rows
    with those.
    """
    found = []
    for given in messages:
        message = {"role": given["role"], "content": None, **_without_null(given)}
        parts = message["content"]
        if isinstance(parts, (list, tuple)) and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
            message["content"] = "\n".join(str(part.get("text", "")) for part in parts)
        if in_parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            with suppress(ValueError, TypeError, KeyError):
                function["arguments"] = json.loads(function["arguments"])
            if as_text and "arguments" in function:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        found.append(message)
    return found


def _without_null(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, (list, tuple)) else value


def tools_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The template's argument of a row with a column of tools, objects or JSON; empty where it has none.

    Raises:
        UsageError: for a value that is no list of objects.
    """
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return {}  # a text about the row, which no template reads
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"{TOOLS} are {tools!r:.80}; they must be a list of objects.")
    return {TOOLS: _without_null(tools)}


def template_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of :data:`FLAG`, ``enable_thinking=false,effort=low``; ``UsageError`` for another form."""
    import yaml

    arguments: dict[str, Any] = {}
    for word in (text or "").split(",") if text else ():
        name, equals, value = word.strip().partition("=")
        if not (equals and name.isidentifier()) or name in arguments or name in _SET_HERE:
            raise UsageError(
                f"{FLAG} {text}: must be the chat template's own arguments, each once, such as enable_thinking=false."
            )
        try:
            arguments[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"{FLAG} {text}: {value!r} must be true, false, a number or a word.") from None
    return arguments


def is_input_template(text: str) -> bool:
    """Whether a text can be an :data:`INPUT_TEMPLATE`."""
    with suppress(LookupError, ValueError):
        return text.format("a") != text.format("b")
    return False


def flags_like(training: Flags) -> dict[str, str]:
    """Flags with which ``ngrpo eval`` and ``ngrpo diagnose`` render prompts as a training with these flags does."""
    if training.has(APPLY) or training.value("--task"):  # a task adds the flag
        own = training.value(FLAG)
        return {} if own is None else {FLAG: own}
    return {TEXT_FLAG: training.value("--data.input_template") or "{}"}


def rendered(tokenizer: Any, prompt: str | Messages, arguments: Mapping[str, Any] | None = None) -> str:
    """A prompt as the model sees it, with the opening of the response; its text where there is no chat template.

    Args:
        tokenizer: of transformers, or a processor.
        prompt: the user's text, or messages with roles; content is a text, None, or parts.
        arguments: of the chat template: ``tools`` and those of :data:`FLAG`; or :data:`INPUT_TEMPLATE`.

    Raises:
        UsageError: where the template fails, or leaves out a message, tools, calls or an argument.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chat, arguments = normalised(messages), dict(arguments or {})
    if INPUT_TEMPLATE in arguments:
        return _in_text(chat, arguments)
    calls = any(message.get("tool_calls") for message in chat)
    # Of the assistant's texts a template may leave out the thinking.
    parts = [p for m in normalised(messages, in_parts=True) if m["role"] != "assistant" for p in m["content"] or ()]
    texts = [str(part.get("text", "")).strip() for part in parts if isinstance(part, dict)]
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        if calls or arguments:
            raise UsageError(f"the tokenizer has no chat template, which would show {', '.join(arguments) or 'calls'}.")
        return "\n\n".join(message["content"] or "" for message in chat)

    def applied(messages: Messages, arguments: Mapping[str, Any]) -> str:
        """In the first form that shows all texts: some templates take parts alone, some take arguments as text."""
        incomplete, fault = [], None
        for in_parts, as_text in ((False, False), (True, False), (False, True), (True, True)):
            form = normalised(messages, in_parts=in_parts, as_text=as_text)
            try:
                text = tokenizer.apply_chat_template(form, tokenize=False, add_generation_prompt=True, **arguments)
            except Exception as error:  # Jinja's own, a template's, or one of an operation inside it
                fault = fault or error
                continue
            shown = all(part in text for part in texts) and not any(mark in text for mark in _UNREAD_PARTS)
            if shown and _left_out(tokenizer, form, text, arguments) is None:
                return str(text)
            incomplete.append((form, str(text)))
        if not incomplete:
            raise UsageError(f"the chat template fails: {fault}. Write the messages as it takes them.") from fault
        left_out = [_left_out(tokenizer, form, text, arguments) for form, text in incomplete]
        for (_, text), number in zip(incomplete, left_out):
            if number is None:  # the template shows each text, and changes one, as a tool's into JSON
                return text
        number = left_out[0] or 0
        raise UsageError(
            f"the chat template leaves out message {number + 1}, of the role {messages[number]['role']!r}. Write its"
            " text into another message, such as the first of the user, or give it a role that the template shows."
        )

    for name in arguments.keys() - {TOOLS}:
        if name not in str(template):
            raise UsageError(f"{FLAG}: the chat template has no argument {name!r}.")
    text = applied(messages, arguments)
    if TOOLS in arguments and applied(messages, {k: v for k, v in arguments.items() if k != TOOLS}) == text:
        raise UsageError("the chat template shows no tools. Write them into a system message, and leave them out.")
    renamed = normalised(messages)
    for call in (call for message in renamed for call in message.get("tool_calls") or ()):
        call.get("function", call)["name"] = "another"
    if calls and applied(renamed, arguments) == text:
        raise UsageError("the chat template shows no tool calls. Write them as the assistant's text.")
    return text


def _left_out(tokenizer: Any, form: Sequence[Mapping[str, Any]], text: str, arguments: Mapping[str, Any]) -> int | None:
    """The number of the first message that may have another text without a change of the rendered one; None if none."""
    for number, message in enumerate(form):
        content = message["content"]
        if isinstance(content, str):
            texts, other = [content], "another text"
        else:
            texts = [part["text"] for part in content or () if part.get("type") == "text"]
            other = [{**part, "text": "another text"} if part.get("type") == "text" else part for part in content or ()]
        if all(content_text.strip() in text for content_text in texts):
            continue
        changed = [*form[:number], {**message, "content": other}, *form[number + 1 :]]
        with suppress(Exception):  # a template that looks into the text shows it
            again = tokenizer.apply_chat_template(changed, tokenize=False, add_generation_prompt=True, **arguments)
            if again == text:
                return number
    return None


def _in_text(chat: Messages, arguments: Mapping[str, Any]) -> str:
    """The one message of a prompt in the :data:`INPUT_TEMPLATE` of its arguments."""
    if len(chat) > 1 or len(arguments) > 1 or chat[0].get("tool_calls"):
        raise UsageError("the prompt has several messages, tools or calls, which need a chat template.")
    return str(arguments[INPUT_TEMPLATE]).format(chat[0]["content"])
