"""Evaluation rollouts carry `enabled: False`; training rollouts do not. Engines are stood in for by their handles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.trainer.rollout_actor import plain_evaluation
from tests.fast.run import run_with


class Engine:
    """The handle of a rollout actor: remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.get_num_unfinished_requests = SimpleNamespace(remote=lambda: 0)
        self.generate_responses = SimpleNamespace(remote=lambda **kwargs: self.asked.append(kwargs["sampling_params"]))


class Generator:
    """As OpenRLHF's SamplesGenerator as far as this matters: both kinds of samples go through one dispatch."""

    def __init__(self) -> None:
        self.vllm_engines = [Engine()]

    def generate_samples(self) -> None:
        self._dispatch_prompts_to_vllm(["p"], ["l"])

    def generate_eval_samples(self) -> None:
        self._dispatch_prompts_to_vllm(["p"], ["l"])

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str]) -> None:
        for engine in self.vllm_engines:
            engine.get_num_unfinished_requests.remote()
            params = SimpleNamespace(extra_args={"other": 1})
            engine.generate_responses.remote(prompt=prompts[0], label=labels[0], sampling_params=params)


@pytest.mark.parametrize(("spec", "perturbed"), [({}, False), ({"perturb_eval": True}, True)])
def test_evaluation_is_plain_unless_asked(spec: dict, perturbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, perturbation_spec={"name": "neighbor", **spec})
    generator = plain_evaluation(Generator)()
    engine = generator.vllm_engines[0]
    generator.generate_samples()
    generator.generate_eval_samples()
    generator.generate_samples()
    off = {"other": 1, "perturbation": {"enabled": False}}
    on = {"other": 1}
    assert [params.extra_args for params in engine.asked] == [on, on if perturbed else off, on]
    assert generator.vllm_engines == [engine], "the engines are back in place"
