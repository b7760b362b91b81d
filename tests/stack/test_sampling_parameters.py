# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules and request limits in a real engine: which tokens are drawn, and their log-probabilities.

test_v2.py has each schedule with a perturbation, for both runners.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods import sampling_schedules
from ngrpo.rollout import set_perturbation, take_trajectories
from perturbations import ReplayRecord, registry
from tests.stack.harness import build_engine, chat_prompts, sample, worker_of
from tests.stack.schedule_truth import scheduled_gaps

# A schedule that reaches its τ_min within the answers of these tests.
EAD: dict[str, Any] = {"d_0": 20, "growth": 0, "c": 3}
SEEDS = [{"seed": number} for number in range(4)]


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[Any]:
    """An engine with a schedule and no perturbation, with prefills in chunks, and log-probabilities as for OpenRLHF."""
    config = {"sampling_schedule": {"name": "ead", **EAD}}
    options = {
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
    }
    yield build_engine(model, None, additional_config=config, **options)


def test_a_schedule_alone(llm: Any, hf_model: Any) -> None:
    """The engine has the schedule that it was built with. vLLM's own log-probabilities, with which OpenRLHF trains, are
    those that are recorded.
    """
    rollouts = sample(llm, chat_prompts(llm), SEEDS, max_tokens=32)
    assert scheduled_gaps(hf_model, rollouts, "ead", EAD).max() <= 1e-4
    assert scheduled_gaps(hf_model, rollouts, None, {}).max() >= 0.1, "one temperature throughout would show"
    for rollout in rollouts:
        assert len(rollout.record) == 0
        np.testing.assert_allclose(rollout.engine_log_probs, rollout.log_probs, rtol=1e-5, atol=1e-4)

    in_batch = rollouts[2]
    (alone,) = sample(llm, [in_batch.prompt], [SEEDS[2]], max_tokens=32)
    assert alone.tokens == in_batch.tokens, "the draws must not depend on the batch"


def test_a_mixed_batch(llm: Any, hf_model: Any) -> None:
    """One request is of the first training step, one of a later step, where d is 40,000, and one has no schedule."""
    prompts = chat_prompts(llm)[:3]
    arguments = [
        {"seed": 1},
        {"seed": 2, "training_step": 100_000},
        {"seed": 3, "scheduled": False},
    ]
    first_step = {"d_0": 20, "c": 0}
    later_step = {"d_0": 40_000, "c": 0}
    worker_of(llm).perturbation.schedule = sampling_schedules.create("ead", growth=5, tau_max=1.2, **first_step)
    set_perturbation(llm, "none")
    of_first_step, of_later_step, unscheduled = sample(llm, prompts, arguments, max_tokens=24)
    assert scheduled_gaps(hf_model, [of_first_step], "ead", first_step).max() <= 1e-4
    assert scheduled_gaps(hf_model, [of_later_step], "ead", later_step).max() <= 1e-4
    assert scheduled_gaps(hf_model, [unscheduled], None, {}).max() <= 1e-4

    greedy = sample(llm, prompts, arguments, max_tokens=8, temperature=0.0)
    assert scheduled_gaps(hf_model, greedy, None, {}).max() <= 1e-4

    # min-p keeps the tokens that are likely at the schedule's temperature, which is high at first and then low.
    filtered = sample(llm, prompts[:1], [{"seed": 5}], max_tokens=24, min_p=0.3, top_k=50)
    assert scheduled_gaps(hf_model, filtered, "ead", first_step).max() <= 1e-4


# --- limits: filters, lists of tokens, a grammar ----------------------------------------------------------------


@pytest.fixture
def limited(llm: Any) -> Any:
    worker_of(llm).perturbation.schedule = None
    return llm


ALLOWED = list(range(300, 320))
SINGLE = [17]
BAD_WORDS = ["plus", "The"]  # one token each, with and without a space
DIGITS = r"[0-9]{3}-[0-9]{4}"
TOKENS = 12
RUNNER_UP = {"name": "tests.stack.own_perturbations:RunnerUp"}
PERTURBATIONS = [
    *({"name": name} for name in registry.available() if name != "none"),
    {"name": "neighbor", "variant": "released", "realization": "anchor", "until": None},
    {"name": "gaussian", "base": "fuzzy"},
    {"name": "gumbel", "top_p": 1.0, "clamp": False, "entropy_min": 0.01, "gate": "top_margin", "gate.margin": 1.0},
    {"name": "dirichlet", "alpha": 0.01, "top_p": 1.0},
    {"name": "normal", "top_p": 1.0, "k": 10},
    RUNNER_UP,
]


@dataclass(frozen=True)
class Answer:
    """vLLM's completion of a request, and the request's trajectory."""

    completion: Any
    record: ReplayRecord
    log_probs: np.ndarray

    @property
    def tokens(self) -> list[int]:
        return list(self.completion.token_ids)

    @property
    def drawn(self) -> list[Any]:
        """vLLM's log-probability and rank of each token."""
        return [step[token] for step, token in zip(self.completion.logprobs, self.tokens)]

    @property
    def processed_log_probs(self) -> list[float]:
        """vLLM's own log-probabilities, among the tokens that the request's limits left."""
        return [token.logprob for token in self.drawn]


