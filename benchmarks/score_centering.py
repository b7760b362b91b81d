# SPDX-License-Identifier: Apache-2.0
"""Time of a training step with ``--sampling.score_centering`` over without, interleaved in one process.

    python -m benchmarks.score_centering [--model smollm2-135m] [--pairs 7] [--batch 4] [--prompt 64] [--response 192]

A step is a forward, OpenRLHF's policy loss, and the backward. All tokens of the responses were drawn from another
distribution than the policy, so a mean score is computed for each. Printed: the median of the paired ratios (centered /
plain, lower is better), and the range.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import add_model, parser_of
from benchmarks.machine import describe
from benchmarks.pairs import ratio_and_range, summary
from ngrpo.machine.models.packaged import resolve
from ngrpo.methods import sampling_schedules
from ngrpo.trainers.common.log_probs import with_overrides
from ngrpo.trainers.common.sample_records import RequestedDraws
from ngrpo.trainers.common.score_centering import Sampler, ScoreCentering
from perturbations import FinishedTrajectory
from perturbations.replay.sampling_mask import SamplingMask
from tests.support.gradient_problem import policy_loss
from tests.support.replay_examples import a_record
from tests.support.token_log_probs import log_probs_of

TOKENS_LEFT = 20
"""Tokens that top-p leaves at each position."""
SAMPLERS = {
    "top-p": Sampler(),
    "--sampling.schedule ladder": Sampler(schedule=sampling_schedules.create("ladder")),
}


def trajectory(prompt: int, response: int, mask: SamplingMask) -> FinishedTrajectory:
    """An unperturbed trajectory of ``prompt + response`` tokens, of which the filters left what ``mask`` says."""
    no_edits = a_record(0, 1, prompt_tokens=prompt, num_tokens=prompt + response)
    return FinishedTrajectory(no_edits, np.zeros(prompt + response, np.float32), mask)


def top_p_mask(prompt: int, response: int, vocabulary: int, seed: int) -> SamplingMask:
    """A mask with :data:`TOKENS_LEFT` random tokens at each position of the response."""
    draws = np.random.default_rng(seed)
    left = {}
    for position in range(prompt, prompt + response):
        left[position] = (False, np.sort(draws.choice(vocabulary, TOKENS_LEFT, replace=False)))
    return SamplingMask.of(vocabulary, left)


class Trainer:
    """Training steps of one model on one batch of random tokens."""

    def __init__(self, model: Any, batch: int, prompt: int, response: int) -> None:
        self._model = model
        draws = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, model.config.vocab_size, (batch, prompt + response), generator=draws)
        self._advantages = torch.randn(batch, 1, generator=draws).repeat(1, response)
        self._loss = policy_loss()
        self.action_mask = torch.ones(batch, response, dtype=torch.int64)

    def centering(self, sampler: Sampler) -> ScoreCentering:
        """The trainer's loss with its score centered, for tokens that ``sampler`` drew."""
        attention_mask = torch.ones_like(self._tokens)
        return ScoreCentering(self._loss, sampler, action_mask=self.action_mask, attention_mask=attention_mask)

    def step(
        self,
        centering: ScoreCentering | None = None,
        trajectories: Sequence[FinishedTrajectory] = (),
        requests: Sequence[RequestedDraws] = (),
    ) -> float:
        """The seconds of one step, with the loss of ``centering`` where it is given."""
        self._model.zero_grad()
        loss_function = centering or self._loss
        watching = centering.watching(trajectories, requests) if centering else nullcontext()
        began = time.perf_counter()
        with watching:
            logits = self._model(self._tokens, use_cache=False).logits.float()
            log_probs = with_overrides(log_probs_of)(logits, self._tokens.roll(-1, dims=1))
        response = self.action_mask.shape[1]
        action_log_probs = log_probs[:, :-1][:, -response:]
        loss, *_ = loss_function(
            action_log_probs, action_log_probs.detach(), self._advantages, action_mask=self.action_mask
        )
        loss.backward()
        return time.perf_counter() - began


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens [64]")
    parser.add_argument("--response", type=int, default=192, help="tokens [192]")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.float32)
    vocabulary = model.config.vocab_size
    trainer = Trainer(model, options.batch, options.prompt, options.response)
    requests = []
    for answer in range(options.batch):
        requests.append(RequestedDraws(temperature=1.0, training_step=0, answer=answer, answers=options.batch))
    print(f"{describe()}; {options.model}, float32, {options.batch} x ({options.prompt} + {options.response}) tokens")
    print(f"{'drawn with':28s} {'plain s':>8s} {'ratio':>7s}  range")
    for name, sampler in SAMPLERS.items():
        trajectories = []
        for seed in range(options.batch):
            if sampler.schedule is None:
                mask = top_p_mask(options.prompt, options.response, vocabulary, seed)
            else:
                mask = SamplingMask.of(vocabulary, {})
            trajectories.append(trajectory(options.prompt, options.response, mask))
        centering = trainer.centering(sampler)
        seconds = []
        for _ in range(options.pairs + 1):
            plain_seconds = trainer.step()
            seconds.append((plain_seconds, trainer.step(centering, trajectories, requests)))
        figures = summary(seconds[1:], "plain_s")  # the first pair warms up
        print(f"{name:28s} {figures['plain_s']:8.2f} {ratio_and_range(figures)}", flush=True)


if __name__ == "__main__":
    main()
