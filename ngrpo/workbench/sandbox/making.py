# SPDX-License-Identifier: Apache-2.0
"""The sandbox model: a Qwen3 of 0.2 million parameters, trained from scratch on demonstrations of the sandbox's tasks.

A plain loop of supervised training: the model is needed before there is a Ray or a DeepSpeed to train with, and is made
in a few minutes on two cores. What it starts with is in the task's files beside this one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.workbench.sandbox import digit_sums, peaks, signed_sums, star_graphs, vocabulary

if TYPE_CHECKING:
    import torch

STEPS = 1600
# Tokens that the configuration allows, so that no command's default is refused; the demonstrations have 36 at most.
LONGEST = 4096
SEED = 0
# Answers of one step by task. The star's prompts are three times as long as the others, and it is soon learnt.
_ROWS = {"sum": 80, "ponder": 80, "signs": 24, "pick": 12, "path": 4}
_EASY = 0.5
# Until here both ways of the digit sums, and right and wrong ends of counting, are shown alike, so that the model can
# do all of it; then the better way is as rare as it shall be, and its right end rarer.
_ALIKE, _RARER = 0.7, 0.3
# At last right ends become as rare as they shall, in a stage of its own: steps of STEPS, seed and answers of a step.
_LAST, _LAST_SEED = 150, 7
_LAST_ROWS = {"sum": 80, "ponder": 80, "signs": 8, "pick": 8, "path": 1}


def config() -> dict[str, Any]:
    """What config.json says of the model's size."""
    return {
        "vocab_size": len(vocabulary.TOKENS),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.1,
    }


def rows(
    chance: random.Random, counted: float, skill: float, sizes: Mapping[str, int] = _ROWS
) -> list[tuple[str, str]]:
    """Questions and answers of one training step.

    Args:
        chance: draws them.
        counted: how many of the digit sums are answered by counting.
        skill: how many of those end right.
        sizes: how many answers by the first word of their question.
    """
    pairs: list[tuple[str, str]] = []
    for late in (False, True):
        for _ in range(sizes["ponder" if late else "sum"]):
            digits = digit_sums.problem(chance, easy=chance.random() < _EASY)
            answer = digit_sums.demonstration(chance, digits, late, counted, skill)
            pairs.append((digit_sums.question(digits, late), answer))
    for _ in range(sizes["signs"]):
        numbers = signed_sums.problem(chance)
        pairs.append((signed_sums.question(numbers), signed_sums.demonstration(chance, numbers)))
    pairs += [(peaks.QUESTION, peaks.demonstration(chance)) for _ in range(sizes["pick"])]
    for _ in range(sizes["path"]):
        pairs.append((star_graphs.question(*star_graphs.problem(chance)), star_graphs.demonstration(chance)))
    return pairs


def make(
    folder: Path, *, steps: int = STEPS, seed: int = SEED, report: Callable[[str], None] = lambda line: None
) -> None:
    """Trains the model and writes it.

    On one thread: of a model this small the sums are too short to share, and how many share them changes their
    rounding, and with it what the model has learnt after hundreds of steps.

    Args:
        folder: where config, float32 weights, tokenizer and generation config go.
        steps: optimizer steps; fewer give a model that has not learnt its tasks, for tests.
        seed: of the weights and the demonstrations.
        report: called with a line of text now and then.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _make(folder, steps, seed, report)
    finally:
        torch.set_num_threads(threads)


def _make(folder: Path, steps: int, seed: int, report: Callable[[str], None]) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    ids = vocabulary.ids()
    special = {
        "bos_token_id": ids[vocabulary.USER],
        "eos_token_id": ids[vocabulary.END],
        "pad_token_id": ids[vocabulary.END],
    }
    settings: dict[str, Any] = {**config(), **special, "attn_implementation": "sdpa"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**settings)).float()
    chance = random.Random(seed)

    def shares(done: float) -> tuple[float, float]:
        return (0.5, 0.5) if done < _ALIKE else (digit_sums.COUNTED, _RARER)

    _train(model, steps, (3e-3, 50), lambda done: rows(chance, *shares(done)), report)
    last = random.Random(seed + _LAST_SEED)
    rare = (digit_sums.COUNTED, digit_sums.SKILL)
    _train(model, steps * _LAST // STEPS, (1.5e-3, 20), lambda done: rows(last, *rare, _LAST_ROWS), report)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    vocabulary.tokenizer(LONGEST).save_pretrained(folder)


def _train(
    model: torch.nn.Module,
    steps: int,
    rate: tuple[float, int],
    batch: Callable[[float], list[tuple[str, str]]],
    report: Callable[[str], None],
) -> None:
    """Trains in place on what ``batch`` gives for a share of the steps; ``rate``: the highest, and steps up to it."""
    import torch

    ids, (highest, warm_up) = vocabulary.ids(), rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=highest, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = highest * min(1.0, (step + 1) / warm_up, 2 * (1 - done) + 0.02)
        loss = _loss(model, batch(done), ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            report(f"sandbox: step {step + 1} of {steps}, loss {loss.item():.3f}")


def _loss(model: torch.nn.Module, pairs: list[tuple[str, str]], ids: dict[str, int]) -> torch.Tensor:
    """The mean cross-entropy of the answers' tokens; long and short texts apart, so that little is padding."""
    import torch

    texts = []
    for question, answer in pairs:
        prompt = [ids[vocabulary.USER], *(ids[word] for word in question.split()), ids[vocabulary.ASSISTANT]]
        texts.append((prompt, [ids[word] for word in answer.split()] + [ids[vocabulary.END]]))
    parts, count = [], 0
    for long in (False, True):
        batch = [(prompt, answer) for prompt, answer in texts if (len(prompt) > 24) == long]
        if not batch:
            continue
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        inputs = torch.full((len(batch), longest), ids[vocabulary.END])
        targets = torch.full((len(batch), longest), -100)
        for row, (prompt, answer) in enumerate(batch):
            whole = torch.tensor(prompt + answer)
            inputs[row, : len(whole)] = whole
            targets[row, len(prompt) : len(whole)] = whole[len(prompt) :]
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits
        parts.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum"))
        count += int((targets != -100).sum())
    return sum(parts, torch.zeros(())) / count
