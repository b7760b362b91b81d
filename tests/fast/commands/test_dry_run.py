# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: placement as OpenRLHF's program has it, memory by hand, and what is printed where nothing can run."""

import ast
import dataclasses
import json
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo import cli
from ngrpo.machine import colors
from ngrpo.machine.hardware import gpu_plan
from ngrpo.machine.models import architecture
from ngrpo.machine.models.architecture import ModelSize
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags, parsed
from perturbations.errors import UsageError

BASE = "--actor.model_name_or_path m --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4"
BASE += " --reward.remote_url r.py --data.prompt_dataset p.jsonl --vllm.num_engines 2 --train.batch_size 8"
BASE += " --rollout.batch_size 8 --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --algo.kl.init_coef 0.01"


def args_of(more: str = "") -> dict[str, Any]:
    return Flags([*BASE.split(), *more.split()]).args


class Bundles:
    """A placement group: GPUs that OpenRLHF has asked for together, and the models on them."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.models: list[str] = []
        placement_groups.append(self)

    def ready(self) -> None:
        return None


placement_groups: list[Bundles] = []
NAMES = {
    "PolicyModelActor": "actor",
    "ReferenceModelActor": "reference",
    "CriticModelActor": "critic",
    "RewardModelActor": "reward model",
}


def as_openrlhf_asks(words: list[str]) -> list[tuple[int, tuple[str, ...]]]:
    """The GPUs that OpenRLHF's own program asks Ray for: its function up to the trainer, with Ray's part left out."""
    origin = find_spec("openrlhf").origin
    source = (Path(origin).parent / "cli/train_ppo_ray.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (train,) = [function for function in functions if function.name == "train"]
    makes_trainer = ["PPOTrainerAsync" in ast.unparse(statement) for statement in train.body]
    train.body = train.body[: makes_trainer.index(True)]

    def actor_group(nodes: int, gpus: int, kind: str, pg: Bundles | None, **_: Any) -> None:
        bundles = pg or Bundles(nodes * gpus)
        bundles.models.append(NAMES[kind])

    def engines(number: int, tensor: int, *arguments: Any, **_: Any) -> None:
        shared = [argument for argument in arguments if isinstance(argument, Bundles)]
        bundles = shared[0] if shared else Bundles(number * tensor)
        bundles.models.append("vLLM engines")

    def nothing(*_: Any) -> None:
        return None

    names = {
        "ray": SimpleNamespace(is_initialized=lambda: True, get=nothing),
        "RayActorGroup": actor_group,
        "create_vllm_engines": engines,
        "get_strategy": lambda args: SimpleNamespace(print=nothing),
        "placement_group": lambda bundles, strategy: Bundles(len(bundles)),
        **{name: name for name in NAMES},
    }
    exec(compile(ast.Module([train], []), "train_ppo_ray.py", "exec"), names)
    placement_groups.clear()
    names["train"](parsed(words)["args"])
    return [(bundles.gpus, tuple(sorted(bundles.models))) for bundles in placement_groups if bundles.models]


@pytest.mark.parametrize("colocated", ["", "--train.colocate_actor_ref", "--train.colocate_all"])
@pytest.mark.parametrize("asynchronous", ["", "--train.async_enable"])
@pytest.mark.parametrize("critic", ["", "--algo.advantage.estimator gae"])
@pytest.mark.parametrize("together", ["", "--train.colocate_critic_reward"])
@pytest.mark.parametrize("penalty", ["0", "0.01"])
def test_placement_is_that_of_openrlhfs_own_program(
    colocated: str, asynchronous: str, critic: str, together: str, penalty: str
) -> None:
    """Every combination; with a critic, a reward model too."""
    words = f"{colocated} {asynchronous} {critic} {together} --algo.kl.init_coef {penalty}"
    words += " --vllm.num_engines 2 --vllm.tensor_parallel_size 2"
    if critic:
        words += " --reward.model_name_or_path r --critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2"
    base = BASE.replace(" --reward.remote_url r.py", "") if critic else BASE
    flags = [*base.split(), *words.split()]
    planned = [(group.gpus, tuple(sorted(group.models))) for group in placement.groups(Flags(flags).args)]
    assert planned == as_openrlhf_asks(flags)


# 1000 parameters; a layer keeps 16·4 + 4·4 + 4·2 + 8·6 = 136 bytes of each token.
WIDTHS = {"hidden": 4, "intermediate": 6, "heads": 2, "kv_heads": 1, "head_dim": 2, "vocabulary": 10}
SIZE = ModelSize(parameters=1000, layers=3, **WIDTHS, head_norms=False, source="by hand")


def memory_of_actor(flags: str) -> dict[str, tuple[float, ...]]:
    """Bytes while responses are drawn, scored, in the backward pass, at the update, and on the host."""
    items = gpu_plan.trained("actor", SIZE, args_of(f"--data.max_len 50 {flags}"), 4)
    return {item.name.removeprefix("actor: "): (*item.phases, item.host) for item in items}


def test_memory_of_a_trained_model_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # ZeRO-2 on 4 GPUs: weights 2·1000; of an earlier micro-batch 2·250 bytes of gradients; at the update 2·250, in
    # float32 and scaled 6·250; states 12·250. At the logits' peak, 50·(3·136 + 12·10), there are no new gradients.
    assert memory_of_actor("--train.micro_batch_size 1") == {
        "weights": (2000, 2000, 2000, 2000, 0),
        "activations": (0, 0, 26400, 0, 0),
        "gradients, in exchange": (0, 0, 10**9, 0, 0),
        "gradients": (0, 0, 500, 500, 0),
        "gradients, float32 and scaled": (0, 0, 0, 1500, 0),
        "optimizer states": (3000, 3000, 3000, 3000, 0),
    }
    # ZeRO-1 shards no gradients, ZeRO-3 the weights too.
    assert memory_of_actor("--ds.zero_stage 1")["gradients"] == (0, 0, 500, 2000, 0)
    stage_3 = memory_of_actor("--ds.zero_stage 3")
    assert stage_3["weights"] == (500, 500, 500, 500, 0)
    assert stage_3["gradients, in exchange"] == (10**9, 10**9, 10**9, 10**9, 0)
    # ZeRO-3 adds the gradients of earlier micro-batches where they are.
    assert memory_of_actor("--ds.zero_stage 3 --train.micro_batch_size 1")["gradients"] == (0, 0, 0, 500, 0)
    # On the host the master weights and two moments, 4·250 each, are page-locked: 1024 each.
    asleep = memory_of_actor("--ds.enable_sleep --train.colocate_all")
    assert asleep["optimizer states"] == (0, 0, 3000, 3000, 3072)
    # Moments 8·250 and sums 2·250; page-locked master weights and gradients, 1024 each, and a copy of 2·250, thus 512.
    offloaded = memory_of_actor("--ds.adam_offload")
    assert offloaded["optimizer, offloaded"] == (0, 0, 0, 0, 5060)
    # ZeRO-3 locks no master weights, keeps no sums, and has a buffer for each group: two of 100 parameters, one of 50.
    monkeypatch.setattr(gpu_plan, "_SUB_GROUP", 100)
    stage_3 = memory_of_actor("--ds.zero_stage 3 --ds.adam_offload")
    assert stage_3["optimizer, offloaded"][-1] == 12 * 250 + (2 * 512 + 256) + (2 * 256 + 128)
    assert "gradients" not in offloaded
    # Two samples at a time: twice as many tokens, and no earlier micro-batch.
    two_samples = memory_of_actor("--train.micro_batch_size 2")
    assert two_samples["activations"] == (0, 0, 52800, 0, 0)
    assert two_samples["gradients"] == (0, 0, 0, 500, 0)
    # Checkpoints: 50·(3·2·4 + 136), at the backward pass of a layer, which exceeds that of the logits with 120 for 136.
    checkpoints = memory_of_actor("--actor.gradient_checkpointing_enable")
    assert checkpoints["activations"] == (0, 0, 8000, 0, 0)
    # With 10 tokens a layer and the gradients, 10·136 + 500, exceed the logits' 10·160.
    ten_tokens = memory_of_actor("--actor.gradient_checkpointing_enable --data.max_len 10")
    assert ten_tokens["activations"] == (0, 0, 1600, 0, 0)
    assert ten_tokens["gradients"] == (0, 0, 1000, 500, 0)


def test_memory_of_reference_logits_and_engine_by_hand() -> None:
    assert gpu_plan.frozen("reference", SIZE, args_of(), 4).phases == (2000,) * 4
    stage3 = args_of("--ds.zero_stage 3")
    assert gpu_plan.frozen("reference", SIZE, stage3, 4).phases == (500,) * 4
    offloaded = gpu_plan.frozen("reference", SIZE, stage3, 4, offloaded=True)
    assert offloaded.phases == (0,) * 4
    assert offloaded.host == 500
    # Two samples of 50 tokens with 10 logits of 2 + 4 bytes.
    scored = gpu_plan.scored(SIZE, args_of("--data.max_len 50 --rollout.micro_batch_size 2"))
    assert scored.phases == (0, 6000, 0, 0)
    # The two GPUs of a ring have half of each sample.
    ring = args_of("--data.max_len 50 --rollout.micro_batch_size 2") | {"ds.ring_attn_size": 2}
    assert gpu_plan.scored(SIZE, ring).phases == (0, 3000, 0, 0)
    args = args_of("--vllm.gpu_memory_utilization 0.5")
    engine = gpu_plan.engine(SIZE, args, 10_000)
    assert engine.phases == (5000,) * 4
    assert engine.host == 0
    # 5000 − 2·1000 bytes, of which a token takes 3 layers · 2 · 1 head · 2 wide · 2 bytes.
    assert gpu_plan.kv_cache_tokens(SIZE, args, 10_000) == 125
    # On two GPUs: 5000 − 1000 bytes, and two of four heads, 3 · 2 · 2 · 2 · 2 bytes; a single head is on both.
    halves = args_of("--vllm.gpu_memory_utilization 0.5 --vllm.tensor_parallel_size 2")
    assert gpu_plan.kv_cache_tokens(dataclasses.replace(SIZE, kv_heads=4), halves, 10_000) == 4000 // 48
    assert gpu_plan.kv_cache_tokens(dataclasses.replace(SIZE, kv_heads=1), halves, 10_000) == 4000 // 24
    asleep = args_of("--vllm.gpu_memory_utilization 0.5 --vllm.enable_sleep --train.colocate_all --vllm.num_engines 4")
    engine = gpu_plan.engine(SIZE, asleep, 10_000)
    # Asleep it keeps 2 GiB.
    assert engine.phases == (5000, *[2 * 2**30] * 3)
    assert engine.host == 2000


def test_the_ranks_of_a_ring_have_the_same_responses() -> None:
    assert placement.rank_groups(args_of()) == {"actor": 4, "ref": 4}
    ring = {"ds.ring_attn_size": 2}
    assert placement.rank_groups(args_of() | ring) == {"actor": 2, "ref": 2}
    ring_of_tensor_parallel_ranks = {**ring, "ds.tensor_parallel_size": 2}
    assert placement.rank_groups(args_of() | ring_of_tensor_parallel_ranks) == {"actor": 1, "ref": 1}


@pytest.mark.parametrize(("flags", "cpus"), [("", 11), ("--train.async_enable", 13)], ids=["in turn", "overlapping"])
def test_ray_needs_a_cpu_for_each_gpu_and_for_openrlhfs_own_processes(flags: str, cpus: int) -> None:
    """Two engines, four GPUs of the actor and four of the reference; three further processes where rollouts overlap."""
    enough = placement.Machine((8, 8), 80 * 2**30, "by hand", cpus=cpus)
    assert gpu_plan.check_machine(args_of(flags), enough) is None
    one_less = dataclasses.replace(enough, cpus=cpus - 1)
    with pytest.raises(UsageError, match=rf"this run needs {cpus} CPUs of Ray and {cpus - 1} are there"):
        gpu_plan.check_machine(args_of(flags), one_less)


@pytest.mark.parametrize("name", sorted(architecture.size_table()))
def test_sizes_of_the_table_are_those_that_transformers_makes(name: str) -> None:
    config = {key: value for key, value in architecture.size_table()[name].items() if key != "parameters"}
    by_transformers = architecture.size_from(config, "made here")
    by_table = architecture.size_of(name)
    assert by_table == dataclasses.replace(by_transformers, source=by_table.source)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sizes_and_activations_are_those_of_a_real_model(family: str) -> None:
    """Parameters to the last one; what autograd keeps of a layer within 1%."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    widths |= {"vocab_size": 100, "tie_word_embeddings": family == "qwen3", "head_dim": 32}
    tokens = 64

    def kept(layers: int) -> tuple[int, ModelSize, int]:
        config = transformers.AutoConfig.for_model(family, num_hidden_layers=layers, **widths)
        kind = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        model = transformers.AutoModelForCausalLM.from_config(config, **kind).train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen: list[Any] = []
        ids = torch.arange(tokens).unsqueeze(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            held = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}
        del held
        of_layers = sum(size for address, size in storages.items() if address not in own)
        size = architecture.size_from(config.to_dict(), "made here")
        return of_layers, size, sum(parameter.numel() for parameter in model.parameters())

    two, size, parameters = kept(2)
    four, _, _ = kept(4)
    assert size.parameters == parameters
    assert (four - two) / 2 / tokens == pytest.approx(size.saved_bytes_per_token, rel=0.01)


