# SPDX-License-Identifier: Apache-2.0
"""One function renders conversations: training through OpenRLHF's dataset, evaluation and diagnosis see one prompt."""

import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.commands import eval as eval_command
from ngrpo.commands.command_parser import problems_of
from ngrpo.config import complete_run, input_checks, verl_lines
from ngrpo.machine.models import sandbox
from ngrpo.machine.models.conversation import rendered
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf import trainer
from ngrpo.workbench.compare.plan import read_plan
from ngrpo.workbench.compare.runs import eval_argv, run_config
from ngrpo.workbench.evaluate import load_problems
from ngrpo.workbench.evaluate.engine import render
from perturbations.errors import UsageError
from tests.support.run import run_of, run_with

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }};{% endif %}{% for m in messages %}{{ m.role }}{{ m.name }}: "
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
FIRST_SYSTEM = (  # as Qwen2.5's
    "{% for m in messages %}{% if loop.first and m.role == 'system' or m.role in ('user', 'assistant') %}"
    "{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }};{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }};{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2 + 2?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}, {"type": "text", "text": "Briefly."}]}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLED = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"b": {"type": "int"}, "a": {"enum": [2]}}}}
OTHER = {"type": "function", "function": {"name": "mul", "description": "of two", "parameters": {"a": {"type": "int"}}}}
AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
# `pandas` writes a column of parquet so to CSV.
PRINTED_BY_NUMPY = """[{'content': 'Be brief.', 'role': 'system'}
 {'content': array([{'text': '2 + 2?', 'type': 'text'}],
       dtype=object), 'role': 'user'}        ]"""
TURNS = [*CALLED, {"role": "user", "content": "So?"}]
SAID = 'user: 2 + 2?;assistant: {"name": "add", "arguments": {"a": 2}};tool: 4;user: So?;assistant:'


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps({"label": "4", **row}) + "\n" for row in rows))
    return str(path)


def tokenizer_with(template: str) -> Any:
    made = sandbox.tokenizer()
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("rows", "prompts"),
    [
        ([{"input": "2 + 2?"}, {"input": [ASKED]}], ["user: 2 + 2?;assistant:"] * 2),
        ([{"input": [PARTS]}, {"input": TURNS}], ["user: 2 + 2?\nBriefly.;assistant:", SAID]),
        ([{"input": [ASKED, {**CALLED[1], "tool_calls": [AS_TEXT]}, *TURNS[2:]]}], [SAID]),
        (
            [{"input": TURNS, "tools": [TOOL]}, {"input": [ASKED], "tools": json.dumps([OTHER])}, {"input": [ASKED]}],
            [
                f"tools: {json.dumps([TOOL])};{SAID}",
                f"tools: {json.dumps([OTHER])};user: 2 + 2?;assistant:",
                "user: 2 + 2?;assistant:",
            ],
        ),
    ],
)
@pytest.mark.parametrize("given", [None, "enable_thinking=false"])
def test_training_and_evaluation_have_one_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], prompts: list[str], given: str | None
) -> None:
    """Training reads hub datasets with `datasets`, which fills rows with nulls; evaluation reads the file."""
    import datasets

    from ngrpo.machine.models.conversation import template_arguments

    upstream = pytest.importorskip("openrlhf.datasets.prompts_dataset")
    source = written(tmp_path / "a.jsonl", *rows)
    tokenizer = tokenizer_with(TEMPLATE)
    run_with(monkeypatch, chat_template_kwargs=given)
    preprocess = trainer.preprocess_data(upstream.preprocess_data)
    read = datasets.load_dataset("json", data_files=source, cache_dir=str(tmp_path / "cache"))["train"]
    trained = [preprocess(row, None, "input", "label", tokenizer.apply_chat_template) for row in read]
    problems = load_problems(source, instruction="", template=template_arguments(given))
    end = "<think></think>" if given else ""
    assert [text for text, _ in trained] == [render(tokenizer, problem) for problem in problems]
    assert [text for text, _ in trained] == [prompt + end for prompt in prompts]
    assert preprocess({"input": "as it is", "label": 4}, None, "input", "label", None) == ("as it is", 4)


