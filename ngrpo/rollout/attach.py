# SPDX-License-Identifier: Apache-2.0
"""Attaches the perturber to a vLLM worker: everything that its two model runners have in common.

The embedding's override is there before anything is compiled. Requests, inputs and sampling differ between the runners:
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
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.routed_experts import RoutedExperts
from ngrpo.rollout.sampling_support import SamplingMaskStore
from ngrpo.rollout.settings import ROUTED_EXPERTS, SAMPLING_MASKS, fingerprint, read_mask_limit, read_schedule
from ngrpo.rollout.step_graphs import SIZES, rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import Perturbation, ReplayBuffer, UsageError, parameters
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate
from perturbations.neighbors import Drift
from perturbations.neighbors.base import Shard, over_ranks

logger = logging.getLogger("ngrpo.rollout")

# vLLM's DEFAULT_VOCAB_PADDING_SIZE: float32 logits are a view of this many columns.
_VOCABULARY_PADDING = 64


class AttachedPerturbation:
    """The perturbation of one worker: what its remote procedures talk to."""

    asleep = False  # while the engine sleeps, the addresses of its weights lead nowhere: reading them ends the process
    _hooks: Sequence[RemovableHandle] = ()

    def __init__(self, runner: Any, perturbation: Perturbation, buffer: ReplayBuffer) -> None:
        """runner: vLLM's V1 or V2 model runner, its model loaded and not yet compiled; buffer: of finished records."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self._runner, self._buffer = runner, buffer
        config, model = runner.model_config, runner.get_model()
        embedding: Any = find_input_embedding(model)
        # The matrix's own dtype: a row must be what the model would have looked up.
        self._hidden = embedding.embedding_dim
        self._override = InputOverride(
            embedding,
            max_tokens=runner.max_num_tokens,
            drawn_rows=rows_of_buffers(runner.max_num_reqs),
            hidden=self._hidden,
            dtype=embedding.weight.dtype,
            device=runner.device,
            bare=VocabParallelEmbedding,
        )
        self._graphs = _may_capture(runner, embedding)
        # Whether a table next to the input embedding reads the token in the text, whatever is fed instead.
        self.reads_tokens = reads_tokens_elsewhere(tables_of_text(model), embedding)
        self._tokenizer = _LazyTokenizer(config)
        self._vocabulary = config.get_vocab_size()
        self.embeddings = _embeddings(model, embedding, self._override, self._vocabulary, self._tokenizer)
        # On a CPU a table of neighbors takes half a minute, so that its rows are computed as they are needed.
        self._ahead = runner.device.type != "cpu"
        self.schedule = read_schedule(runner.vllm_config.additional_config)
        self._routed = RoutedExperts(runner) if runner.vllm_config.additional_config.get(ROUTED_EXPERTS) else None
        reserved = _reserved(runner.device)
        self.replace(perturbation)
        if self._graphs:
            with torch.inference_mode():
                self.perturber.rehearse(self._example_logits(runner.max_num_reqs))
        if runner.device.type == "cuda":
            # Before vLLM measures how much memory is left for its KV cache, so that tables and graphs are counted.
            torch.cuda.empty_cache()
            runner.model_memory_usage += max(_reserved(runner.device) - reserved, 0)
            runner.profile_run = self._with_refresh(runner.profile_run)
        # An encoder of pictures or sound runs between the layout of a step and its forward.
        encoders = (runner, "_execute_mm_encoder"), (getattr(runner, "model_state", None), "execute_mm_encoder")
        for owner, name in encoders:
            if hasattr(owner, name):  # contextmanager's object is a decorator that makes a new one for each call
                setattr(owner, name, self._override.suspended()(getattr(owner, name)))
        follow_weights(runner, self)

    def replace(self, perturbation: Perturbation) -> None:
        """Exchanges the perturbation between requests; UsageError while some run, or where it does not fit."""
        runner, tokenizer = self._runner, self._tokenizer
        running = self.requests.running if hasattr(self, "requests") else 0
        if running:
            why = f"{running} requests are running: wait for them"
            raise UsageError(f"the perturbation cannot be replaced while {why}.")
        self._check_awake("the perturbation cannot be replaced")
        perturbation.check_model(self._vocabulary)
        embedding = self._vocabulary, self._hidden
        store = TrajectoryStore(runner.max_num_reqs, runner.max_model_len, embedding, perturbation.has_parameters)
        gate = BoundGate(perturbation, lambda: tokenizer.token_bytes, self._vocabulary, store.slots, runner.device)
        module, model = perturbation.module(self._hidden), runner.model_config
        if module is not None:  # with the parameters saved next to the model
            # The engine's dtype, and not float32: a synced parameter arrives in it, and both sides must start alike.
            module.to(device=runner.device, dtype=model.dtype).requires_grad_(False)
            load_saved(module, perturbation, model.model, model.revision)
        for hook in self._hooks:
            hook.remove()
        # No perturbation pays for the hidden states but one that reads them.
        reads = perturbation.reads_hidden
        self._hooks = _follow_output_layer(runner.get_model(), lambda h: self.perturber.computed(h)) if reads else ()
        self.perturbation, self.module = perturbation, module
        config, masks = runner.vllm_config.additional_config, None
        if config.get(SAMPLING_MASKS):
            masks = SamplingMaskStore(self._vocabulary, store.slots, read_mask_limit(config))
        if self._routed is not None:
            self._routed.restart(store)
        self.perturber = RolloutPerturber(
            perturbation,
            store,
            gate,
            self.embeddings,
            self._override,
            runner.device,
            module=self.module,
            masks=masks,
            schedule=self.schedule,
            routed=self._routed,
            graphs=self._graphs,
        )
        self._buffer.drop(self._buffer.names())
        rank = runner.vllm_config.parallel_config.data_parallel_index
        self.requests = RunningRequests(perturbation, store, self.perturber, self._buffer, rank)
        self.prepare()

    def fingerprint(self) -> str:
        """Of the perturbation and the schedule that this worker has."""
        return fingerprint(self.perturbation, self.schedule)

    def warm_up(self) -> None:
        """Compiles what the first requests need, for one and for several; no index is built before it is needed."""
        with torch.inference_mode():
            for rows in (2, 1):  # a batch of one is compiled separately
                self.perturber.rehearse(self._example_logits(rows), edits=self._ahead)

    def _example_logits(self, rows: int) -> Tensor:
        """Logits of zeros as the model computes them, (rows, V)."""
        padded = -(-self._vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        dtype = self._runner.model_config.dtype
        return torch.zeros(rows, padded, dtype=dtype, device=self._runner.device)[:, : self._vocabulary]

    def _with_refresh(self, original: Callable[..., None]) -> Callable[..., None]:
        """vLLM's run by which it measures its memory; a weight sync may need more than a forward.

        An engine that does not sleep builds neighbor tables anew beside its KV cache.
        """

        def profile_run(*args: object, **kwargs: object) -> None:
            original(*args, **kwargs)
            torch.empty(self.embeddings.refresh_bytes, dtype=torch.uint8, device=self._runner.device)

        return profile_run

    def prepare(self) -> None:
        """Computes everything that the perturbation needs of the weights; a weight sync ends with this."""
        self._check_awake("perturbation_prepare: nothing can be computed of the weights")
        if self._ahead:
            self.perturbation.prepare(self.embeddings)

    def drift(self) -> Drift | None:
        """How many neighbor sets the latest weight sync changed."""
        self._check_awake("perturbation_drift: neighbors cannot be looked for")
        return self.embeddings.drift()

    def _check_awake(self, what: str) -> None:
        if self.asleep:
            fix = "Wake it first, at least with wake_up(tags=['weights'])"
            raise UsageError(f"{what} while the engine sleeps and its weights are not in memory. {fix}.")

    def wake(self, tags: list[str] | None) -> None:
        """An engine may wake in parts; without tags all of it does."""
        self.asleep = self.asleep and tags is not None and "weights" not in tags

    def weights_changed(self) -> None:
        """All new weights are loaded."""
        if self._routed is not None:
            self._routed.watch()
        self.refresh()
        self.prepare()

    def refresh(self) -> None:
        """Some weights are new: nothing that was computed of them, or captured with them, is used again."""
        self.embeddings.refresh()
        self.perturber.weights_changed()


def _reserved(device: torch.device) -> int:
    """Bytes that PyTorch has of a GPU's memory; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _may_capture(runner: RunnerV2, embedding: VocabParallelEmbedding) -> bool:
    """Whether a step may be one CUDA graph in this worker; a worker with a GPU says where it may not."""
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
    """Has a runner's ways of loading weights refresh what its perturbation computed of them.

    Every weight sync ends in ``model.load_weights``. OpenRLHF calls it for each parameter, so only calls that load all
    at once (``reload_weights``, ``finish_weight_update``, the last call in `rollout_actor.py`) prepare the perturbation
    again. A perturbation's own parameters come among the model's, and go to its module.
    """
    model = runner.get_model()
    load, reload = model.load_weights, runner.reload_weights

    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: object, **kwargs: object) -> Any:
        own: dict[str, Tensor] = {}
        try:
            result = load(parameters.split(weights, own), *args, **kwargs)
            if not own:
                return result
            names = f"weight sync: {', '.join(own)}"
            if attached.module is None:
                name = attached.perturbation.name
                raise ValueError(f"{names} belong to a perturbation with parameters, but this engine runs {name!r}.")
            if any(bool(part.isnan().any()) for part in own.values()):
                # vLLM's sparse transfer puts NaN in the place of elements that it leaves out.
                raise ValueError(f"{names} hold NaN, as in vLLM's sparse transfer. Transfer these parameters whole.")
            parameters.load(attached.module, own, whole=False)
            return result
        finally:  # also where it fails: some of the weights may have been replaced
            attached.refresh()

    def reload_weights(*args: object, **kwargs: object) -> Any:
        try:
            return reload(*args, **kwargs)
        finally:
            attached.weights_changed()

    model.load_weights, runner.reload_weights = load_weights, reload_weights


class _LazyTokenizer:
    """The engine's tokenizer, loaded only if an option needs it."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._config = model_config

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        config = self._config
        revision, trusted = config.tokenizer_revision, config.trust_remote_code
        return AutoTokenizer.from_pretrained(config.tokenizer, revision=revision, trust_remote_code=trusted)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, also of one that is part of a character; the same list each time."""
        from xgrammar import TokenizerInfo  # which vLLM installs; transformers decodes a part of a character to U+FFFD

        return TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=len(self._tokenizer)).decoded_vocab

    def vocabulary(self) -> list[str]:
        """The decoded text of each token."""
        return self._tokenizer.batch_decode([[i] for i in range(len(self._tokenizer))])

    def special_ids(self, size: int) -> list[int]:
        """The rows of special tokens among the embedding's ``size`` ones, and rows without a token."""
        # A tokenizer may have tokens beyond the embedding, such as a placeholder that was added to it.
        special = {token for token in self._tokenizer.all_special_ids if token < size}
        return sorted({*special, *range(len(self._tokenizer), size)})


def _embeddings(
    model: nn.Module, embedding: VocabParallelEmbedding, override: InputOverride, vocabulary: int, texts: _LazyTokenizer
) -> ModelEmbeddings:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    def shard(module: Any) -> Shard:
        weight = module.weight.data
        if module.tp_size == 1:
            return Shard(weight[:vocabulary], vocabulary)
        from vllm.distributed import get_tp_group

        start = module.shard_indices.org_vocab_start_index
        return Shard(weight, vocabulary, start, over_ranks(get_tp_group().device_group))

    owner = language_model(model)
    heads = [m for m in owner.modules() if isinstance(m, ParallelLMHead)]
    heads = heads or [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    head = heads[0] if len(heads) == 1 else getattr(owner, "lm_head", None)
    # The output layer of the model's text, where it has a matrix of its own.
    separate = head is not None and head is not embedding and head.weight is not embedding.weight
    of_output = partial(shard, head) if separate else None
    special = partial(texts.special_ids, vocabulary)
    return ModelEmbeddings(override.lookup, partial(shard, embedding), of_output, special, texts.vocabulary)


def _follow_output_layer(model: nn.Module, take: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Hands over the last hidden states (B, D) each time a model computes logits, by its `LogitsProcessor`'s input.

    The input is that of Hugging Face's output embedding, and is outside of compiled or captured graphs.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def before(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(inputs[1] if len(inputs) > 1 else named["hidden_states"])

    # LoRA's runs the forward of its base layer as its own, past that one's hooks.
    found = [part for part in model.modules() if isinstance(getattr(part, "base_layer", part), LogitsProcessor)]
    if not found:
        why = f"{type(model).__name__} has no LogitsProcessor, so the last hidden states are not known"
        raise UsageError(f"perturbation: {why}. Use another model, or a perturbation that reads logits alone.")
    return [module.register_forward_pre_hook(before, with_kwargs=True) for module in found]
