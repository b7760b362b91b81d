# SPDX-License-Identifier: Apache-2.0
"""Input that used to be accepted, or misread: each is one clear error, or is said."""

import json
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from ngrpo import cli
from ngrpo.config import flag_checks
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.input_checks import check_files, check_options
from ngrpo.config.run_notes import label_notes
from ngrpo.machine.upstream.openrlhf_flags import Flags, defaults
from ngrpo.methods.second_rounds import SecondRound
from perturbations import registry
from perturbations.errors import UsageError
from tests.support import run
from tests.support.run import run_of

RUN = "--model m --hardware cpu --perturbation neighbor --preset grpo --data.prompt_dataset d.jsonl"
RUN += " --data.label_key label --reward.remote_url r.py --rollout.batch_size 4 --rollout.n_samples_per_prompt 4"
RUN += " --train.batch_size 16 --rollout.max_new_tokens 8 --data.max_len 64"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 8}
CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 10}
CONFIG |= {"max_position_embeddings": 64}
TEMPLATE = "{% for m in messages %}{% if m.role == 'human' %}{{ raise_exception('unknown role human') }}{% endif %}"
TEMPLATE += "<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What :data:`RUN` names: a model without weights, a dataset and a reward."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("m")
    Path("m/config.json").write_text(json.dumps(CONFIG))
    Path("r.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': len(labels)}\n")
    for name, label in (("d.jsonl", "7"), ("other.jsonl", 7)):
        Path(name).write_text((json.dumps({"input": "a", "label": label}) + "\n") * 16)
    return tmp_path


def dry_run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a dry run, and all that it prints, in one line."""
    given = Flags(words.split())
    others = Flags(RUN.split()).without(*(flag.name for flag in given))
    code = cli.main(["train", "--dry-run", *others.argv, *given.argv])
    return code, " ".join("".join(capsys.readouterr()).split())


def test_a_right_run_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = dry_run("", capsys)
    assert code == 0 and "has no weights (*.safetensors), which a run needs" in told, told


def test_data_that_a_run_would_not_use_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--eval.dataset other.jsonl --eval.steps 100 --data.max_samples 8 --ckpt.best_metric_key eval_math_pass1"
    code, told = dry_run(words, capsys)
    assert code == 0 and "--eval.steps 100: the run ends with step 2, so no step is evaluated" in told, told
    assert "of the 16 rows of other.jsonl, only the first 8 are read" in told
    assert "--ckpt.best_metric_key eval_math_pass1: the evaluation has no such metric" in told


def test_a_model_that_transformers_would_not_save(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is saved once the training has ended."""
    Path("m/generation_config.json").write_text('{"temperature": 0.9}')
    code, told = dry_run("", capsys)
    assert code == 1 and "refuses to save it" in told and '"do_sample": true' in told and "`temperature`" in told, told
    Path("m/generation_config.json").write_text('{"temperature": 0.9, "do_sample": true}')
    code, told = dry_run("", capsys)
    assert code == 0, told


def test_openrlhfs_own_defaults_pass() -> None:
    for name, value in defaults().items():
        if value not in ("False", "True"):  # a switch takes no value
            flag_checks.check(Flags(["--actor.model_name_or_path", "m", name, value]))