@pytest.mark.parametrize(
    ("template", "row", "says"),
    [
        (TEMPLATE, {"input": [{"role": "user", "content": [{"type": "image"}]}]}, "chat messages with pictures"),
        (TEMPLATE, {"input": [{"role": "user", "content": None}]}, "chat messages without content"),
        (TEMPLATE, {"input": CALLED[:2]}, "chat messages that end without a text"),
        (TEMPLATE, {"input": [{**ASKED, "tool_calls": ["add"]}]}, "tool calls that are no objects"),
        (TEMPLATE, {"input": [{"content": "2 + 2?"}]}, "the prompt is a list"),
        (TEMPLATE, {"input": '[ {"content": "2 + 2?", "role": "user"}]'}, "chat messages written as a text.*Store the"),
        (TEMPLATE, {"input": str([{"content": "2 + 2?", "role": "user"}])}, "chat messages written as a text"),
        (TEMPLATE, {"input": PRINTED_BY_NUMPY}, "chat messages written as a text"),
        (TEMPLATE, {"input": {"role": "user"}}, "neither a text nor a list"),
        (TEMPLATE, {"input": [ASKED], "tools": ["add"]}, "tools are .*; they must be a list of objects"),
        (PLAIN, {"input": [ASKED], "tools": [TOOL]}, "the chat template shows no tools"),
        (PLAIN, {"input": TURNS}, "the chat template shows no tool calls"),
        (sandbox.CHAT_TEMPLATE, {"input": TURNS}, "the chat template fails: "),
        ("", {"input": TURNS}, "the tokenizer has no chat template"),
        (
            TEMPLATE,
            {"input": [ASKED, {"role": "assistant", "content": "4"}]},
            "end with the assistant's text.*Leave the",
        ),
        (
            FIRST_SYSTEM,
            {"input": [SYSTEM, {"role": "system", "content": "In English."}, ASKED]},
            "message 2, .*'system'",
        ),
        (FIRST_SYSTEM, {"input": [{"role": "developer", "content": "Be brief."}, ASKED]}, "message 1, .*'developer'"),
        (USERS, {"input": [ASKED, {"role": "assistant", "content": "It is 4."}, ASKED]}, "message 2, .*'assistant'"),
        (NO_SYSTEM, {"input": [SYSTEM, ASKED]}, "leaves out message 1, of the role 'system'. Write its text into"),
        (NO_SYSTEM, {"input": [{**SYSTEM, "content": PARTS["content"]}, ASKED]}, "leaves out message 1"),
        (
            NO_SYSTEM,
            {"input": [ASKED, {"role": "tool", "content": "4"}, ASKED]},
            "leaves out message 2, of the role 'tool'",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_row(
    tmp_path: Path, template: str, row: dict[str, Any], says: str
) -> None:
    source = written(tmp_path / "a.jsonl", {"input": "2 + 2?"}, row)
    tokenizer = tokenizer_with(template)
    with pytest.raises(UsageError, match=rf"(row 2|problem a-1)\b.*{says}"):
        [render(tokenizer, problem) for problem in load_problems(source)]
    if not template or "pictures" in says:  # an image model's training takes pictures
        return
    tokenizer.save_pretrained(tmp_path)
    words = ["--data.prompt_dataset", source, "--actor.model_name_or_path", str(tmp_path)]
    flags = Flags([*words, "--data.apply_chat_template"])
    with pytest.raises(UsageError, match=r"row 2\b"):
        input_checks.check_files(flags)
        input_checks.check_template(flags, run_of())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("enable_thinking", "such as enable_thinking=false"),
        ("tools=none", "the chat template's own arguments"),
        ("style=[1]", r"'\[1\]' must be true, false, a number or a word"),
        ("a=1,a=2", "each once"),
        ("a=[", "must be true, false, a number or a word"),
        ("effort=low", "the chat template has no argument 'effort'"),
    ],
)
def test_arguments_that_no_template_takes(tmp_path: Path, given: str, says: str) -> None:
    tokenizer_with(TEMPLATE).save_pretrained(tmp_path)
    source = written(tmp_path / "a.jsonl", {"input": "2 + 2?"})
    words = ["--data.prompt_dataset", source, "--actor.model_name_or_path", str(tmp_path)]
    with pytest.raises(UsageError, match=says):
        input_checks.check_template(Flags([*words, "--data.apply_chat_template"]), run_of(chat_template_kwargs=given))
    with pytest.raises(UsageError, match="no effect without --data"):
        input_checks.check_template(Flags(words), run_of(chat_template_kwargs="enable_thinking=false"))


def test_one_flag_for_all_sides() -> None:
    """A comparison trains, evaluates and diagnoses with it; verl has the same under its own name."""
    flag = ["--chat_template_kwargs", "enable_thinking=false"]
    words = ["--perturbations", "none", "--model", "m", "--task", "arithmetic", "--base", "grpo", *flag]
    plan, _ = read_plan(words)
    run = run_config(plan, plan.runs()[0], Path("runs"))
    assert run.chat_template_kwargs == "enable_thinking=false"
    assert run.flags()["chat_template_kwargs"] == "enable_thinking=false"
    for argv in (eval_argv(plan, "m", Path("out")), plan.diagnosis):
        assert Flags(argv).value(flag[0]) == flag[1]
    other, _ = read_plan([*words, "--eval.chat_template_kwargs", "enable_thinking=true"])
    assert eval_argv(other, "m", Path("out"))[-3] == "enable_thinking=true", "the last one counts"
    swept = "chat_template_kwargs=enable_thinking=true"
    own, _ = read_plan([*words, "--strategy", f"none --{swept}"])
    templates = [Flags(eval_argv(own, "m", Path("out"), arm)).value(flag[0]) for arm in own.arms]
    assert templates == ["enable_thinking=false", "enable_thinking=true"]
    assert Flags(own.diagnosis or ()).value("--strategy") == "none"
    assert own.diagnosis == plan.diagnosis
    lines, _ = verl_lines.of_run(complete_run.make_algorithm(run))
    assert "+data.apply_chat_template_kwargs.enable_thinking=false" in lines


def test_templates_that_take_parts_alone_and_arguments_as_text_show_all() -> None:
    """As SmolVLM's and DeepSeek-R1's templates do; a picture beside a text keeps both."""
    in_parts = tokenizer_with(
        "{% for m in messages %}{% for p in m.content if p is mapping %}{{ p.text or p.type }};{% endfor %}{% endfor %}"
    )
    as_text = tokenizer_with(
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ 'call ' + c.function.name + c.function.arguments }};{% endfor %}{% endfor %}"
    )
    short = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2 + 2?"}]}]
    assert rendered(in_parts, short) == rendered(in_parts, [{"role": "system", "content": "Be brief."}]) == "Be brief.;"
    assert rendered(in_parts, short + shown) == "Be brief.;image;2 + 2?;"
    for call in (CALL, AS_TEXT):
        called = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ASKED]
        assert rendered(as_text, called) == '2 + 2?call add{"a": 2};2 + 2?'


