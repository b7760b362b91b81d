# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous run evaluates: OpenRLHF's own classes in two threads, around a model that is its step's number.

Only what reaches other processes is a stand-in: Ray, the engines, the training of a batch, and the loggers.
"""

import ast
import asyncio
import logging
import sys
import threading
import time
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ngrpo.machine.upstream.patch import source_of
from ngrpo.trainers.openrlhf import async_trainer
from tests.support import openrlhf_doubles
from tests.support.run import run_with

ray = pytest.importorskip("ray")
pytest.importorskip("openrlhf")

PATIENCE = 60.0
RESPONSES = 2


class Handle:
    """A Ray actor in this process: ``handle.method.remote(…)`` calls the method at once."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class Lock:
    """OpenRLHF's ``VLLMLock``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self) -> None:
        assert self._lock.acquire(timeout=PATIENCE), "a deadlock"

    def release(self) -> None:
        self._lock.release()

    @classmethod
    def remote(cls) -> Handle:
        return Handle(cls())


class Engines:
    """Engines whose weights are the number of their step."""

    def __init__(self) -> None:
        self.step = 0
        self.evaluating = False
        self.generating = False


class Loader(list[int]):
    def state_dict(self) -> dict[str, Any]:
        return {"at": 5}


class SamplesGenerator:
    """Ours: each batch has ``args.rollout.batch_size`` of the loader's prompts."""

    rollout_round = 0

    def __init__(
        self, strategy: Any, prompts_dataloader: Any, eval_dataloader: Any, tokenizer: Any, vllm_engines: Any
    ) -> None:
        self.args = strategy.args
        self.prompts = prompts_dataloader
        self.drawn = 0
        self.engines = vllm_engines

    def generate_samples(self, **_: Any) -> tuple[list[Any], None, int, bool]:
        assert not self.engines.evaluating, "rollouts during an evaluation"
        self.engines.generating = True
        time.sleep(self.args.seconds_of_generation)
        size = self.args.rollout.batch_size
        self.drawn += size
        exhausted = self.drawn >= len(self.prompts)
        if exhausted:
            self.drawn = 0
        self.engines.generating = False
        return ["sample"] * size, None, size, exhausted

    def generate_eval_samples(self, **kwargs: Any) -> list[int]:
        assert kwargs["n_samples_per_prompt"] == RESPONSES
        assert not self.engines.generating
        self.engines.evaluating = True
        time.sleep(0.005)
        self.engines.evaluating = False
        return [self.engines.step]


class BaseTrainer:
    """OpenRLHF's ``BasePPOTrainer`` without its models. It has no ``eval_dataloader``: only `PPOTrainer` makes one."""

    wandb_logger = None

    def __init__(self, strategy: Any, *groups: Any) -> None:
        self.strategy = strategy
        self.args = strategy.args
        self.vllm_engines = groups[-2]
        self.tokenizer = None
        self.experience_maker = openrlhf_doubles.makers_state()
        self.kl_ctl = SimpleNamespace(value=0.0)
        self.evaluated: list[tuple[int, int]] = []
        self.saved: list[tuple[int, int, int]] = []
        self.tensorboard_logger = SimpleNamespace(
            log_eval=lambda step, metrics: self.evaluated.append((step, metrics["eval_pass1"])),
            writer=SimpleNamespace(flush=lambda: None),
            close=lambda: None,
        )

    def init_checkpoint_states(self) -> dict[str, Any]:
        return {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}

    def restore_best_checkpoint_state(self, states: Any) -> None: ...

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        time.sleep(self.args.seconds_of_training)
        self.broadcast_to_vllm()
        return {"rollout/reward_mean": 0.0, "optimizer_steps": 1.0}, global_step + 1

    def broadcast_to_vllm(self) -> None:
        assert not self.vllm_engines.evaluating
        self.vllm_engines.step += 1

    def save_logs_and_checkpoints(self, *_: Any) -> None: ...

    def save_best_checkpoint(self, metrics: Any, step: int, states: Any) -> None:
        assert "ngrpo" in states and states["data_loader_state_dict"]["at"] == 5, "what a resumed run needs"
        self.saved.append((step, self.vllm_engines.step, states["global_step"]))


