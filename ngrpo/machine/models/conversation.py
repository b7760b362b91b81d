# SPDX-License-Identifier: Apache-2.0
"""Prompts as the model sees them: one function renders a conversation for training, evaluation and diagnosis."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

FLAG = "--chat_template_kwargs"
"""The template's arguments, in every command that renders prompts."""
APPLY = "--data.apply_chat_template"
"""OpenRLHF's flag that has a training render its prompts."""
INPUT_TEMPLATE = "input_template"
"""Among the arguments of a template: a text with {}, for the prompt, which replaces the chat template."""
INPUT_TEMPLATES = "a text with {} once, where the prompt goes; other braces are doubled: {{ and }}"
"""What an input template must be, for messages."""
TEXT_FLAG = "--input-template"
EVALUATION_FLAGS = (FLAG, TEXT_FLAG)
"""Flags of ``ngrpo eval`` and ``ngrpo diagnose`` that say how prompts are rendered."""
TOOLS = "tools"
"""The column with the tools of a row, and the name of the template's argument."""
# Arguments of `apply_chat_template` that ngrpo passes itself.
_RESERVED_ARGUMENTS = (
    TOOLS,
    INPUT_TEMPLATE,
    "messages",
    "conversation",
    "add_generation_prompt",
    "tokenize",
    "chat_template",
)
# A template that expects content as a text, but gets parts, prints the parts as Python or JSON.
_PRINTED_PARTS = ("{'type': 'text'", '{"type": "text"')
# numpy prints a nested array as array([...], dtype=object), and `pandas` reads lists in parquet as arrays.
_PRINTED_ARRAY = re.compile(r"array\(|,\s*dtype=object\)")

Messages = Sequence[Mapping[str, Any]]


class ValueKind(Enum):
    """The kind of a value in a dataset; its value is the kind in words, for messages."""

    MISSING = "nothing"
    EMPTY = "empty"
    TEXT = "a text"
    TEXT_WITH_IMAGE = "a text with <image>"
    MESSAGES = "chat messages"
    MESSAGES_AS_TEXT = "chat messages written as a text"
    MESSAGES_WITH_PICTURES = "chat messages with pictures"
    MESSAGES_WITH_UNKNOWN_PARTS = "chat messages with content in unknown parts"
    MESSAGES_WITH_BAD_CALLS = "chat messages with tool calls that are no objects"
    MESSAGES_WITHOUT_CONTENT = "chat messages without content"
    MESSAGES_WITHOUT_LAST_TEXT = "chat messages that end without a text"
    ANSWERED_MESSAGES = "chat messages that end with the assistant's text"
    LIST = "a list"
    OBJECT = "an object"
    BOOLEAN = "true or false"
    NUMBER = "a number"
    NEITHER_TEXT_NOR_LIST = "neither a text nor a list"
    OTHER = "neither text, number, list nor object"

    def __str__(self) -> str:
        return self.value

    @property
    def fix(self) -> str:
        """What its user can do about a prompt of a kind that :func:`fault` returns."""
        if self is ValueKind.ANSWERED_MESSAGES:
            return "Leave the last message out: the model writes the response that would follow."
        if self is ValueKind.MESSAGES_AS_TEXT:
            return "Store the list itself, in JSONL, JSON or parquet; a CSV file has texts alone."
        return 'A prompt is a text, or a list of chat messages: {"role": "user", "content": "…"}.'


