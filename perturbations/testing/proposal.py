# SPDX-License-Identifier: Apache-2.0
"""Checks of what a perturbation proposes, on steps of a small synthetic model."""

import dataclasses
import logging
from functools import partial

import torch
from torch import Tensor, nn

from perturbations import InputEdit, Perturbation, Proposal, Step, streams, user_files
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.testing.log_density import (
    check_density,
    check_device,
    check_is_of_the_draws,
    check_text_probabilities,
)
from perturbations.testing.module import HIDDEN_SIZE
from perturbations.testing.report import (
    CLOSE,
    NoAnswer,
    PerturbationError,
    answered,
    check_answers,
    check_tensor,
    differing,
    expect,
    refuse,
)
from perturbations.testing.waits import check_without_values

ROWS = 7  # of a step
_VOCABULARIES = [64, 256, 1024, 4096, 1 << 14, 1 << 16, 1 << 18]
_DECLARATIONS = (
    "density_of_vector",
    "draws_text",
    "draws_token",
    "has_density",
    "reads_hidden",
    "samples_text",
    "score_only",
    "zero_mean_score",
)
_log = logging.getLogger(__name__)


def smallest_vocabulary(perturbation: Perturbation) -> int:
    """V of the synthetic model: the smallest that the perturbation fits."""
    refusal = ""
    for size in _VOCABULARIES:
        try:
            perturbation.check_model(size)
            return size
        except ValueError as error:
            refusal = f"{perturbation.name}: check_model refuses a vocabulary of {size:,} tokens: {error}"
    raise PerturbationError(refusal, "Refuse only a vocabulary that is too small for the options.")


def steps(vocabulary: int) -> list[tuple[str, Step]]:
    """Steps over a synthetic model: ordinary logits, temperatures, masks, both extremes of confidence."""
    generator = torch.Generator().manual_seed(20)
    # In bfloat16, as most models: a proposal computed from embeddings alone then has another dtype than its logits.
    embedding = torch.randn(vocabulary, HIDDEN_SIZE, generator=generator).bfloat16()
    embedding[5] = 0.0  # never-trained tokens: a zero row and two equal ones
    embedding[7] = embedding[6]
    embeddings = matrix_embeddings(embedding, special_ids=(0, 1))
    seeds = torch.randint(-(2**62), 2**62, (ROWS,), generator=generator)
    positions = torch.randint(1, 10_000, (ROWS,), generator=generator).sort().values
    raw = 3.0 * torch.randn(ROWS, vocabulary, generator=generator)

    def step(logits: Tensor, temperature: float = 1.0, drawable: Tensor | None = None) -> Step:
        keys = streams.keys(seeds, positions, streams.Stream.TOKEN)
        noise = streams.gumbel(keys, vocabulary)
        sampled_from = logits if drawable is None else drawable
        return Step(
            logits=logits,
            sampled=(sampled_from + noise).argmax(dim=-1),
            temperature=torch.full((ROWS,), temperature),
            seeds=seeds,
            positions=positions,
            embeddings=embeddings,
            drawable=drawable,
        )

    masked = raw.clone()
    masked[:, :3] = -torch.inf
    masked[1, 4:] = -torch.inf  # one possible token, as grammars do
    peaked = raw.clone()
    peaked[torch.arange(ROWS), torch.tensor([0, vocabulary - 1, 11, 12, 13, 14, 15])] = 1e4
    fifth_largest = raw.topk(5, dim=-1).values[:, -1:]
    likely = torch.where(raw >= fifth_largest, raw, -torch.inf)
    return [
        ("ordinary logits", step(raw)),
        ("top-k of the request", step(raw, drawable=likely)),
        ("temperature 0.3", step(raw / 0.3, 0.3)),
        ("temperature 1.5", step(raw / 1.5, 1.5)),
        ("logits with -inf (masked tokens)", step(masked)),
        ("very peaked logits", step(peaked)),
        ("uniform logits", step(torch.zeros_like(raw))),
    ]


