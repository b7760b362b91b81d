# SPDX-License-Identifier: Apache-2.0
"""Our advantages and sampling where OpenRLHF uses them, in its own experience maker; test_routing.py has a training.

OpenRLHF's experience maker and samples generator have our patches, and no engines. They are in a process of their own,
which runs this file, since patches change modules for good.
"""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ngrpo import patches
from ngrpo.config.run import RunConfig, Sampling, begin
from ngrpo.machine.upstream import patch
from ngrpo.methods.advantages import compute, create
from tests.support.own_process import RESULT, result_of

SIZE = 4
# Prompts a (one right), b (all wrong), c (all right). Every token of an answer is the answer's place in this list.
REWARDS = [1.0, 0.0, 0.0, 0.0] + [0.0] * 4 + [1.0] * 4
PLACES = range(len(REWARDS))
# How many tokens each answer has. Those with three were cut off.
LENGTHS = [1 + place % 3 for place in PLACES]
# Micro batches as dynamic batching makes them: neither in order nor of one prompt.
MICRO_BATCHES = [
    [7, 0, 11, 3, 4],
    [1, 2, 5, 6],
    [8, 9, 10],
]
# What the answers say: two of prompt a's agree, three of b's, all of c's.
ANSWERS = ["12", "7", "7", "9", "1", "2", "2", "2", "5", "5", "5", "5"]
GROUPS = torch.tensor(REWARDS).reshape(-1, SIZE)
OVERLONG = torch.tensor([length == 3 for length in LENGTHS]).reshape(-1, SIZE)


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    """What OpenRLHF's own classes computed with the patches in place."""
    return result_of("tests.pipeline.test_advantages")


def check_tokens(answers: list[list[float]], expected: torch.Tensor) -> None:
    """Every token of an answer has the answer's advantage; answers are in the order of their places."""
    values = expected.flatten().tolist()
    assert [len(tokens) for tokens in answers] == LENGTHS
    for tokens, value in zip(answers, values, strict=True):
        assert tokens == pytest.approx([value] * len(tokens), abs=1e-6)


def test_each_answer_gets_our_advantage(computed: dict[str, Any]) -> None:
    """Which for `group_norm` is OpenRLHF's own, to the bit, where rewards are 0 and 1."""
    assert computed["group_norm"] == computed["stock"]
    for name in ("group_norm", "ngrpo", "nsr"):
        check_tokens(computed[name], compute(name, GROUPS))
    assert "12 responses are not a whole number of groups of 5" in computed["incomplete"]


def test_answers_that_were_cut_off_are_out_of_their_groups(computed: dict[str, Any]) -> None:
    """Places 2, 5, 8 and 11, which have three tokens."""
    excluding = create("group_norm", overlong="exclude")
    check_tokens(computed["exclude"], excluding.compute(GROUPS, overlong=OVERLONG))
    assert computed["exclude"] != computed["group_norm"]
    assert computed["excluded"] == pytest.approx(1 / 3)


