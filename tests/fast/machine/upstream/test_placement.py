# SPDX-License-Identifier: Apache-2.0
"""Placement with CUDA: what is added on 1, 8 and 16 GPUs, and each plan that cannot work as one line."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.commands import doctor
from ngrpo.config import batch_checks, complete_run, parse, rules
from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import gpu_notes, gpu_plan
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

BASE = "--hardware cuda --preset grpo --perturbation neighbor --task arithmetic --rollout.n_samples_per_prompt 4"
SIZES = " --rollout.batch_size 16 --train.batch_size 64"
MODEL = " --model Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("openrlhf")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)


def completed(more: str, shape: str = "8x80", sizes: str = SIZES + MODEL) -> Flags:
    """All flags of a run on a machine, after every rule before its start."""
    run = parse.run_config(f"{BASE}{sizes} {more}".split())
    planned = dataclasses.replace(run, machine=placement.planned(shape, "--dry-run"), run_dir="runs/x")
    return rules.checked(planned).flags


def refusal(more: str, shape: str = "8x80", sizes: str = SIZES + MODEL) -> str:
    with pytest.raises(UsageError) as caught:
        completed(more, shape, sizes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLACED = ("actor.num_nodes", "actor.num_gpus_per_node", "vllm.num_engines", "vllm.tensor_parallel_size")
PLACED += ("vllm.gpu_memory_utilization", "ds.zero_stage", "ds.adam_offload")


def placed(flags: Flags) -> tuple[Any, ...]:
    """What matters of a placement: the values of PLACED."""
    return tuple(flags.args[name] for name in PLACED)


SEVEN = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "1x80", (1, 1, 1, 1, 0.6, 2, False)),
        (SEVEN, "1x80", (1, 1, 1, 1, 0.5, 2, True)),
        ("Qwen/Qwen3-0.6B", "8x80", (1, 8, 8, 1, 0.6, 2, False)),
        # Weights and reference 28.4 GiB, 4 free: 0.6 of 79.2 GiB do not fit beside them, 0.5 do.
        (SEVEN, "8x80", (1, 8, 8, 1, 0.5, 2, False)),
        (SEVEN, "8x40", (1, 8, 8, 1, 0.6, 3, False)),
        (SEVEN, "2x8x80", (2, 8, 16, 1, 0.5, 2, False)),
        # Its update takes 27 GiB under ZeRO-3, 15.25 for weights in 0.6 of 23.8 leave no answer room on one GPU.
        ("Qwen/Qwen3-8B", "8x24", (1, 8, 4, 2, 0.6, 3, True)),
    ],
)
def test_default_by_machine_and_model(model: str, shape: str, expected: object) -> None:
    flags = completed(f"--model {model}", shape, SIZES)
    assert placed(flags) == expected
    args = flags.args
    assert all(args[name] for name in ("train.colocate_all", "vllm.enable_sleep", "ds.enable_sleep"))
    assert args["actor.gradient_checkpointing_enable"]
    assert args["ckpt.save_steps"] == 20
    assert args["ref.num_gpus_per_node"] == args["actor.num_gpus_per_node"]
    assert gpu_plan.fits(args, placement.planned(shape, "--dry-run").memory)
    assert "--train.colocate_all" in flags.added
    assert "--ckpt.save_steps" in flags.added


def test_any_flag_of_the_users_wins() -> None:
    given = "--vllm.gpu_memory_utilization 0.4 --ds.zero_stage 3 --ckpt.save_steps 7 --vllm.tensor_parallel_size 2"
    flags = completed(given)
    assert placed(flags) == (1, 8, 4, 2, 0.4, 3, False)
    assert flags.value("--ckpt.save_steps") == "7"
    assert "--ckpt.save_steps" not in flags.added
    assert placed(completed("--vllm.num_engines 4"))[:4] == (1, 8, 4, 2)
    assert placed(completed("--actor.num_gpus_per_node 4"))[:4] == (1, 4, 4, 1)
    assert placed(completed("--vllm.num_engines 2 --vllm.tensor_parallel_size 2"))[:4] == (1, 4, 2, 2)
    hybrid = completed("--train.colocate_all")
    assert hybrid.value("--vllm.num_engines") == "8"
    assert hybrid.has("--vllm.enable_sleep")
    awake = completed("--train.colocate_all --vllm.gpu_memory_utilization 0.4")
    assert not awake.has("--vllm.enable_sleep", "--actor.gradient_checkpointing_enable")


def test_noise_on_weights_has_whole_parameters() -> None:
    flags = completed(f"--model {SEVEN} --policy_noise aqn --algo.advantage.is_correction_level token", "8x40", SIZES)
    assert placed(flags)[-2:] == (2, True)


def test_models_apart_take_the_actors_ranks() -> None:
    flags = completed("--actor.num_gpus_per_node 3 --vllm.num_engines 2 --train.batch_size 48 --rollout.batch_size 12")
    groups = [(group.gpus, group.models[0]) for group in placement.groups(flags.args)]
    assert groups == [(2, "vLLM engines"), (3, "actor"), (3, "reference")]
    assert not flags.has("--train.colocate_all")


APART = "--actor.num_gpus_per_node 2 --vllm.num_engines 2"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--train.async_enable", "--train.async_enable gives half a placement: --actor.num_gpus_per_node and"),
        ("--train.colocate_actor_ref --actor.num_gpus_per_node 4", "--vllm.num_engines missing. Fix: add --vllm.num"),
        (
            "--train.async_enable --train.colocate_actor_ref --vllm.num_engines 6",
            "--actor.num_gpus_per_node 2, or leave --train.colocate_actor_ref and --train.async_enable out",
        ),
        ("--actor.num_gpus_per_node 8 --vllm.num_engines 8", "needs 24 GPUs and 8 are there (as --dry-run says)"),
        (
            "--train.colocate_all --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 1",
            "--vllm.num_engines 4 × --vllm.tensor_parallel_size 1 is 4 GPUs, and the actor has 8",
        ),
        ("--vllm.tensor_parallel_size 3", "--vllm.tensor_parallel_size 3 must divide the 16 attention heads of Qwen/"),
        ("--ref.num_gpus_per_node 4", "--ref.num_gpus_per_node 4 must be those of --actor (1 and 8)"),
        ("--train.colocate_all --vllm.gpu_memory_utilization 0.95", "0.95 without --vllm.enable_sleep"),
        ("--data.max_len 24 --rollout.max_new_tokens 28", "28 leaves no room for a prompt in --data.max_len 24"),
        ("--train.micro_batch_size 3", "--train.batch_size 64 must be a multiple of 24, 8 ranks of --actor"),
        ("--train.dynamic_batch_enable --ds.packing_samples --train.batch_size 128", "more than the 64 responses"),
        ("--ds.tensor_parallel_size 3", "× --ds.tensor_parallel_size 3 must divide the 8 ranks"),
        ("--rollout.batch_size 15", "60 responses of a step (--rollout.batch_size 15 × "),
        # 48 responses in micro-batches of 3 are 16 forwards, which three ranks do not share out evenly.
        (
            f"{APART} --rollout.batch_size 12 --train.batch_size 48 --rollout.micro_batch_size 3"
            " --train.micro_batch_size 4 --ref.num_gpus_per_node 3 --ds.zero_stage 3",
            "do not divide over the ranks (actor 2, ref 3)",
        ),
        (
            f"{APART} --ref.num_gpus_per_node 4 --train.dynamic_batch_enable --ds.packing_samples",
            "its batches for the 2 ranks of --actor, and the 4 of --ref do not divide them",
        ),
    ],
)
def test_plans_that_cannot_work(more: str, said: str) -> None:
    assert said in refusal(more), refusal(more)


@pytest.mark.parametrize(
    ("shape", "share", "smaller"),
    [
        ("4x40", None, None),  # OpenRLHF's share is 0.95, which leaves 2 of 39.6 GiB
        ("4x16", None, None),
        ("4x8", None, "0.93"),  # half a GiB of 7.92 is more than 0.05
        ("4x80", "0.999", "0.99"),
    ],
)
def test_engines_of_their_own_leave_room_for_a_context(
    shape: str, share: str | None, smaller: str | None, tmp_path: Path
) -> None:
    """With a model so small that only the context takes memory beside the engine."""
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **small, **heads}))
    apart = f"--model {tmp_path} --train.colocate_actor_ref --actor.num_gpus_per_node 2 --vllm.num_engines 2"
    apart += " --rollout.micro_batch_size 2 --train.micro_batch_size 2"
    words = apart if share is None else f"{apart} --vllm.gpu_memory_utilization {share}"
    flags = completed(words, shape, SIZES)
    machine = placement.planned(shape, "-")
    notes = gpu_notes.notes(flags.args, machine)
    assert [note.split("Fix: ")[1] for note in notes] == [f"--vllm.gpu_memory_utilization {smaller}."] * bool(smaller)
    if smaller:
        fixed = completed(f"{apart} --vllm.gpu_memory_utilization {smaller}", shape, SIZES)
        assert not gpu_notes.notes(fixed.args, machine)


def test_a_packaged_model_that_is_not_made_yet_is_not_sought_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NGRPO_CACHE", str(tmp_path))
    flags = completed("--model sandbox", "1x80", SIZES)
    (note,) = gpu_notes.notes(flags.args, placement.planned("1x80", "-"))
    assert note.endswith("it is not made yet. Fix: run `ngrpo model sandbox` first.")


@pytest.mark.parametrize(
    ("model", "shape", "remedy"),
    [
        ("Qwen/Qwen3-1.7B", "1x80", "--vllm.enable_sleep --ds.enable_sleep"),
        ("Qwen/Qwen3-0.6B", "1x24", "--vllm.enable_sleep --ds.enable_sleep --actor.gradient_checkpointing_enable"),
        ("Qwen/Qwen3-4B", "1x16", None),
    ],
)
def test_a_colocated_script_is_told_the_flags_with_which_it_fits(model: str, shape: str, remedy: str | None) -> None:
    """A script for OpenRLHF that has its placement already, without sleep: nothing is added to it."""
    script = f"--model {model} --train.colocate_all --vllm.gpu_memory_utilization 0.6"
    machine = placement.planned(shape, "-")
    (note,) = gpu_notes.notes(completed(script, shape, SIZES).args, machine)
    told = note.split("Fix: ")[1]
    if remedy is None:
        assert told == "more GPUs, a smaller --data.max_len, or a smaller model."
        return
    assert told.startswith(f"{remedy}, with which ")
    assert not gpu_notes.notes(completed(f"{script} {remedy}", shape, SIZES).args, machine)


@pytest.mark.parametrize("words", ["--ds.load_in_4bit --ds.lora.rank 16", "--actor.optim muon"])
def test_a_plan_has_no_stage_that_its_run_refuses(words: str) -> None:
    """Qwen3-8B under ZeRO-2 needs more than these cards have, and both need whole parameters on every GPU."""
    assert placed(planned_for("Qwen/Qwen3-8B", "8x24", ""))[5] == 3
    flags = planned_for("Qwen/Qwen3-8B", "8x24", words)
    assert flags.args["ds.zero_stage"] == 2
    if "muon" in words:
        assert not flags.args["ds.adam_offload"]


def planned_for(model: str, shape: str, more: str) -> Flags:
    """The flags of a run with its placement, whether it fits or not."""
    run = parse.run_config(f"{BASE}{SIZES} --model {model} {more}".split())
    planned = dataclasses.replace(run, machine=placement.planned(shape, "-"), run_dir="runs/x")
    return complete_run.make(planned).flags


def test_no_checkpoints_are_planned_where_openrlhf_saves_none() -> None:
    assert completed("").args["ckpt.save_steps"] == 20
    assert completed("--ckpt.disable_ds").args["ckpt.save_steps"] == -1
    assert completed("--ckpt.disable_ds --ckpt.save_hf").args["ckpt.save_steps"] == 20


class TestRows:
    """`answers` of a step go to the ranks in micro-batches, the last ranks getting fewer."""

    def flags(self, tmp_path: Path, rows: int, more: str = "") -> Flags:
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"input": "x", "label": "y"}\n' * rows)
        words = f"--data.prompt_dataset {file} --reward.remote_url http://r {more}"
        base = BASE.replace("--task arithmetic ", "")
        run = parse.run_config(f"{base}{SIZES}{MODEL} --data.label_key label {words}".split())
        planned = dataclasses.replace(run, machine=placement.planned("8x80", "-"), run_dir="runs/x")
        return complete_run.make(planned).flags

    def left_out(self, tmp_path: Path, rows: int, more: str = "") -> str:
        """What a start warns of about the last step of a pass over these rows."""
        return " ".join(batch_checks.last_step_notes(self.flags(tmp_path, rows, more)))

    def test_prompts_of_a_last_step_that_do_not_divide_are_left_out_and_said(self, tmp_path: Path) -> None:
        """43 = 2 × 16 + 11: 44 responses go out as 7 × 6 + 2; of 10 prompts, 40 responses are 8 × 5."""
        assert "leaves out 1 of its 11 prompts" in self.left_out(tmp_path, 43)
        for rows in (32, 42, 34):
            assert not self.left_out(tmp_path, rows), rows

    def test_rows_that_are_left_out_fill_no_batch(self, tmp_path: Path) -> None:
        """Of 3 rows, 2 train in each pass: 3 passes are 24 responses, and 2 passes are 16."""
        words = "--train.batch_size 24 --train.micro_batch_size 1 --train.num_episodes"
        batch_checks.check_rows(self.flags(tmp_path, 3, f"{words} 3"))
        with pytest.raises(
            UsageError, match=r"3 rows, of which 1 do not divide over the ranks \(.*\), × .* 4 are fewer"
        ):
            batch_checks.check_rows(self.flags(tmp_path, 3, f"{words} 2"))

    def test_fewer_rows_than_a_step_takes_are_said(self, tmp_path: Path) -> None:
        one = "--actor.num_gpus_per_node 1 --train.num_episodes 2"
        (note,) = batch_checks.few_rows_notes(self.flags(tmp_path, 15, one))
        assert "15 rows are fewer than the 16 prompts of a step" in note
        assert "one step of 60 responses" in note
        assert "--rollout.batch_size 15" in note
        for rows in (16, 17):
            assert not batch_checks.few_rows_notes(self.flags(tmp_path, rows, one)), rows

    def test_one_rank_takes_any_number_and_dynamic_batches_agree_on_theirs(self, tmp_path: Path) -> None:
        assert not self.left_out(tmp_path, 43, "--actor.num_gpus_per_node 1")
        dynamic = "--train.dynamic_batch_enable --ds.packing_samples"
        assert not self.left_out(tmp_path, 43, dynamic)
        # 33 = 2 × 16 + 1: one prompt's 4 responses cannot be dealt to 8 ranks.
        assert "leaves out 1 of its 1 prompts" in self.left_out(tmp_path, 33, dynamic)

    def test_rows_of_several_episodes_fill_a_batch_only_where_whole_steps_leave_responses_over(
        self, tmp_path: Path
    ) -> None:
        """10 rows × 4 responses × 2 episodes are 80 responses. A whole step has 64: an update of 64, or 48 and 16."""
        two_episodes = "--actor.num_gpus_per_node 1 --train.num_episodes 2"
        with pytest.raises(UsageError, match=r"are fewer responses than --train\.batch_size 64"):
            batch_checks.check_rows(self.flags(tmp_path, 10, two_episodes))
        batch_checks.check_rows(self.flags(tmp_path, 10, f"{two_episodes} --train.batch_size 48"))
        two_epochs = two_episodes.replace("num_episodes", "max_epochs")  # each of which has its own batches
        with pytest.raises(UsageError, match=r"are fewer responses than --train\.batch_size 64"):
            batch_checks.check_rows(self.flags(tmp_path, 10, two_epochs))
        batch_checks.check_rows(self.flags(tmp_path, 10, f"{two_epochs} --train.batch_size 48"))
        with pytest.raises(UsageError, match=r"are fewer responses than --train\.batch_size 48"):
            batch_checks.check_rows(self.flags(tmp_path, 10, "--actor.num_gpus_per_node 1 --train.batch_size 48"))

    def test_the_limit_of_rows_holds_for_several_files_together(self, tmp_path: Path) -> None:
        """22 and 21 rows are 43, of which 32 are two whole steps."""
        other = tmp_path / "other.jsonl"
        other.write_text('{"input": "x", "label": "y"}\n' * 21)
        both = f"--data.prompt_dataset {tmp_path / 'prompts.jsonl'},{other}"
        assert "leaves out 1 of its 11 prompts" in self.left_out(tmp_path, 22, f"--data.max_samples 43 {both}")
        assert not self.left_out(tmp_path, 22, f"--data.max_samples 32 {both}")


@pytest.mark.parametrize("shape", ["0x80", "8x", "x80", "2x2x2x80", "8×80", "-8x80", "8x0"])
def test_shapes_that_are_none(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--dry-run", shape, *f"{BASE}{SIZES}{MODEL}".split()]) == 2
    assert f"--dry-run {shape}: must be GB of one GPU, GPUs x GB, or nodes x GPUs x GB" in capsys.readouterr().err


def test_what_was_not_looked_at_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither hardware nor GPUs nor the model's files nor a reward's address are here."""
    words = f"{BASE.replace('--task arithmetic', '')}{SIZES} --model some/model --reward.remote_url http://r"
    assert cli.main(["train", "--dry-run", *words.split(), "--data.prompt_dataset", "some/data"]) == 0
    text = capsys.readouterr().out
    for label in ("hardware cuda can do it", "GPUs: 8 needed", "model some/model", "dataset and reward"):
        assert f"  open   {label}" in text, label
    assert "assumed; --dry-run 1x80 plans for one GPU" in " ".join(text.split())


