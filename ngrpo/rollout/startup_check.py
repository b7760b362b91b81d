# SPDX-License-Identifier: Apache-2.0
"""The start-up check: do overrides land where they belong, in an engine and in a trainer's model?

A text whose row i is fed with the embedding of another token y must give the log-probabilities of the text with y in
that place; a row fed with its own token's embedding, and all other rows, those of the untouched text. In an engine a
few tiny requests find out before anybody else's, in its core, with its own scheduler, model runner and graphs, so that
whatever a model does with its embedding takes part; docs/decisions.md has the reasons. The trainer's model is asked by
`ngrpo/trainers/openrlhf/replay_probe.py`. The functions that take an ``original`` are rows of `ngrpo.patches`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ngrpo import patches
from ngrpo.rollout.settings import DEFERRED_PROBE, KEY, read
from perturbations.errors import UsageError
from perturbations.replay import ReplayRecord

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore

_LENGTH = 10
# Share of the effect of y itself that rounding may make up, and the effect in nats below which nothing can be told.
_ROUNDING = {False: 0.02, True: 0.25}
_LEAST_EFFECT = {False: 1e-3, True: 0.2}
_DUE, _PASSED = "_perturbation_probe_due", "_perturbation_probe_passed"
_TOP = 5  # log-probabilities that are compared at a generated token
_NUMBERS = itertools.count()
_ATTEMPTS = 3  # texts that are tried where a model's output hardly depends on one of its inputs


class ProbeFailure(UsageError):
    """An override does not land where it belongs, or the model's output does not tell where it landed.

    Attributes:
        is_certain: False where it could not be told where an override landed.
    """

    def __init__(self, message: str, is_certain: bool) -> None:
        super().__init__(message)
        self.is_certain = is_certain


# ---- texts and judgement ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeTexts:
    """Tokens of a check.

    Attributes:
        first: a text in front of the one with overrides.
        text: the text with overrides.
        last: a text behind it.
        row: the overridden position in ``text``, from 1 on.
        other: the token whose embedding is fed there; it differs from the token of the text.
    """

    first: list[int]
    text: list[int]
    last: list[int]
    row: int
    other: int


@dataclass(frozen=True)
class Comparison:
    """Two sets of log-probabilities that must agree.

    Attributes:
        subject: what was compared.
        apart: mean |Δ log p| in nats.
        effect: mean |Δ log p| that y in the text makes.
        allowed: share of the effect, where it is not the one of the dtype.
    """

    subject: str
    apart: float
    effect: float
    allowed: float | None = None


def reads_tokens_elsewhere(modules: Iterable[nn.Module], embedding: VocabParallelEmbedding) -> bool:
    """Whether a model has a further table with a row for each token, as Gemma 3n and 4 have for each layer.

    Args:
        modules: of the model, without its output head.
        embedding: its input embedding, with ``num_embeddings`` rows.
    """
    rows = embedding.num_embeddings
    tables = (module for module in modules if module is not embedding and hasattr(module, "embedding_dim"))
    # Gemma's own vocabulary of a layer may lack the last tokens.
    return any(0.9 * rows <= getattr(table, "num_embeddings", 0) <= rows for table in tables)


def text_of_probe(vocabulary: int, longest: int, attempt: int = 0) -> ProbeTexts:
    """The texts: tokens of the lower half of the vocabulary, without those at its very beginning.

    Special tokens stand at either end in nearly all vocabularies; a picture's placeholder would be no text.

    Args:
        vocabulary: V.
        longest: tokens that a text may have.
        attempt: another number gives other texts.

    Raises:
        UsageError: where the model's context is too short.
    """
    length = min(_LENGTH, longest)
    if length < 4:
        raise UsageError(f"a probe needs a context of at least 7 tokens, not {longest + 3}: raise max_model_len.")
    usual = np.arange(vocabulary // 20, max(vocabulary // 2, min(vocabulary, 32)))
    tokens = np.random.default_rng(attempt).permutation(usual)
    tokens = np.resize(tokens, 3 * length + 1).tolist()
    first, text, last = (tokens[start : start + length] for start in (0, length, 2 * length))
    row, other = length // 2, tokens[-1]
    if other == text[row]:  # a vocabulary of fewer tokens than the texts have
        other = next(token for token in usual.tolist() if token != text[row])
    return ProbeTexts(first, text, last, row, other)


def judge(comparisons: Sequence[Comparison], *, half_precision: bool, where: str, model: str) -> None:
    """Compares each difference with what rounding may make of it.

    Args:
        comparisons: of one check.
        half_precision: whether the model computes in bfloat16 or float16.
        where: whose model it is, for the message.
        model: its name, for the message.

    Raises:
        ProbeFailure: naming each comparison that is wrong; or where the effect of y is too small to tell.
    """
    least = min(comparison.effect for comparison in comparisons)
    if not least >= _LEAST_EFFECT[half_precision]:
        raise ProbeFailure(
            f"{where} cannot be proven right for {model}: another token in its text changes log-probabilities by"
            f" {least:.1g} on average, and {_LEAST_EFFECT[half_precision]:g} is needed to see where an override lands."
            " Is it a trained model, and are its weights loaded?",
            is_certain=False,
        )
    limits = [(each.allowed or _ROUNDING[half_precision]) * each.effect for each in comparisons]
    lines = "\n".join(
        f"  {each.subject}: off by {each.apart:.2g}, at most {limit:.2g} is expected"
        for each, limit in zip(comparisons, limits)
        if not each.apart <= limit
    )
    if lines:
        raise ProbeFailure(
            f"{where} does not feed {model} what a perturbation asks for. Mean |Δ log p| in nats, where another token"
            f" in the text changes it by {least:.2g}:\n{lines}\nNothing that this model is fed can be trusted, so that"
            " nothing was started. Use a model of docs/models.md, or report this one with the lines above.",
            is_certain=True,
        )


# ---- when an engine is checked ----------------------------------------------------------------------------------


def checked_core(original: Callable[..., None]) -> Callable[..., None]:
    """The check of an engine that perturbs ends its start, unless it is deferred.

    The scheduler hashes blocks in the core's process, which may be another than the worker's.
    """

    @functools.wraps(original)
    def init(self: EngineCore, vllm_config: VllmConfig, *args: object, **kwargs: object) -> None:
        config: Any = vllm_config.additional_config
        perturbation = read(config)
        if perturbation is not None:
            patches.install([patches.IN_PERTURBED_CORE])
        original(self, vllm_config, *args, **kwargs)
        if perturbation is not None and perturbation.active:
            setattr(self, _DUE, True)
            if not config.get(DEFERRED_PROBE):
                before_request(self)

    return init


def checked_first(original: Callable[..., None]) -> Callable[..., None]:
    """The first request after a weight sync comes after the check that is due, where one is."""

    @functools.wraps(original)
    def add_request(self: EngineCore, *args: object, **kwargs: object) -> None:
        before_request(self)
        original(self, *args, **kwargs)

    return add_request


def with_calls_of_core(original: Callable[..., Any]) -> Callable[..., Any]:
    """The remote procedures that concern an engine's core; all others concern its workers."""

    @functools.wraps(original)
    def collective_rpc(self: EngineCore, method: object, *args: object, **kwargs: object) -> Any:
        if method == "perturbation_probe":
            return [prove_when_idle(self)]
        if method != "perturbation_replace":
            return original(self, method, *args, **kwargs)
        # vLLM tells workers of finished requests with the next step, which an engine in its caller's process takes with
        # the next requests only.
        while _is_idle(self) and (self.scheduler.has_finished_requests() or self.batch_queue):
            _, executed = self.step_fn()
            self.post_step(executed)
        result = original(self, method, *args, **kwargs)
        if not getattr(self, _PASSED, False):  # it may have started without an active perturbation
            setattr(self, _DUE, True)
        return result

    return collective_rpc