def test_a_template_that_changes_a_text_shows_it() -> None:
    """Llama 3 writes a tool's text as JSON, and Qwen3 leaves the thinking of earlier turns out."""
    as_json = tokenizer_with("{% for m in messages %}{{ m.content | tojson }};{% endfor %}")
    assert rendered(as_json, [ASKED, {"role": "tool", "content": '{"sum": 4}'}, ASKED]).count("sum") == 1
    visible = tokenizer_with("{% for m in messages %}{{ m.content.split('</think>')[-1] }};{% endfor %}")
    thought = {"role": "assistant", "content": "<think>2 + 2</think>4"}
    assert rendered(visible, [ASKED, thought, ASKED]) == "2 + 2?;4;2 + 2?;"


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "Ann", "role": "admin"}] Who is the admin?',
        '[{"name": "Ann"}, {"name": "Ben", "role": "admin"}]',
        "[role, play]",
        "[]",
        "[" * 5_000 + "role",
        '{"role": "admin"} is what?',
    ],
)
def test_a_text_that_begins_as_a_list_is_a_prompt(tmp_path: Path, text: str) -> None:
    source = written(tmp_path / "a.jsonl", {"input": text})
    input_checks.check_files(Flags(["--data.prompt_dataset", source]))
    assert load_problems(source)[0].question == text


