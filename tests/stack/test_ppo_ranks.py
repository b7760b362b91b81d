# SPDX-License-Identifier: Apache-2.0
"""Which numbers of answers OpenRLHF 0.11.2 can train on with several ranks; the others hang, or shift the updates.

The start-up rule (`ngrpo/config/batch_checks.py`) must say the same of each number. The ranks run this file: OpenRLHF
and DeepSpeed themselves cut the answers into micro-batches, hand these out, train a tiny model on them, and count the
updates. Only Ray, which would carry the answers to the ranks, is left out. A collective that waits for ten seconds is
a hang.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ngrpo.config import batch_checks
from ngrpo.machine.upstream.openrlhf_flags import Flags, parsed
from perturbations.errors import UsageError
from tests.support.own_process import RESULT, become_rank, run_two_ranks
from tests.support.tiny_folder import tiny_folder

HANGS = "Timed out waiting"
BATCH = 8
"""How many answers make a batch of the training: OpenRLHF updates the model once on each batch."""


class Case(NamedTuple):
    """A step of the training with that many answers, which come in the rollout's micro-batches of that size."""

    answers: int
    micro_rollout: int

    @classmethod
    def parse(cls, word: str) -> "Case":
        answers, micro_rollout = word.split(":")
        return cls(int(answers), int(micro_rollout))

    def __str__(self) -> str:
        return f"{self.answers}:{self.micro_rollout}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return tiny_folder(tmp_path_factory.mktemp("tiny"), smollm2, "llama", **sizes)


def trained(folder: str, ranks: int, micro: int, *cases: Case) -> list[list[Any]]:
    """Trains on all ranks, step after step, and asserts that the start-up rule is right about each step.

    Args:
        folder: of the model.
        ranks: how many processes train.
        micro: how many answers make a micro-batch of the training.
        cases: the steps.

    Returns:
        For each case, what each rank did: a list of its micro-batches, each with its answers and its updates; or the
        error with which the rank ended.
    """
    words = (str(ranks), folder, str(micro), *map(str, cases))
    outputs = run_two_ranks("tests.stack.test_ppo_ranks", *words, ranks=ranks)
    results_by_rank = [results_in(output) for output in outputs]
    results_by_case = zip(*results_by_rank, strict=True)
    outcomes = []
    for case, results in zip(cases, results_by_case, strict=True):
        flags = Flags(arguments(folder, ranks, micro, case.micro_rollout))
        ended_well = not any(result["error"] for result in results)
        assert is_allowed(flags, case.answers) == ended_well, str(case)
        outcomes.append([result["error"] or result["micro_batches"] for result in results])
    return outcomes


def is_allowed(flags: Flags, answers: int) -> bool:
    """Whether a start allows such steps: by OpenRLHF's own assertions, and by our rule."""
    try:
        args = flags.args
    except UsageError:
        return False
    return batch_checks.trains_on_all_ranks(args, answers)


def results_in(output: str) -> list[dict[str, Any]]:
    """The results, a dictionary for each case, that :func:`main` printed."""
    (line,) = (line for line in output.splitlines() if line.startswith(RESULT))
    return json.loads(line.removeprefix(RESULT))


# A micro-batch of one answer, without and with an update after it.
ONE = [1, 0]
UPDATE = [1, 1]


def test_micro_batches_of_one_on_two_ranks(folder: str) -> None:
    cases = (Case(8, 1), Case(8, 4), Case(1, 1), Case(6, 1), Case(8, 1), Case(7, 1))
    eight, eight_in_fours, one, six, eight_after_six, seven = trained(folder, 2, 1, *cases)
    complete_step = [ONE, ONE, ONE, UPDATE]
    assert eight == [complete_step, complete_step]
    assert eight_in_fours == [complete_step, complete_step]
    for error in one:
        assert "Insufficient batch size" in error, "an answer is missing for a rank"
    assert six == [[ONE] * 3] * 2, "both ranks have three micro-batches, but none of them is an update"
    assert eight_after_six == [[UPDATE, ONE, ONE, ONE]] * 2, "what was left counts in this step, and shifts its update"
    first_rank, second_rank = seven
    assert HANGS in first_rank, "four answers and three: the first rank waits for ever"
    assert second_rank == [UPDATE, ONE, ONE]


@pytest.mark.slow
def test_micro_batches_of_two_on_two_ranks(folder: str) -> None:
    """An answer that fills no micro-batch is dropped without a word."""
    cases = (Case(8, 1), Case(6, 1), Case(5, 1), Case(7, 1))
    eight, six, five, seven = trained(folder, 2, 2, *cases)
    assert eight == [[[2, 0], [2, 1]]] * 2
    assert six == [[[2, 0]]] * 2, "of three answers a rank trains on two"
    assert five == [[[2, 1]]] * 2, "three answers and two: one micro-batch each"
    assert any(HANGS in str(outcome) for outcome in seven), "four answers and three: two micro-batches and one"


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 10])
def test_four_ranks(folder: str, count: int) -> None:
    """Each rank but the last ones gets the larger share: 3, 3, 3 and 0 of nine answers, and not 3, 2, 2 and 2."""
    eight, eight_in_threes, uneven = trained(folder, 4, 1, Case(8, 1), Case(8, 3), Case(count, 1))
    assert eight == [[ONE, UPDATE]] * 4
    for error in eight_in_threes:
        assert "Insufficient batch size" in error, "three micro-batches for four ranks"
    assert any(HANGS in str(outcome) for outcome in uneven)


SECONDS = 10.0
"""A collective fails after this time; on CUDA it would wait for hours."""