def with_hidden(step: Step, module: nn.Module | None, size: int = HIDDEN_SIZE) -> Step:
    """A step with last hidden states (B, ``size``), the same at each call, and the perturbation's module."""
    generator = torch.Generator().manual_seed(21)
    hidden = torch.randn(len(step.logits), size, generator=generator)
    return dataclasses.replace(step, hidden=hidden, module=module)


def _readable(perturbation: Perturbation, step: Step) -> Step:
    """A step with the hidden states and the module, where the perturbation reads them."""
    return with_hidden(step, perturbation.module(HIDDEN_SIZE)) if perturbation.reads_hidden else step


def check_step(perturbation: Perturbation, label: str, step: Step) -> None:
    """The proposals for one step: valid, repeatable, and each row's own."""
    where = f"{perturbation.name}, {label}:"
    method = f"propose(){user_files.place(perturbation.propose)}"
    step = _readable(perturbation, step)

    def proposed(step: Step) -> Proposal:
        proposal = answered(f"{where} propose()", lambda: perturbation.propose(step), _expected_shapes(step))
        if not isinstance(proposal, Proposal) or not isinstance(proposal.edit, InputEdit):
            raise NoAnswer(
                f"{where} {method} returns {type(proposal).__name__}.",
                "Return Proposal(InputEdit(ids, weights), tokens): what is fed, and the token of the text.",
            )
        _check_proposal(perturbation, step, proposal, where)
        return proposal

    proposal = check_answers(where, "propose()", proposed, step)
    if label == "ordinary logits":
        with_other_seeds = dataclasses.replace(step, seeds=step.seeds + 1)
        ignores_seeds = differing(proposal, proposed(with_other_seeds), exact=True) is None
        message = "draws no weights or tokens of its own" if ignores_seeds else "draws weights or tokens from the seed"
        _log.info("%s %s", perturbation.name, message)
    if perturbation.has_density:
        check_density(perturbation, step, proposal, where)
    elif not hasattr(perturbation, "density"):
        expect(
            type(perturbation).log_density is Perturbation.log_density,
            f"{where} log_density() is never called.",
            "Override has_density too, or take it out.",
        )


def _expected_shapes(step: Step) -> str:
    """The shapes of a step and of the proposal for it, in a sentence."""
    rows, vocabulary = step.logits.shape
    return (
        f"In this check step.logits is ({rows}, {vocabulary}), the smallest vocabulary that check_model accepts, and"
        f" step.sampled ({rows},). Return ids ({rows}, k) in int64, weights ({rows}, k) in float32 and tokens ({rows},)"
        " in int64, for any logits and any number of rows."
    )


def check_acts(perturbation: Perturbation, vocabulary: int) -> None:
    """Logs a note where the perturbation acts at no position: that breaks no promise, but a run would do nothing."""
    for _, step in steps(vocabulary):
        try:
            acts = perturbation.propose(_readable(perturbation, step)).acts
            acts_somewhere = acts is None or bool(acts.any())
        except Exception:  # the check of this step reports it
            return
        if acts_somewhere:
            return
    _log.warning(
        "%s acts at 0 of %d positions of this check. If it acts at none of a model either, the run is unperturbed.",
        perturbation.name,
        ROWS * len(steps(vocabulary)),
    )


def check_declarations(perturbation: Perturbation) -> None:
    """What the class says of its draws and its density is True or False."""
    for name in _DECLARATIONS:
        label = f"{perturbation.name}: {name}"
        value = answered(label, partial(getattr, perturbation, name), "It must be True or False.")
        expect(isinstance(value, bool), f"{label} is {value!r}.", "It must be True or False.")


def check_prepare(perturbation: Perturbation, vocabulary: int) -> None:
    """It computes ahead from the model's embeddings, which only an engine on a GPU asks for."""
    _, step = steps(vocabulary)[0]
    fix = "It gets step.embeddings after loading and after each weight sync: an engine on a GPU would not start."
    answered(f"{perturbation.name}: prepare()", lambda: perturbation.prepare(step.embeddings), fix)


