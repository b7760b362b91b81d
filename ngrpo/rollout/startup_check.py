# SPDX-License-Identifier: Apache-2.0
"""The start-up check: do overrides land where they belong, in an engine and in a trainer's model (`replay_check`)?

A row fed with another token's embedding must give the log-probabilities of the text with that token there; all other
rows, and a row fed with its own token's embedding, must give those of the untouched text. An engine's core runs a few
tiny requests for this. Functions that take an ``original`` are rows of `ngrpo.patches`.
"""

import itertools
import time
from collections import defaultdict
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

_LENGTH = 10  # tokens of a text
_DUE = "_perturbation_check_due"
_PASSED = "_perturbation_check_passed"
_NUMBERS = itertools.count()
_ATTEMPTS = 3  # texts that are tried where a model's output hardly depends on one of its inputs


class CheckFailure(UsageError):
    """An override does not land where it belongs, or the model's output cannot tell."""


class Precision(NamedTuple):
    """What the log-probabilities of a model can tell, by its dtype."""

    rounding: float  # fraction of another token's effect that rounding may reach
    least_effect: float  # mean |Δ log p| in nats below which another token's effect tells nothing


_FULL_PRECISION = Precision(rounding=0.02, least_effect=1e-3)
_HALF_PRECISION = Precision(rounding=0.25, least_effect=0.2)


# ---- texts and judgement ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckTexts:
    """Three texts of one length, and what is fed in the second of them.

    Attributes:
        first: the text in front of it in a batch.
        text: the text in which a row is overridden.
        last: the text behind it in a batch.
        row: the row that is overridden, 1 or later.
        other: another token than the text's in that row, which is fed there.
    """

    first: list[int]
    text: list[int]
    last: list[int]
    row: int
    other: int

    @property
    def own(self) -> int:
        """The text's token in the row."""
        return self.text[self.row]

    @property
    def swapped(self) -> list[int]:
        """The text with the other token in the row."""
        return [*self.text[: self.row], self.other, *self.text[self.row + 1 :]]


class Answer(NamedTuple):
    """What a model makes of one text.

    Attributes:
        of_text: log π of the text's tokens but the first, (T - 1,).
        next_tokens: log π of the likeliest tokens at each generated position, by token; empty from a trainer's model.
        tokens: the generated tokens.
    """

    of_text: np.ndarray
    next_tokens: Sequence[dict[int, float]] = ()
    tokens: Sequence[int] = ()

    def log_probs(self, start: int = 0, stop: int | None = None, generated: int = 0) -> list[Any]:
        """Those of the text's tokens ``start + 1`` to ``stop``, and of the first ``generated`` generated positions."""
        return [self.of_text[start:stop], *self.next_tokens[:generated]]


class Comparison(NamedTuple):
    """Two sets of log-probabilities that must agree."""

    subject: str
    apart: float  # mean |Δ log p| in nats
    effect: float  # of the other token, likewise
    allowed: float | None = None  # fraction of the effect; None: that of the model's precision


def reads_tokens_elsewhere(modules: Iterable[nn.Module], embedding: VocabParallelEmbedding) -> bool:
    """Whether modules (without the output head) have a further table of tokens, as Gemma 3n and 4 for each layer."""
    vocabulary = embedding.num_embeddings
    for module in modules:
        if module is embedding or not hasattr(module, "embedding_dim"):
            continue
        # Gemma's own vocabulary of a layer may lack the last tokens.
        if 0.9 * vocabulary <= getattr(module, "num_embeddings", 0) <= vocabulary:
            return True
    return False