def prove_when_idle(core: EngineCore) -> None:
    """Checks an engine with an override now, where it is idle, or else before the next request that finds it so.

    Raises:
        ProbeFailure: where an override does not land where it belongs.
    """
    if read(core.vllm_config.additional_config) is not None:
        setattr(core, _DUE, True)
        if _is_idle(core):
            prove(core)


def before_request(core: EngineCore) -> None:
    """Checks the engine where that is due and nothing else is running.

    With vLLM's ``load_format="dummy"``, for measurements of speed, nothing depends on a model's input.
    """
    has_weights = core.vllm_config.load_config.load_format != "dummy"
    if getattr(core, _DUE, False) and has_weights and _is_idle(core):
        prove(core)


def _is_idle(core: EngineCore) -> bool:
    """Whether an engine, paused or not, could run the check's requests now, and has no others.

    A sleeping engine cannot: its weights or its KV cache are not in memory. Requests that have finished do not count,
    although the workers may not have been told of them.
    """
    if core.model_executor.is_sleeping:
        return False
    with _without_pause(core):
        return not core.scheduler.has_unfinished_requests()


@contextmanager
def _without_pause(core: EngineCore) -> Iterator[None]:
    """Lifts the pause of an engine's scheduler for a while.

    A paused scheduler counts none of the requests that it holds back, and would not run those of the check. Nothing
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


# ---- the check of an engine -------------------------------------------------------------------------------------


def prove(core: EngineCore) -> float:
    """Asks for the check's requests and judges the answers; an engine that is paused is paused again afterwards.

    Args:
        core: vLLM's ``EngineCore``, idle.

    Returns:
        Seconds that it took.

    Raises:
        ProbeFailure: where an override does not land where it belongs, or where that cannot be told.
    """
    began = time.perf_counter()
    # The check's own requests ask for no check; a failure leaves it due, so that no request runs unchecked.
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
    partly = any(core.collective_rpc("perturbation_reads_tokens"))
    model = core.vllm_config.model_config
    half, name = str(model.dtype) != "torch.float32", ", ".join(model.architectures or ["a model"])
    for attempt in range(_ATTEMPTS):
        texts = text_of_probe(model.get_vocab_size(), model.max_model_len - 3, attempt)
        try:
            return judge(_comparisons(core, texts, partly), half_precision=half, where="vLLM's engine", model=name)
        except ProbeFailure as error:
            if error.is_certain or attempt == _ATTEMPTS - 1:
                raise


@dataclass
class _Answer:
    """What an engine says of a text: log π of each of its tokens but the first, and of the likeliest next ones."""

    tokens: list[int] = field(default_factory=list)
    of_text: list[np.ndarray] = field(default_factory=list)
    next_tokens: list[dict[int, float]] = field(default_factory=list)

    def since(self, row: int) -> Any:
        """Log π of the tokens behind ``row`` + 1, and the likeliest first tokens after the text."""
        return np.concatenate(self.of_text)[row:], self.next_tokens[0]


def _comparisons(core: EngineCore, texts: ProbeTexts, partly: bool) -> list[Comparison]:
    """Asks twice: of texts as they are, and of the same ones with overrides in the midst of others."""
    first, text, last, row, other = texts.first, texts.text, texts.last, texts.row, texts.other
    swapped = [*text[:row], other, *text[row + 1 :]]
    plain_first, plain, plain_last, as_text = _ask(core, [(t, {}) for t in (first, text, last, swapped)])
    end, fed = len(text), plain.tokens[0]
    # The first request's rows come first in the batch, the last one's after those with an override.
    requests: list[tuple[list[int], Mapping[int, int]]] = [
        (first, {}),
        (text, {row: other}),
        (text, {row: text[row], end: fed}),
        (text, {end: other}),
        (last, {}),
        ([*text, other], {}),
    ]
    beside_first, replaced, own, decoded, beside_last, longer = _ask(core, requests)

    def before(answer: _Answer) -> Any:
        return (answer.since(0)[0][: row - 1],)

    def whole(answer: _Answer, start: int = 0) -> Any:
        return (*answer.since(start), answer.next_tokens[1])

    effect = _distance(plain.since(row), as_text.since(row))
    compared = {
        "rows before the overridden one": (before(replaced), before(plain)),
        "a row overridden with its own token's embedding": (whole(own, row), whole(plain, row)),
        "the request in front": (whole(beside_first), whole(plain_first)),
        "the request behind": (whole(beside_last), whole(plain_last)),
        "the text in front of a generated token's override": (decoded.since(row), plain.since(row)),
    }
    if not partly:
        compared["an overridden row of a prompt"] = (replaced.since(row), as_text.since(row))
    comparisons = [Comparison(subject, _distance(*both), effect) for subject, both in compared.items()]
    if partly:
        # A table that follows the token in the text has a part in the row: only that this very row changes is known.
        here, changed = (
            _distance((plain.since(row)[0][:1],), (answer.since(row)[0][:1],)) for answer in (as_text, replaced)
        )
        same = 1.0 - min(changed / here, 1.0) if here else 1.0
        return [*comparisons, Comparison("an overridden row, which must change", same * here, here, 0.9)]
    step = _distance((decoded.next_tokens[1],), (longer.next_tokens[0],))
    step_effect = _distance((plain.next_tokens[1],), (longer.next_tokens[0],))
    return [*comparisons, Comparison("an overridden generated token", step, step_effect)]


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
    answers = {f"perturbation-probe-{next(_NUMBERS)}": _Answer() for _ in requests}
    for name, (tokens, fed) in zip(answers, requests):
        core.add_request(*core.preprocess_add_request(_request(name, tokens, fed)))
    while core.scheduler.has_requests() or core.batch_queue:
        steps, executed = core.step_fn()
        core.post_step(executed)
        for output in itertools.chain.from_iterable(outputs.outputs for outputs in (steps or {}).values()):
            answer, of_text = answers[output.request_id], output.new_prompt_logprobs_tensors
            answer.tokens.extend(output.new_token_ids)
            if of_text is not None:
                answer.of_text.append(of_text.logprobs[:, 0].float().cpu().numpy())
            if output.new_logprobs is not None:
                for ids, values in zip(output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs):
                    answer.next_tokens.append({int(token): float(value) for token, value in zip(ids, values)})
    core.collective_rpc("perturbation_drop", args=(list(answers),))
    core.reset_prefix_cache()
    return list(answers.values())


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
    given: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "sampling_params": params,
        "arrival_time": time.time(),
        "external_req_id": name,
    }
    # Releases differ in the fields that a request has, and in those without a default.
    fields = EngineCoreRequest.__struct_fields__
    required = fields[: len(fields) - len(EngineCoreRequest.__struct_defaults__)]
    known: dict[str, Any] = dict.fromkeys(required) | {k: v for k, v in given.items() if k in fields}
    return EngineCoreRequest(**known)