def test_copo_counts_over_steps(computed: dict[str, Any]) -> None:
    """Rewards with β = 1 and their advantages, by hand.

    First step: N is how many other answers say the same, 0 1 1 0 for prompt a, so the rewards are 1 + 1, 1/√2, 1/√2, 1,
    with the mean 1.1035534 and the deviation 0.6133731. Second step: N is 1 3 3 1, since each answer was seen once more
    by every visit of the first step, so the rewards are 1 + 1/√2, 1/2, 1/2, 1/√2, with the mean 0.8535534 and the
    deviation 1/√3. In prompt b one answer differs from three equal ones (as in group_norm of 1 0 0 0), in c none does.
    """
    prompts_b_and_c = [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    first, second = computed["copo"]
    check_tokens(first, torch.tensor([1.4615030, -0.6463384, -0.6463384, -0.1688261, *prompts_b_and_c]))
    check_tokens(second, torch.tensor([1.4783978, -0.6123724, -0.6123724, -0.2536530, *prompts_b_and_c]))
    assert computed["copo_metrics"]["advantage/count_mean"] == pytest.approx((8 + 16 + 28) / 12)
    assert computed["copo_metrics"]["advantage/outcomes"] == 3 + 2 + 1


def test_k_follows_the_step(computed: dict[str, Any]) -> None:
    first, last = computed["pass_at_k"]
    check_tokens(first, compute("pass_at_k", GROUPS, k=2))
    check_tokens(last, compute("pass_at_k", GROUPS, k=1))


def test_openrlhfs_length_penalty_comes_first(computed: dict[str, Any]) -> None:
    """Places 2, 5, 8, 11 have three tokens, of which one lies in the buffer of two: they lose 1/2."""
    check_tokens(computed["ngrpo_overlong"], compute("ngrpo", GROUPS - 0.5 * OVERLONG))
    assert computed["metrics"]["advantage/uniform_groups"] == pytest.approx(2 / 3)
    assert computed["metrics"]["advantage/uniform_mean"] == pytest.approx(-0.2 / math.sqrt(0.2) / 2, abs=1e-5)


def test_masks_are_on_in_rollouts_and_off_in_evaluation(computed: dict[str, Any]) -> None:
    masked = [0.9, 0.8, 5, 0.1]
    assert computed["sampling"] == {
        "rollout": masked,
        "evaluation": [0.6, 0.8, -1, 0.0],
        "again": masked,
    }


# --- in a process of its own -----------------------------------------------------------------------------------------


class Tokenizer:
    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        place = int(tokens[0])
        assert {int(token) for token in tokens} == {place}, "tokens of the prompt, or padding, were decoded"
        return f"It is {ANSWERS[place]}."


def main() -> None:
    """Prints what the patched classes compute, as JSON."""
    patches.install(["cpu", "without_flash_attn"])
    from openrlhf.trainer.ppo_utils import experience_maker, samples_generator
    from ray import cloudpickle

    result: dict[str, Any] = {"stock": token_advantages(new_maker())}
    patch.place(row for row in patches.active([patches.TRAINING]) if row.module.endswith("_maker"))
    for name in ("group_norm", "ngrpo", "nsr"):
        result[name] = token_advantages_of(new_maker(), name=name)

    excluding = new_maker()
    result["exclude"] = token_advantages_of(excluding, name="group_norm", overlong="exclude")
    result["excluded"] = excluding.step_measures["advantage/overlong"]

    annealed = new_maker()
    result["pass_at_k"] = []
    for step in (0, 7):
        annealed.training_step = step
        result["pass_at_k"].append(token_advantages_of(annealed, name="pass_at_k", k=2, k_end=1, k_steps=7))

    counting = new_maker()
    result["copo"] = [token_advantages_of(counting, name="copo", beta=1.0) for _ in range(2)]
    result["copo_metrics"] = counting.step_measures

    # DAPO's penalty on the answers of more than 2 tokens: 1 of a buffer of 2 beyond them costs a half.
    penalizing = new_maker(overlong_buffer_len=2, overlong_penalty_factor=1.0)
    result["ngrpo_overlong"] = token_advantages_of(penalizing, name="ngrpo")

    measured = new_maker()
    token_advantages_of(measured, name="ngrpo")
    result["metrics"] = measured.step_measures

    incomplete = new_maker()
    incomplete.args.rollout.n_samples_per_prompt = 5
    try:
        token_advantages_of(incomplete, name="ngrpo")
    except RuntimeError as error:
        result["incomplete"] = str(error)

    result["sampling"] = sampled(samples_generator)
    # Ray pickles the trainer by value from the driver, and with it what its methods name.
    cloudpickle.dumps([samples_generator.SamplesGenerator, experience_maker.RemoteExperienceMaker])
    cloudpickle.dumps([samples_generator.SamplingParams, experience_maker.compute_reward])
    print(RESULT + json.dumps(result))


def new_maker(**reward: Any) -> Any:
    """OpenRLHF's experience maker without engines; ``reward`` has further options of ``--reward.*``."""
    from openrlhf.trainer.ppo_utils import experience_maker

    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=SIZE, max_new_tokens=4),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0, no_std_norm=False)),
        reward=SimpleNamespace(clip_range=(-10, 10), **reward),
    )
    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    maker.args = args
    maker.strategy = SimpleNamespace(args=args)
    maker.kl_ctl = SimpleNamespace(value=0.0)
    maker.advantage_estimator = "group_norm"
    maker.tokenizer = Tokenizer()
    maker.training_step = 0
    return maker


