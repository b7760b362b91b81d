# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds beside OpenRLHF's own states. Whole runs that are killed: tests/pipeline/test_faults.py."""

import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo import patches
from ngrpo.config import flag_checks
from ngrpo.config.run import current_run
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf.async_trainer import generate_samples_actor, training_actor
from ngrpo.trainers.openrlhf.step_advantages import Visits
from ngrpo.trainers.openrlhf.trainer import trainer as our_trainer
from perturbations.errors import UsageError
from tests.support.openrlhf_doubles import LOGGED, makers_state
from tests.support.run import run_with


class Trainer:
    """As OpenRLHF's PPOTrainer: a checkpoint is what it was last given."""

    saved: Any = None
    tensorboard_logger = None
    args = SimpleNamespace(train=SimpleNamespace(num_episodes=1), rollout=SimpleNamespace(batch_size=2))
    prompts_dataloader = range(8)

    def __init__(self) -> None:
        self.samples_generator = SimpleNamespace()
        self.experience_maker = makers_state()
        self.kl_ctl = SimpleNamespace(value=0.01)  # OpenRLHF's, of a fixed coefficient

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        Trainer.saved = pickle.dumps(client_states)

    def init_checkpoint_states(self) -> Any:
        return pickle.loads(self.saved)


def test_round_and_counts_go_on() -> None:
    first = our_trainer(Trainer)()
    second = our_trainer(Trainer)()
    first.samples_generator.rollout_round = 7
    first.experience_maker.prompt_memory = Visits()
    first.experience_maker.prompt_memory.count(["p", "p"], ["1", "2"])
    first.save_logs_and_checkpoints(7, LOGGED, {"global_step": 7, "data_loader_state_dict": {}})
    states = second.init_checkpoint_states()
    assert states["global_step"] == 7
    assert second.samples_generator.rollout_round == 7
    assert second.experience_maker.prompt_memory.count(["p"], ["1"]) == [1]
    assert repr(states["ngrpo"]["prompt_memory"]) == "Visits of 2 outcomes", "OpenRLHF prints the states"


def test_a_checkpoint_of_an_earlier_release_has_the_counts_under_another_name() -> None:
    first = our_trainer(Trainer)()
    first.experience_maker.prompt_memory = Visits()
    first.experience_maker.prompt_memory.count(["p"], ["1"])
    first.save_logs_and_checkpoints(7, LOGGED, {"global_step": 7, "data_loader_state_dict": {}})
    states = pickle.loads(Trainer.saved)
    states["ngrpo"]["visits"] = states["ngrpo"].pop("prompt_memory")
    resumed = our_trainer(Trainer)()
    resumed.saved = pickle.dumps(states)
    resumed.init_checkpoint_states()
    assert resumed.experience_maker.prompt_memory.count(["p"], ["1"]) == [1]


@pytest.mark.parametrize(("adaptive", "resumed"), [({"target": 0.1}, 0.03), ({}, 0.02)])
def test_an_adapted_kl_coefficient_goes_on_and_a_fixed_one_is_that_of_the_flags(
    adaptive: dict[str, float], resumed: float
) -> None:
    first = our_trainer(Trainer)()
    second = our_trainer(Trainer)()
    first.kl_ctl = SimpleNamespace(value=0.03, **adaptive)
    second.kl_ctl = SimpleNamespace(value=0.02, **adaptive)
    first.save_logs_and_checkpoints(7, LOGGED, {"global_step": 7, "data_loader_state_dict": {}})
    second.init_checkpoint_states()
    assert second.kl_ctl.value == resumed


