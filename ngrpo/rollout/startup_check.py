# SPDX-License-Identifier: Apache-2.0
"""The start-up check: do overrides land where they belong, in an engine and in a trainer's model (`replay_check`)?

A row fed with another token's embedding must give the log-probabilities of the text with that token there; all other
rows, and one fed with its own token's, those of the untouched text. An engine's core runs a few tiny requests for this.
Functions that take an ``original`` are rows of `ngrpo.patches`.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ngrpo import patches
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import EngineCore, VllmConfig, VocabParallelEmbedding
from ngrpo.rollout.settings import DEFERRED_CHECK, KEY, read
from perturbations import ReplayRecord, UsageError

_LENGTH = 10
# By half precision or not: the fraction of the other token's effect that rounding may reach, and the least effect, in
# nats, that tells anything.
_ROUNDING = {False: 0.02, True: 0.25}
_LEAST_EFFECT = {False: 1e-3, True: 0.2}
_DUE, _PASSED = "_perturbation_check_due", "_perturbation_check_passed"
_NUMBERS = itertools.count()
_ATTEMPTS = 3  # texts that are tried where a model's output hardly depends on one of its inputs


class CheckFailure(UsageError):
    """An override does not land where it belongs, or the model's output cannot tell."""


# ---- texts and judgement ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckTexts:
    """A text, the two around it in a batch, and the token that is fed at one of its rows (1 or later)."""

    first: list[int]
    text: list[int]
    last: list[int]
    row: int
    other: int

    @property
    def swapped(self) -> list[int]:
        """The text with the other token in the row."""
        return [*self.text[: self.row], self.other, *self.text[self.row + 1 :]]


class Answer(NamedTuple):
    """log π of a text's tokens but the first, (T - 1,); of the likeliest tokens at each generated one; and these."""

    of_text: np.ndarray
    next_tokens: Sequence[dict[int, float]] = ()
    tokens: Sequence[int] = ()


class Comparison(NamedTuple):
    """Two sets of log-probabilities that must agree."""

    subject: str
    apart: float  # mean |Δ log p| in nats
    effect: float  # of the other token
    allowed: float | None = None  # fraction of the effect; None: the one for the model's dtype


def reads_tokens_elsewhere(modules: Iterable[nn.Module], embedding: VocabParallelEmbedding) -> bool:
    """Whether modules (without the output head) have a further table of tokens, as Gemma 3n and 4 for each layer."""
    rows = embedding.num_embeddings
    tables = (module for module in modules if module is not embedding and hasattr(module, "embedding_dim"))
    # Gemma's own vocabulary of a layer may lack the last tokens.
    return any(0.9 * rows <= getattr(table, "num_embeddings", 0) <= rows for table in tables)


