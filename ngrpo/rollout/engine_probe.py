# SPDX-License-Identifier: Apache-2.0
"""An engine's proof that its overrides land where they belong: a few tiny requests, before anybody else's.

It runs in the engine's core, with the engine's own scheduler, model runner and graphs, so that whatever a model does
with its embedding is in it; docs/decisions.md has the reasons. The judgement is :mod:`ngrpo.rollout.override_probe`'s.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ngrpo.rollout.override_probe import Comparison, ProbeFailure, ProbeTexts, judge, text_of_probe
from ngrpo.rollout.settings import DEFERRED_PROBE, KEY, read
from perturbations.replay import ReplayRecord

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore

_DUE, _PASSED = "_perturbation_probe_due", "_perturbation_probe_passed"
_TOP = 5  # log-probabilities that are compared at a generated token
_NUMBERS = itertools.count()
_ATTEMPTS = 3  # texts that are tried where a model's output hardly depends on one of its inputs


def engine_started(core: EngineCore) -> None:
    """Proves an engine that perturbs, at the end of its start.

    Raises:
        ProbeFailure: where an override does not land where it belongs.
    """
    config: Any = core.vllm_config.additional_config
    perturbation = read(config)
    if perturbation is None or not perturbation.active:
        return
    setattr(core, _DUE, True)
    if not config.get(DEFERRED_PROBE):
        before_request(core)


def prove_when_idle(core: EngineCore) -> None:
    """Proves an engine with an override now, where it is idle, or else before the next request that finds it so.

    Raises:
        ProbeFailure: where an override does not land where it belongs.
    """
    if read(core.vllm_config.additional_config) is not None:
        setattr(core, _DUE, True)
        if _is_idle(core):
            prove(core)


def before_request(core: EngineCore) -> None:
    """Proves the engine where that is due and nothing else is running."""
    if getattr(core, _DUE, False) and not _has_dummy_weights(core) and _is_idle(core):
        prove(core)


def _is_idle(core: EngineCore) -> bool:
    """Whether an engine, paused or not, could run the probe's requests now, and has no others.

    A sleeping engine cannot: its weights or its KV cache are not in memory. Requests that have finished do not count,
    although the workers may not have been told of them.
    """
    if core.model_executor.is_sleeping:
        return False
    with _without_pause(core):
        return not core.scheduler.has_unfinished_requests()


def tell_of_finished(core: EngineCore) -> None:
    """Lets the workers of an idle engine know that its last requests have finished.

    vLLM tells them with the next step, which an engine in its caller's process takes with the next requests only.
    """
    while _is_idle(core) and (core.scheduler.has_finished_requests() or core.batch_queue):
        _, executed = core.step_fn()
        core.post_step(executed)


@contextmanager
def _without_pause(core: EngineCore) -> Iterator[None]:
    """Lifts the pause of an engine's scheduler for a while.

    A paused scheduler counts none of the requests that it holds back, and would not run those of the probe. Nothing
    else takes place meanwhile: the core's own loop waits for us.
    """
    scheduler, state = core.scheduler, core.scheduler.pause_state
    unpaused = type(state).UNPAUSED
    if state == unpaused:
        yield
        return
    scheduler.set_pause_state(unpaused)
    try:
        yield
    finally:
        scheduler.set_pause_state(state)


def _has_dummy_weights(core: EngineCore) -> bool:
    """vLLM's ``load_format="dummy"`` for measurements of speed: nothing that such a model says depends on its input."""
    return core.vllm_config.load_config.load_format == "dummy"


def perturbation_replaced(core: EngineCore) -> None:
    """An engine that started without an active perturbation has one now."""
    if not getattr(core, _PASSED, False):
        setattr(core, _DUE, True)


def prove(core: EngineCore) -> float:
    """Asks for the probe's requests and judges the answers; an engine that is paused is paused again afterwards.

    Args:
        core: vLLM's ``EngineCore``, idle.

    Returns:
        Seconds that it took.

    Raises:
        ProbeFailure: where an override does not land where it belongs, or where that cannot be told.
    """
    began = time.perf_counter()
    # The probe's own requests ask for no probe; a failure leaves it due, so that no request runs unproven.
    setattr(core, _DUE, False)
    try:
        with _without_pause(core):
            _prove(core)
    except BaseException:
        setattr(core, _DUE, True)
        raise
    setattr(core, _PASSED, True)
    return time.perf_counter() - began


def _prove(core: EngineCore) -> None:
    model = core.vllm_config.model_config
    half = str(model.dtype) != "torch.float32"
    partly = any(core.collective_rpc("perturbation_reads_tokens"))
    failures: list[ProbeFailure] = []
    for attempt in range(_ATTEMPTS):
        texts = text_of_probe(model.get_vocab_size(), model.max_model_len - 3, attempt)
        try:
            judge(_comparisons(core, texts, partly), half_precision=half, where="vLLM's engine", model=_name(core))
        except ProbeFailure as error:
            failures.append(error)
            if error.is_certain:
                break
        else:
            return
    raise failures[-1]


def _name(core: EngineCore) -> str:
    return ", ".join(core.vllm_config.model_config.architectures or ["a model"])


@dataclass
class _Answer:
    """What an engine says of a text: log π of each of its tokens but the first, and of the likeliest next ones."""

    tokens: list[int] = field(default_factory=list)
    of_text: list[np.ndarray] = field(default_factory=list)
    next_tokens: list[dict[int, float]] = field(default_factory=list)

    @property
    def text(self) -> np.ndarray:
        return np.concatenate(self.of_text)