def test_where_asynchronous_the_round_goes_with_the_dataloader() -> None:
    """The generator runs in a process of its own, whose dataloader's state OpenRLHF takes and gives back."""

    class Loader(list[int]):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 5}

    class GenerateSamplesActor:
        def __init__(self) -> None:
            self.prompts_dataloader = Loader(range(8))
            self.samples_generator = SimpleNamespace(rollout_round=0)
            self.loaded = None

        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = state_dict

    first, second = (generate_samples_actor(GenerateSamplesActor)() for _ in range(2))
    first.samples_generator.rollout_round = 7
    state = first.prompts_dataloader.state_dict()
    assert state["ngrpo_length"] == 8, "for the trainer, which prints the steps of the run"
    second.load_state_dict(state)
    assert second.samples_generator.rollout_round == 7
    assert second.loaded == {"at": 5}
    second.load_state_dict({"at": 6})  # a checkpoint of stock OpenRLHF
    assert second.loaded == {"at": 6}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch", [2, 5])
def test_a_checkpoint_after_the_last_prompts_of_an_episode_resumes_with_the_next_one(batch: int, workers: int) -> None:
    """Whether or not the prompts fill the last batch; OpenRLHF alone would train the whole episode once more."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def new_loader() -> Any:
        torch.manual_seed(3)
        return StatefulDataLoader(range(5), batch_size=None, shuffle=True, num_workers=workers)

    def steps(loader: Any, states: dict[str, Any], episodes: int = 3) -> list[tuple[int, list[int], Any]]:
        """OpenRLHF's loops over episodes and steps: the episode, prompts and loader's later state of each step."""
        taken = []
        for episode in range(states["episode"], episodes):
            prompts = iter(loader)
            while batch_of_step := list(itertools.islice(prompts, batch)):
                is_exhausted = len(batch_of_step) < batch
                taken.append((episode, [int(prompt) for prompt in batch_of_step], loader.state_dict()))
                if is_exhausted:
                    break
        return taken

    whole = steps(new_loader(), {"episode": 0})
    prompts_by_step = [(episode, prompts) for episode, prompts, _ in whole]
    for number, (episode, _, loader_state) in enumerate(whole, start=1):
        states = {"global_step": number, "episode": episode, "data_loader_state_dict": loader_state}
        Trainer.saved = pickle.dumps(states)
        resumed_states = our_trainer(Trainer)().init_checkpoint_states()
        loader = new_loader()
        loader.load_state_dict(resumed_states["data_loader_state_dict"])
        resumed = [(episode, prompts) for episode, prompts, _ in steps(loader, resumed_states)]
        assert resumed == prompts_by_step[number:], f"resumed after step {number}"


def test_an_asynchronous_run_without_any_method_counts_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trainer has no dataloader; the generator of samples, which counts rounds, is another actor's."""
    run_with(monkeypatch, openrlhf=("--train.async_enable",), run_dir=str(tmp_path), hardware="cpu")
    replaced = {row.attribute: row.ours for row in patches.active(current_run().training_conditions)}
    assert replaced["TrainingActor"] == "ngrpo.trainers.openrlhf.async_trainer:training_actor"
    assert replaced["GenerateSamplesActor"] == "ngrpo.trainers.openrlhf.async_trainer:generate_samples_actor"

    class Loader(list[int]):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 5}

    class GenerateSamplesActor:
        def __init__(self) -> None:
            self.prompts_dataloader = Loader(range(8))
            self.samples_generator = SimpleNamespace(rollout_round=0)

    class TrainingActor:
        tensorboard_logger = None
        args = Trainer.args
        experience_maker = makers_state()
        kl_ctl = SimpleNamespace(value=0.01)

        def save_logs_and_checkpoints(self, *_: Any) -> None: ...

    state = generate_samples_actor(GenerateSamplesActor)().prompts_dataloader.state_dict()
    training_actor(TrainingActor)().save_logs_and_checkpoints(1, LOGGED, {"data_loader_state_dict": state})
    assert capsys.readouterr().out == "ngrpo: step 1: reward 0.500, 1 s\n"


