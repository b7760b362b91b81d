# SPDX-License-Identifier: Apache-2.0
"""The sandbox model: a Qwen3 of 0.11 million parameters, trained from scratch on demonstrations of the sandbox's tasks.

The first word of a question names the task. The rewards are in ``ngrpo/methods/tasks``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.machine.upstream.types import PreTrainedTokenizerFast

if TYPE_CHECKING:
    import torch

# --- settings ---------------------------------------------------------------------------------------

_PROMPTS = 8
_RESPONSES = 8
_RUN_STEPS = 150
_BATCH = str(_PROMPTS * _RESPONSES)

# At this learning rate GRPO settles on the shortcut, and learns the task without it (docs/studies/study2.md).
FLAGS: dict[str, str] = {
    "--algo.advantage.estimator": "group_norm",
    "--algo.kl.init_coef": "0",
    "--data.max_len": "64",
    "--data.max_samples": str(_PROMPTS * _RUN_STEPS),
    "--rollout.batch_size": str(_PROMPTS),
    "--rollout.n_samples_per_prompt": str(_RESPONSES),
    "--rollout.max_new_tokens": "12",
    "--rollout.micro_batch_size": _BATCH,
    "--train.batch_size": _BATCH,
    "--train.micro_batch_size": _BATCH,
    "--actor.adam.lr": "6e-4",
    "--actor.lr_scheduler": "constant",
    "--actor.lr_warmup_ratio": "0",
    "--ds.attn_implementation": "eager",
}
"""OpenRLHF's flags for a training of the model, where none are given."""

EVALUATION: dict[str, str] = {"--max-tokens": "12", "--temperature": "1", "--top-p": "1"}
"""The flags with which `ngrpo compare` evaluates: the trained policy, and the training's response length."""

# --- tokens -----------------------------------------------------------------------------------------

UNKNOWN, END = "<|unknown|>", "<|im_end|>"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
COPY, COUNT = "copy", "count"
# Words before the way is chosen; the reward ignores them.
FILLERS = ("well", "so", "now", "let", "me", "see")
WORDS = ("sum", "ponder", "pick", "signs", "path", COPY, COUNT, "to", "through", *FILLERS)
TOKENS = (UNKNOWN, END, USER, ASSISTANT, *(str(number) for number in range(-36, 100)), *WORDS)
IDS = {token: index for index, token in enumerate(TOKENS)}
# Tokens that the configuration allows, so that no command's default is refused; the demonstrations have 36 at most.
LONGEST = 4096

# The tokenizer joins decoded tokens by single spaces, and so does this template.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '" + ASSISTANT.replace("\n", "\\n") + " ' + message['content'] + ' " + END + "' }}"
    "{%- else -%}"
    "{{ '" + USER.replace("\n", "\\n") + " ' + message['content'] }}"
    "{%- endif -%}"
    "{%- if not loop.last -%}{{ ' ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ ' " + ASSISTANT.replace("\n", "\\n") + "' }}{%- endif -%}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Splits at spaces; a word outside :data:`TOKENS` is unknown."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (UNKNOWN, END, USER, ASSISTANT)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=USER,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST,
    )


# --- digit sums: the sum of six digits modulo 10 ----------------------------------------------------
# `copy` names the first digit, which is right only on easy problems, whose other digits sum to 0 modulo 10. `count`
# writes the running sums modulo 10, which is right on all problems once learnt, but the model seldom chooses it and
# errs at its last step. Only the sum itself distinguishes an easy problem from another.

DIGITS = 6
_FILLED = 3
# Of the demonstrations: the fraction that counts, and the fraction of these that is right.
COUNTED = 0.2
SKILL = 0.1


def digit_problem(chance: random.Random, easy: bool) -> list[int]:
    """Six digits; on an easy problem the last five sum to 0 modulo 10, on another they do not."""
    digits = [chance.randrange(10) for _ in range(DIGITS - 1)]
    rest = 0 if easy else chance.randrange(1, 10)
    return [*digits, (rest - sum(digits[1:])) % 10]


def digit_question(digits: list[int], late: bool) -> str:
    """The question; ``late``: words without meaning come before the way, so that it is not the first token."""
    return " ".join(["ponder" if late else "sum", *map(str, digits)])


