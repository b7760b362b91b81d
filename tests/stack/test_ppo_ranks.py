# SPDX-License-Identifier: Apache-2.0
"""Which numbers of answers OpenRLHF 0.11.2 can train on with several ranks; the others hang, or shift the updates.

The start-up rule (`ngrpo/config/flag_checks.py`) says the same of each. The ranks run this file: answers are cut and
handed out, trained on by a tiny model, and counted, all by OpenRLHF and DeepSpeed themselves; Ray alone, which would
carry them to the ranks, is left out. A collective that waits for ten seconds is a hang.
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
from typing import Any

import pytest

from ngrpo.config import flag_checks
from ngrpo.machine.upstream.openrlhf_flags import Flags, parsed
from tests.support.own_process import RESULT, run_two_ranks
from tests.support.tiny_folder import tiny_folder

HANGS = "Timed out waiting"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return tiny_folder(tmp_path_factory.mktemp("tiny"), smollm2, "llama", **sizes)


def trained(folder: str, ranks: int, micro: int, *cases: str) -> dict[str, list[Any]]:
    """What each rank did in each case, "ANSWERS:MICRO": that many answers, in the rollout's micro-batches of that many.

    By "NUMBER: CASE", for each rank: a list of its micro-batches, each with its answers and its updates; or how it
    ended. Batches of 8 make an update. In each case the start-up rule must say the same.
    """
    words = (str(ranks), folder, "8", str(micro), *cases)
    outputs = run_two_ranks("tests.stack.test_ppo_ranks", *words, ranks=ranks)
    steps_by_rank = [results_in(output) for output in outputs]
    ends = {}
    for number, case in enumerate(cases):
        of_ranks = [steps[number] for steps in steps_by_rank]
        answer_count, micro_rollout = (int(size) for size in case.split(":"))
        flags = Flags(arguments(folder, ranks, 8, micro, micro_rollout))
        ended_well = not any(rank["end"] for rank in of_ranks)
        assert flag_checks.trains_on_all_ranks(flags.args, answer_count) == ended_well, case
        ends[f"{number}: {case}"] = [rank["end"] or rank["trained"] for rank in of_ranks]
    return ends


def results_in(output: str) -> list[dict[str, Any]]:
    """What :func:`main` printed of its cases."""
    (line,) = (line for line in output.splitlines() if line.startswith(RESULT))
    return json.loads(line.removeprefix(RESULT))


# A micro-batch of one answer, without and with an update after it.
ONE = [1, 0]
UPDATE = [1, 1]


def test_micro_batches_of_one_on_two_ranks(folder: str) -> None:
    seen = trained(folder, 2, 1, "8:1", "8:4", "1:1", "6:1", "8:1", "7:1")
    whole = [ONE, ONE, ONE, UPDATE]
    assert seen["0: 8:1"] == seen["1: 8:4"] == [whole, whole]
    assert all("Insufficient batch size" in end for end in seen["2: 1:1"]), "an answer is missing for a rank"
    assert seen["3: 6:1"] == [[ONE] * 3] * 2, "both ranks have as many, but none of them is an update"
    assert seen["4: 8:1"] == [[UPDATE, ONE, ONE, ONE]] * 2, "what was left joins the next step's, which it shifts"
    first, second = seen["5: 7:1"]
    assert HANGS in first and second == [UPDATE, ONE, ONE], "four answers and three: the first rank waits for ever"


@pytest.mark.slow
def test_micro_batches_of_two_on_two_ranks(folder: str) -> None:
    """An answer that fills no micro batch is dropped without a word."""
    seen = trained(folder, 2, 2, "8:1", "6:1", "5:1", "7:1")
    assert seen["0: 8:1"] == [[[2, 0], [2, 1]]] * 2
    assert seen["1: 6:1"] == [[[2, 0]]] * 2, "of three answers a rank trains on two"
    assert seen["2: 5:1"] == [[[2, 1]]] * 2, "three answers and two: one micro batch each"
    assert any(HANGS in str(end) for end in seen["3: 7:1"]), "four answers and three: two micro batches, and one"


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 10])
def test_four_ranks(folder: str, count: int) -> None:
    """Each rank but the last ones gets the larger share: 3, 3, 3 and 0 of nine answers, and not 3, 2, 2 and 2."""
    seen = trained(folder, 4, 1, "8:1", "8:3", f"{count}:1")
    assert seen["0: 8:1"] == [[ONE, UPDATE]] * 4
    assert all("Insufficient batch size" in end for end in seen["1: 8:3"]), "three micro batches for four ranks"
    assert any(HANGS in str(end) for end in seen[f"2: {count}:1"])


SECONDS = 10.0
"""After which a collective has failed; hours on CUDA."""


def arguments(folder: str, ranks: int, batch: int, micro: int, micro_rollout: int) -> list[str]:
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
        "--rollout.batch_size": str(batch),
        "--rollout.micro_batch_size": str(micro_rollout),
        "--rollout.n_samples_per_prompt": "1",
        "--train.batch_size": str(batch),
        "--train.micro_batch_size": str(micro),
        "--vllm.num_engines": "1",
        "--vllm.sync_backend": "gloo",
    }
    return ["--ds.adam_offload", *chain.from_iterable(values.items())]


def answers(count: int) -> Iterator[Any]:
    """Answers of two tokens to prompts of three."""
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience

    for at in range(count):
        mask = torch.tensor([[0, 0, 1, 1]])
        yield Experience(
            sequences=torch.arange(5)[None] + at,
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
    """The micro batches of each rank, as OpenRLHF's experience maker cuts them and its group sends them."""
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