def test_checkpoints_of_stock_openrlhf_are_taken_too() -> None:
    Trainer.saved = pickle.dumps({"global_step": 3})
    trainer = our_trainer(Trainer)()
    assert trainer.init_checkpoint_states() == {"global_step": 3}
    assert not vars(trainer.samples_generator)
    assert trainer.experience_maker == makers_state()


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_a_checkpoint_of_other_ranks_is_refused(prefix: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "_actor" / "global_step40"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text("global_step40")
    for rank in range(4):
        (checkpoint / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    words = "--actor.model_name_or_path m --reward.remote_url http://r --ckpt.load_enable --actor.num_nodes 2"

    def check(gpus: int, *more: str) -> None:
        given = [*words.split(), "--ckpt.path", str(tmp_path), "--actor.num_gpus_per_node", str(gpus), *more]
        flag_checks.check_checkpoint(Flags(given))

    check(2)
    with pytest.raises(UsageError, match=r"global_step40 is of 4 ranks, and .* 2 × .* 4 are 8\. Train on 4 GPUs"):
        check(4)
    (checkpoint.parent / "latest_universal").write_text("global_step40")
    check(4, "--ds.use_universal_ckpt")


@pytest.mark.parametrize("critic", ["global_step20", None])
def test_a_critic_of_another_step_than_the_actor_is_refused(critic: str | None, tmp_path: Path) -> None:
    """As a run leaves it that was killed while it saved both: OpenRLHF trains on with a critic of an earlier step."""
    words = "--actor.model_name_or_path m --reward.remote_url http://r --ckpt.load_enable"
    argv = [*words.split(), "--ckpt.path", str(tmp_path)]
    with_critic = Flags([*argv, "--algo.advantage.estimator", "gae"])
    checkpoint = tmp_path / "_actor" / "global_step40"
    checkpoint.mkdir(parents=True)
    (checkpoint / "mp_rank_00_model_states.pt").touch()
    (checkpoint.parent / "latest").write_text("global_step40")
    flag_checks.check_checkpoint(with_critic)  # the run before had another estimator
    latest_of_critic = tmp_path / "_critic" / "latest"
    latest_of_critic.parent.mkdir()
    if critic:
        latest_of_critic.write_text(critic)
    with pytest.raises(UsageError, match=f"actor is global_step40, and of the critic {critic or 'none'} .*both have"):
        flag_checks.check_checkpoint(with_critic)
    flag_checks.check_checkpoint(Flags([*argv, "--algo.advantage.estimator", "group_norm"]))
    latest_of_critic.write_text("global_step40")
    flag_checks.check_checkpoint(with_critic)


def test_where_a_run_starts_is_said(tmp_path: Path) -> None:
    """Whole runs: tests/pipeline/test_faults.py, whose folder DeepSpeed writes."""
    flags = Flags(["--ckpt.path", str(tmp_path), "--ckpt.load_enable"])
    assert flag_checks.about_start(Flags(["--ckpt.path", str(tmp_path)])) == "starts at step 0"
    flag_checks.check_checkpoint(flags)
    line = flag_checks.about_start(flags)
    assert line.startswith("warning: ")
    assert "starts at step 0" in line
    folder = tmp_path / "_actor"
    folder.mkdir()
    with pytest.raises(UsageError, match=f"no checkpoint in {folder} is complete"):
        flag_checks.check_checkpoint(flags)
    for name in ("", "global_step40"):  # as a copy without the large files leaves it
        (folder / "latest").write_text(name)
        with pytest.raises(UsageError, match=f"names the checkpoint '{name}', and there is no such folder"):
            flag_checks.check_checkpoint(flags)
    (folder / "global_step40").mkdir()
    (folder / "global_step40" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(UsageError, match="lacks latest_universal"):
        flag_checks.check_checkpoint(Flags([*flags.argv, "--ds.use_universal_ckpt"]))
    flag_checks.check_checkpoint(flags)
    with pytest.raises(UsageError, match="lacks the moving average"):
        flag_checks.check_checkpoint(Flags([*flags.argv, "--train.enable_ema"]))
    assert flag_checks.about_start(flags) == f"continues after global_step40 of {folder} (--ckpt.load_enable)"