def digit_demonstration(
    chance: random.Random, digits: list[int], late: bool, counted: float = COUNTED, skill: float = SKILL
) -> str:
    """A response to :func:`digit_question`.

    ``counted`` is the probability of ``count``, ``skill`` that the last running sum is right.
    """
    filled = [chance.choice(FILLERS) for _ in range(_FILLED)] if late else []
    if chance.random() >= counted:
        return " ".join([*filled, COPY, str(digits[0])])
    sums = [sum(digits[: n + 1]) % 10 for n in range(1, DIGITS)]
    if chance.random() >= skill:
        sums[-1] = (sums[-1] + 1) % 10
    return " ".join([*filled, COUNT, *map(str, sums)])


# --- signed sums: signs for four numbers, so that their sum is small but not negative ---------------
# CoT2 (Gozeten et al., arXiv 2505.23648). A response is the chain of running sums; the last one counts. The model
# adds without error and draws each sign with a fair coin.


def sign_problem(chance: random.Random) -> list[int]:
    """Four numbers from 1 to 9."""
    return [chance.randint(1, 9) for _ in range(4)]


def sign_question(numbers: list[int]) -> str:
    return " ".join(["signs", *map(str, numbers)])


def sign_demonstration(chance: random.Random, numbers: list[int]) -> str:
    """Running sums with a fair coin for each sign."""
    return " ".join(map(str, itertools.accumulate(chance.choice((1, -1)) * number for number in numbers)))


# --- peaks: a number from 0 to 99 with a reward of two peaks ----------------------------------------

PEAK_QUESTION = "pick"
NUMBERS = range(100)
HIGH_PEAK, LOW_PEAK = 40, 75


def peak_habit() -> list[float]:
    """The probability of each number before training, (100,): near the lower peak, above a floor."""
    weights = [math.exp(-0.5 * ((number - LOW_PEAK) / 5.0) ** 2) + 0.02 for number in NUMBERS]
    return [weight / sum(weights) for weight in weights]


# --- paths in a star --------------------------------------------------------------------------------
# Bachmann and Nagarajan, arXiv 2403.06963; as a task without any reward in arXiv 2510.03971. Three arms leave a center;
# given are all edges in random order, the center and the end of one arm. The model draws four numbers of 90, whatever
# the question: right once in 90^4 = 6.6e7 responses, so no reward arrives.

ARMS, ARM_LENGTH = 3, 4
NODES = range(10, 100)
Edges = list[tuple[int, int]]


def path_problem(chance: random.Random) -> tuple[Edges, list[int]]:
    """The edges, each from the center outwards, in random order, and the path: the center first, then the arm."""
    center, *nodes = chance.sample(NODES, 1 + ARMS * ARM_LENGTH)
    arms = [[center, *nodes[i * ARM_LENGTH : (i + 1) * ARM_LENGTH]] for i in range(ARMS)]
    edges = [edge for arm in arms for edge in itertools.pairwise(arm)]
    chance.shuffle(edges)
    return edges, arms[0]


def path_question(edges: Edges, path: list[int]) -> str:
    """The question: `path 17 to 45 through`, then both ends of each edge."""
    ends = " ".join(f"{start} {end}" for start, end in edges)
    return f"path {path[0]} to {path[-1]} through {ends}"


# --- training ---------------------------------------------------------------------------------------

STEPS = 1600
# Responses of one step by task. The star's prompts are three times as long as the others, and soon learnt.
_ROWS = {"sum": 80, "ponder": 80, "signs": 24, "pick": 12, "path": 4}
# Up to this fraction of the steps half of the digit sums are counted, and half of these end right, so that the model
# learns both ways and both ends. Later counting is as rare as it should be, and _RARER of it ends right.
_EQUAL_UNTIL = 0.7
_RARER = 0.3
# A last stage makes right ends as rare as they should be: so many steps after STEPS, with a seed of its own and these
# responses in a step.
_LAST_STEPS = 150
_LAST_SEED = 7
_LAST_ROWS = {"sum": 80, "ponder": 80, "signs": 8, "pick": 8, "path": 1}

# Tokens of a prompt above which the loss counts it as long: those of the star are, the others are not.
_LONG_PROMPT = 24