def answers(llm: Any, spec: dict[str, Any], requests: list[dict[str, Any]]) -> list[Answer]:
    """Answers to one prompt, in one batch; each request is given by its sampling parameters."""
    from vllm import SamplingParams

    set_perturbation(llm, **{"rate": 1.0, **spec})
    (prompt,) = chat_prompts(llm, ["What is 7 plus 5?"])
    common = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(**{**common, **request}) for request in requests]
    prompts = [{"prompt_token_ids": prompt}] * len(requests)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    trajectories = take_trajectories(llm)
    result = []
    for output in outputs:
        record, log_probs = trajectories[output.request_id]
        (completion,) = output.outputs
        result.append(Answer(completion, record, log_probs))
    return result


@pytest.mark.parametrize("spec", PERTURBATIONS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_every_answer_is_legal(limited: Any, spec: dict[str, Any]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = limited.get_tokenizer()
    end = tokenizer.eos_token_id
    requests = {
        "top-p": {"top_p": 0.3},
        "top-k": {"top_k": 2},
        "min-p": {"min_p": 0.5},
        "hot top-p": {"top_p": 0.9, "temperature": 1.5},
        "top-k 1": {"top_k": 1},
        "allowed": {"allowed_token_ids": ALLOWED},
        "single": {"allowed_token_ids": SINGLE},
        "without bad words": {"bad_words": BAD_WORDS},
        "not ended": {"ignore_eos": False, "min_tokens": TOKENS, "logit_bias": {end: 100.0}},
        "grammar": {"structured_outputs": StructuredOutputsParams(regex=DIGITS), "ignore_eos": False},
        "greedy": {"temperature": 0},
        "greedy with bias": {"temperature": 0, "logit_bias": {17: 1.0}},
    }
    by_name = dict(zip(requests, answers(limited, spec, list(requests.values()))))
    for name, answer in by_name.items():
        assert np.isfinite(answer.processed_log_probs).all(), name
        assert np.isfinite(answer.log_probs).all(), name
        assert np.isfinite(answer.record.weights).all(), name

    assert set(by_name["allowed"].tokens) <= set(ALLOWED)
    assert set(by_name["single"].tokens) == set(SINGLE)
    for word in BAD_WORDS:
        for text in (word, " " + word):
            (bad_token,) = tokenizer.encode(text)
            assert bad_token not in by_name["without bad words"].tokens
    assert len(by_name["not ended"].tokens) == TOKENS
    assert end not in by_name["not ended"].tokens
    assert re.fullmatch(DIGITS, by_name["grammar"].completion.text)
    # Each greedy token is the likeliest after the perturbed inputs before it, whatever token the noise picked.
    for name in ("greedy", "greedy with bias"):
        assert [token.rank for token in by_name[name].drawn] == [1] * TOKENS
        assert by_name[name].record.agreed.all()
        if spec == RUNNER_UP:
            assert len(by_name[name].record) == 0, "the second likeliest is never the likeliest"


def test_a_position_whose_proposal_is_excluded_is_an_ordinary_one(limited: Any) -> None:
    """`RunnerUp` proposes the second likeliest token: top-k 2 always leaves it, top-k 1 never, top-p 0.8 sometimes."""
    requests = [{"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}]
    of_two, of_one, of_nucleus = answers(limited, {**RUNNER_UP, "until": None}, requests)
    assert len(of_two.record) == TOKENS
    assert len(of_one.record) == 0
    assert of_one.processed_log_probs == [0.0] * TOKENS, "top-k 1 leaves one token"

    record = of_nucleus.record
    positions = record.prompt_tokens + np.arange(TOKENS)
    is_perturbed = np.isin(positions, record.positions)
    assert 0 < is_perturbed.sum() < TOKENS
    processed = np.array(of_nucleus.processed_log_probs)
    assert (processed[is_perturbed] < np.log(0.5) + 1e-6).all(), "the second likeliest has a half at most"
    assert (processed[~is_perturbed] == 0.0).all(), "the draw from a nucleus of one token is certain"


def test_the_sampling_correction_is_finite(limited: Any) -> None:
    """GSPO and truncated importance sampling weigh log π_trainer − log π_rollout: one −inf would make all of it NaN."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    with flash_attn_stand_in():
        from openrlhf.models.loss import PolicyLoss

    requests = [{"top_p": 0.8}, {"top_k": 1}, {"min_p": 0.5}]
    batch = answers(limited, {**RUNNER_UP, "until": None}, requests)
    rollout = torch.tensor([answer.processed_log_probs for answer in batch])
    advantages = torch.ones_like(rollout)
    action_mask = torch.ones_like(rollout)
    losses = [
        {"policy_loss_type": "gspo", "is_correction_level": "token"},
        {"policy_loss_type": "ppo", "is_correction_level": "token", "is_correction_mode": "clip"},
        {"policy_loss_type": "ppo", "is_correction_level": "seq"},
    ]
    for options in losses:
        trainer = torch.from_numpy(np.stack([answer.log_probs for answer in batch]))
        trainer.requires_grad_(True)
        policy_loss = PolicyLoss(**options)
        loss, *_ = policy_loss(trainer, trainer.detach(), advantages, action_mask, rollout)
        loss.backward()
        assert loss.isfinite(), options
        assert trainer.grad.isfinite().all(), options
