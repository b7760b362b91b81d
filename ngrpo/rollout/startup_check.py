# SPDX-License-Identifier: Apache-2.0
"""The start-up check of an engine: do overrides land where they belong?

The engine's core runs a few tiny requests, some of them with an override; `check_texts.py` has their texts and judges
the results. A trainer's model is checked alike (`replay_check.py`). Functions that take an ``original`` are rows of
`ngrpo.patches`.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ngrpo import patches
from ngrpo.machine.progress import announce
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import EngineCore, VllmConfig
from ngrpo.rollout import settings
from ngrpo.rollout.check_texts import CheckTexts, Comparison, TextOutput, check_texts, compared, distance, record_of

_DUE = "_perturbation_check_due"
_PASSED = "_perturbation_check_passed"
_BEYOND_TEXT = 3  # tokens after a text: the further one of the probe "longer", and two generated ones
_NUMBERS = itertools.count()


# ---- when an engine is checked ----------------------------------------------------------------------------------


@around
def perturbed_core(original: Callable[..., object], self: EngineCore, vllm_config: VllmConfig) -> object:
    """``EngineCore._initialize_kv_caches``: in a core that perturbs, block hashes are patched and a check is due.

    A core in a process that was spawned loads this plugin inside its ``__init__``, so that is too late to be replaced.
    """
    perturbation = settings.read(vllm_config.additional_config)
    if perturbation is not None:
        patches.install([patches.IN_PERTURBED_CORE])
        setattr(self, _DUE, perturbation.active)
    return original(self, vllm_config)


@around
def checked_core(
    original: Callable[..., None], self: EngineCore, vllm_config: VllmConfig, *args: object, **kwargs: object
) -> None:
    """``EngineCore.__init__``: ends with the check."""
    original(self, vllm_config, *args, **kwargs)
    check_at_start(self)


@around
def checked_loop(original: Callable[..., None], self: EngineCore) -> None:
    """``run_busy_loop`` of a core in a process of its own, which begins with the check if ``__init__`` had none."""
    check_at_start(self)
    original(self)


@around
def checked_first(original: Callable[..., None], self: EngineCore, *args: object, **kwargs: object) -> None:
    """vLLM's ``EngineCore.add_request``: in an idle engine a check that is due runs before the request."""
    check_before_request(self)
    original(self, *args, **kwargs)


@around
def with_calls_of_core(
    original: Callable[..., Any], self: EngineCore, method: object, *args: object, **kwargs: object
) -> Any:
    """vLLM's `EngineCore.collective_rpc`: runs ``perturbation_check`` in the core itself.

    Before ``perturbation_replace`` the workers close finished requests. Other procedures go to the workers alone.
    """
    if method == "perturbation_check":
        return [check_when_idle(self)]
    if method != "perturbation_replace":
        return original(self, method, *args, **kwargs)
    # Workers learn only at the next step which requests have finished, and refuse a replacement until then. An engine
    # in its caller's process makes that step only when requests come, so it is made here.
    while _is_idle(self) and (self.scheduler.has_finished_requests() or self.batch_queue):
        _, executed = self.step_fn()
        self.post_step(executed)
    result = original(self, method, *args, **kwargs)
    if not getattr(self, _PASSED, False):  # it may have started without an active perturbation
        setattr(self, _DUE, True)
    return result


def check_at_start(core: EngineCore) -> None:
    """Checks an engine that perturbs, unless the check is deferred."""
    config: Any = core.vllm_config.additional_config
    if getattr(core, _DUE, False) and not config.get(settings.DEFERRED_CHECK):
        check_before_request(core)


def check_when_idle(core: EngineCore) -> None:
    """Checks an engine with an override: now if it is idle, else before the next request that finds it idle."""
    if settings.read(core.vllm_config.additional_config) is not None:
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
    if not getattr(core, _PASSED, False):  # further ones, after weight syncs, take less than a second
        announce("start-up check of the engine")
    # The check's own requests ask for no check; a failure leaves it due, so that no request runs unchecked.
    setattr(core, _DUE, False)
    try:
        with _without_pause(core):
            reads_tokens = any(core.collective_rpc("perturbation_reads_tokens"))
            check_texts(
                model.get_vocab_size(),
                model.max_model_len - _BEYOND_TEXT,
                lambda texts: _comparisons(core, texts, reads_tokens),
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


def _comparisons(core: EngineCore, texts: CheckTexts, reads_tokens: bool) -> list[Comparison]:
    """Runs two batches and compares them: the texts as they are, and the same texts with some rows overridden."""
    text = texts.text
    plain = _text_outputs(
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
    fed = _text_outputs(
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
    comparisons = compared(plain, fed, texts.row, reads_tokens=reads_tokens, what="overridden", unit="request")
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
    if not reads_tokens:
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


def _text_outputs(core: EngineCore, probes: Mapping[str, Probe]) -> dict[str, TextOutput]:
    """Runs requests to their end, in one batch and in this order, two greedy tokens each; outputs by the same names."""
    # No id comes twice, as none of vLLM's own does: rows of a batch are known by their ids.
    ids = {name: f"perturbation-check-{next(_NUMBERS)}" for name in probes}
    for name, probe in probes.items():
        core.add_request(*core.preprocess_add_request(_request(ids[name], probe)))
    outputs = _run(core)
    core.collective_rpc("perturbation_drop", args=(list(ids.values()),))
    core.reset_prefix_cache()
    return {name: _text_output(outputs[request_id]) for name, request_id in ids.items()}


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
        extra_args={settings.KEY: arguments},
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


def _text_output(outputs: Sequence[Any]) -> TextOutput:
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
    return TextOutput(of_text=np.concatenate(of_text), next_tokens=next_tokens, tokens=tokens)