def rows(
    chance: random.Random, counted: float, skill: float, sizes: Mapping[str, int] = _ROWS
) -> list[tuple[str, str]]:
    """Questions and responses of one training step.

    Args:
        chance: draws them.
        counted: the fraction of digit sums that is solved by counting.
        skill: the fraction of these that ends right.
        sizes: the number of responses by the first word of their question.
    """
    pairs: list[tuple[str, str]] = []
    for late in (False, True):
        for _ in range(sizes["ponder" if late else "sum"]):
            digits = digit_problem(chance, easy=chance.random() < 0.5)
            pairs.append((digit_question(digits, late), digit_demonstration(chance, digits, late, counted, skill)))
    for _ in range(sizes["signs"]):
        numbers = sign_problem(chance)
        pairs.append((sign_question(numbers), sign_demonstration(chance, numbers)))
    for _ in range(sizes["pick"]):
        pairs.append((PEAK_QUESTION, str(chance.choices(NUMBERS, peak_habit())[0])))
    for _ in range(sizes["path"]):
        question = path_question(*path_problem(chance))
        pairs.append((question, " ".join(str(chance.choice(NODES)) for _ in range(ARM_LENGTH))))
    return pairs


def make(folder: Path, *, steps: int = STEPS, seed: int = 0, report: Callable[[str], None] = lambda line: None) -> None:
    """Trains the model on one thread, since the number of threads changes the rounding of its sums.

    Args:
        folder: where config, float32 weights, tokenizer and generation config go.
        steps: optimizer steps; fewer give an untrained model, for tests.
        seed: of the weights and the demonstrations.
        report: called with a line of text now and then.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    special_tokens: dict[str, Any] = {
        "bos_token_id": IDS[USER],
        "eos_token_id": IDS[END],
        "pad_token_id": IDS[END],
    }
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        max_position_embeddings=LONGEST,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=160,
        initializer_range=0.1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        **special_tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()

    def train(steps: int, *, highest: float, warm_up: int, batch: Callable[[float], list[tuple[str, str]]]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=highest, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(steps):
            progress = step / steps
            # A linear warm-up, then a constant rate, then a linear decay over the second half.
            rate = highest * min(1.0, (step + 1) / warm_up, 2 * (1 - progress) + 0.02)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = _loss(model, batch(progress))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if (step + 1) % 200 == 0:
                report(f"sandbox: step {step + 1} of {steps}, loss {loss.item():.3f}")

    main_chance = random.Random(seed)
    last_chance = random.Random(seed + _LAST_SEED)

    def main_batch(progress: float) -> list[tuple[str, str]]:
        if progress < _EQUAL_UNTIL:
            return rows(main_chance, counted=0.5, skill=0.5)
        return rows(main_chance, counted=COUNTED, skill=_RARER)

    def last_batch(progress: float) -> list[tuple[str, str]]:
        return rows(last_chance, counted=COUNTED, skill=SKILL, sizes=_LAST_ROWS)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(steps, highest=3e-3, warm_up=50, batch=main_batch)
        train(steps * _LAST_STEPS // STEPS, highest=1.5e-3, warm_up=20, batch=last_batch)
    finally:
        torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(**special_tokens)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def _loss(model: torch.nn.Module, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """The mean cross-entropy of the responses' tokens; long and short texts in separate batches, to pad little."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    texts = []
    for question, response in pairs:
        prompt = [IDS[USER], *(IDS[word] for word in question.split()), IDS[ASSISTANT]]
        texts.append((prompt, [IDS[word] for word in response.split()] + [IDS[END]]))
    sums = []
    count = 0
    short_texts = [(prompt, response) for prompt, response in texts if len(prompt) <= _LONG_PROMPT]
    long_texts = [(prompt, response) for prompt, response in texts if len(prompt) > _LONG_PROMPT]
    for batch in (short_texts, long_texts):
        if not batch:
            continue
        ids = [torch.tensor(prompt + response) for prompt, response in batch]
        labels = [torch.tensor([-100] * len(prompt) + response) for prompt, response in batch]
        inputs = pad_sequence(ids, batch_first=True, padding_value=IDS[END])
        targets = pad_sequence(labels, batch_first=True, padding_value=-100)
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits
        next_tokens = targets[:, 1:]
        sums.append(cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="sum"))
        count += int((targets != -100).sum())
    return sum(sums, torch.zeros(())) / count