def fault(prompt: object) -> ValueKind | None:
    """The kind of a prompt that no chat template can render; None for a text and for chat messages.

    Each message has a role and a text, or tool calls instead of the text; the last message has a text and is not the
    assistant's. ``MESSAGES_WITH_PICTURES`` are accepted by the training of an image model only.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            return ValueKind.EMPTY
        return ValueKind.MESSAGES_AS_TEXT if _is_messages_as_text(prompt) else None
    if not isinstance(prompt, (list, tuple)):
        return ValueKind.NEITHER_TEXT_NOR_LIST
    if not _have_roles(prompt):
        return ValueKind.LIST
    for call in _tool_calls(prompt):
        if not isinstance(call, dict) or not isinstance(call.get("function", {}), dict):
            return ValueKind.MESSAGES_WITH_BAD_CALLS
    content = None
    for message in normalised(prompt):
        content = message["content"]
        if isinstance(content, list):
            if all(_is_text_part(part) or _is_picture_part(part) for part in content):
                return ValueKind.MESSAGES_WITH_PICTURES
            return ValueKind.MESSAGES_WITH_UNKNOWN_PARTS
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            return ValueKind.MESSAGES_WITHOUT_CONTENT
    if not (content or "").strip():
        return ValueKind.MESSAGES_WITHOUT_LAST_TEXT
    if prompt[-1]["role"] == "assistant":
        return ValueKind.ANSWERED_MESSAGES
    return None


def _is_messages_as_text(text: str) -> bool:
    """Whether a text is a list of messages, or one message, written as JSON or as Python or numpy prints it."""
    text = text.strip()
    if not text.startswith(("[", "{")) or "role" not in text:
        return False
    for parse in (json.loads, _printed_list):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = parse(text)
            if isinstance(value, dict):
                return {"role", "content"} <= value.keys()
            return isinstance(value, list) and _have_roles(value)
    return False


def _printed_list(text: str) -> Any:
    """The value of a printed list; numpy prints no commas between the objects of an array."""
    without_arrays = _PRINTED_ARRAY.sub("", text)
    return ast.literal_eval(re.sub(r"\}\s+\{", "}, {", without_arrays))


def _have_roles(messages: Sequence[object]) -> bool:
    """Whether there are messages, each an object with a role."""
    return bool(messages) and all(isinstance(message, dict) and "role" in message for message in messages)


def _tool_calls(messages: Messages) -> Iterator[Any]:
    """All tool calls of a conversation."""
    for message in messages:
        yield from message.get("tool_calls") or ()


def normalised(messages: Messages, *, in_parts: bool = False, as_text: bool = False) -> list[dict[str, Any]]:
    """Copies of chat messages in one form, so that the reader of a file makes no difference.

    Keys with a null are left out: `datasets` adds them, so that all rows have the same keys. A message without content
    has None.

    Args:
        messages: with content as a text, parts or None.
        in_parts: makes each text one part, ``[{"type": "text", "text": ...}]``; otherwise parts of text are joined to
            one text, with a line for each.
        as_text: writes the arguments of tool calls as JSON text; otherwise JSON text is read.
    """
    copies = []
    for original in messages:
        message = {"role": original["role"], "content": None, **_without_null(original)}
        content = message["content"]
        if isinstance(content, (list, tuple)) and all(_is_text_part(part) for part in content):
            message["content"] = "\n".join(str(part.get("text", "")) for part in content)
        if in_parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            with suppress(ValueError, TypeError, KeyError):
                function["arguments"] = json.loads(function["arguments"])
            if as_text and "arguments" in function:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        copies.append(message)
    return copies


def _is_text_part(part: object) -> bool:
    """Whether a part of a message's content is ``{"type": "text", "text": ...}``."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_picture_part(part: object) -> bool:
    """Whether a part of a message's content is something else than a text, such as ``{"type": "image", ...}``."""
    return isinstance(part, dict) and part.get("type", "text") != "text"


def _without_null(value: object) -> Any:
    """A copy of a value of JSON without the keys whose value is null."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_null(item) for item in value]
    return value


def tools_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The template's argument of a row with a column of tools, objects or JSON; empty where it has none.

    Raises:
        UsageError: for a value that is no list of objects.
    """
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        is_words = not tools.lstrip().startswith(("[", "{"))
        try:
            tools = json.loads(tools)
        except ValueError:
            if is_words:
                return {}  # a text about the row, which no template reads
            raise UsageError(f"{TOOLS} are {tools!r:.80}, which is not JSON. Write them with json.dumps.") from None
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"{TOOLS} are {tools!r:.80}; they must be a list of objects.")
    return {TOOLS: _without_null(tools)}


