# SPDX-License-Identifier: Apache-2.0
"""Attaches the perturber to a vLLM worker: what its two model runners have in common.

The embedding's override is in place before anything is compiled, and each way of loading weights refreshes what was
computed from them. Requests, inputs and sampling differ: :mod:`runner_v1` and :mod:`runner_v2` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ngrpo.machine.storage.parameters_file import load_saved
from ngrpo.rollout import new_weights, output_layer, runner_v1, runner_v2
from ngrpo.rollout.input_override import (
    InputOverride,
    find_input_embedding,
    language_model,
    tables_of_text,
)
from ngrpo.rollout.override_probe import reads_tokens_elsewhere
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.sampling_mask_store import SamplingMaskStore
from ngrpo.rollout.settings import SAMPLING_MASKS, fingerprint, read_mask_limit, read_schedule
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations.base import Perturbation
from perturbations.embeddings import ModelEmbeddings
from perturbations.errors import UsageError
from perturbations.gates.default import BoundGate
from perturbations.neighbors.base import Shard, over_ranks
from perturbations.replay.buffers import ReplayBuffer

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from ngrpo.rollout.vllm_objects import Runner
    from perturbations.neighbors import Drift

# vLLM's DEFAULT_VOCAB_PADDING_SIZE: float32 logits are a view of so many columns.
_VOCABULARY_PADDING = 64


class AttachedPerturbation:
    """The perturbation of one worker: what its remote procedures talk to."""

    _asleep = False
    _hooks: Sequence[RemovableHandle] = ()

    def __init__(self, runner: Any, perturbation: Perturbation, buffer: ReplayBuffer) -> None:
        """
        Args:
            runner: vLLM's V1 or V2 model runner; its model is loaded and not yet compiled.
            perturbation: an active perturbation.
            buffer: where records of finished requests wait to be taken.
        """
        self._runner, self._buffer = runner, buffer
        # The state that only V2 keeps; its class cannot be imported where Triton is missing.
        self.runner_version = "V2" if hasattr(runner, "req_states") else "V1"
        config, model = runner.model_config, runner.get_model()
        embedding = find_input_embedding(model)
        self._override = _override(embedding, runner)
        self._hidden = embedding.embedding_dim
        self.reads_tokens = reads_tokens_elsewhere(tables_of_text(model), embedding)
        """Whether a table beside the input embedding follows the token in the text, whatever is fed in its place."""
        self._tokenizer = _LazyTokenizer(config)
        self._vocabulary = config.get_vocab_size()
        self.embeddings = _embeddings(model, embedding, self._override, self._vocabulary, self._tokenizer)
        # On a CPU a table of neighbors takes half a minute, so that its rows are computed as they are needed.
        self._ahead = runner.device.type != "cpu"
        self.schedule = read_schedule(runner.vllm_config.additional_config)
        self.replace(perturbation)
        (runner_v2 if self.runner_version == "V2" else runner_v1).attach(runner, self)
        self._leave_encoders_alone()
        new_weights.follow(runner, self)

    def replace(self, perturbation: Perturbation) -> None:
        """Puts another perturbation in place, between requests.

        Raises:
            UsageError: while requests are running, or for a perturbation that does not fit the model.
        """
        runner, tokenizer = self._runner, self._tokenizer
        running = self.requests.running if hasattr(self, "requests") else 0
        if running:
            raise UsageError(
                f"the perturbation cannot be replaced while {running} requests are running: wait for them."
            )
        self._check_awake("the perturbation cannot be replaced")
        perturbation.check_model(self._vocabulary)
        store = TrajectoryStore(runner.max_num_reqs, runner.max_model_len, (self._vocabulary, self._hidden))
        gate = BoundGate(
            perturbation, tokenizer.encode, tokenizer.vocabulary, self._vocabulary, store.slots, runner.device
        )
        self.module = _module(perturbation, self._hidden, runner)
        self._follow_hidden(perturbation)
        self.perturbation = perturbation
        config = runner.vllm_config.additional_config
        masks = None
        if config.get(SAMPLING_MASKS):
            masks = SamplingMaskStore(self._vocabulary, store.slots, runner.max_model_len, read_mask_limit(config))
        self.perturber = RolloutPerturber(
            perturbation, store, gate, self.embeddings, self._override, runner.device, self.module, masks, self.schedule
        )
        self._buffer.drop(self._buffer.names())
        rank = runner.vllm_config.parallel_config.data_parallel_index
        self.requests = RunningRequests(perturbation, store, self.perturber, self._buffer, rank)
        self.prepare()

    def _follow_hidden(self, perturbation: Perturbation) -> None:
        """Shows the perturber what the output layer is given, where the perturbation reads it: no other pays for it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if perturbation.reads_hidden:
            self._hooks = output_layer.follow(self._runner.get_model(), lambda found: self.perturber.computed(found))

    def fingerprint(self) -> str:
        """What this worker does to its rollouts, to be compared with what a run asked for."""
        return fingerprint(self.perturbation, self.schedule)

    def warm_up(self) -> None:
        """Compiles what the first requests need, for one and for several."""
        padded = -(-self._vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        with torch.inference_mode():
            for rows in (2, 1):  # a batch of one is compiled by itself
                logits = torch.zeros(rows, padded, dtype=self._runner.model_config.dtype, device=self._runner.device)
                self.perturber.compile(logits[:, : self._vocabulary])

    def forget_requests(self) -> None:
        """Drops the records of vLLM's own warm-up."""
        self.requests.take(None)

    def prepare(self) -> None:
        """Computes what the perturbation needs of the weights at hand; a weight sync ends with this."""
        self._check_awake("perturbation_prepare: nothing can be computed of the weights")
        if self._ahead:
            self.perturbation.prepare(self.embeddings)

    def drift(self) -> Drift | None:
        """How many neighbor sets the latest weight sync changed."""
        self._check_awake("perturbation_drift: neighbors cannot be looked for")
        return self.embeddings.drift()

    def weights_left(self) -> None:
        """The engine sleeps: the addresses of its weights lead nowhere, and reading them ends the process."""
        self._asleep = True

    def weights_back(self) -> None:
        """The engine has its weights in memory again."""
        self._asleep = False

    def _check_awake(self, what: str) -> None:
        if self._asleep:
            raise UsageError(
                f"{what} while the engine sleeps and its weights are not in memory. Wake it first, at least with"
                " wake_up(tags=['weights'])."
            )

    def weights_changed(self) -> None:
        """All new weights are in place."""
        self.perturber.weights_changed()
        self.prepare()

    def _leave_encoders_alone(self) -> None:
        """An encoder of pictures or sound runs between the layout of a step and its forward."""
        for owner, name in (
            (self._runner, "_execute_mm_encoder"),
            (getattr(self._runner, "model_state", None), "execute_mm_encoder"),
        ):
            if hasattr(owner, name):
                setattr(owner, name, self._suspending(getattr(owner, name)))

    def _suspending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def encode(*args: object, **kwargs: object) -> Any:
            with self._override.suspended():
                return original(*args, **kwargs)

        return encode


def _module(perturbation: Perturbation, hidden: int, runner: Any) -> nn.Module | None:
    """The perturbation's module with the parameters saved beside the model, on the runner's device."""
    module = perturbation.module(hidden)
    if module is None:
        return None
    config = runner.model_config
    # The engine's dtype, and not float32: a synced parameter arrives in it, and both sides must start alike.
    module.to(device=runner.device, dtype=config.dtype).requires_grad_(False)
    load_saved(module, perturbation, config.model, config.revision)
    return module


def _override(embedding: Any, runner: Runner) -> InputOverride:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    # The matrix's own dtype: a row must be what the model would have looked up.
    rows, hidden, dtype = runner.max_num_tokens, embedding.embedding_dim, embedding.weight.dtype
    return InputOverride(embedding, rows, hidden, dtype, runner.device, VocabParallelEmbedding)


def _output_head(model: nn.Module, embedding: VocabParallelEmbedding) -> VocabParallelEmbedding | None:
    """The output layer of the model's text, where it has a matrix of its own."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    owner = language_model(model)
    heads = [m for m in owner.modules() if isinstance(m, ParallelLMHead)]
    heads = heads or [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    head = heads[0] if len(heads) == 1 else getattr(owner, "lm_head", None)
    separate = head is not None and head is not embedding and head.weight is not embedding.weight
    return head if separate else None


def _embeddings(
    model: nn.Module,
    embedding: VocabParallelEmbedding,
    override: InputOverride,
    vocabulary: int,
    tokenizer: _LazyTokenizer,
) -> ModelEmbeddings:
    def shard(module: Any) -> Shard:
        weight = module.weight.data
        if module.tp_size == 1:
            return Shard(weight[:vocabulary], vocabulary)
        from vllm.distributed import get_tp_group

        start = module.shard_indices.org_vocab_start_index
        return Shard(weight, vocabulary, start, over_ranks(get_tp_group().device_group))

    head = _output_head(model, embedding)
    return ModelEmbeddings(
        override.lookup,
        lambda: shard(embedding),
        None if head is None else (lambda: shard(head)),
        lambda: tokenizer.special_ids(vocabulary),
        tokenizer.vocabulary,
    )


class _LazyTokenizer:
    """The engine's tokenizer, loaded only if an option needs it."""

    def __init__(self, model_config: ModelConfig) -> None:
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