def check_draws(perturbation: Perturbation, step: Step) -> None:
    """The density, and the probabilities of the text, are those of what the perturbation draws."""
    step = _readable(perturbation, step)
    if perturbation.has_density and perturbation.zero_mean_score:
        check_is_of_the_draws(perturbation, step)
    if perturbation.has_text_probabilities:
        check_text_probabilities(perturbation, step)


def check_waits(perturbation: Perturbation, step: Step) -> None:
    """A proposal needs no value on the host; a neighbor index may work there, since it is an operator of its own.

    A density, too, computes where the logits are.
    """
    if perturbation.has_density:
        check_device(perturbation, _readable(perturbation, step))
    module = perturbation.module(HIDDEN_SIZE) if perturbation.reads_hidden else None
    if module is not None:
        module = module.to("meta")
    step = with_hidden(step, module)
    check_without_values(f"{perturbation.name}:", "propose()", perturbation.propose, step)


def _check_proposal(perturbation: Perturbation, step: Step, proposal: Proposal, where: str) -> None:
    """Shapes, types, ranges and values of one proposal."""
    rows, vocabulary = step.logits.shape
    edit = proposal.edit
    device = step.logits.device
    width = edit.ids.shape[-1] if isinstance(edit.ids, Tensor) and edit.ids.dim() == 2 else 1
    place = user_files.place(perturbation.propose)
    check_tensor(f"{where} edit.ids{place}", edit.ids, (rows, max(width, 1)), torch.int64, device)
    check_tensor(f"{where} edit.weights{place}", edit.weights, (rows, width), torch.float32, device)
    check_tensor(f"{where} tokens{place}", proposal.tokens, (rows,), torch.int64, device)
    for name, ids in (("edit.ids", edit.ids), ("tokens", proposal.tokens)):
        is_wrong = (ids < 0) | (ids >= vocabulary)
        refuse(ids, is_wrong, f"{where} {name}", _fix_of_ids(ids[is_wrong], vocabulary))
    _check_weights(perturbation, proposal, where)
    if proposal.acts is not None:
        check_tensor(f"{where} acts", proposal.acts, (rows,), torch.bool, device)
        _check_where_it_does_not_act(edit, proposal.tokens, proposal.acts, where)
    _check_optional_tensors(edit, rows, device, where)
    _check_text(perturbation, step, proposal, where)
    keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
    inputs = realise(edit, step.embeddings.lookup, keys, perturbation.module(HIDDEN_SIZE))
    is_finite = torch.isfinite(inputs).all()
    expect(is_finite, f"{where} the perturbed input is not finite.", "Check weights, sigma and vectors.")


def _fix_of_ids(wrong_ids: Tensor, vocabulary: int) -> str:
    """How to correct ids that are no tokens: the neighbors of the first and the last token, or a certain model's."""
    fix = f"Token ids must be in [0, {vocabulary - 1}]"
    if ((wrong_ids == -1) | (wrong_ids == vocabulary)).all():
        return f"{fix}, also where step.sampled is the first or the last of them: clamp what is added to a token's id."
    return (
        f"{fix}: this check's model has {vocabulary} tokens, the fewest that check_model accepts. If the id is that of"
        " one model's token, let check_model(self, vocabulary) raise UsageError where vocabulary <= id."
    )