def test_doctor_prints_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--dry-run 1x80" in doctor._placement("cpu").state
    planned = placement.planned("1x80", "--dry-run")
    monkeypatch.setattr(placement, "here", lambda: planned)
    state = doctor._placement("cuda").state
    fitting, offloaded = state.split("with --ds.adam_offload: ")
    assert state.startswith("hybrid on 1 GPU of 79.2 GiB")
    assert "Qwen/Qwen3-1.7B" in fitting
    assert SEVEN not in fitting
    assert SEVEN in offloaded


def test_a_gpu_in_use_is_not_planned_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the second GPU another process holds the most; nvidia-smi tells MiB."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    card = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho 81000\n[ "$3" = --id=0 ] || echo 21504\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    in_use = placement.here()
    assert in_use is not None
    assert in_use.free == 21 * 2**30
    args = completed("", "2x80").args
    with pytest.raises(
        UsageError, match=r"0\.6 is 48\.0 GiB of a GPU, and other processes leave 21\.0 GiB of one\. Fix: "
    ):
        gpu_plan.check_machine(args, in_use)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    free = placement.here()
    assert free is not None
    assert free.free == 81000 * 2**20
    assert free == in_use
    assert gpu_plan.check_machine(args, dataclasses.replace(free, cpus=None)) is None


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