def _comparisons(core: EngineCore, texts: ProbeTexts, partly: bool) -> list[Comparison]:
    """Asks twice: of texts as they are, and of the same ones with overrides in the midst of others."""
    first, text, last, row, other = texts.first, texts.text, texts.last, texts.row, texts.other
    swapped = [*text[:row], other, *text[row + 1 :]]
    plain_first, plain, plain_last, as_text = _ask(core, [(t, {}) for t in (first, text, last, swapped)])
    end, fed = len(text), plain.tokens[0]
    # The first request's rows come first in the batch, the last one's after those with an override.
    beside_first, replaced, own, decoded, beside_last, longer = _ask(
        core,
        [
            (first, {}),
            (text, {row: other}),
            (text, {row: text[row], end: fed}),
            (text, {end: other}),
            (last, {}),
            ([*text, other], {}),
        ],
    )

    def at_row(answer: _Answer) -> Any:
        return answer.text[row:], answer.next_tokens[0]

    def before(answer: _Answer) -> Any:
        return (answer.text[: row - 1],)

    def whole(answer: _Answer, start: int = 0) -> Any:
        return (answer.text[start:], *answer.next_tokens[:2])

    effect = _distance(at_row(plain), at_row(as_text))
    step_effect = _distance((plain.next_tokens[1],), (longer.next_tokens[0],))
    comparisons = [
        Comparison("rows before the overridden one", _distance(before(replaced), before(plain)), effect),
        Comparison(
            "a row overridden with its own token's embedding", _distance(whole(own, row), whole(plain, row)), effect
        ),
        Comparison("the request in front", _distance(whole(beside_first), whole(plain_first)), effect),
        Comparison("the request behind", _distance(whole(beside_last), whole(plain_last)), effect),
        Comparison(
            "the text in front of a generated token's override", _distance(at_row(decoded), at_row(plain)), effect
        ),
    ]
    if partly:
        # A table that follows the token in the text has a part in the row: only that this very row changes is known.
        here = _distance((plain.text[row : row + 1],), (as_text.text[row : row + 1],))
        changed = _distance((plain.text[row : row + 1],), (replaced.text[row : row + 1],))
        same = 1.0 - min(changed / here, 1.0) if here else 1.0
        return [*comparisons, Comparison("an overridden row, which must change", same * here, here, 0.9)]
    step = _distance((decoded.next_tokens[1],), (longer.next_tokens[0],))
    return [
        *comparisons,
        Comparison("an overridden row of a prompt", _distance(at_row(replaced), at_row(as_text)), effect),
        Comparison("an overridden generated token", step, step_effect),
    ]


def _distance(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """Mean |Δ log p|, in nats, of log-probabilities of a text (arrays) and of likeliest next tokens (dictionaries)."""
    apart: list[float] = []
    for one, other in zip(ones, others, strict=True):
        if isinstance(one, dict):
            for here, there in ((one, other), (other, one)):
                # A token that is not among the likeliest ones there is at most as likely as the last of them.
                apart.extend(abs(value - there.get(token, min(there.values()))) for token, value in here.items())
        else:
            apart.extend(np.abs(one - other).tolist())
    return float(np.mean(apart)) if apart else 0.0


def _ask(core: EngineCore, requests: Sequence[tuple[list[int], Mapping[int, int]]]) -> list[_Answer]:
    """Runs requests to their end: two greedy tokens each, unperturbed but for what is to be replayed.

    Args:
        core: vLLM's ``EngineCore``, idle.
        requests: tokens, and by position the token whose embedding is fed there; the position after the last token
            is that of the first generated one.
    """
    # No name comes twice, as none of vLLM's own does: rows of a batch are known by their names.
    names = [f"perturbation-probe-{next(_NUMBERS)}" for _ in requests]
    for name, (tokens, fed) in zip(names, requests):
        core.add_request(*core.preprocess_add_request(_request(name, tokens, fed)))
    answers = {name: _Answer() for name in names}
    while core.scheduler.has_requests() or core.batch_queue:
        steps, executed = core.step_fn()
        core.post_step(executed)
        for outputs in (steps or {}).values():
            for output in outputs.outputs:
                _take(answers[output.request_id], output)
    core.collective_rpc("perturbation_drop", args=(names,))
    core.reset_prefix_cache()
    return [answers[name] for name in names]


def _take(answer: _Answer, output: EngineCoreOutput) -> None:
    answer.tokens.extend(output.new_token_ids)
    of_text = output.new_prompt_logprobs_tensors
    if of_text is not None:
        answer.of_text.append(of_text.logprobs[:, 0].float().cpu().numpy())
    if output.new_logprobs is not None:
        for ids, values in zip(output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs):
            answer.next_tokens.append({int(token): float(value) for token, value in zip(ids, values)})


def _request(name: str, tokens: list[int], fed: Mapping[int, int]) -> EngineCoreRequest:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    arguments: dict[str, Any] = {"seed": 0, "enabled": False, "scheduled": False}
    if fed:
        positions = np.array(sorted(fed), dtype=np.int32)
        ids = np.array([[fed[position]] for position in positions.tolist()], dtype=np.int32)
        ones = np.ones((len(ids), 1), dtype=np.float32)
        record = ReplayRecord(0, len(tokens), len(tokens) + 2, positions, ids, ones, None, ones[:, 0] > 0)
        arguments |= {"record": record.to_bytes(), "ahead": True}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        ignore_eos=True,
        logprobs=_TOP,
        prompt_logprobs=0,
        detokenize=False,
        extra_args={KEY: arguments},
    )
    request_arguments: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "sampling_params": params,
        "arrival_time": time.time(),
        "external_req_id": name,
    }
    fields = EngineCoreRequest.__struct_fields__
    required = fields[: len(fields) - len(EngineCoreRequest.__struct_defaults__)]
    known: dict[str, Any] = {**dict.fromkeys(required), **{k: v for k, v in request_arguments.items() if k in fields}}
    return EngineCoreRequest(**known)