def experiences() -> list[Any]:
    """The answers in their micro batches, as OpenRLHF's experience maker gets them from the generator of samples."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    made = []
    for places in MICRO_BATCHES:
        # Two tokens of prompt (99), then 1 to 3 of the answer, then padding; entry t of the mask is of token t+1.
        lengths = [LENGTHS[place] for place in places]
        longest = max(lengths)
        sequences = torch.full((len(places), 2 + longest), 99)
        mask = torch.zeros(len(places), 1 + longest)
        for row, (place, length) in enumerate(zip(places, lengths)):
            sequences[row, 2 : 2 + length] = place
            mask[row, 1 : 1 + length] = 1
        rewards = torch.tensor(REWARDS)[places]
        experience = Experience(
            sequences=sequences,
            action_mask=mask,
            prompts=["abc"[place // SIZE] for place in places],
            rewards=rewards,
            info={"reward": rewards},
            index=list(places),
            truncated=torch.tensor([length == 3 for length in lengths]),
            response_length=torch.tensor(lengths),
            kl=torch.zeros_like(mask),
        )
        made.append(experience)
    return made


def token_advantages(maker: Any) -> list[list[float]]:
    """Every answer's advantages by token, in the order of the places; padding is cut off."""
    by_place: dict[int, list[float]] = {}
    for experience in maker.compute_advantages_and_returns(experiences()):
        assert torch.equal(experience.advantages, experience.returns)
        for row, place in enumerate(experience.index):
            of_answer = experience.action_mask[row].bool()
            by_place[place] = experience.advantages[row][of_answer].tolist()
    return [by_place[place] for place in PLACES]


def token_advantages_of(maker: Any, **spec: Any) -> list[list[float]]:
    """The same in a run with this advantage."""
    begin(RunConfig(specs={"advantage": spec}))
    return token_advantages(maker)


def sampled(module: Any) -> dict[str, list[float]]:
    """(temperature, top_p, top_k, min_p) of a training rollout, an evaluation, and a rollout after that."""
    begin(RunConfig(specs={"perturbation": {"name": "neighbor"}}, sampling=Sampling(top_k=5, min_p=0.1)))
    patch.place(row for row in patches.active([patches.TRAINING]) if row.module == module.__name__)
    sampling_params: list[Any] = []

    def generate_responses(**kwargs: Any) -> None:
        sampling_params.append(kwargs["sampling_params"])

    engine = SimpleNamespace(
        get_num_unfinished_requests=SimpleNamespace(remote=lambda: 0),
        generate_responses=SimpleNamespace(remote=generate_responses),
    )
    module.ray = SimpleNamespace(get=lambda value: value)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="off"), dynamic_filtering_enable=False),
        rollout=SimpleNamespace(n_samples_per_prompt=2, batch_size=1),
        vllm=SimpleNamespace(enable_sleep=False),
    )
    prompts = DataLoader([1])
    generator = module.SamplesGenerator(SimpleNamespace(args=args), prompts, prompts, None, [engine])

    def generate_vllm(**kwargs: Any) -> Any:
        for name in ("dataloader_iter", "num_prompts", "dynamic_filtering"):
            kwargs.pop(name)
        generator._dispatch_prompts_to_vllm(["question"], ["label"], **kwargs)
        return [], 1, True

    generator._generate_vllm = generate_vllm
    generator.generate_samples(temperature=0.9, top_p=0.8)
    generator.generate_eval_samples(temperature=0.6, top_p=0.8)
    generator.generate_samples(temperature=0.9, top_p=0.8)
    values = [[params.temperature, params.top_p, params.top_k, params.min_p] for params in sampling_params]
    return dict(zip(("rollout", "evaluation", "again"), values, strict=True))


if __name__ == "__main__":
    main()
