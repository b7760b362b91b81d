# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine, in one process without Ray: its forwards are those of a plain model that replays.

Needs an environment with verl: `make test-verl`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs verl: make test-verl")
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from ngrpo.trainers.common.log_probs import Densities
from ngrpo.trainers.verl import replaying_engine
from ngrpo.trainers.verl.replaying_engine import CORRECT_MASK, KEY, TOKEN_LOG_PROBS, ReplayingCPUEngine
from perturbations import ReplayRecord, registry, replaying
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.scope import ReplayScope
from perturbations.replay.trajectory import FinishedTrajectory
from tests.support.tiny_folder import tiny_folder

VOCABULARY = 199
TEMPERATURE = 1.3
NEIGHBOR = {"name": "neighbor", "rate": 0.5}
LENGTHS = ((5, 9), (3, 4), (7, 1), (4, 11))  # tokens of prompt and answer


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Path:
    """A small random model."""
    return Path(
        tiny_folder(
            tmp_path_factory.mktemp("model"),
            smollm2,
            "llama",
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            initializer_range=0.2,
            tie_word_embeddings=request.param,
        )
    )


def engine_of(folder: Path, packed: bool, reference: bool = False) -> Any:
    """verl's engine of the model, for the actor or for the reference."""
    model = HFModelConfig(
        path=str(folder),
        enable_gradient_checkpointing=True,
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=packed,
    )
    config = FSDPEngineConfig(
        strategy="fsdp2",
        forward_only=reference,
        model_dtype="fp32",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        use_remove_padding=packed,
    )
    optimizer = None
    if not reference:
        optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=4)
    engine = EngineRegistry.new("language_model", "fsdp2", model, config, optimizer, None)
    assert isinstance(engine, ReplayingCPUEngine), "the registry must choose ours"
    engine._build_model_optimizer()
    return engine


def rollouts(seed: int = 1) -> tuple[list[torch.Tensor], list[ReplayRecord]]:
    """Tokens of a few samples, and a record of each that perturbs half of its answer."""
    draws = np.random.default_rng(seed)
    sequences = []
    records = []
    for number, (prompt, answer) in enumerate(LENGTHS):
        sequences.append(torch.from_numpy(draws.integers(0, VOCABULARY, prompt + answer)))
        positions = np.arange(prompt, prompt + answer, 2, dtype=np.int32)
        count = len(positions)
        record = ReplayRecord(
            seed=number,
            prompt_tokens=prompt,
            num_tokens=prompt + answer,
            positions=positions,
            ids=draws.integers(0, VOCABULARY, (count, 3)).astype(np.int32),
            weights=draws.dirichlet(np.ones(3), count).astype(np.float32),
            sigma=None,
            agreed=np.ones(count, dtype=bool),
        )
        records.append(record)
    return sequences, records


def random_advantages(records: list[ReplayRecord], draws: np.random.Generator) -> list[torch.Tensor]:
    """An advantage for each token of each answer."""
    advantages = []
    for record in records:
        values = draws.normal(size=record.num_tokens - record.prompt_tokens)
        advantages.append(torch.from_numpy(values).float())
    return advantages


def extra_fields_of(record: ReplayRecord, sampling_mask: SamplingMask | None = None) -> dict[str, Any]:
    """The fields of a sample that a rollout adds to verl's."""
    log_probs = np.zeros(record.num_tokens, np.float32)
    return {KEY: FinishedTrajectory(record, log_probs, sampling_mask=sampling_mask).pack()}


