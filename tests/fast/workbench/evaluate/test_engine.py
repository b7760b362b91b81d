# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules and noise on the weights without a training: what is taken, and what the engine is given."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.models.tiny import random_model
from ngrpo.commands import eval as command
from ngrpo.config import parse
from ngrpo.config.arms import parse_arms
from ngrpo.methods import policy_noises
from ngrpo.workbench.diagnose import policy_of
from ngrpo.workbench.evaluate import engine
from ngrpo.workbench.evaluate.engine import RolloutPolicy, Sampling, noisy_folder, noisy_model
from perturbations.errors import UsageError


def policy(*words: str, step: int = 0, steps: int | None = None) -> RolloutPolicy:
    return RolloutPolicy.of(parse.run_config(list(words)), step, steps)


def test_a_policy_describes_schedule_noise_and_step() -> None:
    words = ["--sampling.schedule", "ead", "--policy_noise", "psn", "--policy_noise.sigma", "0.02"]
    hot_and_noisy = policy(*words, step=7)
    description = hot_and_noisy.described()
    assert description["sampling_schedule"]["name"] == "ead"
    assert description["policy_noise"]["name"] == "psn"
    assert description["training_step"] == 7
    assert description["sigma"] == 0.02
    assert hot_and_noisy.scale == 0.02


def test_a_plain_policy_describes_nothing() -> None:
    plain = policy()
    assert plain.specs == {}
    assert plain.described() == {}
    assert plain.scale == 0.0


def test_the_scale_of_adaptive_noise_is_that_of_its_stage() -> None:
    # Twenty of 100 steps: stage 2 of 10, 1e-2 · (1/20)^(1/9).
    aqn = policy("--policy_noise", "aqn", step=20, steps=100)
    assert aqn.scale == pytest.approx(1e-2 * 20 ** (-1 / 9))
    assert aqn.notes == []


def test_noise_that_is_0_at_the_first_step_is_noted() -> None:
    (note,) = policy("--policy_noise", "aqn").notes
    assert "no noise at training step 0: give another --at-step N" in note