def _check_weights(perturbation: Perturbation, proposal: Proposal, where: str) -> None:
    """Weights are finite and of the kind that ``mixture`` names."""
    weights = proposal.edit.weights
    refuse(
        weights,
        ~torch.isfinite(weights),
        f"{where} edit.weights",
        "Weights must be finite, whatever the logits: a masked token's logit is -inf, and 0 · inf is nan.",
    )
    mixture = perturbation.mixture
    expect(
        mixture in ("convex", "affine", "free"),
        f"{where} mixture is {mixture!r}.",
        "It must be 'convex' (weights not negative, sum 1), 'affine' (sum 1) or 'free'.",
    )
    if mixture == "convex":
        refuse(
            weights,
            weights < 0.0,
            f"{where} edit.weights",
            "Weights must not be negative. Where they are meant to be, say mixture = 'affine' or 'free' in the class.",
        )
    # With vectors, or a module, the input is not the mixture alone.
    is_mixture_alone = proposal.edit.vectors is None and perturbation.module(HIDDEN_SIZE) is None
    if mixture == "free" or not is_mixture_alone:
        return
    sums = weights.double().sum(dim=-1)
    worst_sum = sums[(sums - 1.0).abs().argmax()].item()
    expect(
        abs(worst_sum - 1.0) <= CLOSE,
        f"{where} the weights of a position sum to {worst_sum:.6g}.",
        "They must sum to 1, or the input's length changes: normalise them, or say mixture = 'free' in the class.",
    )


def _check_where_it_does_not_act(edit: InputEdit, tokens: Tensor, acts: Tensor, where: str) -> None:
    """Where ``acts`` is False, the edit is the token alone."""
    weight_of_token = (edit.weights * (edit.ids == tokens.unsqueeze(-1))).sum(dim=-1)
    is_edited = (weight_of_token - 1.0).abs() > CLOSE
    if edit.sigma is not None:
        is_edited |= edit.sigma != 0.0
    expect(
        not is_edited[~acts].any(),
        f"{where} a position where acts is False is fed something else than its token.",
        "Give the token weight 1 there, and no noise.",
    )


def _check_optional_tensors(edit: InputEdit, rows: int, device: torch.device, where: str) -> None:
    """Shapes and values of sigma, vectors and normalizer, where the edit has them."""
    shapes = {"sigma": (rows,), "vectors": (rows, HIDDEN_SIZE), "normalizer": (rows,)}
    for name, shape in shapes.items():
        values = getattr(edit, name)
        if values is None:
            continue
        label = f"{where} edit.{name}"
        check_tensor(label, values, shape, torch.float32, device)
        if name == "sigma":
            refuse(values, ~torch.isfinite(values) | (values < 0.0), label, "It must be finite and not negative.")
        else:
            refuse(values, ~torch.isfinite(values), label, "It must be finite.")


def _check_text(perturbation: Perturbation, step: Step, proposal: Proposal, where: str) -> None:
    """The tokens in the text are possible, and are the sampled ones where ``samples_text`` says so."""
    is_impossible = step.logits.gather(-1, proposal.tokens.unsqueeze(-1)).isneginf().flatten()
    refuse(
        proposal.tokens,
        is_impossible,
        f"{where} tokens",
        "Its logit is -inf. Choose a possible token, for example step.sampled or the argmax of step.logits.",
    )
    expect(
        not perturbation.samples_text or torch.equal(proposal.tokens, step.sampled),
        f"{where} samples_text is True, but another token than the sampled one is in the text.",
        "Return step.sampled, or leave samples_text at False: importance weights would be wrong.",
    )
    if not perturbation.has_text_probabilities:
        return
    left = ~(step.logits if step.drawable is None else step.drawable).isneginf()
    label = f"{where} text_probabilities()"
    temperature = float(step.temperature[0])
    probabilities = answered(label, lambda: perturbation.text_probabilities(step.logits, temperature, left))
    check_tensor(label, probabilities, tuple(step.logits.shape), torch.float32, step.logits.device)
    sums = probabilities.sum(dim=-1)
    refuse(sums, (sums - 1.0).abs() > 1e-4, f"{label}, summed over the vocabulary,", "It must sum to 1.")
    of_text = probabilities.gather(-1, proposal.tokens.unsqueeze(-1)).flatten()
    refuse(of_text, of_text <= 0.0, f"{label} of the token in the text", "It must be above 0 for what propose() draws.")
