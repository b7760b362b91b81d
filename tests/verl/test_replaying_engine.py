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
    made, sizes = tmp_path_factory.mktemp("model"), {"vocab_size": VOCABULARY, "hidden_size": 32}
    options = {"intermediate_size": 64, "initializer_range": 0.2, "tie_word_embeddings": request.param}
    return Path(tiny_folder(made, smollm2, "llama", **sizes, **options))


def engine_of(folder: Path, packed: bool, reference: bool = False) -> Any:
    loading = {"load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}}
    packing = {"use_remove_padding": packed}
    model = HFModelConfig(path=str(folder), enable_gradient_checkpointing=True, **loading, **packing)
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    options = {"model_dtype": "fp32", "mixed_precision": fp32, "use_torch_compile": False}
    config = FSDPEngineConfig(strategy="fsdp2", forward_only=reference, **options, **packing)
    optimizer = None if reference else FSDPOptimizerConfig(lr=1e-2, total_training_steps=4)
    made = EngineRegistry.new("language_model", "fsdp2", model, config, optimizer, None)
    assert isinstance(made, ReplayingCPUEngine), "the registry must choose ours"
    made._build_model_optimizer()
    return made


def rollouts(seed: int = 1) -> tuple[list[torch.Tensor], list[ReplayRecord]]:
    """Tokens of a few samples, and a record of each that perturbs half of its answer."""
    random, sequences, records = np.random.default_rng(seed), [], []
    for number, (prompt, answer) in enumerate(LENGTHS):
        sequences.append(torch.from_numpy(random.integers(0, VOCABULARY, prompt + answer)))
        positions = np.arange(prompt, prompt + answer, 2, dtype=np.int32)
        count = len(positions)
        ids = random.integers(0, VOCABULARY, (count, 3)).astype(np.int32)
        weights = random.dirichlet(np.ones(3), count).astype(np.float32)
        made = (number, prompt, prompt + answer, positions, ids, weights, None, np.ones(count, dtype=bool))
        records.append(ReplayRecord(*made))
    return sequences, records


def batch_of(sequences: list[torch.Tensor], records: list[ReplayRecord], spec: Any = NEIGHBOR, **more: Any) -> Any:
    """As verl's transfer queue hands it to a worker."""

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    answers = [tokens[record.prompt_tokens :] for tokens, record in zip(sequences, records)]
    carried = [FinishedTrajectory(record, np.zeros(record.num_tokens, np.float32)).pack() for record in records]
    fields = {
        "input_ids": nested(sequences),
        "position_ids": nested([torch.arange(len(tokens)) for tokens in sequences]),
        "prompts": nested([tokens[: record.prompt_tokens] for tokens, record in zip(sequences, records)]),
        "responses": nested(answers),
        "response_mask": nested([torch.ones(len(answer), dtype=torch.int64) for answer in answers]),
        "loss_mask": nested([torch.ones(len(answer), dtype=torch.int64) for answer in answers]),
        "extra_fields": NonTensorStack(*({KEY: each} for each in carried)),
        "uid": NonTensorStack(*(f"0{number}" for number in range(len(records)))),
        **{name: nested(parts) for name, parts in more.items()},
    }
    batch = TensorDict(fields, batch_size=[len(sequences)])
    told = {"temperature": 1.3, "use_dynamic_bsz": True, "max_token_len_per_gpu": 24, "global_batch_size": 4}
    tu.assign_non_tensor(batch, **told, **({KEY: registry.create(**spec).spec()} if spec else {}))
    return batch


def expected(folder: Path, sequences: list[torch.Tensor], records: list[ReplayRecord | None]) -> list[torch.Tensor]:
    """log π of each sample's tokens but the first, by a plain model that replays."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for tokens, record in zip(sequences, records):
        with torch.no_grad(), replaying(model, [record]):
            logits = model(tokens[None]).logits[0, :-1] / 1.3
        found.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    return found


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_forwards_replay(folder: Path, group: None, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In dynamic batches, which reorder the samples; of the actor as of the reference."""
    sequences, records = rollouts()
    truth, plain = (expected(folder, sequences, each) for each in (records, [None] * 4))
    assert max(float((a - b).abs().max()) for a, b in zip(truth, plain)) > 0.1
    for reference in (False, True):
        engine = engine_of(folder, packed, reference)
        output = engine.infer_batch(batch_of(sequences, records))["model_output"]
        for name in ("log_probs", TOKEN_LOG_PROBS):
            for found, wanted in zip(output[name].unbind(), truth):
                torch.testing.assert_close(found[:-1], wanted, atol=1e-5, rtol=0.0)
        output = engine.infer_batch(batch_of(sequences, records, spec=None))["model_output"]
        for found, wanted in zip(output["log_probs"].unbind(), plain):
            torch.testing.assert_close(found[:-1], wanted, atol=1e-5, rtol=0.0)
    # The test could not fail if nothing were replayed.
    monkeypatch.setattr(replaying_engine, "ReplayScope", _nothing)
    with pytest.raises(AssertionError):
        found = engine.infer_batch(batch_of(sequences, records))["model_output"]["log_probs"].unbind()
        for one, wanted in zip(found, truth):
            torch.testing.assert_close(one[:-1], wanted, atol=1e-5, rtol=0.0)


def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    return lambda *_: contextlib.nullcontext()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_training_step_replays(folder: Path, group: None, packed: bool) -> None:
    """verl's own loss has ratio 1 against the old log-probabilities of the replay, and a gradient."""
    sequences, records = rollouts()
    engine = engine_of(folder, packed)
    truth = expected(folder, sequences, records)
    old = [found[record.prompt_tokens - 1 :] for found, record in zip(truth, records)]
    advantages = [torch.full((len(part),), float(number) - 1.5) for number, part in enumerate(old)]
    batch = batch_of(sequences, records, old_log_probs=old, advantages=advantages)
    options = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 4, "use_dynamic_bsz": True}
    actor = FSDPActorConfig(**options, fsdp_config=FSDPEngineConfig())
    metrics = engine.train_batch(batch, partial(ppo_loss, actor))["metrics"]
    assert metrics["grad_norm"] > 0.0
    kl = [float(getattr(value, "value", value)) for value in _flat(metrics["actor/ppo_kl"])]
    assert max(map(abs, kl)) < 1e-5, kl
    assert sum(metrics[f"{KEY}/replayed"]) == sum(map(len, records))


