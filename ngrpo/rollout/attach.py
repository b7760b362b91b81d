# SPDX-License-Identifier: Apache-2.0
"""Attaches the perturber to a vLLM worker: what its two model runners have in common.

The embedding gets its override before vLLM compiles the model. The runners differ in requests, inputs and sampling:
:mod:`ngrpo.rollout.runners`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ngrpo.machine.storage.parameters_file import load_saved
from ngrpo.machine.upstream.types import ModelConfig, RunnerV2, VocabParallelEmbedding
from ngrpo.rollout.check_texts import reads_tokens_elsewhere
from ngrpo.rollout.input_override import InputOverride, find_input_embedding, language_model, tables_of_text
from ngrpo.rollout.output_layer import output_layer_of, runs_v2
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.routed_experts import RoutedExperts
from ngrpo.rollout.sampling_support import SamplingMaskStore
from ngrpo.rollout.settings import (
    FULL_LOG_PROBS,
    ROUTED_EXPERTS,
    SAMPLING_MASKS,
    fingerprint,
    read_mask_limit,
    read_schedule,
)
from ngrpo.rollout.step_graphs import SIZES, rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import Perturbation, ReplayBuffer, UsageError, parameters
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate
from perturbations.neighbors import Drift
from perturbations.neighbors.base import Shard, fills_on_demand, over_ranks

logger = logging.getLogger("ngrpo.rollout")

# vLLM's DEFAULT_VOCAB_PADDING_SIZE: a model computes logits of a multiple of so many columns.
_VOCABULARY_PADDING = 64


class AttachedPerturbation:
    """The perturbation of one worker: what its remote procedures talk to.

    Attributes:
        asleep: whether the engine sleeps. Its weights are not in memory then, and to read them ends the process.
        output_layer: of the model, where a step's graph may compute the logits; else None.
        reads_tokens: whether a table beside the input embedding reads the token in the text, whatever is fed instead.
    """

    asleep = False
    _hooks: Sequence[RemovableHandle] = ()

    def __init__(self, runner: Any, perturbation: Perturbation, buffer: ReplayBuffer) -> None:
        """runner: vLLM's V1 or V2 model runner, its model loaded and not yet compiled; buffer: of finished records."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self._runner = runner
        self._buffer = buffer
        config = runner.model_config
        model = runner.get_model()
        embedding: Any = find_input_embedding(model)
        self._hidden = embedding.embedding_dim
        reserved_before = _reserved(runner.device)
        self._override = InputOverride(
            embedding,
            max_tokens=runner.max_num_tokens,
            drawn_rows=rows_of_buffers(runner.max_num_reqs),
            hidden=self._hidden,
            dtype=embedding.weight.dtype,  # a vector takes the place of a row of the matrix
            device=runner.device,
            bare=VocabParallelEmbedding,
        )
        self._graphs = _may_capture(runner, embedding)
        self.reads_tokens = reads_tokens_elsewhere(tables_of_text(model), embedding)
        self._tokenizer = _LazyTokenizer(config)
        self._vocabulary = config.get_vocab_size()
        self.embeddings = _embeddings(model, embedding, self._override, self._vocabulary, self._tokenizer)
        self._prepares = not fills_on_demand(runner.device)
        additional_config = runner.vllm_config.additional_config
        self.schedule = read_schedule(additional_config)
        self._routed = RoutedExperts(runner) if additional_config.get(ROUTED_EXPERTS) else None
        self.output_layer = output_layer_of(runner, self._vocabulary) if self._graphs else None
        self._install(perturbation, previous=None)
        if self._graphs:
            with torch.inference_mode():
                self.perturber.rehearse(self._example_logits(runner.max_num_reqs))
        if runner.device.type == "cuda":
            # Tables and graphs count as the model's memory: vLLM then measures how much is left for its KV cache.
            torch.cuda.empty_cache()
            runner.model_memory_usage += max(_reserved(runner.device) - reserved_before, 0)
            runner.profile_run = self._with_refresh(runner.profile_run)
        self._suspend_in_encoders()
        follow_weights(runner, self)

    def _suspend_in_encoders(self) -> None:
        """An encoder of pictures or sound runs between the layout of a step and its forward, without the override."""
        encoders = (
            (self._runner, "_execute_mm_encoder"),  # V1
            (getattr(self._runner, "model_state", None), "execute_mm_encoder"),  # V2
        )
        for owner, name in encoders:
            if hasattr(owner, name):
                # The object that contextmanager returns is a decorator, which enters a new context for each call.
                setattr(owner, name, self._override.suspended()(getattr(owner, name)))

    def replace(self, perturbation: Perturbation) -> None:
        """Sets the perturbation, between requests.

        Raises ``UsageError`` while requests run, while the engine sleeps, and where the perturbation does not fit the
        model.
        """
        running = self.requests.running
        if running:
            raise UsageError(
                f"the perturbation cannot be replaced while {running} requests are running: wait for them."
            )
        self._check_awake("the perturbation cannot be replaced")
        self._install(perturbation, previous=self.perturber)

    def _install(self, perturbation: Perturbation, previous: RolloutPerturber | None) -> None:
        """Makes everything that belongs to one perturbation; ``UsageError`` where it does not fit the model.

        ``previous``: the perturber whose place is taken. It stays as it is where the perturbation does not fit.
        """
        runner = self._runner
        perturbation.check_model(self._vocabulary)
        store = TrajectoryStore(
            # On a GPU a request keeps its slot for a step or two after its end, when as many new ones may have begun.
            2 * runner.max_num_reqs,
            runner.max_model_len,
            embedding=(self._vocabulary, self._hidden),
            module=perturbation.has_parameters,
        )
        tokenizer = self._tokenizer
        gate = BoundGate(perturbation, lambda: tokenizer.token_bytes, self._vocabulary, store.slots, runner.device)
        module = self._load_module(perturbation)
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        if perturbation.reads_hidden:
            self._hooks = _follow_output_layer(runner.get_model(), lambda hidden: self.perturber.keep_hidden(hidden))
        self.perturbation = perturbation
        self.module = module
        if self._routed is not None:
            self._routed.restart(store)
        if previous is not None:
            previous.close()
        self.perturber = self._new_perturber(perturbation, store, gate, module)
        self._buffer.drop(self._buffer.names())
        rank = runner.vllm_config.parallel_config.data_parallel_index
        self.requests = RunningRequests(perturbation, store, self.perturber, self._buffer, rank)
        self.prepare()

    def _new_perturber(
        self, perturbation: Perturbation, store: TrajectoryStore, gate: BoundGate, module: nn.Module | None
    ) -> RolloutPerturber:
        """The perturber of this worker, with what the engine's settings have it record."""
        config = self._runner.vllm_config.additional_config
        masks = None
        if config.get(SAMPLING_MASKS):
            masks = SamplingMaskStore(self._vocabulary, store.slots, read_mask_limit(config))
        return RolloutPerturber(
            perturbation,
            store,
            gate,
            self.embeddings,
            self._override,
            self._runner.device,
            module=module,
            masks=masks,
            full_log_probs=config.get(FULL_LOG_PROBS, False),
            schedule=self.schedule,
            routed=self._routed,
            graphs=self._graphs,
            output=self.output_layer,
        )

    def _load_module(self, perturbation: Perturbation) -> nn.Module | None:
        """The module of a perturbation with the parameters that are saved next to the model; None for no module."""
        module = perturbation.module(self._hidden)
        if module is None:
            return None
        model = self._runner.model_config
        # The engine's dtype, and not float32: a synced parameter arrives in it, and both sides must start alike.
        module.to(device=self._runner.device, dtype=model.dtype).requires_grad_(False)
        load_saved(module, perturbation, model.model, model.revision)
        return module

    def fingerprint(self) -> str:
        """The fingerprint of this worker's perturbation and schedule."""
        return fingerprint(self.perturbation, self.schedule)

    def warm_up(self) -> None:
        """Compiles what the first requests need.

        Edits are rehearsed only where neighbor tables are made ahead of requests, as on a GPU. Where their rows are
        filled on first use, as on a CPU, a rehearsal would fill some.
        """
        with torch.inference_mode():
            for rows in (2, 1):  # torch.compile specialises on a batch of 1
                self.perturber.rehearse(self._example_logits(rows), edits=self._prepares)

    def _example_logits(self, rows: int) -> Tensor:
        """Logits of zeros, (rows, V), in the dtype and with the strides of those that the runner samples from."""
        padded = -(-self._vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        dtype = self._runner.model_config.dtype
        logits = torch.zeros(rows, padded, dtype=dtype, device=self._runner.device)[:, : self._vocabulary]
        # V1's sampler copies the logits into float32, without the padding unless they are float32 already.
        return logits if runs_v2(self._runner) else logits.to(torch.float32)

    def _with_refresh(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps the run by which vLLM measures its memory, so that it includes what a weight sync needs.

        An engine that does not sleep builds new neighbor tables beside its KV cache, which may take more memory than a
        forward.
        """

        def profile_run(*args: object, **kwargs: object) -> None:
            original(*args, **kwargs)
            torch.empty(self.embeddings.refresh_bytes, dtype=torch.uint8, device=self._runner.device)

        return profile_run

    def prepare(self) -> None:
        """Computes what the perturbation needs from the weights, at the start and at the end of a weight sync."""
        self._check_awake("perturbation_prepare: nothing can be computed from the weights")
        if self._prepares:
            self.perturbation.prepare(self.embeddings)

    def drift(self) -> Drift | None:
        """How many neighbor sets the latest weight sync changed."""
        self._check_awake("perturbation_drift: neighbors cannot be looked for")
        return self.embeddings.drift()

    def _check_awake(self, what: str) -> None:
        if self.asleep:
            raise UsageError(
                f"{what} while the engine sleeps and its weights are not in memory."
                f" Wake it first, at least with wake_up(tags=['weights'])."
            )

    def wake(self, tags: list[str] | None) -> None:
        """The engine wakes: the parts that vLLM calls by these tags, or all of them where there are no tags."""
        self.asleep = self.asleep and tags is not None and "weights" not in tags

    def weights_changed(self) -> None:
        """All new weights are loaded."""
        if self._routed is not None:
            self._routed.watch()
        self.refresh()
        self.prepare()

    def refresh(self) -> None:
        """Some weights are new: what was computed from the old ones or captured with them is dropped."""
        self.embeddings.refresh()
        self.perturber.weights_changed()


def _reserved(device: torch.device) -> int:
    """The bytes of a GPU's memory that PyTorch has reserved; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _may_capture(runner: RunnerV2, embedding: VocabParallelEmbedding) -> bool:
    """Whether a step may be one CUDA graph in this worker. A worker with a GPU logs why not."""
    if runner.device.type != "cuda":
        return False
    if runner.model_config.enforce_eager:
        logger.info("perturbation: enforce_eager is set, so the steps of the perturbation are no CUDA graphs either.")
        return False
    if embedding.tp_size > 1:
        message = "perturbation: with %d tensor-parallel ranks a step is no CUDA graph, and takes the host longer."
        logger.info(message, embedding.tp_size)
        return False
    if runner.max_num_reqs > SIZES[-1]:
        message = "perturbation: steps of more than %d sequences are no CUDA graphs; the device needs longer for them."
        logger.info(message, SIZES[-1])
    return True


def follow_weights(runner: Any, attached: AttachedPerturbation) -> None:
    """Wraps the methods by which a runner loads weights, so that what its perturbation computed from them is refreshed.

    Every weight sync ends in ``model.load_weights``. OpenRLHF calls it for each parameter, so only calls that load all
    at once (``reload_weights``, ``finish_weight_update``, the last call in `rollout_actor.py`) prepare the perturbation
    again. The parameters of the perturbation come among those of the model, and go to its module.
    """
    model = runner.get_model()
    original_load = model.load_weights
    original_reload = runner.reload_weights

    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: object, **kwargs: object) -> Any:
        own_parameters: dict[str, Tensor] = {}
        try:
            result = original_load(parameters.split(weights, own_parameters), *args, **kwargs)
            if own_parameters:
                _load_parameters(attached, own_parameters)
            return result
        finally:  # also where it fails: some of the weights may have been replaced
            attached.refresh()

    def reload_weights(*args: object, **kwargs: object) -> Any:
        try:
            return original_reload(*args, **kwargs)
        finally:
            attached.weights_changed()

    model.load_weights = load_weights
    runner.reload_weights = reload_weights


def _load_parameters(attached: AttachedPerturbation, own_parameters: dict[str, Tensor]) -> None:
    """Loads synced parameters into the perturbation's module; ``ValueError`` where they cannot be."""
    names = ", ".join(own_parameters)
    if attached.module is None:
        raise ValueError(
            f"weight sync: {names} belong to a perturbation with parameters, but this engine runs"
            f" {attached.perturbation.name!r}."
        )
    if any(bool(parameter.isnan().any()) for parameter in own_parameters.values()):
        # vLLM's sparse transfer puts NaN in the place of elements that it leaves out.
        raise ValueError(
            f"weight sync: {names} hold NaN, as in vLLM's sparse transfer. Transfer these parameters whole."
        )
    parameters.load(attached.module, own_parameters, whole=False)


class _LazyTokenizer:
    """The engine's tokenizer, loaded only if an option needs it."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._config = model_config

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self._config.tokenizer,
            revision=self._config.tokenizer_revision,
            trust_remote_code=self._config.trust_remote_code,
        )

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token; the same list each time."""
        # transformers decodes a token that is a part of a character to U+FFFD; xgrammar, which vLLM installs, does not.
        from xgrammar import TokenizerInfo

        return TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=len(self._tokenizer)).decoded_vocab

    def vocabulary(self) -> list[str]:
        """The decoded text of each token."""
        return self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))])

    def special_ids(self, size: int) -> list[int]:
        """The rows of special tokens, and rows without a token, of an embedding with ``size`` rows."""
        # A tokenizer may have tokens beyond the embedding, such as a placeholder that was added to it.
        special = {token for token in self._tokenizer.all_special_ids if token < size}
        without_token = range(len(self._tokenizer), size)
        return sorted({*special, *without_token})