def classes_of_openrlhf(names: dict[str, Any]) -> dict[str, Any]:
    """OpenRLHF's three classes by their names, with these names for what their module imports."""
    source = source_of("openrlhf.trainer.ppo_trainer_async")
    assert source is not None
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name != "VLLMLock"]
    for node in classes:
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope = dict(names)
    exec(compile(ast.Module([*future, *classes], []), "ppo_trainer_async.py", "exec"), scope)
    return scope


def run(
    monkeypatch: pytest.MonkeyPatch, *, ours: bool = True, batches: int = 4, every: float = 4, **options: Any
) -> tuple[Any, Any]:
    """An asynchronous run of some batches in each of its episodes; the trainer, and the generator."""
    train = {"num_episodes": 1, "async_queue_size": 1, "partial_rollout_enable": False}
    train |= {name: value for name, value in options.items() if name in train}
    args = SimpleNamespace(
        train=SimpleNamespace(**train),
        data=SimpleNamespace(disable_fast_tokenizer=False),
        rollout=SimpleNamespace(batch_size=2, n_samples_per_prompt=4),
        eval=SimpleNamespace(steps=every, temperature=0.6, n_samples_per_prompt=RESPONSES),
        ckpt=SimpleNamespace(save_steps=-1),
        ds=SimpleNamespace(load_in_4bit=False),
        algo=SimpleNamespace(dynamic_filtering_enable=False),
        seconds_of_generation=options.get("generation", 0.01),
        seconds_of_training=options.get("training", 0.01),
    )
    problems = options.get("problems", (1, 2))

    def compute_eval_metrics(dataloader: Any, samples: list[int], responses: int) -> dict[str, float]:
        assert (dataloader, responses) == (problems, RESPONSES)
        return {"eval_pass1": samples[0]}

    scope = classes_of_openrlhf({
        "asyncio": asyncio,
        "time": time,
        "ray": ray,
        "Queue": Queue,
        "tqdm": lambda *_, **__: SimpleNamespace(update=lambda _: None, close=lambda: None),
        "BasePPOTrainer": BaseTrainer,
        "compute_eval_metrics": compute_eval_metrics,
        "prepare_datasets": lambda *_: (Loader(range(2 * batches)), problems, batches),
        "SamplesGenerator": SamplesGenerator,
        "VLLMLock": Lock,
        "logger": logging.getLogger("test"),
        "get_tokenizer": lambda *_, **__: None,
        "batch_vllm_engine_call": lambda *_: None,
    })  # fmt: skip
    subclasses = {
        "TrainingActor": async_trainer.training_actor,
        "GenerateSamplesActor": async_trainer.generate_samples_actor,
        "PPOTrainerAsync": async_trainer.async_trainer,
    }
    if ours:
        for name, subclass in subclasses.items():
            scope[name] = subclass(scope[name])
    for name in ("TrainingActor", "GenerateSamplesActor"):
        scope[name].remote = lambda cls=scope[name], **kwargs: Handle(cls(**kwargs))
    modules = {
        "openrlhf.trainer.ppo_trainer": {"compute_eval_metrics": compute_eval_metrics},
        "openrlhf.trainer.ppo_trainer_async": {"VLLMLock": Lock},
        "openrlhf.trainer.ppo_utils.samples_generator": {"SamplesGenerator": SamplesGenerator},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray, "get", lambda result: result)
    run_with(monkeypatch, openrlhf=("--train.async_enable",), eval_at_start=options.get("at_start", False))

    strategy = SimpleNamespace(args=args)
    whole = scope["PPOTrainerAsync"]("model", strategy, None, None, None, None, Engines())
    generator = whole.generator_actor._actor
    trainer = whole.trainer_actor._actor
    # Two Ray actors run at once: the generator's loop begins in a thread of its own.
    thread = threading.Thread(target=generator.fit, daemon=True, kwargs={"episode": 0, "total_consumed_prompts": 0})
    generator.fit = lambda **_: thread.start()
    whole.fit()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return trainer, generator


