# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules and request limits in a real engine: what is drawn, and its score.

Each schedule with a perturbation is in test_v2.py, for both runners.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.methods import sampling_schedules
from ngrpo.rollout import set_perturbation, take_trajectories
from perturbations import registry
from tests.stack.harness import build_engine, chat_prompts, sample, worker_of
from tests.stack.schedule_truth import scheduled_gaps

# Its τ_min is reached within the answers of these tests.
EAD: dict[str, Any] = {"d_0": 20, "growth": 0, "c": 3}
SEEDS = [{"seed": i} for i in range(4)]


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[Any]:
    """A schedule and no perturbation, prefills in chunks, log-probabilities as OpenRLHF asks for them."""
    config = {"sampling_schedule": {"name": "ead", **EAD}}
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs"}
    yield build_engine(model, None, additional_config=config, **options)


def test_a_schedule_alone(llm: Any, hf_model: Any) -> None:
    """As the engine was built; the log-probabilities that vLLM hands over, and OpenRLHF trains with, are these too."""
    rollouts = sample(llm, chat_prompts(llm), SEEDS, max_tokens=32)
    assert scheduled_gaps(hf_model, rollouts, "ead", EAD).max() <= 1e-4
    assert scheduled_gaps(hf_model, rollouts, None, {}).max() >= 0.1, "one temperature throughout would show"
    assert all(len(rollout.record) == 0 for rollout in rollouts)
    (alone,) = sample(llm, [rollouts[2].prompt], SEEDS[2:3], max_tokens=32)
    assert alone.tokens == rollouts[2].tokens, "whatever the batch"
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.engine_log_probs, rollout.log_probs, rtol=1e-5, atol=1e-4)


def test_a_mixed_batch(llm: Any, hf_model: Any) -> None:
    """One that follows the schedule, a later step of the training, one without a schedule; greedy ones; filters."""
    prompts = chat_prompts(llm)[:3]
    arguments = [{"seed": 1}, {"seed": 2, "training_step": 100_000}, {"seed": 3, "scheduled": False}]
    worker_of(llm).perturbation.schedule = sampling_schedules.create("ead", d_0=20, growth=5, c=0, tau_max=1.2)
    set_perturbation(llm, "none")
    mixed = sample(llm, prompts, arguments, max_tokens=24)
    assert scheduled_gaps(hf_model, mixed[:1], "ead", {"d_0": 20, "c": 0}).max() <= 1e-4
    assert scheduled_gaps(hf_model, mixed[1:2], "ead", {"d_0": 40_000, "c": 0}).max() <= 1e-4
    assert scheduled_gaps(hf_model, mixed[2:], None, {}).max() <= 1e-4
    greedy = sample(llm, prompts, arguments, max_tokens=8, temperature=0.0)
    assert scheduled_gaps(hf_model, greedy, None, {}).max() <= 1e-4
    # min-p keeps what is likely at the schedule's temperature: hot at first, then cold.
    filtered = sample(llm, prompts[:1], [{"seed": 5}], max_tokens=24, min_p=0.3, top_k=50)
    assert scheduled_gaps(hf_model, filtered, "ead", {"d_0": 20, "c": 0}).max() <= 1e-4


# --- limits: filters, lists of tokens, a grammar ----------------------------------------------------------------


@pytest.fixture
def limited(llm: Any) -> Any:
    worker_of(llm).perturbation.schedule = None
    return llm


ALLOWED, SINGLE = list(range(300, 320)), [17]
BAD_WORDS = ["plus", "The"]  # one token each, with and without a space
DIGITS = r"[0-9]{3}-[0-9]{4}"
TOKENS = 12
EVERY = [
    *({"name": name} for name in registry.available() if name != "none"),
    {"name": "neighbor", "variant": "released", "realization": "anchor", "until": None},
    {"name": "gaussian", "base": "fuzzy"},
    {"name": "gumbel", "top_p": 1.0, "clamp": False, "entropy_min": 0.01, "gate": "top_margin", "gate.margin": 1.0},
    {"name": "dirichlet", "alpha": 0.01, "top_p": 1.0},
    {"name": "normal", "top_p": 1.0, "k": 10},
    {"name": "tests.stack.own_perturbations:RunnerUp"},
]