def _flat(values: Any) -> list[Any]:
    if hasattr(values, "values") and not isinstance(values, dict):
        values = values.values
    return list(values) if isinstance(values, (list, tuple)) else [values]


def test_samples_without_their_record_are_refused(folder: Path, group: None) -> None:
    sequences, records = rollouts()
    engine = engine_of(folder, packed=False)
    batch = batch_of(sequences, records)
    lost = [{KEY: None} if i == 2 else row for i, row in enumerate(tu.get(batch, "extra_fields"))]
    batch["extra_fields"] = NonTensorStack(*lost)
    with pytest.raises(RuntimeError, match="sample 02 has no replay record"):
        engine.infer_batch(batch)
    moved = [dataclasses.replace(record, prompt_tokens=record.prompt_tokens - 1) for record in records]
    batch = batch_of(sequences, records)
    rows = [{KEY: FinishedTrajectory(r, np.zeros(r.num_tokens, np.float32)).pack()} for r in moved]
    batch["extra_fields"] = NonTensorStack(*rows)
    with pytest.raises(RuntimeError, match="3 \\+ 4 tokens of prompt and response"):
        engine.infer_batch(batch)
    padding = batch_of(sequences, records)
    padding["uid"] = NonTensorStack("00", "01", "pad12", "03")
    engine.infer_batch(padding)  # a copy of another sample's record rides with it


def with_masks(batch: Any, records: list[ReplayRecord], sets: list[dict[int, np.ndarray]]) -> Any:
    """The batch with sampling masks, of the tokens left at some positions of each sample."""
    packed = []
    for record, of_sample in zip(records, sets):
        mask = SamplingMask.of(VOCABULARY, {position: (False, ids) for position, ids in of_sample.items()})
        log_probs = np.zeros(record.num_tokens, np.float32)
        packed.append({KEY: FinishedTrajectory(record, log_probs, sampling_mask=mask).pack()})
    batch["extra_fields"] = NonTensorStack(*packed)
    tu.assign_non_tensor(batch, **{CORRECT_MASK: True})
    return batch


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probabilities_among_the_tokens_that_sampling_left(folder: Path, group: None, packed: bool) -> None:
    """At every second position of a response 20 tokens were left; values and gradient are those of a plain model."""
    from transformers import AutoModelForCausalLM

    sequences, records = rollouts()
    random = np.random.default_rng(8)
    sets: list[dict[int, np.ndarray]] = []
    for tokens, record in zip(sequences, records):
        of_sample = {}
        for position in range(record.prompt_tokens, record.num_tokens, 2):
            drawn = int(tokens[position])
            of_sample[position] = np.unique([drawn, *random.integers(0, VOCABULARY, 19)])
        sets.append(of_sample)
    advantages = [torch.from_numpy(random.normal(size=r.num_tokens - r.prompt_tokens)).float() for r in records]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    truth = []
    for tokens, record, of_sample, own in zip(sequences, records, sets, advantages):
        with replaying(model, [record]):
            logits = model(tokens[None]).logits[0, :-1] / 1.3
            log_probs = list(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
            for position, ids in of_sample.items():
                row = logits[position - 1]
                log_probs[position - 1] = row[tokens[position]] - row[torch.from_numpy(ids)].logsumexp(0)
            (-(torch.stack(log_probs)[record.prompt_tokens - 1 :] * own).sum()).backward()
        truth.append(torch.stack(log_probs).detach())

    engine = engine_of(folder, packed)
    output = engine.infer_batch(with_masks(batch_of(sequences, records), records, sets))["model_output"]
    for name in ("log_probs", TOKEN_LOG_PROBS):
        for of_engine, wanted in zip(output[name].unbind(), truth):
            torch.testing.assert_close(of_engine[:-1], wanted, atol=1e-5, rtol=0.0)
    # The whole distribution's are others.
    for of_engine, wanted in zip(expected(folder, sequences, records), truth):
        assert float((of_engine - wanted).abs().max()) > 0.1

    batch = with_masks(batch_of(sequences, records, advantages=advantages), records, sets)
    engine.forward_backward_batch(batch, _loss)
    gradient = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=2e-5, rtol=1e-4)