class TestCommand:
    LINE = "train --dry-run --hardware cuda --preset grpo --rollout.n_samples_per_prompt 4 --train.batch_size 32"
    LINE += " --rollout.batch_size 8 --vllm.num_engines 8 --train.colocate_all --vllm.enable_sleep"
    LINE += " --vllm.gpu_memory_utilization 0.5 --perturbation neighbor"

    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """An empty folder and no network."""

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a dry run asks nothing of the network")

        pytest.importorskip("openrlhf")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(socket, "create_connection", refuse)
        monkeypatch.setattr(socket.socket, "connect", refuse)

    def run(self, more: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
        assert cli.main([*self.LINE.split(), *more.split()]) == code
        return capsys.readouterr().out

    def test_all_of_it_and_nothing_is_written(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        text = self.run("--task arithmetic --model Qwen/Qwen3-1.7B-Base", capsys)
        for line in (
            "--perturbation neighbor: rate=0.1",
            "--algo.kl.estimator                 k3",
            "--data.prompt_dataset               runs/dry/task/train.jsonl",
            "GPU 0-7: actor, reference, 8 vLLM engines (tensor parallel 1)",
            "hybrid",
            "P = 1,720,574,976",
            "a step draws 8 prompts × 4 responses = 32 responses",
            "  ok     dataset and reward",
        ):
            assert line in text, line
        # 1,720,574,976 parameters: 2 bytes each; 12 bytes each over 8 GPUs; half of the 79.2 GiB of a card of
        # 80 GB; asleep the engine keeps 2, and 4 stay free.
        table = [line.split() for line in text.splitlines()]
        assert ["actor:", "weights", "3.2", "3.2", "3.2", "3.2", "-", "2P"] in table
        assert ["actor:", "optimizer", "states", "2.4", "2.4", "2.4", "2.4", "-", "12P/D"] in table
        assert ["vLLM", "engine", "39.6", "2.0", "2.0", "2.0", "3.2"] in [row[:7] for row in table]
        # To weights, states, 2 and 4, 14.81, come 2048 tokens of 151,936 logits of 6 bytes, 1.74; 2048 tokens of 28
        # layers of 112,640 bytes and logits of 12, 9.49, earlier gradients, 0.40, and their exchange, 0.93; gradients,
        # 0.40, and 1.20 in float32 and scaled.
        assert ["sum", "52.4", "16.6", "25.6", "16.4", "3.2"] in table
        # The rollout takes half of the GPU. It needs weights, states and 4, 12.81, the engine's weights, 3.20, 2 for
        # its graphs and a cache of 2048 tokens, 0.22: less than the backward pass.
        assert "needed: 25.6 GiB, with a KV cache for one response; taken: 52.4" in text
        assert list(tmp_path.iterdir()) == []

    def test_each_added_flag_has_a_line_and_a_reason(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.run(
            "--task arithmetic --model Qwen/Qwen3-1.7B-Base --advantage maxrl --rollout.batch_size 16", capsys
        )
        assert max(map(len, text.splitlines())) <= 100
        section = text.partition("added to OpenRLHF's flags\n")[2].partition("\n\n")[0]
        reasons = {line.split()[0]: " ".join(line.split()) for line in section.splitlines()}
        assert all(name.startswith("--") or name == "runs" for name in reasons)
        for line in (
            "--algo.advantage.estimator group_norm --advantage maxrl needs it",
            "--algo.kl.estimator k3 --preset grpo",
            "--ckpt.path runs/dry/checkpoints checkpoints go into the run's folder",
            "--vllm.tensor_parallel_size 1 the fewest GPUs for which an engine fits",
            "--data.label_key label --task arithmetic: the column of its references",
        ):
            assert reasons[line.split()[0]] == line

    @pytest.mark.parametrize("colored", [True, False])
    def test_colour_is_for_terminals(
        self, colored: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(colors, "has_color", lambda stream: colored)
        text = self.run("--data.prompt_dataset ./none.jsonl --model Qwen/Qwen3-1.7B-Base", capsys, code=1)
        assert ("\x1b[31mWRONG\x1b[0m  dataset and reward" in text) is colored
        assert ("\x1b[32mok\x1b[0m     runs/dry can be written" in text) is colored
        assert ("\x1b[" in text) is colored

    def test_what_does_not_fit_or_divide_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = "--task arithmetic --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --train.batch_size 24"
        assert cli.main([*self.LINE.replace("--dry-run", "--dry-run 24").split(), *line.split()]) == 1
        text = capsys.readouterr().out
        assert "placement on 8 GPUs of 23.8 GiB (as --dry-run says)" in text
        assert "do not fit into 23.8" in text
        assert "warning: --train.batch_size 24 does not divide the 32 responses" in text

    @pytest.mark.parametrize("fix", ["", "--train.dynamic_batch_enable"])
    def test_responses_that_no_micro_batch_has_are_told(self, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
        """OpenRLHF's actor leaves out what is left of its buffer: of 9 × 4 responses the last four."""
        line = f"--model Qwen/Qwen3-0.6B --task arithmetic --rollout.batch_size 9 --train.micro_batch_size 8 {fix}"
        line += " --actor.gradient_checkpointing_enable"
        text = self.run(f"{line} --vllm.num_engines 1 --dry-run 1x80", capsys)
        lost = "warning: 4 of the 36 responses of a step fill no --train.micro_batch_size and are never trained. Have"
        assert (lost in " ".join(text.split())) is not bool(fix)

    def test_a_check_that_fails_stops_no_other(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.run("--data.prompt_dataset ./none.jsonl --model Qwen/Qwen3-1.7B-Base", capsys, code=1)
        assert "WRONG  dataset and reward" in text
        assert "./none.jsonl" in text
        assert "  ok     runs/dry can be written" in text
        assert "optimizer states" in text
        assert "reward model not counted: none is named" in text

    def test_the_run_s_folder_is_that_of_a_start(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """No shell expands the ~ after an equals sign."""
        monkeypatch.setenv("HOME", str(tmp_path))
        text = self.run("--model Qwen/Qwen3-0.6B --task arithmetic --run-dir=~/first", capsys)
        assert f"ok {tmp_path}/first can be written" in " ".join(text.split())

    def test_a_folder_with_a_config_alone_is_enough(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        folder = tmp_path / "m"
        folder.mkdir()
        config = {"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
        config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10}
        (folder / "config.json").write_text(json.dumps(config))
        # Two matrices of 10·4; q and o 4·4, k and v 4·2 each, MLP 3·4·6, three norms of 4: 80 + 48 + 72 + 12.
        assert "P = 212 (m/config.json)" in self.run("--task arithmetic --model m", capsys)
        wrong = self.run("--task arithmetic --model m --perturbation.k 11", capsys, code=1)
        assert "WRONG  the options fit the model m" in wrong

    def test_a_comparison_checks_every_strategy(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = "compare --dry-run --perturbations none,neighbor:k=9 --base grpo --seeds 0,1,2 --task arithmetic"
        line += " --model smollm2-135m --hardware cpu --rollout.n_samples_per_prompt 4 --rollout.batch_size 8"
        assert cli.main([*line.split(), "--train.batch_size", "32", "--eval.data", "none"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("6 runs: 2 arms × 3 seeds")
        assert text.count("configuration") == 1
        assert text.count("ok     dataset and reward") == 2
        assert not Path("runs").exists()