def template_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of :data:`FLAG`, ``enable_thinking=false,effort=low``; ``UsageError`` for another form."""
    import yaml

    if not text:
        return {}
    arguments: dict[str, Any] = {}
    for assignment in text.split(","):
        name, equals, value = assignment.strip().partition("=")
        if not (equals and name.isidentifier()) or name in arguments or name in _RESERVED_ARGUMENTS:
            raise UsageError(
                f"{FLAG} {text}: must be the chat template's own arguments, each once, such as enable_thinking=false."
            )
        other_form = UsageError(f"{FLAG} {text}: {value!r} must be true, false, a number or a word.")
        try:
            arguments[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise other_form from None
        if isinstance(arguments[name], (list, dict)):
            raise other_form
    return arguments


def is_input_template(text: str) -> bool:
    """Whether a text can be an :data:`INPUT_TEMPLATE`."""
    if "{}" not in text:  # OpenRLHF leaves the prompt out of any other form, such as {0}
        return False
    try:
        return text.format("a") != text.format("b")
    except (AttributeError, LookupError, TypeError, ValueError):  # such as \boxed{[x]}, whose braces are not doubled
        return False


def flags_like(training: Flags) -> dict[str, str]:
    """Flags with which ``ngrpo eval`` and ``ngrpo diagnose`` render prompts as a training with these flags does."""
    training = training.without_false()
    is_applied_by_task = training.value("--task") is not None and APPLY not in training.off
    if training.has(APPLY) or is_applied_by_task:
        arguments = training.value(FLAG)
        return {} if arguments is None else {FLAG: arguments}
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
    chat = normalised(messages)
    arguments = dict(arguments or {})
    if INPUT_TEMPLATE in arguments:
        return _in_input_template(chat, arguments)
    has_calls = any(message.get("tool_calls") for message in chat)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        if has_calls or arguments:
            raise UsageError(f"the tokenizer has no chat template, which would show {', '.join(arguments) or 'calls'}.")
        return "\n\n".join(message["content"] or "" for message in chat)
    for name in arguments.keys() - {TOOLS}:
        if name not in str(template):
            raise UsageError(f"{FLAG}: the chat template has no argument {name!r}.")
    _check_bare(tokenizer, str(template), chat, arguments)

    text = _applied(tokenizer, messages, arguments)
    # A template shows tools, or calls, if the text changes with them.
    if TOOLS in arguments:
        without_tools = {name: value for name, value in arguments.items() if name != TOOLS}
        if _applied(tokenizer, messages, without_tools) == text:
            raise UsageError("the chat template shows no tools. Write them into a system message, and leave them out.")
    if has_calls:
        with_renamed_calls = normalised(messages)
        for call in _tool_calls(with_renamed_calls):
            call.get("function", call)["name"] = "another"
        if _applied(tokenizer, with_renamed_calls, arguments) == text:
            raise UsageError("the chat template shows no tool calls. Write them as the assistant's text.")
    return text


def text_tokenizer(tokenizer: object) -> Any:
    """The tokenizer of texts: a multimodal model's processor holds one, and counts texts itself, not their tokens."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def count_tokens(tokenizer: object, text: str) -> int:
    """The number of tokens of a rendered prompt."""
    return len(text_tokenizer(tokenizer)(text=text, add_special_tokens=False)["input_ids"])