def _embeddings(
    model: nn.Module, embedding: VocabParallelEmbedding, override: InputOverride, vocabulary: int, texts: _LazyTokenizer
) -> ModelEmbeddings:
    """The model's embeddings as the perturbation sees them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    def shard(module: Any) -> Shard:
        weight = module.weight.data
        if module.tp_size == 1:
            return Shard(weight[:vocabulary], vocabulary)
        from vllm.distributed import get_tp_group

        start = module.shard_indices.org_vocab_start_index
        return Shard(weight, vocabulary, start, over_ranks(get_tp_group().device_group))

    # The output head: the only one of the language model or, if it has none, of the whole model; with several or none,
    # the language model's attribute `lm_head`. A head that shares the input matrix counts as none.
    owner = language_model(model)
    heads = [module for module in owner.modules() if isinstance(module, ParallelLMHead)]
    if not heads:
        heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    head = heads[0] if len(heads) == 1 else getattr(owner, "lm_head", None)
    has_own_matrix = head is not None and head is not embedding and head.weight is not embedding.weight
    return ModelEmbeddings(
        lookup=override.lookup,
        input_matrix=partial(shard, embedding),
        output_matrix=partial(shard, head) if has_own_matrix else None,
        special_ids=partial(texts.special_ids, vocabulary),
        token_texts=texts.vocabulary,
    )


def _follow_output_layer(model: nn.Module, take: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Calls ``take`` with the last hidden states (B, D) each time a model computes logits.

    They are the input of vLLM's `LogitsProcessor`, which is what Hugging Face's output embedding gets, and which is
    outside of compiled and captured regions of the forward. ``UsageError`` for a model without one.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def take_hidden(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        take(inputs[1] if len(inputs) > 1 else keywords["hidden_states"])

    # LoRA's processor calls the forward of its base layer directly, past the hooks of that layer.
    processors = [
        module for module in model.modules() if isinstance(getattr(module, "base_layer", module), LogitsProcessor)
    ]
    if not processors:
        raise UsageError(
            f"perturbation: {type(model).__name__} has no LogitsProcessor, so the last hidden states are not known."
            f" Use another model, or a perturbation that reads logits alone."
        )
    return [module.register_forward_pre_hook(take_hidden, with_kwargs=True) for module in processors]