def main(rank: int, port: str, ranks: int, folder: str, batch: int, micro: int, *cases: tuple[int, int]) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank))
    os.environ.update(LOCAL_RANK="0", WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    from ngrpo.patches import install

    install(["cpu", "without_flash_attn"])
    import torch

    torch.set_num_threads(1)
    torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=SECONDS)
    from openrlhf.models import Actor
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
    from openrlhf.utils import get_strategy

    def meet(at: str) -> None:
        """Waits for all ranks, without a collective."""
        Path(folder, f"{port}-{at}-{rank}").touch()
        until = time.monotonic() + 90.0
        while len(list(Path(folder).glob(f"{port}-{at}-*"))) < ranks and time.monotonic() < until:
            time.sleep(0.05)

    strategy = get_strategy(parsed(arguments(folder, ranks, batch, micro, cases[0][1]))["args"])
    meet("start")
    strategy.setup_distributed(timedelta(seconds=SECONDS))
    actor = Actor(folder, attn_implementation="eager", ds_config=strategy.get_ds_train_config(), param_dtype="bf16")
    adam = vars(strategy.args.actor.adam)
    plan = {"optim": "adam", "adam": adam, "muon": {}, "lr_scheduler": "constant", "scheduler_steps": 9}
    actor, optimizer, scheduler = strategy.prepare((actor, plan))
    trainer = ActorPPOTrainer(
        strategy, actor, None, optimizer, scheduler, micro_train_batch_size=micro, dataloader_pin_memory=False
    )
    step, seen = trainer.training_step, []

    def noted_step(experience: Any, *args: Any) -> dict[str, Any]:
        before = actor.model.global_steps
        result = step(experience, *args)
        trained.append([len(experience.sequences), actor.model.global_steps - before])
        return result

    trainer.training_step = noted_step
    for count, micro_rollout in cases:
        strategy.args.rollout.micro_batch_size = micro_rollout
        trained: list[list[int]] = []
        try:
            for experience in handed_out(strategy, ranks, count)[rank]:
                trainer.replay_buffer.append(experience)
            trainer.ppo_train(0.0)
            end = ""
        except (RuntimeError, ValueError) as error:
            end = f"{type(error).__name__}: {error}"
        trainer.replay_buffer.clear()
        seen.append({"trained": trained, "end": end})
        # As Ray's actors wait for the next call: by a collective of its own a rank would disturb those that hang.
        meet(str(len(seen)))
    print(RESULT + json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    rank, port, ranks, folder, batch, micro, *cases = sys.argv[1:]
    sizes_of_cases = [tuple(map(int, case.split(":"))) for case in cases]
    main(int(rank), port, int(ranks), folder, int(batch), int(micro), *sizes_of_cases)