def _check_bare(tokenizer: object, template: str, chat: Messages, arguments: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for a text that has the template's special tokens already, and would get them twice."""
    further = tuple((name, value) for name, value in arguments.items() if name != TOOLS)
    for token in _special_tokens_of(tokenizer, template, further):
        for message in chat:
            text = message["content"]
            if message["role"] != "assistant" and isinstance(text, str) and token in text:
                raise UsageError(
                    f"the prompt has {token} of the chat template already. Give the bare text, or leave the template"
                    f" out: {APPLY} in a training, {TEXT_FLAG} '{{}}' in ngrpo eval and ngrpo diagnose."
                )


@lru_cache(maxsize=16)
def _special_tokens_of(tokenizer: object, template: str, arguments: tuple[tuple[str, Any], ...]) -> list[str]:
    """The special tokens that a chat template writes around a text. Kept, since every row of a dataset asks for them.

    ``template`` is the tokenizer's present one, so that another one is asked anew.
    """
    text = _applied(tokenizer, [{"role": "user", "content": "x"}], dict(arguments))
    return [token for token in getattr(tokenizer, "all_special_tokens", ()) if token in text]


class _Attempt(NamedTuple):
    """Messages in one of the forms that templates read, and the rendered text."""

    messages: list[dict[str, Any]]
    text: str


def _applied(tokenizer: Any, messages: Messages, arguments: Mapping[str, Any]) -> str:
    """The text of the first form of the messages in which the template shows all of them.

    Some templates read content in parts only, and some read tool arguments as JSON text only.

    Raises:
        UsageError: where the template fails on each form, or leaves out a message in each.
    """
    texts = _shown_texts(messages)
    incomplete: list[_Attempt] = []
    first_error: Exception | None = None
    for in_parts, as_text in ((False, False), (True, False), (False, True), (True, True)):
        form = normalised(messages, in_parts=in_parts, as_text=as_text)
        try:
            text = tokenizer.apply_chat_template(form, tokenize=False, add_generation_prompt=True, **arguments)
        except Exception as error:  # Jinja's own, a template's, or one of an operation inside it
            first_error = first_error or error
            continue
        prints_parts = any(printed in text for printed in _PRINTED_PARTS)
        if (
            all(shown in text for shown in texts)
            and not prints_parts
            and _left_out(tokenizer, form, text, arguments) is None
        ):
            return str(text)
        incomplete.append(_Attempt(form, str(text)))
    if not incomplete:
        raise UsageError(
            f"the chat template fails: {first_error}. Write the messages as it takes them."
        ) from first_error

    left_out: list[int] = []
    for attempt in incomplete:
        number = _left_out(tokenizer, attempt.messages, attempt.text, arguments)
        if number is None:  # the template shows every text, some of them in another form, such as JSON
            return attempt.text
        left_out.append(number)
    number = left_out[0]
    raise UsageError(
        f"the chat template leaves out message {number + 1}, of the role {messages[number]['role']!r}. Write its"
        " text into another message, such as the first of the user, or give it a role that the template shows."
    )


def _shown_texts(messages: Messages) -> list[str]:
    """The texts that a template must show: of the assistant's texts it may leave out the thinking."""
    texts = []
    for message in normalised(messages, in_parts=True):
        if message["role"] == "assistant":
            continue
        for part in message["content"] or ():
            if isinstance(part, dict):
                texts.append(str(part.get("text", "")).strip())
    return texts


def _left_out(tokenizer: Any, messages: Messages, text: str, arguments: Mapping[str, Any]) -> int | None:
    """The number of the first message that the template leaves out of a rendered text; None if it shows all.

    A message is left out if the rendered text stays the same when the message's text changes.
    """
    for number, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            texts = [content]
            other_content: str | list[Any] = "another text"
        else:
            texts = []
            other_content = []
            for part in content or ():
                is_text = part.get("type") == "text"
                if is_text:
                    texts.append(part["text"])
                other_content.append({**part, "text": "another text"} if is_text else part)
        if all(content_text.strip() in text for content_text in texts):
            continue
        changed = [*messages[:number], {**message, "content": other_content}, *messages[number + 1 :]]
        with suppress(Exception):  # a template that fails on another text reads the text
            again = tokenizer.apply_chat_template(changed, tokenize=False, add_generation_prompt=True, **arguments)
            if again == text:
                return number
    return None


def _in_input_template(chat: Messages, arguments: Mapping[str, Any]) -> str:
    """The one message of a prompt in the :data:`INPUT_TEMPLATE` of its arguments."""
    if len(chat) > 1 or len(arguments) > 1 or chat[0].get("tool_calls"):
        raise UsageError("the prompt has several messages, tools or calls, which need a chat template.")
    return str(arguments[INPUT_TEMPLATE]).format(chat[0]["content"])