def batch_of(
    sequences: list[torch.Tensor],
    records: list[ReplayRecord],
    spec: dict[str, Any] | None = NEIGHBOR,
    **further: list[torch.Tensor],
) -> Any:
    """As verl's transfer queue hands it to a worker; ``further`` has values of each sample's answer, by their field."""

    def nested(of_samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(of_samples, layout=torch.jagged)

    prompts = []
    answers = []
    for tokens, record in zip(sequences, records):
        prompts.append(tokens[: record.prompt_tokens])
        answers.append(tokens[record.prompt_tokens :])
    fields = {
        "input_ids": nested(sequences),
        "position_ids": nested([torch.arange(len(tokens)) for tokens in sequences]),
        "prompts": nested(prompts),
        "responses": nested(answers),
        "response_mask": nested([torch.ones(len(answer), dtype=torch.int64) for answer in answers]),
        "loss_mask": nested([torch.ones(len(answer), dtype=torch.int64) for answer in answers]),
        "extra_fields": NonTensorStack(*(extra_fields_of(record) for record in records)),
        "uid": NonTensorStack(*(f"0{number}" for number in range(len(records)))),
    }
    for name, of_samples in further.items():
        fields[name] = nested(of_samples)
    batch = TensorDict(fields, batch_size=[len(sequences)])
    options: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 24,
        "global_batch_size": 4,
    }
    if spec is not None:
        options[KEY] = registry.create(**spec).spec()
    tu.assign_non_tensor(batch, **options)
    return batch


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the T tokens but the first at the temperature, (T - 1, V)."""
    return model(tokens[None]).logits[0, :-1] / TEMPERATURE


def log_probs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log π of the tokens but the first, (T - 1,)."""
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def expected_log_probs(
    folder: Path, sequences: list[torch.Tensor], records: list[ReplayRecord] | list[None]
) -> list[torch.Tensor]:
    """log π of each sample's tokens but the first, by a plain model that replays."""
    model = plain_model(folder)
    log_probs = []
    for tokens, record in zip(sequences, records):
        with torch.no_grad(), replaying(model, [record]):
            log_probs.append(log_probs_of(logits_of(model, tokens), tokens))
    return log_probs


def assert_log_probs(of_engine: torch.Tensor, expected: list[torch.Tensor]) -> None:
    """The engine's values are these; the last row of a sample belongs to no token."""
    for log_probs, expected_values in zip(of_engine.unbind(), expected, strict=True):
        torch.testing.assert_close(log_probs[:-1], expected_values, atol=1e-5, rtol=0.0)


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    """The gradients of the engine's parameters, gathered from all ranks."""
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.full_tensor()
    return gradients