def answers(llm: Any, spec: dict[str, Any], each: list[dict[str, Any]]) -> list[tuple[Any, Any, np.ndarray]]:
    """The completion, the record and the log-probabilities of one request for each dictionary of parameters."""
    from vllm import SamplingParams

    set_perturbation(llm, **{"rate": 1.0, **spec})
    (prompt,) = chat_prompts(llm, ["What is 7 plus 5?"])
    common = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(**{**common, **one}) for one in each]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(each), params, use_tqdm=False)
    taken = take_trajectories(llm)
    return [(output.outputs[0], *taken[output.request_id]) for output in outputs]


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: "-".join(map(str, spec.values())))
def test_every_answer_is_legal(limited: Any, spec: dict[str, Any]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    end = limited.get_tokenizer().eos_token_id
    filters = [{"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.5}, {"top_p": 0.9, "temperature": 1.5}, {"top_k": 1}]
    found = answers(
        limited,
        spec,
        [
            *filters,
            {"allowed_token_ids": ALLOWED},
            {"allowed_token_ids": SINGLE},
            {"bad_words": BAD_WORDS},
            {"ignore_eos": False, "min_tokens": TOKENS, "logit_bias": {end: 100.0}},
            {"structured_outputs": StructuredOutputsParams(regex=DIGITS), "ignore_eos": False},
            {"temperature": 0},
            {"temperature": 0, "logit_bias": {17: 1.0}},
        ],
    )
    for completion, record, log_probs in found:
        scores = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids)]
        assert np.isfinite(scores).all() and np.isfinite(log_probs).all()
        assert np.isfinite(record.weights).all()
    few, one, without, long, grammar, *_ = (completion for completion, *_ in found[len(filters) :])
    # Greedy: each token is the likeliest after the perturbed inputs before it, whatever token the noise picked.
    for completion, record, _ in found[-2:]:
        assert [step[token].rank for step, token in zip(completion.logprobs, completion.token_ids)] == [1] * TOKENS
        assert record.agreed.all()
        assert not (spec["name"].endswith("RunnerUp") and len(record)), "the second likeliest is never the likeliest"
    assert set(few.token_ids) <= set(ALLOWED) and set(one.token_ids) == set(SINGLE)
    bad = [limited.get_tokenizer().encode(space + word) for word in BAD_WORDS for space in ("", " ")]
    assert all(len(tokens) == 1 and tokens[0] not in without.token_ids for tokens in bad)
    assert len(long.token_ids) == TOKENS and end not in long.token_ids
    assert re.fullmatch(DIGITS, grammar.text)


def test_a_position_whose_proposal_is_excluded_is_an_ordinary_one(limited: Any) -> None:
    """`RunnerUp` proposes the second likeliest token: always there for top-k 2, never for top-k 1."""
    spec = {"name": "tests.stack.own_perturbations:RunnerUp", "until": None}
    two, one, some = answers(limited, spec, [{"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}])
    assert len(two[1]) == 12 and len(one[1]) == 0
    scores = [step[token].logprob for step, token in zip(one[0].logprobs, one[0].token_ids)]
    assert scores == [0.0] * 12  # the only token that top-k 1 leaves
    record = some[1]
    perturbed = np.isin(np.arange(12) + record.prompt_tokens, record.positions)
    assert 0 < perturbed.sum() < 12
    # The runner-up is never likelier than one half; the ordinary draw of a set of one token is certain.
    processed = np.array([step[token].logprob for step, token in zip(some[0].logprobs, some[0].token_ids)])
    assert (processed[perturbed] < np.log(0.5) + 1e-6).all() and (processed[~perturbed] == 0.0).all()


def test_the_sampling_correction_is_finite(limited: Any) -> None:
    """GSPO and truncated importance sampling weigh log π_trainer − log π_rollout: one −inf would make all of it NaN."""
    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    with flash_attn_stand_in():
        from openrlhf.models.loss import PolicyLoss

    spec = {"name": "tests.stack.own_perturbations:RunnerUp", "until": None}
    rows = answers(limited, spec, [{"top_p": 0.8}, {"top_k": 1}, {"min_p": 0.5}])
    rollout = torch.tensor([[s[t].logprob for s, t in zip(c.logprobs, c.token_ids)] for c, _, _ in rows])
    for kind, options in {
        "gspo": {"is_correction_level": "token"},
        "ppo": {"is_correction_level": "token", "is_correction_mode": "clip"},
        "ppo-seq": {"is_correction_level": "seq"},
    }.items():
        trainer = torch.from_numpy(np.stack([log_probs for *_, log_probs in rows])).requires_grad_(True)
        loss_fn = PolicyLoss(policy_loss_type=kind.split("-")[0], **options)
        loss = loss_fn(trainer, trainer.detach(), torch.ones_like(rollout), torch.ones_like(rollout), rollout)[0]
        loss.backward()
        assert loss.isfinite() and trainer.grad.isfinite().all()
