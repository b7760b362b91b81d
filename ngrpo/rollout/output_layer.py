# SPDX-License-Identifier: Apache-2.0
"""A model's output layer, which the graph of a step runs itself where nothing changes the logits before the draw.

vLLM calls ``compute_logits`` between the forward and the sampler: several launches, and a copy of the logits to the
graph's address. Within :meth:`OutputLayer.left_to_graph` this call only keeps the last hidden states, and returns a
placeholder. The perturber then hands the hidden states to a graph that computes the logits (`step_graphs.py`).

The placeholder is on PyTorch's ``meta`` device: it has a shape and no values, so that code which reads logits anyway
fails instead of reading wrong ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

from ngrpo.machine.upstream.types import RunnerV1, RunnerV2
from ngrpo.rollout.input_override import language_model


class ComputesLogits(Protocol):
    """A model of vLLM's, as far as it is needed here."""

    compute_logits: Callable[..., Tensor]


class OutputLayer:
    """How a model computes logits from its last hidden states.

    Attributes:
        compute: last hidden states (B, D) to logits (B, V).
        tensors: the parameters of the layer, which a graph reads at their addresses.
    """

    def __init__(self, model: ComputesLogits, tensors: list[Tensor], example: Tensor, vocabulary: int) -> None:
        """
        Args:
            model: whose ``compute_logits`` is replaced.
            tensors: the parameters of its output layer.
            example: a last hidden state of any values, (1, D), with the dtype and on the device of the model's.
            vocabulary: V.
        """
        self.compute: Callable[..., Tensor] = model.compute_logits
        self.tensors = tensors
        self._example = example
        self._vocabulary = vocabulary
        self._left_to_graph = False
        self._hidden: Tensor | None = None
        self._placeholder = self.placeholder(1)
        model.compute_logits = self._compute_or_keep

    @contextmanager
    def left_to_graph(self) -> Iterator[None]:
        """The first ``compute_logits`` within keeps its hidden states for :meth:`take`."""
        self._left_to_graph = True
        try:
            yield
        finally:
            self._left_to_graph = False
            self._hidden = None

    def take(self) -> Tensor | None:
        """The last hidden states, (B, D), whose logits are left to the graph; None where vLLM has computed them."""
        hidden = self._hidden
        self._hidden = None
        return hidden

    def examples(self, rows: int) -> Tensor:
        """Last hidden states of any values, (rows, D)."""
        return self._example.repeat(rows, 1)

    def placeholder(self, rows: int) -> Tensor:
        """Takes the place of logits, (rows, V), and has no values."""
        return torch.empty(rows, self._vocabulary, dtype=self._example.dtype, device="meta")

    def _compute_or_keep(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        if not self._left_to_graph:
            return self.compute(hidden, *args, **kwargs)
        self._left_to_graph = False
        self._hidden = hidden
        if len(self._placeholder) != len(hidden):
            self._placeholder = self.placeholder(len(hidden))
        return self._placeholder


def runs_v2(runner: RunnerV1 | RunnerV2) -> bool:
    """Whether a runner is of vLLM's V2, which has a method of its own for logits and draw."""
    return hasattr(runner, "sample")


def output_layer_of(runner: RunnerV1 | RunnerV2, vocabulary: int) -> OutputLayer | None:
    """The output layer of a runner's model; None where the logits stay outside of graphs.

    They do in vLLM's V1 runner, which computes them before it knows whether a grammar masks them; with several ranks,
    which gather them from each other; with LoRA, whose kernels read the batch's adapters from the host; and in a model
    without exactly one `LogitsProcessor` of vLLM's own.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    config = runner.vllm_config
    if not runs_v2(runner) or config.parallel_config.world_size > 1 or config.lora_config is not None:
        return None
    model = runner.get_model()
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(processors) != 1 or type(processors[0]) is not LogitsProcessor:
        return None
    # The head is a table of its own or, tied, the input embedding.
    tables = [module for module in language_model(model).modules() if isinstance(module, VocabParallelEmbedding)]
    tensors = [parameter.data for table in tables for parameter in table.parameters()]
    hidden_size = runner.model_config.get_hidden_size()
    dtype = cast(torch.dtype, runner.model_config.dtype)  # vLLM has resolved the names that a user may give
    example = torch.zeros(1, hidden_size, dtype=dtype, device=runner.device)
    return OutputLayer(cast(ComputesLogits, model), tensors, example, vocabulary)