class Hub(BaseHTTPRequestHandler):
    """Has one model, owner/llama-8b, and of its files the config.json."""

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def answer(self, *, with_content: bool) -> None:
        pages = {
            "/api/models/owner/llama-8b": {"id": "owner/llama-8b"},
            "/owner/llama-8b/resolve/main/config.json": LLAMA,
        }
        content = json.dumps(pages.get(self.path, {})).encode()
        self.send_response(200 if self.path in pages else 404)
        self.send_header("ETag", '"a"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A hub at this machine, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield
        server.shutdown()


@pytest.mark.more
def test_a_hub_models_first_plan_is_its_second(hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A start asks the hub for the model's size; a dry run, which asks nothing, says that it does not have it."""
    model = "--model owner/llama-8b"
    line = f"{BASE}{SIZES} {model}"
    assert cli.main(["train", "--dry-run", "1x80", *line.split()]) == 0
    told = "warning: the size of owner/llama-8b is unknown, so the placement is that of a small model"
    assert told in capsys.readouterr().out
    first, second = (completed(model, "1x80", SIZES) for _ in range(2))
    assert placed(first) == placed(second) == (1, 1, 1, 1, 0.5, 2, True)
    assert cli.main(["train", "--dry-run", "1x80", *line.split()]) == 0
    assert "is unknown" not in capsys.readouterr().out


HEAD = """
import sys, ray
resources = {"accelerator_type:H100": 1}
info = ray.init(address="local", num_gpus=8, num_cpus=16, resources=resources, include_dashboard=False,
                object_store_memory=1 << 27, log_to_driver=False)
print("at", info.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.mark.more
def test_a_driver_without_gpus_joins_a_cluster_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dataclasses.replace(parse.run_config(f"{BASE}{SIZES}{MODEL} --hardware auto".split()), run_dir="runs/x")
    command = [sys.executable, "-c", HEAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("at "))
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert RunConfig().profile.name == "cuda"
        there = placement.here()
        assert there is not None
        assert there.per_node == (8,)
        assert there.cpus == 16
        assert "H100" in there.source
        assert placed(rules.checked(run).flags) == (1, 8, 8, 1, 0.6, 2, False)