@pytest.mark.parametrize(("words", "said"), run.refused("values"))
def test_what_openrlhf_takes_and_cannot_use(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    code, told = dry_run(words, capsys)
    assert code in (1, 2) and said in told and "Traceback" not in told, told


@pytest.mark.parametrize(("prompts", "said"), run.refused("rows"))
def test_prompts_that_cannot_be_rendered(
    folder: Path, capsys: pytest.CaptureFixture[str], prompts: str, said: str
) -> None:
    lines = [json.dumps({"input": prompt, "label": "1"}) + "\n" for prompt in json.loads(prompts)]
    Path("d.jsonl").write_text("".join(lines) * 8)
    code, told = dry_run("--data.apply_chat_template", capsys)
    assert code == 1 and said in told and "Traceback" not in told, told


def test_a_prompt_without_room_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`a` is a token; 64 of a sequence, 8 of them for the response, leave 56."""
    Path("d.jsonl").write_text("".join(json.dumps({"input": "a " * n, "label": "1"}) + "\n" for n in [57] + [56] * 15))
    code, told = dry_run("", capsys)
    assert code == 0 and "row 1: the prompt has 57 tokens. --data.max_len leaves room for 56" in told, told
    assert "tokens. --data.max_len" not in dry_run("--data.max_len 64 --rollout.max_new_tokens 7", capsys)[1]


@pytest.mark.parametrize(("text", "said"), run.refused("files"))
def test_tables_without_a_value_or_with_one_too_many(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    assert said in refused("--data.prompt_dataset", str(file), "--data.label_key", "label")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier, which generates nothing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 32}, ""),
    ],
)
def test_models_that_cannot_run(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    Path("m/config.json").write_text(json.dumps(CONFIG | change))
    code, told = dry_run("", capsys)
    assert code == bool(said) and said in told, told


def test_weights_that_are_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run needs the config.json alone; a start does not begin without weights."""
    assert cli.main(["train", *RUN.split()]) == 2
    assert "m has no weights (*.safetensors). Download the whole model" in capsys.readouterr().err
    Path("m/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "names model-1.safetensors, which is missing" in dry_run("", capsys)[1]
    Path("m/model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "model-1.safetensors holds no weights. Download it again, with Git LFS" in dry_run("", capsys)[1]


def refused(*args: str) -> str:
    with pytest.raises(UsageError) as caught:
        check_files(Flags(args))
    return str(caught.value)


@pytest.mark.parametrize("name", ["r.py", "UPPER.JSONL"])
def test_a_file_that_is_no_dataset(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text('{"input": "x"}\n')
    said = refused("--data.prompt_dataset", str(file))
    assert f"{file}: is no dataset" in said
    assert ".jsonl" in said


def rows(tmp_path: Path, *columns: tuple[Any, Any]) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": one, "label": two}) + "\n" for one, two in columns))
    return ["--data.prompt_dataset", str(file), "--data.label_key", "label"]


CHAT = [{"role": "user", "content": "1 + 1"}]


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    args = rows(tmp_path, (CHAT, "2"))
    assert "is chat messages in row 1. Add --data.apply_chat_template" in refused(*args)
    check_files(Flags([*args, "--data.apply_chat_template"]))


def test_tools_reach_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "tools.jsonl"
    file.write_text("".join(json.dumps({"input": "a", "tools": tools}) + "\n" for tools in (None, [], [{}])))
    said = refused("--data.prompt_dataset", str(file))
    assert "row 3 has tools, which no prompt shows. Add --data.apply_chat_template" in said


def labels(flags: Flags) -> list[str]:
    """The warnings about labels of a run with these flags."""
    complete = CompleteRun(run=run_of(openrlhf=tuple(flags.argv)), flags=flags)
    return [note for note in label_notes(complete) if "the label" in note]


def test_labels_that_only_some_rewards_can_read_are_said(tmp_path: Path) -> None:
    args = rows(tmp_path, ("x", [1, 2]), ("y", [3]))
    check_files(Flags(args))
    (note,) = labels(Flags(args))
    assert "the label 'label' is a list in row 1; the reward is given it as it is" in note
    assert labels(Flags(rows(tmp_path, ("x", "1"), ("y", "2")))) == []


def test_labels_that_become_texts_of_another_form_are_said_with_the_text(tmp_path: Path) -> None:
    (note,) = labels(Flags(rows(tmp_path, ("x", "yes"), ("y", False))))
    assert "the label 'label' is a bool in row 2; the reward is given the text 'False'" in note
    file = tmp_path / "rows.parquet"
    flags = Flags(["--data.prompt_dataset", str(file), "--data.label_key", "label"])
    for label, said in (
        (True, "is a bool in row 1; the reward is given the text 'True'"),
        (date(2024, 1, 2), "is a date in row 1; the reward is given the text '2024-01-02'"),
        (datetime(2024, 1, 2), "is a datetime in row 1; the reward is given the text '2024-01-02 00:00:00'"),
    ):
        parquet.write_table(pyarrow.table({"input": ["x"], "label": [label]}), file)
        (note,) = labels(flags)
        assert said in note
    for label in (b"7", Decimal("7.5")):
        parquet.write_table(pyarrow.table({"input": ["x"], "label": [label]}), file)
        assert labels(flags) == []


HEAD = "from dataclasses import dataclass\nfrom perturbations import Gate, Perturbation, option, register\n"
DATACLASS = "@dataclass(frozen=True, kw_only=True)\n"
PROPOSE = "    def propose(self, step):\n        return None\n"
SHARE = '    share: float = option(0.5, "how much", low=0.0)\n'
ABSTRACT = f'{HEAD}{DATACLASS}class Mine(Perturbation):\n    """Mine."""\n'
PLAIN = f'{HEAD}class Mine(Perturbation):\n    """Mine."""\n{SHARE}{PROPOSE}'


def own(line: str) -> str:
    """A file with a perturbation that has this line for its option."""
    return f'{HEAD}{DATACLASS}class Mine(Perturbation):\n    """Mine."""\n    {line}\n{PROPOSE}'


NEEDY = f'{HEAD}{DATACLASS}class Mine(Perturbation):\n    """Mine."""\n    share: float\n{PROPOSE}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ABSTRACT, "Mine does not define propose"),
        (PLAIN, "Mine is not a dataclass"),
        (NEEDY, "Mine has no default for its option 'share'"),
    ],
)
@pytest.mark.parametrize("command", [["list"], ["train", "--model", "smollm2-135m", "--dry-run", "--perturbation"]])
def test_an_incomplete_class_is_its_files_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str, command: list[str]
) -> None:
    file = tmp_path / "incomplete.py"
    file.write_text(text)
    assert cli.main([*command, str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (own("share: list = option([0.5], 'how much')"), "option([0.5], 'how much'): an option is a number, a text"),
        (own("share: 'Flaot' = option(0.5, 'how much')"), "name 'Flaot' is not defined"),
        (own("share: tuple[int, ...] = option('1', 'how much')"), "annotation is tuple[int, ...]; must be int, float"),
        (ABSTRACT.replace(DATACLASS, f"@register\n{DATACLASS}"), "@register needs the name of the perturbation"),
    ],
)
def test_a_wrong_declaration_is_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    assert cli.main(["train", "--model", "smollm2-135m", "--dry-run", "--perturbation", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_what_fails_in_a_users_file_is_not_called_a_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "failing.py"
    made = "    def __post_init__(self):\n        super().__post_init__()\n        len(3)\n"
    file.write_text(f'{HEAD}{DATACLASS}class Mine(Perturbation):\n    """Mine."""\n{SHARE}{made}{PROPOSE}')
    assert cli.main(["train", "--model", "smollm2-135m", "--perturbation", str(file)]) == 1
    error = capsys.readouterr().err
    assert "line 9 of failing.py fails with TypeError" in error
    assert "report it" not in error


def test_a_subclass_without_options_needs_no_decorator(tmp_path: Path) -> None:
    file = tmp_path / "inheriting.py"
    text = "from typing import ClassVar\nfrom perturbations.methods.soft import Soft\n"
    file.write_text(f'{text}class Mine(Soft):\n    """Mine."""\n    note: ClassVar[str] = "x"\n')
    assert registry.create(str(file), k=3).k == 3


@dataclass(frozen=True, kw_only=True)
class LongWord(SecondRound):
    """A word in front of the prompt, which is a token of the conformance suite's tokenizer and several of SmolLM2's."""

    name = "long_word"
    room = 1

    def prompt(self, text: str, tokenizer: Any, random: Random) -> str:
        return f"Antidisestablishmentarianism {text}"


def test_a_second_round_is_checked_with_the_model_s_tokenizer(tmp_path: Path, smollm2: str) -> None:
    """Its engines would have too little room for a prompt, which a training meets once all responses are wrong."""
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"input": "What is 2 + 2?"}) + "\n")
    words = ["--actor.model_name_or_path", smollm2, "--data.prompt_dataset", str(data)]
    check_options(Flags(words), run_of(second_round={"name": "lope"}))
    check_options(Flags([*words, "--data.apply_chat_template"]), run_of(second_round={"name": "lope"}))
    with pytest.raises(UsageError, match=r"--second_round long_word, --data.prompt_dataset .*: row 1: .* room is 1"):
        check_options(Flags(words), run_of(second_round=LongWord().spec()))
