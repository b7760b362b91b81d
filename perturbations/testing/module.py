# SPDX-License-Identifier: Apache-2.0
"""Checks of a perturbation's learned parameters."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from perturbations import Perturbation
from perturbations.testing.report import (
    EVERY_ROW,
    NoAnswer,
    answered,
    check_tensor,
    differing,
    expect,
)
from perturbations.testing.waits import check_without_values

HIDDEN_SIZE = 64  # D of the synthetic model; a module may divide D, as a low-rank one does
_ARGUMENTS = "It gets E[c_1] and the mixture, (N, D) float32 each with any N, and returns (N, D) float32."


def check_module(perturbation: Perturbation) -> None:
    """Learned parameters start alike in every process, each row is its own, and all parameters have a gradient."""
    torch.manual_seed(1)
    module = _made(perturbation)
    trained = _made(perturbation)
    torch.manual_seed(2)
    of_other_process = _made(perturbation)
    if module is None or trained is None or of_other_process is None:
        return
    for (name, parameter), other_parameter in zip(module.named_parameters(), of_other_process.parameters()):
        expect(
            torch.equal(parameter, other_parameter),
            f"{perturbation.name}: the parameter {name!r} of its module starts differently in each process.",
            "Start with constants, or draw with perturbations.streams.",
        )
    tokens = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    mixtures = tokens.flip(0)
    for dtype in (torch.float32, torch.bfloat16):
        _check_forward(f"{perturbation.name}: forward() of its module in {dtype}", module.to(dtype), tokens, mixtures)
    check_without_values(
        f"{perturbation.name}:",
        "forward() of its module",
        lambda rows: module.to("meta")(rows["tokens"], rows["mixtures"]),
        {"tokens": tokens, "mixtures": mixtures},
        fix="Hold constants with self.register_buffer(name, tensor), and make tensors with device=mixture.device.",
    )
    _check_gradients(perturbation, trained, tokens, mixtures)


def _made(perturbation: Perturbation) -> nn.Module | None:
    """The perturbation's module for the synthetic model."""
    label = f"{perturbation.name}: module({HIDDEN_SIZE})"
    module = answered(label, lambda: perturbation.module(HIDDEN_SIZE), "It must accept the hidden size of any model.")
    if module is not None and not isinstance(module, nn.Module):
        raise NoAnswer(f"{label} returns {type(module).__name__}.", "Return a torch.nn.Module, or None.")
    return module


def _check_forward(label: str, module: nn.Module, tokens: Tensor, mixtures: Tensor) -> None:
    """The module's outputs are float32, repeatable, each row's own, and none for no rows."""
    outputs = answered(label, lambda: module(tokens, mixtures), _ARGUMENTS)
    fix_of_dtype = "It must compute in float32 whatever its parameters are: write self.w.float() in forward()."
    is_tensor = isinstance(outputs, Tensor)
    expect(not is_tensor or outputs.dtype == torch.float32, f"{label} gives {outputs.dtype}.", fix_of_dtype)
    check_tensor(f"what {label} returns", outputs, tuple(mixtures.shape), torch.float32, tokens.device)
    if differing(outputs, module(tokens, mixtures), exact=True):
        raise NoAnswer(
            f"{label} gives two results for the same inputs.",
            "Take dropout and draws out of it: a replay must feed what the rollout fed.",
        )
    rows_alone = []
    for token, mixture in zip(tokens.split(1), mixtures.split(1)):
        rows_alone.append(module(token, mixture))
    difference = differing(outputs.detach(), torch.cat(rows_alone).detach(), name="its output")
    expect(not difference, f"{label}: a row alone gives another result, {difference}.", EVERY_ROW)
    of_no_rows = answered(f"{label}, given no rows,", lambda: module(tokens[:0], mixtures[:0]), _ARGUMENTS)
    check_tensor(f"{label}, given no rows,", of_no_rows, (0, mixtures.shape[1]), torch.float32, tokens.device)


def _check_gradients(perturbation: Perturbation, module: nn.Module, tokens: Tensor, mixtures: Tensor) -> None:
    """Every parameter that trains gets a finite gradient."""
    module.requires_grad_()
    loss = module(tokens, mixtures).square().sum()
    if loss.requires_grad:
        loss.backward()
    for name, parameter in module.named_parameters():
        expect(
            parameter.grad is not None and torch.isfinite(parameter.grad).all(),
            f"{perturbation.name}: no finite gradient reaches {name}, a parameter of its module.",
            "Use it in forward(), without detach, no_grad or a division by 0.",
        )


def check_learning_rates(perturbation: Perturbation) -> None:
    """Each parameter has a learning rate or the policy's, and the options that its module depends on exist."""
    module = perturbation.module(HIDDEN_SIZE)
    parameters = [] if module is None else [name for name, _ in module.named_parameters()]
    for parameter in parameters:
        label = f"{perturbation.name}: learning_rate({parameter!r})"
        fix = "It is asked for each parameter of module(), by its name there."
        rate = answered(label, partial(perturbation.learning_rate, parameter), fix)
        is_rate = rate is None or (isinstance(rate, int | float) and math.isfinite(rate) and rate > 0.0)
        expect(is_rate, f"{label} gives {rate!r}.", "Return a number above 0, or None for the policy's learning rate.")
    unknown = [name for name in perturbation.module_options if name not in perturbation.option_names()]
    expect(
        not unknown,
        f"{perturbation.name}: module_options names {', '.join(unknown)}, which is no option of it.",
        "Name the options that module() reads, as a tuple of texts, such as ('start',).",
    )