@pytest.mark.parametrize(
    ("words", "step", "steps", "message"),
    [
        pytest.param(
            ["--sampling.schedule", "e3"],
            0,
            None,
            "follows a training's rollouts, and there is none here",
            id="a schedule of the training",
        ),
        pytest.param(["--policy_noise", "aqn"], 3, None, "Add --of-steps N", id="a step without their number"),
        pytest.param([], -1, None, "--at-step -1: must be a training step, from 0.", id="a step below 0"),
        pytest.param(
            [],
            5,
            5,
            "--at-step 5: must be a training step, from 0 to 4, the last of --of-steps 5.",
            id="a step beyond the last",
        ),
    ],
)
def test_what_a_policy_refuses(words: list[str], step: int, steps: int | None, message: str) -> None:
    with pytest.raises(UsageError) as error:
        policy(*words, step=step, steps=steps)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sampling.schedule ead --temperature 0", "ead has no effect with --temperature 0"),
        ("--credit top_entropy", "--credit belongs to ngrpo train"),
    ],
)
def test_eval_refuses_what_would_have_no_effect(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command.check(["--model", "smollm2-135m", "--task", "arithmetic", *words.split()])


def test_noise_on_the_weights_is_allowed_at_temperature_0() -> None:
    policy("--policy_noise", "psn").check_temperature(0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_model("llama")[1].save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def parameters(folder: Path | str) -> dict[str, torch.nn.Parameter]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def assert_equal_parameters(one: Any, other: Any) -> None:
    """Asserts that two mappings have the same names and bits."""
    one = dict(one)
    other = dict(other)
    assert one.keys() == other.keys()
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name


def test_the_noise_is_that_of_the_trainings_sync(tiny: Path) -> None:
    """As `policy_noise.py` of the trainer sends it before the rollouts of the step, on the Hugging Face parameters."""
    noise = policy("--policy_noise", "psn", "--policy_noise.sigma", "0.05", step=3)
    with noisy_model(str(tiny), noise) as loaded:
        noisy = {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}

    clean = parameters(tiny)
    sent = parameters(tiny)
    with policy_noises.create("psn", sigma=0.05).added(sent, 0.05, 3):
        assert_equal_parameters(sent, noisy)
    changed = {name for name in noisy if not torch.equal(noisy[name], clean[name])}
    assert changed == {name for name in noisy if ".mlp." in name}
    # The noise is taken off again at the end.
    assert_equal_parameters(loaded.named_parameters(), clean)


def test_an_engine_has_the_noise_while_an_arm_is_sampled_and_its_own_weights_afterwards(tiny: Path) -> None:
    """Also where the sampling fails. Cached prefixes of other weights are dropped after each load."""
    events: list[Any] = []
    clean = parameters(tiny)
    core = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        collective_rpc=lambda method: events.append(load_file(method.keywords["path"])),
        reset_prefix_cache=lambda: events.append("reset"),
    )
    llm: Any = SimpleNamespace(llm_engine=core)
    noise = policy("--policy_noise", "psn", "--policy_noise.sigma", "0.05", step=3)
    with pytest.raises(KeyError), engine.noisy_engine(llm, str(tiny), noise):
        noisy, reset = events
        assert reset == "reset"
        raise KeyError
    assert_equal_parameters(events[2], clean)
    assert events[3:] == ["reset"]
    with noisy_model(str(tiny), noise) as loaded:
        assert_equal_parameters(loaded.named_parameters(), noisy)


def test_a_folder_with_noise_is_temporary_and_has_the_other_files(tiny: Path) -> None:
    noise = policy("--policy_noise", "psn", "--policy_noise.sigma", "0.05")
    (tiny / "consolidated.pth").touch()  # further weights of the model without noise

    with noisy_folder(str(tiny), noise) as folder:
        noisy = parameters(folder)
        assert not (Path(folder) / "consolidated.pth").exists()
        assert (Path(folder) / "tokenizer.json").read_text() == "{}"

    assert not Path(folder).exists()
    with noisy_model(str(tiny), noise) as loaded:
        assert_equal_parameters(loaded.named_parameters(), noisy)


def test_without_noise_the_folder_is_the_model_s_own(tiny: Path) -> None:
    with noisy_folder(str(tiny), policy("--policy_noise", "aqn")) as folder:
        assert folder == str(tiny)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the package, whose import takes seconds."""
    stand_in = SimpleNamespace(SamplingParams=SimpleNamespace, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    stand_in.__spec__ = find_spec("vllm")  # its sources are looked up too
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in


class TwoRequests:
    """An engine whose first request ends in the first step, and whose second one never does."""

    def __init__(self) -> None:
        self.running: list[str] = []

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.running.append(name)

    def step(self) -> list[Any]:
        answer = SimpleNamespace(text="7", token_ids=[1], finish_reason="stop")
        return [SimpleNamespace(request_id=self.running.pop(0), finished=True, outputs=[answer])]

    def abort_request(self, names: list[str]) -> None:
        self.running = [name for name in self.running if name not in names]


def test_samples_that_nobody_waits_for_are_aborted(vllm: SimpleNamespace) -> None:
    llm: Any = SimpleNamespace(llm_engine=TwoRequests())
    jobs = [engine.Job([1], 0, 0), engine.Job([1], 0, 1)]
    stream = engine.generate(llm, jobs, Sampling(), perturbed=False, reproducible=False)
    assert [generated.job for generated in next(stream)] == [0]
    assert llm.llm_engine.running == ["eval-1"]

    stream.close()

    assert llm.llm_engine.running == []


def test_the_engine_is_built_with_the_schedule(vllm: SimpleNamespace) -> None:
    options: dict[str, Any] = {}
    vllm.LLM = lambda model, **keywords: options.update(keywords)
    hot = policy("--sampling.schedule", "ead")
    engine.build("m", None, 10, hardware="cpu", policy=hot)
    assert options["additional_config"]["sampling_schedule"] == hot.specs["sampling_schedule"]


def test_a_request_has_its_seed_sample_and_step(vllm: SimpleNamespace) -> None:
    job = engine.Job([1], 2, 3)
    params = engine.parameters(Sampling(), False, True, job, step=9)
    assert params.extra_args["perturbation"] == {"enabled": False, "seed": 2, "sample": 3, "training_step": 9}


def test_arms_of_a_diagnosis_have_schedules_and_noise() -> None:
    lines = ["none", "none sampling.schedule=ead sampling.schedule.tau_max=1.5", "neighbor k=2 policy_noise=psn"]
    arms = parse_arms(None, (), lines, rollouts=True)
    assert [arm.id for arm in arms] == lines
    plain, hot, noisy = map(policy_of, arms)
    assert plain.specs == {}
    assert hot.run.sampling_schedule.tau_max == 1.5
    assert hot.run.policy_noise is None
    assert noisy.run.policy_noise.name == "psn"
    assert noisy.run.sampling_schedule is None


def test_arms_of_a_diagnosis_have_nothing_of_a_training() -> None:
    with pytest.raises(UsageError, match="is for a training"):
        parse_arms(None, (), ["none credit=top_entropy"], rollouts=True)


def test_a_request_has_its_sampling_and_its_place_among_a_prompts_responses(vllm: SimpleNamespace) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=5)
    params = engine.parameters(sampling, True, True, engine.Job([1], 2, 3), responses=8)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.9, 5)
    assert params.extra_args["perturbation"] == {"enabled": True, "seed": 2, "sample": 3, "answer": 3, "answers": 8}