def texts_of_check(vocabulary: int, longest: int, attempt: int = 0) -> CheckTexts:
    """Texts of at most ``longest`` tokens from the vocabulary's lower half; UsageError for too short a context."""
    length = min(_LENGTH, longest)
    if length < 4:
        raise UsageError(f"the start-up check needs at least 7 tokens, not {longest + 3}: raise max_model_len.")
    usual = np.arange(vocabulary // 20, max(vocabulary // 2, min(vocabulary, 32)))
    tokens = np.resize(np.random.default_rng(attempt).permutation(usual), 3 * length + 1).tolist()
    first, text, last = (tokens[start : start + length] for start in (0, length, 2 * length))
    row, other = length // 2, tokens[-1]
    if other == text[row]:  # a vocabulary of fewer tokens than the texts have
        other = next(token for token in usual.tolist() if token != text[row])
    return CheckTexts(first, text, last, row, other)


def record_of(fed: Mapping[int, int], prompt_tokens: int, num_tokens: int) -> ReplayRecord:
    """A record that feeds tokens at positions, which ascend."""
    ids = np.array([[token] for token in fed.values()], dtype=np.int32)
    ones = np.ones((len(ids), 1), dtype=np.float32)
    positions = np.array(list(fed), dtype=np.int32)
    return ReplayRecord(0, prompt_tokens, num_tokens, positions, ids, ones, None, ones[:, 0] > 0)


def check_texts(
    vocabulary: int,
    longest: int,
    compare: Callable[[CheckTexts], Sequence[Comparison]],
    *,
    half_precision: bool,
    where: str,
    model: str,
) -> None:
    """Compares up to three texts, until one tells where overrides land; raises :class:`CheckFailure` otherwise."""
    least = 0.0
    for attempt in range(_ATTEMPTS):
        comparisons = compare(texts_of_check(vocabulary, longest, attempt))
        least = min(comparison.effect for comparison in comparisons)
        if least >= _LEAST_EFFECT[half_precision]:
            break
    else:
        raise CheckFailure(
            f"{where} cannot be proven right for {model}: another token in its text changes log-probabilities by"
            f" {least:.1g} on average, and {_LEAST_EFFECT[half_precision]:g} is needed to see where an override lands."
            " Is it a trained model, and are its weights loaded?"
        )
    limits = [(each, (each.allowed or _ROUNDING[half_precision]) * each.effect) for each in comparisons]
    wrong = [(each, limit) for each, limit in limits if not each.apart <= limit]
    said = [f"  {each.subject}: off by {each.apart:.2g}, at most {limit:.2g} is expected" for each, limit in wrong]
    if lines := "\n".join(said):
        raise CheckFailure(
            f"{where} does not feed {model} what a perturbation asks for. Mean |Δ log p| in nats, where another token"
            f" in the text changes it by {least:.2g}:\n{lines}\nNothing was started, since its inputs cannot be"
            " trusted. Use a model of docs/models.md, or report this one with the lines above."
        )


def compared(
    plain: Sequence[Answer], fed: Sequence[Answer], row: int, *, partly: bool, what: str, each: str
) -> list[Comparison]:
    """What an engine and a trainer must agree on with themselves.

    Args:
        plain: for the first text, the text, the last one, and the text with the other token.
        fed: for the first text, the text with the other token fed at the row, with its own one fed, and the last text.
        partly: whether the model also reads the token in the text.
        what: what happens to a row, in the comparisons' names.
        each: a text there.
    """

    def part(answer: Answer, start: int = row, stop: int | None = None, tokens: int = 2) -> Any:
        return answer.of_text[start:stop], *answer.next_tokens[:tokens]

    (plain_first, text, plain_last, as_text), (first, replaced, own, last) = plain, fed
    effect = distance(part(text, tokens=1), part(as_text, tokens=1))
    pairs = {
        f"rows before the {what} one": [part(answer, 0, row - 1, tokens=0) for answer in (replaced, text)],
        f"a row {what} with its own token's embedding": [part(own), part(text)],
        f"the {each} in front": [part(first, 0), part(plain_first, 0)],
        f"the {each} behind": [part(last, 0), part(plain_last, 0)],
    }
    changed = f"a row {what} with another token's embedding"
    if not partly:
        pairs[changed] = [part(replaced, tokens=1), part(as_text, tokens=1)]
    found = [Comparison(subject, distance(*both), effect) for subject, both in pairs.items()]
    if partly:
        # A table that follows the token in the text has a part in the row: only that this very row changes is known.
        before, expected, there = (part(answer, row, row + 1, tokens=0) for answer in (text, as_text, replaced))
        here = distance(before, expected)
        same = 1.0 - min(distance(before, there) / here, 1.0) if here else 1.0
        found.append(Comparison(f"{changed}, which must change", same * here, here, 0.9))
    return found


def distance(ones: Sequence[Any], others: Sequence[Any]) -> float:
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


# ---- when an engine is checked ----------------------------------------------------------------------------------


@around
def checked_core(
    original: Callable[..., None], self: EngineCore, vllm_config: VllmConfig, *args: object, **kwargs: object
) -> None:
    """The check of an engine that perturbs ends its start, unless it is deferred; its core hashes blocks."""
    config: Any = vllm_config.additional_config
    perturbation = read(config)
    if perturbation is not None:
        patches.install([patches.IN_PERTURBED_CORE])
    original(self, vllm_config, *args, **kwargs)
    if perturbation is not None and perturbation.active:
        setattr(self, _DUE, True)
        if not config.get(DEFERRED_CHECK):
            check_before_request(self)


@around
def checked_first(original: Callable[..., None], self: EngineCore, *args: object, **kwargs: object) -> None:
    """The first request after a weight sync comes after the check that is due, where one is."""
    check_before_request(self)
    original(self, *args, **kwargs)


@around
def with_calls_of_core(
    original: Callable[..., Any], self: EngineCore, method: object, *args: object, **kwargs: object
) -> Any:
    """The remote procedures that concern an engine's core; all others concern its workers."""
    if method == "perturbation_check":
        return [check_when_idle(self)]
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


def check_when_idle(core: EngineCore) -> None:
    """Checks an engine with an override now, where it is idle, or else before the next request that finds it so."""
    if read(core.vllm_config.additional_config) is not None:
        setattr(core, _DUE, True)
        if _is_idle(core):
            check_core(core)


def check_before_request(core: EngineCore) -> None:
    """Checks the engine where that is due and nothing else is running; vLLM's dummy weights tell nothing."""
    has_weights = core.vllm_config.load_config.load_format != "dummy"
    if getattr(core, _DUE, False) and has_weights and _is_idle(core):
        check_core(core)


def _is_idle(core: EngineCore) -> bool:
    """Whether an engine, paused or not, could run the check's requests now, and has no others."""
    if core.model_executor.is_sleeping:  # its weights or its KV cache are not in memory
        return False
    with _without_pause(core):
        return not core.scheduler.has_unfinished_requests()


@contextmanager
def _without_pause(core: EngineCore) -> Iterator[None]:
    """Lifts the pause of a scheduler, which counts and runs no request while paused; the core's own loop waits."""
    scheduler, state = core.scheduler, core.scheduler.pause_state
    scheduler.set_pause_state(type(state).UNPAUSED)
    try:
        yield
    finally:
        scheduler.set_pause_state(state)


# ---- the check of an engine -------------------------------------------------------------------------------------


def check_core(core: EngineCore) -> float:
    """Runs the check's requests in an idle engine and judges the results; returns the seconds that it took."""
    began = time.perf_counter()
    model = core.vllm_config.model_config
    # The check's own requests ask for no check; a failure leaves it due, so that no request runs unchecked.
    setattr(core, _DUE, False)
    try:
        with _without_pause(core):
            partly = any(core.collective_rpc("perturbation_reads_tokens"))
            check_texts(
                model.get_vocab_size(),
                model.max_model_len - 3,
                lambda texts: _comparisons(core, texts, partly),
                half_precision=str(model.dtype) != "torch.float32",
                where="vLLM's engine",
                model=", ".join(model.architectures or ["a model"]),
            )
    except BaseException:
        setattr(core, _DUE, True)
        raise
    setattr(core, _PASSED, True)
    return time.perf_counter() - began


def _comparisons(core: EngineCore, texts: CheckTexts, partly: bool) -> list[Comparison]:
    """Asks twice: of texts as they are, and of the same ones with overrides in the midst of others."""
    first, text, last, row, other = texts.first, texts.text, texts.last, texts.row, texts.other
    plain = _ask(core, [(each, {}) for each in (first, text, last, texts.swapped)])
    end, answer = len(text), plain[1]
    # The first request's rows come first in the batch, the last one's after those with an override.
    own, longer = {row: text[row], end: answer.tokens[0]}, [*text, other]
    texts_fed = (first, {}), (text, {row: other}), (text, own), (text, {end: other}), (last, {}), (longer, {})
    *fed, decoded, beside_last, as_longer = _ask(core, texts_fed)
    comparisons = compared(plain, [*fed, beside_last], row, partly=partly, what="overridden", each="request")
    before = [(each.of_text[row:], each.next_tokens[0]) for each in (decoded, answer)]
    subject = "the text in front of a generated token's override"
    comparisons.append(Comparison(subject, distance(*before), comparisons[0].effect))
    if not partly:
        step, effect = (distance((each.next_tokens[1],), as_longer.next_tokens[:1]) for each in (decoded, answer))
        comparisons.append(Comparison("an overridden generated token", step, effect))
    return comparisons


def _ask(core: EngineCore, requests: Sequence[tuple[list[int], Mapping[int, int]]]) -> list[Answer]:
    """Runs requests to their end, two greedy tokens each: a text, and by position the token that is fed there.

    The position after the text's last token is that of the first generated one.
    """
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    # Releases differ in the fields that a request has, and in those without a default.
    fields = EngineCoreRequest.__struct_fields__
    required = fields[: len(fields) - len(EngineCoreRequest.__struct_defaults__)]
    # No name comes twice, as none of vLLM's own does: rows of a batch are known by their names.
    names = [f"perturbation-check-{next(_NUMBERS)}" for _ in requests]
    of_text, tokens, likeliest = ({name: [] for name in names} for _ in range(3))
    for name, (text, fed) in zip(names, requests):
        arguments: dict[str, Any] = {"seed": 0, "enabled": False, "scheduled": False}
        if fed:
            arguments |= {"record": record_of(fed, len(text), len(text) + 2).to_bytes(), "ahead": True}
        shown: dict[str, Any] = {
            "logprobs": 5,
            "prompt_logprobs": 0,
            "detokenize": False,
            "extra_args": {KEY: arguments},
        }
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, **shown)
        given: dict[str, Any] = {"request_id": name, "external_req_id": name, "prompt_token_ids": text}
        given |= {"sampling_params": params, "arrival_time": time.time()}
        known: dict[str, Any] = dict.fromkeys(required) | {k: v for k, v in given.items() if k in fields}
        core.add_request(*core.preprocess_add_request(EngineCoreRequest(**known)))
    while core.scheduler.has_requests() or core.batch_queue:
        steps, executed = core.step_fn()
        core.post_step(executed)
        for output in itertools.chain.from_iterable(outputs.outputs for outputs in (steps or {}).values()):
            name, found = output.request_id, output.new_prompt_logprobs_tensors
            tokens[name].extend(output.new_token_ids)
            if found is not None:
                of_text[name].append(found.logprobs[:, 0].float().cpu().numpy())
            if output.new_logprobs is not None:
                for ids, values in zip(output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs):
                    likeliest[name].append({int(token): float(value) for token, value in zip(ids, values)})
    core.collective_rpc("perturbation_drop", args=(names,))
    core.reset_prefix_cache()
    return [Answer(np.concatenate(of_text[name]), likeliest[name], tokens[name]) for name in names]