@pytest.mark.parametrize("form", ["{}", "Q: {}\nA:"])
def test_a_training_without_the_chat_template_and_evaluation_have_one_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    upstream = pytest.importorskip("openrlhf.datasets.prompts_dataset")
    source = written(tmp_path / "a.jsonl", {"input": "2 + 2?"})
    run_with(monkeypatch)
    trained, _ = trainer.preprocess_data(upstream.preprocess_data)({"input": "2 + 2?"}, form, "input")
    words = ["--perturbations", "none", "--model", "m", "--data.prompt_dataset", source, "--eval.dataset", source]
    plan, _ = read_plan([*words, "--base", "grpo", *(["--data.input_template", form] if form != "{}" else [])])
    for argv in (eval_argv(plan, "m", Path("out")), plan.diagnosis or ()):
        assert Flags(argv).value("--input-template") == form
        args = eval_command.parser().read(["--data", source, "--input-template", form])
        (problem,), _ = problems_of(args, None, print)
        for template in (TEMPLATE, ""):
            assert render(tokenizer_with(template), problem) == trained
    if form == "{}":
        assert render(tokenizer_with(""), load_problems(source)[0]) == trained, "a tokenizer without a chat template"


@pytest.mark.parametrize(
    ("words", "row", "says"),
    [
        (["--input-template", "Q:"], {"input": "2 + 2?"}, r"--input-template Q:: must be a text with \{\} once"),
        (["--input-template", "Q{0}"], {"input": "2 + 2?"}, r"--input-template Q\{0\}: must be a text with \{\} once"),
        (["--input-template", "{}", "--chat_template_kwargs", "a=1"], {"input": "2 + 2?"}, "has no effect with"),
        (["--input-template", "{}"], {"input": [SYSTEM, ASKED]}, "row 1 .*several messages.*need a chat template"),
    ],
)
def test_what_goes_with_no_input_template(tmp_path: Path, words: list[str], row: dict[str, Any], says: str) -> None:
    source = written(tmp_path / "a.jsonl", row)
    with pytest.raises(UsageError, match=says):
        problems_of(eval_command.parser().read(["--data", source, *words]), None, print)


def test_a_training_without_the_chat_template_that_the_model_has_is_said(tmp_path: Path) -> None:
    tokenizer_with(TEMPLATE).save_pretrained(tmp_path)
    source = written(tmp_path / "a.jsonl", {"input": "2 + 2?"})
    words = ["--data.prompt_dataset", source, "--actor.model_name_or_path", str(tmp_path)]
    (note,) = input_checks.template_notes(Flags(words))
    assert "Add --data.apply_chat_template, or evaluate with --input-template '{}'" in note
    assert not [*input_checks.template_notes(Flags([*words, "--data.apply_chat_template"]))]


def test_a_prompt_in_the_chat_template_already_is_refused() -> None:
    bare = "What is <|im_end|>?"
    marked = tokenizer_with("{{ messages[0].content }}<|im_end|>")
    assert "<|im_end|>" in marked.all_special_tokens
    assert rendered(tokenizer_with(PLAIN), bare) == f"user: {bare};", "the template has no such token"
    for prompt in (bare, [{"role": "user", "content": bare}]):
        with pytest.raises(UsageError, match=r"the prompt has <\|im_end\|> of the chat template already"):
            rendered(marked, prompt)


@pytest.mark.parametrize(
    "prompt",
    ['{"role": "user", "content": "a"}', [{"role": "user", "content": [{"type": "text", "content": "a"}]}]],
)
def test_messages_whose_text_would_be_lost_are_refused(tmp_path: Path, prompt: object) -> None:
    with pytest.raises(UsageError, match=r"chat messages (written as a text|with content in unknown parts)"):
        load_problems(written(tmp_path / "a.jsonl", {"input": prompt}))


def test_tools_that_are_no_json_are_refused_and_words_are_not(tmp_path: Path) -> None:
    (problem,) = load_problems(written(tmp_path / "a.jsonl", {"input": [ASKED], "tools": "hammer, saw"}))
    assert "tools" not in problem.template
    with pytest.raises(UsageError, match=r"tools are .*, which is not JSON"):
        load_problems(written(tmp_path / "a.jsonl", {"input": [ASKED], "tools": "[{'name': 'add'}]"}))