def texts_of_check(vocabulary: int, longest: int, attempt: int = 0) -> CheckTexts:
    """Texts of at most ``longest`` tokens from the vocabulary's lower half; UsageError for too short a context."""
    length = min(_LENGTH, longest)
    if length < 4:
        raise UsageError(f"the start-up check needs at least 7 tokens, not {longest + 3}: raise max_model_len.")
    usual_tokens = np.arange(vocabulary // 20, max(vocabulary // 2, min(vocabulary, 32)))
    shuffled = np.random.default_rng(attempt).permutation(usual_tokens)
    tokens = np.resize(shuffled, 3 * length + 1).tolist()
    text = tokens[length : 2 * length]
    row = length // 2
    other = tokens[-1]
    if other == text[row]:  # a vocabulary of fewer tokens than the texts have
        other = next(token for token in usual_tokens.tolist() if token != text[row])
    return CheckTexts(first=tokens[:length], text=text, last=tokens[2 * length : 3 * length], row=row, other=other)


def record_of(fed: Mapping[int, int], prompt_tokens: int, num_tokens: int) -> ReplayRecord:
    """A record that feeds one token with weight 1 at each position of ``fed``, which ascend."""
    count = len(fed)
    return ReplayRecord(
        seed=0,
        prompt_tokens=prompt_tokens,
        num_tokens=num_tokens,
        positions=np.array(list(fed), dtype=np.int32),
        ids=np.array([[token] for token in fed.values()], dtype=np.int32),
        weights=np.ones((count, 1), dtype=np.float32),
        sigma=None,
        agreed=np.ones(count, dtype=bool),
    )


def check_texts(
    vocabulary: int,
    longest: int,
    compare: Callable[[CheckTexts], Sequence[Comparison]],
    *,
    half_precision: bool,
    where: str,
    model: str,
) -> None:
    """Compares up to three texts, until one tells where overrides land; raises :class:`CheckFailure` otherwise.

    Args:
        vocabulary: tokens of the model.
        longest: tokens of the longest text.
        compare: asks the model about a text and those around it.
        half_precision: whether the model computes in bfloat16 or float16.
        where: whose override it is, for messages.
        model: its name, for messages.
    """
    precision = _HALF_PRECISION if half_precision else _FULL_PRECISION
    effect = 0.0
    for attempt in range(_ATTEMPTS):
        comparisons = compare(texts_of_check(vocabulary, longest, attempt))
        effect = min(comparison.effect for comparison in comparisons)
        if effect >= precision.least_effect:
            break
    else:
        raise CheckFailure(
            f"{where} cannot be proven right for {model}: another token in its text changes log-probabilities by"
            f" {effect:.1g} on average, and {precision.least_effect:g} is needed to see where an override lands."
            " Is it a trained model, and are its weights loaded?"
        )
    wrong: list[str] = []
    for comparison in comparisons:
        limit = (comparison.allowed or precision.rounding) * comparison.effect
        if not comparison.apart <= limit:  # also where it is NaN
            wrong.append(f"  {comparison.subject}: off by {comparison.apart:.2g}, at most {limit:.2g} is expected")
    if wrong:
        lines = "\n".join(wrong)
        raise CheckFailure(
            f"{where} does not feed {model} what a perturbation asks for. Mean |Δ log p| in nats, where another token"
            f" in the text changes it by {effect:.2g}:\n{lines}\nNothing was started, since its inputs cannot be"
            " trusted. Use a model of docs/models.md, or report this one with the lines above."
        )


def compared(
    plain: Mapping[str, Answer], fed: Mapping[str, Answer], row: int, *, partly: bool, what: str, unit: str
) -> list[Comparison]:
    """What an engine and a trainer must agree on with themselves.

    Args:
        plain: without overrides, of the ``first`` text, the ``text``, the ``last`` one, and the ``swapped`` one, which
            is the text with the other token.
        fed: in one batch, of the ``first`` text, the text with the ``other`` token fed at the row, the text with its
            ``own`` token fed there, and the ``last`` text.
        row: the row that is overridden.
        partly: whether the model also reads the token in the text.
        what: what happens to a row, in the comparisons' subjects.
        unit: what a text is there, in the comparisons' subjects.
    """
    text = plain["text"]
    swapped = plain["swapped"]
    effect = distance(text.log_probs(row, generated=1), swapped.log_probs(row, generated=1))

    def comparison(subject: str, ones: Sequence[Any], others: Sequence[Any]) -> Comparison:
        return Comparison(subject, distance(ones, others), effect)

    comparisons = [
        comparison(
            f"rows before the {what} one",
            fed["other"].log_probs(0, row - 1),
            text.log_probs(0, row - 1),
        ),
        comparison(
            f"a row {what} with its own token's embedding",
            fed["own"].log_probs(row, generated=2),
            text.log_probs(row, generated=2),
        ),
        comparison(
            f"the {unit} in front",
            fed["first"].log_probs(generated=2),
            plain["first"].log_probs(generated=2),
        ),
        comparison(
            f"the {unit} behind",
            fed["last"].log_probs(generated=2),
            plain["last"].log_probs(generated=2),
        ),
    ]
    subject = f"a row {what} with another token's embedding"
    if not partly:
        comparisons.append(
            comparison(
                subject,
                fed["other"].log_probs(row, generated=1),
                swapped.log_probs(row, generated=1),
            )
        )
        return comparisons
    # The row is a sum in which a table that follows the token in the text has a share. So it is not that of the swapped
    # text, and all that is known is that this very row changes.
    unchanged = text.log_probs(row, row + 1)
    expected_change = distance(unchanged, swapped.log_probs(row, row + 1))
    unchanged_share = 1.0
    if expected_change:
        change = distance(unchanged, fed["other"].log_probs(row, row + 1))
        unchanged_share = 1.0 - min(change / expected_change, 1.0)
    comparisons.append(
        Comparison(
            f"{subject}, which must change",
            apart=unchanged_share * expected_change,
            effect=expected_change,
            allowed=0.9,
        )
    )
    return comparisons


def distance(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """Mean |Δ log p|, in nats, of log-probabilities of a text (arrays) and of likeliest next tokens (dictionaries)."""
    differences: list[float] = []
    for one, other in zip(ones, others, strict=True):
        if isinstance(one, dict):
            differences.extend(_differences(one, other))
            differences.extend(_differences(other, one))
        else:
            differences.extend(np.abs(one - other).tolist())
    return float(np.mean(differences)) if differences else 0.0


def _differences(log_probs: dict[int, float], others: dict[int, float]) -> list[float]:
    """|Δ log p| of each token of ``log_probs``, where ``others`` has the likeliest tokens."""
    # A token that is not among the likeliest ones is at most as likely as the last of them.
    least = min(others.values())
    return [abs(log_prob - others.get(token, least)) for token, log_prob in log_probs.items()]


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
    scheduler = core.scheduler
    state = scheduler.pause_state
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


class Probe(NamedTuple):
    """A request of the check: a text, and by position the token that is fed there.

    The position after the text's last token is that of the first generated one.
    """

    text: list[int]
    fed: Mapping[int, int]


def _comparisons(core: EngineCore, texts: CheckTexts, partly: bool) -> list[Comparison]:
    """Asks twice: of texts as they are, and of the same ones with overrides in the midst of others."""
    text = texts.text
    plain = _answers(
        core,
        {
            "first": Probe(texts.first, fed={}),
            "text": Probe(text, fed={}),
            "last": Probe(texts.last, fed={}),
            "swapped": Probe(texts.swapped, fed={}),
        },
    )
    end = len(text)
    first_generated = plain["text"].tokens[0]
    # The first request's rows come first in the batch, the last one's after those with an override.
    fed = _answers(
        core,
        {
            "first": Probe(texts.first, fed={}),
            "other": Probe(text, fed={texts.row: texts.other}),
            "own": Probe(text, fed={texts.row: texts.own, end: first_generated}),
            "generated": Probe(text, fed={end: texts.other}),
            "last": Probe(texts.last, fed={}),
            "longer": Probe([*text, texts.other], fed={}),
        },
    )
    comparisons = compared(plain, fed, texts.row, partly=partly, what="overridden", unit="request")
    comparisons.append(
        Comparison(
            "the text in front of a generated token's override",
            apart=distance(
                fed["generated"].log_probs(texts.row, generated=1),
                plain["text"].log_probs(texts.row, generated=1),
            ),
            effect=comparisons[0].effect,
        )
    )
    if not partly:
        # The second generated token follows the overridden first one, as the first one follows the longer text.
        after_other = fed["longer"].next_tokens[:1]
        comparisons.append(
            Comparison(
                "an overridden generated token",
                apart=distance([fed["generated"].next_tokens[1]], after_other),
                effect=distance([plain["text"].next_tokens[1]], after_other),
            )
        )
    return comparisons


def _answers(core: EngineCore, probes: Mapping[str, Probe]) -> dict[str, Answer]:
    """Runs requests to their end, in one batch and in this order, two greedy tokens each; answers by the same names."""
    # No id comes twice, as none of vLLM's own does: rows of a batch are known by their ids.
    ids = {name: f"perturbation-check-{next(_NUMBERS)}" for name in probes}
    for name, probe in probes.items():
        core.add_request(*core.preprocess_add_request(_request(ids[name], probe)))
    outputs = _run(core)
    core.collective_rpc("perturbation_drop", args=(list(ids.values()),))
    core.reset_prefix_cache()
    return {name: _answer(outputs[request_id]) for name, request_id in ids.items()}


def _request(request_id: str, probe: Probe) -> Any:
    """A request of vLLM's core, with the log-probabilities of its text and of the likeliest next tokens."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    arguments: dict[str, Any] = {"seed": 0, "enabled": False, "scheduled": False}
    if probe.fed:
        length = len(probe.text)
        record = record_of(probe.fed, prompt_tokens=length, num_tokens=length + 2)
        arguments["record"] = record.to_bytes()
        arguments["ahead"] = True
    params = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=0,
        detokenize=False,
        extra_args={KEY: arguments},
    )
    ours = {
        "request_id": request_id,
        "external_req_id": request_id,
        "prompt_token_ids": probe.text,
        "sampling_params": params,
        "arrival_time": time.time(),
    }
    # vLLM's releases differ in the fields that a request has, and in those without a default.
    fields = EngineCoreRequest.__struct_fields__
    required = fields[: len(fields) - len(EngineCoreRequest.__struct_defaults__)]
    values: dict[str, Any] = dict.fromkeys(required)
    values |= {field: value for field, value in ours.items() if field in fields}
    return EngineCoreRequest(**values)


def _run(core: EngineCore) -> dict[str, list[Any]]:
    """Steps until no request is left; vLLM's outputs of each, by its id."""
    outputs_by_id: dict[str, list[Any]] = defaultdict(list)
    while core.scheduler.has_requests() or core.batch_queue:
        step_outputs, executed = core.step_fn()
        core.post_step(executed)
        for client_outputs in (step_outputs or {}).values():
            for output in client_outputs.outputs:
                outputs_by_id[output.request_id].append(output)
    return outputs_by_id


def _answer(outputs: Sequence[Any]) -> Answer:
    """What vLLM's outputs of one request say."""
    of_text: list[np.ndarray] = []
    next_tokens: list[dict[int, float]] = []
    tokens: list[int] = []
    for output in outputs:
        tokens.extend(output.new_token_ids)
        prompt_log_probs = output.new_prompt_logprobs_tensors
        if prompt_log_probs is not None:
            of_text.append(prompt_log_probs.logprobs[:, 0].float().cpu().numpy())
        generated = output.new_logprobs
        if generated is not None:
            for ids, log_probs in zip(generated.logprob_token_ids, generated.logprobs):
                next_tokens.append({int(token): float(log_prob) for token, log_prob in zip(ids, log_probs)})
    return Answer(of_text=np.concatenate(of_text), next_tokens=next_tokens, tokens=tokens)
