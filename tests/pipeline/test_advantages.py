# SPDX-License-Identifier: Apache-2.0
"""Our advantages and sampling where OpenRLHF uses them, in its own experience maker; test_routing.py has a training.

OpenRLHF's experience maker and samples generator have our patches, and no engines, in a process that runs this file:
patches change modules for good.
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
from tests.support.own_process import run_module

SIZE = 4
# Prompts a (one right), b (all wrong), c (all right). An answer's tokens are its place, so a place can be read off.
REWARDS = [1.0, 0.0, 0.0, 0.0] + [0.0] * 4 + [1.0] * 4
# Micro batches as dynamic batching makes them: neither in order nor of one prompt.
MICRO_BATCHES = [[7, 0, 11, 3, 4], [1, 2, 5, 6], [8, 9, 10]]
# What the answers say: two of prompt a's agree, three of b's, all of c's.
ANSWERS = ["12", "7", "7", "9", "1", "2", "2", "2", "5", "5", "5", "5"]
GROUPS = torch.tensor(REWARDS).reshape(-1, SIZE)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What OpenRLHF's own classes computed with the patches in place."""
    return json.loads(run_module("tests.pipeline.test_advantages").splitlines()[-1])


def check_tokens(answers: list[list[float]], expected: torch.Tensor) -> None:
    """Every token of an answer has the answer's advantage, in the order in which they were generated."""
    flat = expected.flatten().tolist()
    assert [len(tokens) for tokens in answers] == [1 + place % 3 for place in range(len(flat))]
    for tokens, value in zip(answers, flat, strict=True):
        assert tokens == pytest.approx([value] * len(tokens), abs=1e-6)


def test_each_answer_gets_our_advantage(found: dict[str, Any]) -> None:
    """Which for `group_norm` is OpenRLHF's own, to the bit, where rewards are 0 and 1."""
    assert found["group_norm"] == found["stock"]
    for name in ("group_norm", "ngrpo", "nsr"):
        check_tokens(found[name], compute(name, GROUPS))
    assert "12 responses are not a whole number of groups of 5" in found["incomplete"]


def test_answers_that_were_cut_off_are_out_of_their_groups(found: dict[str, Any]) -> None:
    """Places 2, 5, 8, 11, of three tokens."""
    overlong = torch.tensor([place % 3 == 2 for place in range(len(REWARDS))]).reshape(-1, SIZE)
    check_tokens(found["exclude"], create("group_norm", overlong="exclude").compute(GROUPS, overlong=overlong))
    assert found["exclude"] != found["group_norm"] and found["excluded"] == pytest.approx(1 / 3)


