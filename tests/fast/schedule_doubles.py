# SPDX-License-Identifier: Apache-2.0
"""A rollout's generator and step, as far as a sampling schedule meets them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.decode_step import Decoding
from ngrpo.methods import sampling_schedules
from ngrpo.rollout.requests import RunningRequests
from perturbations import create, registry


class Step:
    """A perturber with requests, asked at one step of theirs."""

    def __init__(self, **schedule: Any) -> None:
        decoding = Decoding(create("none"), 4)
        self.perturber = decoding.perturber
        self.perturber._schedule = sampling_schedules.create(**schedule)
        self.requests = RunningRequests(
            create("none"), self.perturber._store, self.perturber, registry.buffers.create("memory")
        )
        for name in decoding.requests:
            self.perturber._store.close(name)

    def add(self, name: str, prompt: int, **arguments: Any) -> None:
        params = SimpleNamespace(seed=None, extra_args={"perturbation": arguments})
        new = SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[5] * prompt)
        self.requests.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new]))

    def factor(self, names: list[str], starts: list[int], counts: list[int], greedy: list[int] | None = None) -> list:
        size = len(names)
        self.perturber.begin(names, np.array(starts), np.array(counts), np.zeros(size, dtype=bool))
        given = None if greedy is None else torch.tensor(greedy)
        return self.perturber.temperature_factor(torch.zeros(size, 8), torch.ones(size), given).tolist()


class Generator:
    """As OpenRLHF's: asks an engine for samples at a temperature."""

    def __init__(self, asked: list[Any], **rollout: Any) -> None:
        def remote(sampling_params: Any, **kwargs: Any) -> None:
            asked.append((sampling_params.temperature, sampling_params.extra_args["perturbation"]))

        self.vllm_engines = [SimpleNamespace(generate_responses=SimpleNamespace(remote=remote))]
        self.args = SimpleNamespace(rollout=SimpleNamespace(batch_size=8, **rollout))

    def _generate_vllm(self, **kwargs: Any) -> None:
        self._dispatch_prompts_to_vllm(["a"], **kwargs)

    def generate_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def generate_eval_samples(self, **kwargs: Any) -> None:
        self._generate_vllm(**kwargs)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], **kwargs: Any) -> None:
        params = SimpleNamespace(temperature=kwargs.get("temperature", 1.0), extra_args=None)
        self.vllm_engines[0].generate_responses.remote(sampling_params=params)
