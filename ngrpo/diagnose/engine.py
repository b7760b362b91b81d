"""One vLLM engine in this process for all strategies: the same model, the same prompts, the same random draws."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ngrpo.diagnose import inputs, probe
from ngrpo.diagnose.sample import Sample
from perturbations.streams import trajectory_seed

if TYPE_CHECKING:
    from ngrpo.evaluate import Problem
    from ngrpo.strategies import Strategy

_CONCURRENT = 64
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, the same for every strategy."""

    group: int = 8
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


def prompt_tokens(tokenizer: Any, problem: Problem) -> list[int]:
    """The prompt as the model sees it: chat template with a generation prompt, or plain text where there is none."""
    from ngrpo.evaluate.engine import render

    return tokenizer.encode(render(tokenizer, problem), add_special_tokens=False)


def build(model: str, longest: int, *, hardware: str = "auto", dtype: str = "auto") -> Any:
    """A ``vllm.LLM`` in this process whose operator can be swapped.

    Args:
        model: a local folder or a hub name.
        longest: tokens of the longest prompt and its answer.
        hardware: a hardware profile.
        dtype: as vLLM takes it.
    """
    from ngrpo.evaluate import engine

    # The records, the embedding and the probe's rows are read where they are: in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options = {"dtype": dtype, "max_num_seqs": _CONCURRENT, "distributed_executor_backend": "uni"}
    return engine.build(model, {"name": probe.ADDRESS}, longest, hardware=hardware, options=options)


def attached(llm: Any) -> Any:
    """The worker's :class:`ngrpo.rollout.attach.AttachedPerturbation`, which is in this process."""
    return llm.llm_engine.collective_rpc(lambda worker: worker.perturbation)[0]


def put(llm: Any, strategy: Strategy) -> None:
    """Gives the engine a strategy's operator. Unperturbed ones are drawn by the same code, so that noise is shared."""
    from ngrpo.rollout import set_perturbation

    set_perturbation(llm, **(strategy.spec or {"name": "none"}))


def sample_strategy(
    llm: Any, strategy: Strategy, problems: Sequence[Problem], sampling: Sampling
) -> tuple[list[Sample], dict[str, Any]]:
    """Samples a group for every problem under one strategy and measures what needs the model.

    Args:
        llm: of :func:`build`.
        strategy: which.
        problems: the P problems.
        sampling: group size, length, temperature and seed.

    Returns:
        P × G samples, and ``tokens_per_second``, ``anchor_nearest``, ``text_nearest``.
    """
    from ngrpo.evaluate import score
    from ngrpo.evaluate.engine import render
    from ngrpo.rollout import take_trajectories

    put(llm, strategy)
    tokenizer = llm.get_tokenizer()
    prompts = [prompt_tokens(tokenizer, problem) for problem in problems]
    shown = [render(tokenizer, problem) for problem in problems]
    # Fills neighbor tables and compiles the sampler for this batch, so that the speed is that of a long run.
    _generate(llm, prompts, sampling, min(_WARM_UP_TOKENS, sampling.max_tokens))
    take_trajectories(llm)
    began = time.perf_counter()
    outputs = _generate(llm, prompts, sampling, sampling.max_tokens)
    seconds = time.perf_counter() - began
    taken = take_trajectories(llm)
    records = [taken[output.request_id][0] for output in outputs]
    completions = [output.outputs[0] for output in outputs]
    answers = [list(completion.token_ids) for completion in completions]
    here = attached(llm)
    shares = inputs.shares_still_nearest(records, answers, here.embeddings, here.module)
    losses = losses_of(llm, [prompt for prompt in prompts for _ in range(sampling.group)], answers)
    samples = []
    for i, (completion, tokens) in enumerate(zip(completions, answers)):
        group, member = divmod(i, sampling.group)
        verdict = score(problems[group], completion.text, prompt=shown[group])
        samples.append(
            Sample(
                strategy.id,
                problems[group].id,
                group,
                member,
                completion.text,
                tokens,
                completion.finish_reason == "stop",
                verdict.reward,
                verdict.correct,
                verdict.extracted,
                verdict.parsed,
                losses[i],
                records[i] if strategy.spec is not None else None,
            )
        )
    speed = sum(map(len, answers)) / seconds
    return samples, {"tokens_per_second": speed, "anchor_nearest": shares[0], "text_nearest": shares[1]}


def _generate(llm: Any, prompts: Sequence[list[int]], sampling: Sampling, max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    requests, params = [], []
    for index, prompt in enumerate(prompts):
        for member in range(sampling.group):
            wish = {"seed": trajectory_seed(sampling.seed, index), "sample": member}
            requests.append({"prompt_token_ids": prompt})
            params.append(
                SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=max_tokens,
                    extra_args={"perturbation": wish},
                )
            )
    return llm.generate(requests, params, use_tqdm=False)


def losses_of(llm: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """-log p of each answer under the unperturbed model at temperature 1, summed over its tokens, in nats.

    The text is fed as a plain prompt: no position of it is perturbed.

    Args:
        llm: of :func:`build`.
        prompts: the prompt of each answer.
        answers: generated tokens, at least one each.
    """
    from vllm import SamplingParams

    from ngrpo.rollout import take_trajectories

    plain = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args={"perturbation": {"enabled": False}})
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], plain, use_tqdm=False)
    take_trajectories(llm)
    losses = []
    for prompt, text, output in zip(prompts, texts, outputs):
        scored = list(zip(text, output.prompt_logprobs))[len(prompt) :]
        losses.append(-sum(each[token].logprob for token, each in scored))
    return losses