def arguments(folder: str, ranks: int, micro: int, micro_rollout: int) -> list[str]:
    """OpenRLHF's flags of a run in which that many ranks train."""
    values = {
        "--actor.model_name_or_path": folder,
        "--actor.num_gpus_per_node": str(ranks),
        "--actor.lr_scheduler": "constant",
        "--algo.advantage.estimator": "reinforce",
        "--algo.kl.init_coef": "0",
        "--data.prompt_dataset": "none",
        "--ds.attn_implementation": "eager",
        "--reward.remote_url": "none",
        "--rollout.batch_size": str(BATCH),
        "--rollout.micro_batch_size": str(micro_rollout),
        "--rollout.n_samples_per_prompt": "1",
        "--train.batch_size": str(BATCH),
        "--train.micro_batch_size": str(micro),
        "--vllm.num_engines": "1",
        "--vllm.sync_backend": "gloo",
    }
    return ["--ds.adam_offload", *chain.from_iterable(values.items())]


def answers(count: int) -> Iterator[Any]:
    """Answers of two tokens to prompts of three."""
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience

    for number in range(count):
        mask = torch.tensor([[0, 0, 1, 1]])
        yield Experience(
            sequences=torch.arange(5)[None] + number,
            attention_mask=torch.ones(1, 5, dtype=torch.int64),
            action_mask=mask,
            action_log_probs=-torch.ones(1, 4),
            advantages=mask.float(),
            returns=mask.float(),
            rewards=torch.ones(1),
            response_length=torch.tensor([2]),
            truncated=torch.tensor([False]),
            total_length=torch.tensor([5]),
            prompts=["?"],
            labels=[""],
            images=[None],
            mm_train_inputs=[None],
            info={"reward": torch.ones(1)},
        )


def handed_out(strategy: Any, ranks: int, count: int) -> list[list[Any]]:
    """The rollout's micro-batches of each rank, as OpenRLHF's experience maker cuts them and its group sends them."""
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ray import launcher

    maker = SimpleNamespace(args=strategy.args, tokenizer=SimpleNamespace(pad_token_id=0))
    batches = RemoteExperienceMaker.split_rollout_samples(maker, list(answers(count)))
    launcher.ray = SimpleNamespace(put=lambda chunk: chunk)
    received: list[list[Any]] = []

    def remote(method: str, chunk: dict[str, list[Any]], start: int, end: int) -> None:
        received.append(chunk["experience"][start:end])

    handler = SimpleNamespace(execute_batch=SimpleNamespace(remote=remote))
    group = SimpleNamespace(_actor_handlers=[handler] * ranks, duplicate_actors=1)
    launcher.RayActorGroup.async_run_method_batch(group, "append", experience=batches)
    return received


def build_trainer(strategy: Any, folder: str, micro: int) -> Any:
    """OpenRLHF's trainer of one rank, with the model and an optimizer under DeepSpeed."""
    from openrlhf.models import Actor
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    actor = Actor(folder, attn_implementation="eager", ds_config=strategy.get_ds_train_config(), param_dtype="bf16")
    plan = {
        "optim": "adam",
        "adam": vars(strategy.args.actor.adam),
        "muon": {},
        "lr_scheduler": "constant",
        "scheduler_steps": 9,
    }
    actor, optimizer, scheduler = strategy.prepare((actor, plan))
    return ActorPPOTrainer(
        strategy, actor, None, optimizer, scheduler, micro_train_batch_size=micro, dataloader_pin_memory=False
    )


def main(rank: int, port: str, ranks: int, folder: str, micro: int, *cases: Case) -> None:
    """One rank: trains on its share of each case, and prints what it did."""
    become_rank(rank, port, ranks)
    from ngrpo.patches import install

    install(["cpu", "without_flash_attn"])
    import torch

    torch.set_num_threads(1)
    torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=SECONDS)
    from openrlhf.utils import get_strategy

    def meet(place: str) -> None:
        """Waits for the other ranks at a place, for at most 90 seconds, and without a collective.

        Ray's actors wait for their next call in the same way. A rank that waited by a collective of its own would
        disturb those that hang.
        """
        Path(folder, f"{port}-{place}-{rank}").touch()
        deadline = time.monotonic() + 90.0
        while time.monotonic() < deadline:
            arrived = list(Path(folder).glob(f"{port}-{place}-*"))
            if len(arrived) >= ranks:
                return
            time.sleep(0.05)

    flags = parsed(arguments(folder, ranks, micro, cases[0].micro_rollout))
    strategy = get_strategy(flags["args"])
    meet("start")
    strategy.setup_distributed(timedelta(seconds=SECONDS))
    trainer = build_trainer(strategy, folder, micro)
    model = trainer.actor.model
    training_step = trainer.training_step
    micro_batches: list[list[int]] = []

    def training_step_and_note(experience: Any, *args: Any) -> dict[str, Any]:
        updates_before = model.global_steps
        result = training_step(experience, *args)
        updates = model.global_steps - updates_before
        micro_batches.append([len(experience.sequences), updates])
        return result

    trainer.training_step = training_step_and_note
    results = []
    for number, case in enumerate(cases):
        strategy.args.rollout.micro_batch_size = case.micro_rollout
        micro_batches.clear()
        error_text = ""
        try:
            for experience in handed_out(strategy, ranks, case.answers)[rank]:
                trainer.replay_buffer.append(experience)
            trainer.ppo_train(0.0)
        except (RuntimeError, ValueError) as error:
            error_text = f"{type(error).__name__}: {error}"
        trainer.replay_buffer.clear()
        results.append({"micro_batches": micro_batches.copy(), "error": error_text})
        meet(str(number))
    print(RESULT + json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    rank, port, ranks, folder, micro, *cases = sys.argv[1:]
    main(int(rank), port, int(ranks), folder, int(micro), *map(Case.parse, cases))