def test_copo_counts_over_steps(found: dict[str, Any]) -> None:
    """With β = 1. First step: N is how many others say the same, 0 1 1 0 for prompt a, so 1 + 1, 1/√2, 1/√2, 1; with
    the mean 1.1035534 and the deviation 0.6133731. Second step: 1 3 3 1 (each was seen once more by every visit of the
    first step), so 1 + 1/√2, 1/2, 1/2, 1/√2; mean 0.8535534, deviation 1/√3. In prompt b one answer differs from three
    equal ones (as in group_norm of 1 0 0 0), in c none does."""
    rest = [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    first, second = found["copo"]
    check_tokens(first, torch.tensor([1.4615030, -0.6463384, -0.6463384, -0.1688261, *rest]))
    check_tokens(second, torch.tensor([1.4783978, -0.6123724, -0.6123724, -0.2536530, *rest]))
    assert found["copo_metrics"]["advantage/count_mean"] == pytest.approx((8 + 16 + 28) / 12)
    assert found["copo_metrics"]["advantage/outcomes"] == 3 + 2 + 1


def test_k_follows_the_step(found: dict[str, Any]) -> None:
    first, later = found["pass_at_k"]
    check_tokens(first, compute("pass_at_k", GROUPS, k=2))
    check_tokens(later, compute("pass_at_k", GROUPS, k=1))


def test_openrlhfs_length_penalty_comes_first(found: dict[str, Any]) -> None:
    """Places 2, 5, 8, 11 have three tokens, of which one lies in the buffer of two: they lose 1/2."""
    rewards = torch.tensor([reward - 0.5 * (place % 3 == 2) for place, reward in enumerate(REWARDS)])
    check_tokens(found["ngrpo_overlong"], compute("ngrpo", rewards.reshape(-1, SIZE)))
    assert found["metrics"]["advantage/uniform_groups"] == pytest.approx(2 / 3)
    assert found["metrics"]["advantage/uniform_mean"] == pytest.approx(-0.2 / math.sqrt(0.2) / 2, abs=1e-5)


def test_masks_are_on_in_rollouts_and_off_in_evaluation(found: dict[str, Any]) -> None:
    masked = [0.9, 0.8, 5, 0.1]
    assert found["sampling"] == {"rollout": masked, "evaluation": [0.6, 0.8, -1, 0.0], "again": masked}


class Tokenizer:
    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        place = int(tokens[0])
        assert {int(token) for token in tokens} == {place}, "tokens of the prompt, or padding, were decoded"
        return f"It is {ANSWERS[place]}."


def main() -> None:
    patches.install(["cpu", "without_flash_attn"])
    from openrlhf.trainer.ppo_utils import experience_maker, samples_generator
    from openrlhf.trainer.ppo_utils.experience import Experience
    from ray import cloudpickle

    def experiences() -> list[Any]:
        made = []
        for places in MICRO_BATCHES:
            # Two tokens of prompt (99), then 1 to 3 of the answer, then padding; entry t of the mask is of token t+1.
            lengths = [1 + place % 3 for place in places]
            sequences = torch.full((len(places), 2 + max(lengths)), 99)
            mask = torch.zeros(len(places), 1 + max(lengths))
            for row, (place, length) in enumerate(zip(places, lengths)):
                sequences[row, 2 : 2 + length] = place
                mask[row, 1 : 1 + length] = 1
            rewards, truncated = torch.tensor(REWARDS)[places], torch.tensor([length == 3 for length in lengths])
            known = {"rewards": rewards, "info": {"reward": rewards}, "index": list(places), "truncated": truncated}
            known |= {"response_length": torch.tensor(lengths), "kl": torch.zeros_like(mask)}
            prompts = ["abc"[place // SIZE] for place in places]
            made.append(Experience(sequences=sequences, action_mask=mask, prompts=prompts, **known))
        return made

    def maker(**reward: Any) -> Any:
        made = object.__new__(experience_maker.RemoteExperienceMaker)
        made.args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=SIZE, max_new_tokens=4),
            algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0, no_std_norm=False)),
            reward=SimpleNamespace(clip_range=(-10, 10), **reward),
        )
        made.strategy, made.kl_ctl = SimpleNamespace(args=made.args), SimpleNamespace(value=0.0)
        made.advantage_estimator, made.tokenizer, made.training_step = "group_norm", Tokenizer(), 0
        return made

    def run(made: Any) -> list[list[float]]:
        """Every answer's advantages by token, in the order of the places; padding cut off."""
        by_place: dict[int, list[float]] = {}
        for experience in made.compute_advantages_and_returns(experiences()):
            for row, place in enumerate(experience.index):
                inside = experience.action_mask[row].bool()
                assert torch.equal(experience.advantages, experience.returns)
                by_place[place] = experience.advantages[row][inside].tolist()
        return [by_place[place] for place in range(len(REWARDS))]

    result: dict[str, Any] = {"stock": run(maker())}
    patch.place(row for row in patches.active([patches.TRAINING]) if row.module.endswith("_maker"))

    def ours(made: Any, **spec: Any) -> list[list[float]]:
        begin(RunConfig(specs={"advantage": spec}))
        return run(made)

    for name in ("group_norm", "ngrpo", "nsr"):
        result[name] = ours(maker(), name=name)
    excluding, annealed, counting, measured, incomplete = (maker() for _ in range(5))
    result["exclude"] = ours(excluding, name="group_norm", overlong="exclude")
    result["excluded"] = excluding.step_measures["advantage/overlong"]
    result["pass_at_k"] = []
    for annealed.training_step in (0, 7):
        result["pass_at_k"].append(ours(annealed, name="pass_at_k", k=2, k_end=1, k_steps=7))
    result["copo"] = [ours(counting, name="copo", beta=1.0), ours(counting, name="copo", beta=1.0)]
    result["copo_metrics"] = counting.step_measures
    # DAPO's penalty on the answers of more than 2 tokens: 1 of a buffer of 2 beyond them costs a half.
    result["ngrpo_overlong"] = ours(maker(overlong_buffer_len=2, overlong_penalty_factor=1.0), name="ngrpo")
    ours(measured, name="ngrpo")
    result["metrics"] = measured.step_measures
    incomplete.args.rollout.n_samples_per_prompt = 5
    try:
        ours(incomplete, name="ngrpo")
    except RuntimeError as error:
        result["incomplete"] = str(error)
    result["sampling"] = sampled(samples_generator)
    # Ray pickles the trainer by value from the driver, and with it what its methods name.
    cloudpickle.dumps([samples_generator.SamplesGenerator, experience_maker.RemoteExperienceMaker])
    cloudpickle.dumps([samples_generator.SamplingParams, experience_maker.compute_reward])
    print(json.dumps(result))


def sampled(module: Any) -> dict[str, list[float]]:
    """(temperature, top_p, top_k, min_p) of a training rollout, an evaluation, and a rollout after that."""
    begin(RunConfig(specs={"perturbation": {"name": "neighbor"}}, sampling=Sampling(top_k=5, min_p=0.1)))
    # With the perturbation's own row for the same class, in the order of the table.
    patch.place(row for row in patches.active(("perturbation", "sampling")) if row.module == module.__name__)
    seen: list[Any] = []
    engine = SimpleNamespace(
        get_num_unfinished_requests=SimpleNamespace(remote=lambda: 0),
        generate_responses=SimpleNamespace(remote=lambda **kwargs: seen.append(kwargs["sampling_params"])),
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
        for word in ("dataloader_iter", "num_prompts", "dynamic_filtering"):
            kwargs.pop(word)
        generator._dispatch_prompts_to_vllm(["question"], ["label"], **kwargs)
        return [], 1, True

    generator._generate_vllm = generate_vllm
    generator.generate_samples(temperature=0.9, top_p=0.8)
    generator.generate_eval_samples(temperature=0.6, top_p=0.8)
    generator.generate_samples(temperature=0.9, top_p=0.8)
    names = ("rollout", "evaluation", "again")
    return {name: [p.temperature, p.top_p, p.top_k, p.min_p] for name, p in zip(names, seen, strict=True)}


if __name__ == "__main__":
    main()