def test_samples_without_their_mask_are_refused(folder: Path, group: None) -> None:
    sequences, records = rollouts()
    batch = batch_of(sequences, records)
    tu.assign_non_tensor(batch, **{CORRECT_MASK: True})
    with pytest.raises(RuntimeError, match="came without their sampling mask"):
        engine_of(folder, packed=False).infer_batch(batch)


DENSITIES = [{"name": "multiplex", "density": "joint"}, {"name": "gaussian", "density": "gaussian", "sigma": 0.7}]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("spec", DENSITIES, ids=lambda spec: spec["name"])
def test_densities_take_the_place_of_the_token(
    folder: Path, group: None, packed: bool, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are those of a plain model, sample by sample; the second counts by its score alone."""
    perturbation = registry.create(**spec)
    sequences, records = rollouts()
    if perturbation.score_only:
        records = [dataclasses.replace(r, sigma=np.full(len(r), 0.2, np.float32)) for r in records]
    random = np.random.default_rng(5)
    advantages = [torch.from_numpy(random.normal(size=r.num_tokens - r.prompt_tokens)).float() for r in records]
    values, gradient = _plain_densities(folder, sequences, records, perturbation, advantages)
    engine = engine_of(folder, packed)
    output = engine.infer_batch(batch_of(sequences, records, spec))["model_output"]
    for found, wanted in zip(output["log_probs"].unbind(), values):
        torch.testing.assert_close(found[:-1], wanted, atol=1e-5, rtol=0.0)
    own = expected(folder, sequences, records)
    for found, wanted in zip(output[TOKEN_LOG_PROBS].unbind(), own):
        torch.testing.assert_close(found[:-1], wanted, atol=1e-5, rtol=0.0)
    engine.forward_backward_batch(batch_of(sequences, records, spec, advantages=advantages), _loss)
    found = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters() if p.grad is not None}
    for name, wanted in gradient.items():
        torch.testing.assert_close(found[name], wanted, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    # Another gradient than the tokens' own.
    engine.module.zero_grad()
    engine.forward_backward_batch(batch_of(sequences, records, NEIGHBOR, advantages=advantages), _loss)
    others = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters() if p.grad is not None}
    assert max(float((others[name] - wanted).abs().max()) for name, wanted in gradient.items()) > 1e-2


def _loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
    """−Σ A log π, of which every gradient is a part."""
    parts = zip(model_output["log_probs"].unbind(), data["advantages"].unbind())
    return -sum((row[len(row) - len(a) - 1 : -1] * a).sum() for row, a in parts), {}


def _plain_densities(
    folder: Path, sequences: list[Any], records: list[Any], perturbation: Any, advantages: list[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model, values = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for tokens, record, own in zip(sequences, records, advantages):
        full = torch.cat([torch.zeros(record.prompt_tokens), own])[None]
        for learning in (False, True):
            scope = ReplayScope(model.get_input_embeddings(), perturbation=perturbation)
            with torch.set_grad_enabled(learning), scope([record], torch.ones(1, len(tokens))):
                logits = model(tokens[None]).logits / 1.3
                plain = logits[0].log_softmax(-1).gather(1, tokens.roll(-1)[:, None])[:, 0]
                densities = Densities(scope, 1.3, full if learning else None)
                found = densities.override(logits, tokens[None], plain[None])[0, :-1]
                if learning:
                    by_token = torch.cat([found.new_zeros(1), found])[None]
                    (-(densities.for_policy_loss(by_token)[0] * full[0]).sum()).backward()
                else:
                    values.append(found)
    return values, {name: p.grad for name, p in model.named_parameters()}