def test_openrlhf_alone_never_evaluates_the_last_steps_and_saves_others_as_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the evaluation is ours: when a release evaluates all steps, this test says so."""
    monkeypatch.setattr(BaseTrainer, "save_best_checkpoint", lambda *_: None)
    trainer, _ = run(monkeypatch, ours=False, batches=5, every=4)
    assert trainer.evaluated == []
    saved: list[tuple[int, int]] = []
    monkeypatch.setattr(
        BaseTrainer, "save_best_checkpoint", lambda self, _, step, __: saved.append((step, self.vllm_engines.step))
    )
    trainer, _ = run(monkeypatch, ours=False, batches=8, every=4)
    assert trainer.evaluated == [(4, 4)]
    assert saved == [(4, 5)], "the checkpoint of step 4 has the weights of step 5"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"batches": 4, "every": 4}, [4]),
        ({"batches": 5, "every": 4}, [4]),
        ({"batches": 5, "every": 1}, [1, 2, 3, 4, 5]),
        ({"batches": 3, "every": 2, "num_episodes": 2}, [2, 4, 6]),
        ({"batches": 7, "every": 2, "async_queue_size": 3, "generation": 0.03}, [2, 4, 6]),
        ({"batches": 7, "every": 3, "async_queue_size": 3, "training": 0.03}, [3, 6]),
        ({"batches": 6, "every": 2, "partial_rollout_enable": True, "generation": 0.03}, [2, 4, 6]),
        ({"batches": 4, "every": -1}, []),
        ({"batches": 4, "every": 2, "problems": None}, []),
    ],
)
def test_every_nth_step_is_evaluated_and_saved_with_its_own_weights(
    options: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, generator = run(monkeypatch, **options)
    assert trainer.evaluated == [(step, step) for step in steps]
    assert trainer.saved == [(step, step, step) for step in steps]
    assert generator._last_eval_step == -1, "the generator evaluates nothing itself"


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4]), (-1, [])])
def test_the_first_weights_are_evaluated_before_any_rollout(
    every: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--eval.steps` too. No checkpoint is saved for it, as in a synchronous run."""
    drawn: list[int] = []
    evaluate = SamplesGenerator.generate_eval_samples

    def generate_eval_samples(self: Any, **kwargs: Any) -> list[int]:
        drawn.append(generators[0].drawn)
        return evaluate(self, **kwargs)

    generators: list[Any] = []
    make = SamplesGenerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        generators.append(self)

    monkeypatch.setattr(SamplesGenerator, "__init__", init)
    monkeypatch.setattr(SamplesGenerator, "generate_eval_samples", generate_eval_samples)
    trainer, _ = run(monkeypatch, batches=4, every=every, at_start=True)
    assert trainer.evaluated == [(step, step) for step in (0, *steps)]
    assert trainer.saved == [(step, step, step) for step in steps]
    assert drawn[0] == 0


def test_a_resumed_run_is_not_evaluated_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"episode": 0, "global_step": 2, "total_consumed_prompts": 0, "data_loader_state_dict": {}}
    monkeypatch.setattr(BaseTrainer, "init_checkpoint_states", lambda self: dict(states))
    monkeypatch.setattr(async_trainer.AsyncGenerator, "load_state_dict", lambda self, states: None)
    trainer, _ = run(monkeypatch, batches=2, every=-1, at_start=True)
    assert trainer.evaluated == []


def test_the_time_of_a_step_is_without_the_evaluation_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.2
    slow = SamplesGenerator.generate_eval_samples

    def generate_eval_samples(self: Any, **kwargs: Any) -> list[int]:
        time.sleep(seconds)
        return slow(self, **kwargs)

    monkeypatch.setattr(SamplesGenerator, "generate_eval_samples", generate_eval_samples)
    times: list[float] = []

    def save_logs_and_checkpoints(self: Any, step: int, status: dict[str, float], states: Any) -> None:
        times.append(status["timing/step_total"])

    monkeypatch.setattr(BaseTrainer, "save_logs_and_checkpoints", save_logs_and_checkpoints)
    run(monkeypatch, batches=3, every=1)
    assert len(times) == 3 and all(0.0 < time_of_step < seconds for time_of_step in times)