def assert_gradients(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    gradients = gradients_of(engine)
    for name, gradient in expected.items():
        with_name = partial("{}: {}".format, name)
        torch.testing.assert_close(gradients[name], gradient, atol=2e-5, rtol=1e-4, msg=with_name)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_forwards_replay(folder: Path, group: None, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In dynamic batches, which reorder the samples; of the actor as of the reference."""
    sequences, records = rollouts()
    replayed = expected_log_probs(folder, sequences, records)
    plain = expected_log_probs(folder, sequences, [None] * len(sequences))
    differences = [float((with_replay - without).abs().max()) for with_replay, without in zip(replayed, plain)]
    assert max(differences) > 0.1
    for reference in (False, True):
        engine = engine_of(folder, packed, reference)
        output = engine.infer_batch(batch_of(sequences, records))["model_output"]
        assert_log_probs(output["log_probs"], replayed)
        assert_log_probs(output[TOKEN_LOG_PROBS], replayed)
        output = engine.infer_batch(batch_of(sequences, records, spec=None))["model_output"]
        assert_log_probs(output["log_probs"], plain)

    # Without the replay the test fails.
    monkeypatch.setattr(replaying_engine, "ReplayScope", _replays_nothing)
    output = engine.infer_batch(batch_of(sequences, records))["model_output"]
    with pytest.raises(AssertionError):
        assert_log_probs(output["log_probs"], replayed)


def _replays_nothing(*_args: Any, **_kwargs: Any) -> Any:
    return lambda *_: contextlib.nullcontext()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_training_step_replays(folder: Path, group: None, packed: bool) -> None:
    """verl's own loss has ratio 1 against the old log-probabilities of the replay, and a gradient."""
    sequences, records = rollouts()
    engine = engine_of(folder, packed)
    old_log_probs = []
    advantages = []
    replayed = expected_log_probs(folder, sequences, records)
    for number, (log_probs, record) in enumerate(zip(replayed, records)):
        of_answer = log_probs[record.prompt_tokens - 1 :]
        old_log_probs.append(of_answer)
        advantages.append(torch.full((len(of_answer),), number - 1.5))
    batch = batch_of(sequences, records, old_log_probs=old_log_probs, advantages=advantages)
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=4,
        use_dynamic_bsz=True,
        fsdp_config=FSDPEngineConfig(),
    )
    metrics = engine.train_batch(batch, partial(ppo_loss, actor))["metrics"]
    assert metrics["grad_norm"] > 0.0
    kl = [float(getattr(value, "value", value)) for value in _as_list(metrics["actor/ppo_kl"])]
    assert max(map(abs, kl)) < 1e-5, kl
    assert sum(metrics[f"{KEY}/replayed"]) == sum(map(len, records))


def _as_list(metric: Any) -> list[Any]:
    """The values of one of verl's metrics, which is a number, a list of numbers, or an object that has them."""
    if hasattr(metric, "values") and not isinstance(metric, dict):
        metric = metric.values
    return list(metric) if isinstance(metric, (list, tuple)) else [metric]


def test_samples_without_their_record_are_refused(folder: Path, group: None) -> None:
    sequences, records = rollouts()
    engine = engine_of(folder, packed=False)

    batch = batch_of(sequences, records)
    extra_fields = list(tu.get(batch, "extra_fields"))
    extra_fields[2] = {KEY: None}
    batch["extra_fields"] = NonTensorStack(*extra_fields)
    with pytest.raises(RuntimeError, match="sample 02 has no replay record"):
        engine.infer_batch(batch)

    batch = batch_of(sequences, records)
    shorter_prompts = [dataclasses.replace(record, prompt_tokens=record.prompt_tokens - 1) for record in records]
    batch["extra_fields"] = NonTensorStack(*(extra_fields_of(record) for record in shorter_prompts))
    with pytest.raises(RuntimeError, match="3 \\+ 4 tokens of prompt and response"):
        engine.infer_batch(batch)

    # verl's padding is a copy of another sample, with that sample's record, which is not compared.
    batch = batch_of(sequences, records)
    batch["uid"] = NonTensorStack("00", "01", "pad12", "03")
    engine.infer_batch(batch)


TokensLeft = dict[int, np.ndarray]
"""The tokens that sampling left, by their position in a sample."""


def tokens_left(
    sequences: list[torch.Tensor], records: list[ReplayRecord], draws: np.random.Generator
) -> list[TokensLeft]:
    """At every second position of each answer the drawn token and up to 19 others."""
    of_samples = []
    for tokens, record in zip(sequences, records):
        by_position: TokensLeft = {}
        for position in range(record.prompt_tokens, record.num_tokens, 2):
            drawn = int(tokens[position])
            by_position[position] = np.unique([drawn, *draws.integers(0, VOCABULARY, 19)])
        of_samples.append(by_position)
    return of_samples


def with_masks(batch: Any, records: list[ReplayRecord], left: list[TokensLeft]) -> Any:
    """The batch with sampling masks, of the tokens left at some positions of each sample."""
    extra_fields = []
    for record, by_position in zip(records, left):
        sets = {position: (False, ids) for position, ids in by_position.items()}
        extra_fields.append(extra_fields_of(record, SamplingMask.of(VOCABULARY, sets)))
    batch["extra_fields"] = NonTensorStack(*extra_fields)
    tu.assign_non_tensor(batch, **{CORRECT_MASK: True})
    return batch


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probabilities_among_the_tokens_that_sampling_left(folder: Path, group: None, packed: bool) -> None:
    """At every second position of a response 20 tokens were left; values and gradient are those of a plain model."""
    sequences, records = rollouts()
    draws = np.random.default_rng(8)
    left = tokens_left(sequences, records, draws)
    advantages = random_advantages(records, draws)
    expected, expected_gradients = _plain_masked(folder, sequences, records, left, advantages)

    engine = engine_of(folder, packed)
    output = engine.infer_batch(with_masks(batch_of(sequences, records), records, left))["model_output"]
    assert_log_probs(output["log_probs"], expected)
    assert_log_probs(output[TOKEN_LOG_PROBS], expected)
    # Those of the whole distribution are different.
    for whole, among_left in zip(expected_log_probs(folder, sequences, records), expected):
        assert float((whole - among_left).abs().max()) > 0.1

    batch = with_masks(batch_of(sequences, records, advantages=advantages), records, left)
    engine.forward_backward_batch(batch, _loss)
    assert_gradients(engine, expected_gradients)


def _plain_masked(
    folder: Path,
    sequences: list[torch.Tensor],
    records: list[ReplayRecord],
    left: list[TokensLeft],
    advantages: list[torch.Tensor],
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """log π among the tokens left, (T - 1,) of each sample, and the gradient of their loss, by a plain model."""
    model = plain_model(folder)
    values = []
    for tokens, record, by_position, of_answer in zip(sequences, records, left, advantages):
        with replaying(model, [record]):
            logits = logits_of(model, tokens)
            log_probs = list(log_probs_of(logits, tokens))
            for position, ids in by_position.items():
                row = logits[position - 1]
                log_probs[position - 1] = row[tokens[position]] - row[torch.from_numpy(ids)].logsumexp(0)
            masked = torch.stack(log_probs)
            loss = -(masked[record.prompt_tokens - 1 :] * of_answer).sum()
            loss.backward()
        values.append(masked.detach())
    return values, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_samples_without_their_mask_are_refused(folder: Path, group: None) -> None:
    sequences, records = rollouts()
    batch = batch_of(sequences, records)
    tu.assign_non_tensor(batch, **{CORRECT_MASK: True})
    with pytest.raises(RuntimeError, match="came without their sampling mask"):
        engine_of(folder, packed=False).infer_batch(batch)


DENSITIES = [
    {"name": "multiplex", "density": "joint"},
    {"name": "gaussian", "density": "gaussian", "sigma": 0.7},
]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("spec", DENSITIES, ids=lambda spec: spec["name"])
def test_densities_take_the_place_of_the_token(folder: Path, group: None, packed: bool, spec: dict[str, Any]) -> None:
    """Values and gradients are those of a plain model, sample by sample; the second counts by its score alone."""
    perturbation = registry.create(**spec)
    sequences, records = rollouts()
    if perturbation.score_only:
        records = [dataclasses.replace(record, sigma=np.full(len(record), 0.2, np.float32)) for record in records]
    advantages = random_advantages(records, np.random.default_rng(5))
    expected, expected_gradients = _plain_densities(folder, sequences, records, perturbation, advantages)

    engine = engine_of(folder, packed)
    output = engine.infer_batch(batch_of(sequences, records, spec))["model_output"]
    assert_log_probs(output["log_probs"], expected)
    assert_log_probs(output[TOKEN_LOG_PROBS], expected_log_probs(folder, sequences, records))
    engine.forward_backward_batch(batch_of(sequences, records, spec, advantages=advantages), _loss)
    assert_gradients(engine, expected_gradients)

    # The gradient of the tokens' own log-probabilities is another.
    engine.module.zero_grad()
    engine.forward_backward_batch(batch_of(sequences, records, NEIGHBOR, advantages=advantages), _loss)
    of_tokens = gradients_of(engine)
    differences = [float((of_tokens[name] - gradient).abs().max()) for name, gradient in expected_gradients.items()]
    assert max(differences) > 1e-2


def _loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
    """-Σ A log π, of which every gradient is a part."""
    total = 0.0
    for log_probs, advantages in zip(model_output["log_probs"].unbind(), data["advantages"].unbind()):
        # The last row of a sample belongs to no token.
        of_answer = log_probs[len(log_probs) - len(advantages) - 1 : -1]
        total = total + (of_answer * advantages).sum()
    return -total, {}


def _plain_densities(
    folder: Path,
    sequences: list[torch.Tensor],
    records: list[ReplayRecord],
    perturbation: Any,
    advantages: list[torch.Tensor],
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The densities, (T - 1,) of each sample, and the gradient of their loss, by a plain model.

    As in a training, a first forward computes the values, and a second one, which knows the advantages, the gradient.
    """
    model = plain_model(folder)
    values = []
    for tokens, record, of_answer in zip(sequences, records, advantages):
        of_tokens = torch.cat([torch.zeros(record.prompt_tokens), of_answer])[None]
        for learning in (False, True):
            scope = ReplayScope(model.get_input_embeddings(), perturbation=perturbation)
            with torch.set_grad_enabled(learning), scope([record], torch.ones(1, len(tokens))):
                logits = model(tokens[None]).logits / TEMPERATURE
                log_probs = logits[0].log_softmax(-1).gather(1, tokens.roll(-1)[:, None])[:, 0]
                densities = Densities(scope, TEMPERATURE, of_tokens if learning else None)
                overridden = densities.override(logits, tokens[None], log_probs[None])[0, :-1]
                if learning:
                    by_token = torch.cat([overridden.new_zeros(1), overridden])[None]
                    loss = -(densities.for_policy_loss(by_token)[0] * of_tokens[0]).sum()
                    loss.backward()
                else:
                    values.append(overridden)
    return values, {name: parameter.grad for name, parameter in model.named_parameters()}
