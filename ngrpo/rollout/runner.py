"""Attaches the perturber to a vLLM V1 model runner (``v1/worker/gpu_model_runner.py``, vLLM 0.26 to 0.29).

Four bound methods of one runner instance are wrapped: ``_update_states`` (requests come and go), ``_preprocess``
(the inputs are laid out), the sampler's ``sample`` (tokens are drawn), and the two ways of loading weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.parameters_file import load_saved
from ngrpo.rollout.embedding import InputOverride, find_input_embedding
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RequestBook
from ngrpo.rollout.sampling import GREEDY_BELOW
from ngrpo.rollout.sampling_mask import SamplingMaskStore
from ngrpo.rollout.settings import SAMPLING_MASKS
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import parameters
from perturbations.base import Perturbation
from perturbations.gates import TokenConditions, protected_tokens
from perturbations.geometry import Geometry


class AttachedPerturbation:
    """The perturbation of one worker: what its remote procedures talk to."""

    def __init__(self, runner: Any, operator: Perturbation) -> None:
        """
        Args:
            runner: a V1 ``GPUModelRunner`` or ``CPUModelRunner`` whose model is loaded and not yet compiled.
            operator: an active operator.
        """
        self._runner = runner
        self._tempered: tuple[Any, Tensor | None] = (None, None)
        config, model = runner.model_config, runner.get_model()
        embedding = find_input_embedding(model)
        self._override = InputOverride(
            embedding, runner.max_num_tokens, embedding.embedding_dim, config.dtype, runner.device
        )
        self._hidden = embedding.embedding_dim
        self._tokenizer = _LazyTokenizer(config)
        self._vocabulary = config.get_vocab_size()
        self._geometry = _geometry(model, embedding, self._override, self._vocabulary, self._tokenizer)
        self.replace(operator)
        self._wrap()

    def replace(self, operator: Perturbation) -> None:
        """Puts another operator in place, between requests.

        Raises:
            ValueError: while requests are running, or for an operator that does not fit the model.
        """
        runner, tokenizer = self._runner, self._tokenizer
        book = getattr(self, "book", None)
        if book is not None and book.running:
            raise ValueError(
                f"the perturbation cannot be replaced while {book.running} requests are running: wait for them."
            )
        operator.check_model(self._vocabulary)
        store = TrajectoryStore(runner.max_num_reqs, runner.max_model_len, operator, self._hidden)
        conditions = TokenConditions(
            tokenizer.encode(operator.until) if operator.until is not None else [],
            protected_tokens(operator.protect, tokenizer.vocabulary, self._vocabulary),
            operator.entropy_min,
            store.slots,
            runner.device,
        )
        self.module = _module(operator, self._hidden, runner)
        self.operator = operator
        recorded = runner.vllm_config.additional_config.get(SAMPLING_MASKS)
        masks = SamplingMaskStore(self._vocabulary) if recorded else None
        self._perturber = RolloutPerturber(
            operator, store, conditions, self._geometry, self._override, runner.device, self.module, masks
        )
        self.book = RequestBook(operator, store, self._perturber)

    @property
    def geometry(self) -> Geometry:
        """The model's embeddings, as operators see them."""
        return self._geometry

    def _wrap(self) -> None:
        runner = self._runner
        runner._update_states = self._after_update(runner._update_states)
        runner._preprocess = self._before_preprocess(runner._preprocess)
        runner.sampler.sample = self._in_place_of_sample(runner.sampler.sample)
        model = runner.get_model()
        model.load_weights = self._then_refresh(self._without_ours(model.load_weights))
        runner.reload_weights = self._then_refresh(runner.reload_weights)

    def _after_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_states(scheduler_output: Any) -> Any:
            result = original(scheduler_output)
            self.book.update(scheduler_output)
            return result

        return update_states

    def _before_preprocess(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def preprocess(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            runner = self._runner
            batch, count = runner.input_batch, runner.input_batch.num_reqs
            self._perturber.begin(
                batch.req_ids[:count],
                batch.num_computed_tokens_cpu[:count].astype(np.int64),
                np.diff(runner.query_start_loc.np[: count + 1]).astype(np.int64),
                runner.discard_request_mask.np[:count],
            )
            return original(scheduler_output, *args, **kwargs)

        return preprocess

    def _in_place_of_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        sampler = self._runner.sampler

        def sample(logits: Tensor, metadata: Any, logprobs_mode_override: str | None = None) -> Any:
            if not self._perturber.busy:
                return original(logits, metadata, logprobs_mode_override)
            greedy = None
            if not metadata.all_random:
                greedy = logits.argmax(dim=-1)
                if not metadata.all_greedy:
                    greedy = torch.where(metadata.temperature < GREEDY_BELOW, greedy, -1)
            temperature = self._temperature(metadata, logits)
            scaled = logits if metadata.all_greedy else logits.div_(temperature.unsqueeze(-1))
            drawable = _filtered(scaled, metadata)
            tokens = self._perturber.finish(scaled, temperature, drawable, greedy)
            return tokens, _processed(sampler, metadata, logprobs_mode_override, drawable)

        return sample

    def _temperature(self, metadata: Any, logits: Tensor) -> Tensor:
        """(B,) float32, 1 for greedy rows. vLLM makes new metadata only when the batch changes."""
        if self._tempered[0] is not metadata:
            given = metadata.temperature
            ours = logits.new_ones(len(logits)) if given is None else torch.where(given < GREEDY_BELOW, 1.0, given)
            self._tempered = (metadata, ours)
        return self._tempered[1]

    def _without_ours(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Every weight sync ends here, whatever way it comes: the operator's own parameters go to its module."""

        def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
            own: dict[str, Tensor] = {}
            result = original(parameters.split(weights, own), *args, **kwargs)
            if own and self.module is None:
                raise ValueError(
                    f"weight sync: {', '.join(own)} belong to a perturbation with parameters, but this engine runs"
                    f" {self.operator.name!r}."
                )
            if own:
                parameters.load(self.module, own, whole=False)
            return result

        return load_weights

    def _then_refresh(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._perturber.weights_changed()

        return load


def _module(operator: Perturbation, hidden: int, runner: Any) -> nn.Module | None:
    """The operator's module with the parameters saved beside the model, on the runner's device."""
    module = operator.module(hidden)
    if module is None:
        return None
    config = runner.model_config
    # The engine's dtype, and not float32: a synced parameter arrives in it, and both sides must start alike.
    module.to(device=runner.device, dtype=config.dtype).requires_grad_(False)
    load_saved(module, operator, config.model, config.revision)
    return module


def _filtered(scaled: Tensor, metadata: Any) -> Tensor:
    """Logits after min-p, top-k and top-p. The scaled logits themselves stay as they are: operators see those."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    processors = metadata.logitsprocs.argmax_invariant
    unfiltered = metadata.top_k is None and metadata.top_p is None
    if metadata.all_greedy or (unfiltered and not any(_in_use(p) for p in processors)):
        return scaled
    drawable = scaled.clone()
    for processor in processors:
        drawable = processor.apply(drawable)
    return apply_top_k_top_p(drawable, metadata.top_k, metadata.top_p)


def _in_use(processor: Any) -> bool:
    """False for vLLM's own min-p where no request of the batch asks for it, which saves a copy of the logits."""
    return getattr(processor, "min_p_count", 1) > 0


def _processed(sampler: Any, metadata: Any, override: str | None, drawable: Tensor) -> Tensor | None:
    """What vLLM's sampler returns beside the tokens, for its two processed log-probability modes."""
    mode = override or sampler.logprobs_mode
    if metadata.max_num_logprobs is None and not getattr(metadata, "logprob_token_ids", None):
        return None
    if mode == "processed_logits":
        return drawable
    return sampler.compute_logprobs(drawable) if mode == "processed_logprobs" else None


def _geometry(
    model: Any, embedding: Any, override: InputOverride, vocabulary: int, tokenizer: _LazyTokenizer
) -> Geometry:
    def whole(module: Any) -> Tensor:
        weight = module.weight.data
        if module.tp_size > 1:
            from vllm.distributed import tensor_model_parallel_all_gather

            weight = tensor_model_parallel_all_gather(weight, dim=0)
        return weight[:vocabulary]

    head = getattr(model, "lm_head", None)
    separate = head is not None and head is not embedding and head.weight is not embedding.weight
    return Geometry(
        override.lookup,
        lambda: whole(embedding),
        (lambda: whole(head)) if separate else None,
        lambda: tokenizer.special_ids(vocabulary),
        tokenizer.vocabulary,
    )


class _LazyTokenizer:
    """The engine's tokenizer, loaded only if an option needs it."""

    def __init__(self, model_config: Any) -> None:
        self._config = model_config
        self._loaded: Any = None

    def _get(self) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(
                self._config.tokenizer,
                revision=self._config.tokenizer_revision,
                trust_remote_code=self._config.trust_remote_code,
            )
        return self._loaded

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens added around it."""
        return self._get().encode(text, add_special_tokens=False)

    def vocabulary(self) -> list[str]:
        """The decoded text of each token."""
        tokenizer = self._get()
        return tokenizer.batch_decode([[i] for i in range(len(tokenizer))])

    def special_ids(self, size: int) -> list[int]:
        """Special tokens, and rows of the embedding that no token uses."""
        tokenizer = self._get()
        return sorted({*tokenizer.all_special_ids, *range(len(tokenizer), size)})
