# SPDX-License-Identifier: Apache-2.0
"""`ngrpo diagnose` on a real engine: six prompts of the arithmetic task, four answers each."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from ngrpo.config.arms import parse_arms
from ngrpo.rollout import set_perturbation
from ngrpo.workbench.diagnose import embedding_map, group_sampling
from ngrpo.workbench.diagnose.diagnosis import diagnose
from ngrpo.workbench.diagnose.group_sampling import GroupSampling, Sample, prompt_tokens
from ngrpo.workbench.evaluate import load_task

NAMES = "none,neighbor:rate=0,neighbor:rate=0.3,gaussian,gaussian:sigma=20,gumbel"
WILD = "gaussian sigma=20"
PROMPTS = 6  # the fewest of which a difference can be beyond noise
SAMPLING = GroupSampling(group=4, max_tokens=16)
WORDS = "because,number,green"


@dataclass(frozen=True)
class Diagnosed:
    """What `diagnose` returned, and the folder with its files."""

    result: dict[str, Any]
    folder: Path

    def rows(self) -> dict[str, Any]:
        """The row of each strategy, by its name."""
        return {row["name"]: row for row in self.result["strategies"]}


@pytest.fixture(scope="module")
def diagnosed(engine: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Diagnosed]:
    folder = tmp_path_factory.mktemp("diagnosis") / "out"
    with pytest.MonkeyPatch.context() as patch:
        # Speed is not tested here, and three tokens need no long texts.
        patch.setattr(group_sampling, "_WARM_UP_TOKENS", 1)
        patch.setattr(embedding_map, "_LENGTH", 24)
        stand_ins = stand_ins_of_words(engine)
        patch.setattr(embedding_map, "choose_tokens", lambda *_: stand_ins)
        try:
            result = diagnose(
                model,
                load_task("arithmetic", limit=PROMPTS),
                parse_arms(NAMES),
                out=folder,
                sampling=SAMPLING,
                dataset="arithmetic",
                with_map=True,
                map_words=WORDS,
                llm=engine,
            )
            yield Diagnosed(result, folder)
        finally:
            set_perturbation(engine, "neighbor", rate=0.1)


def stand_ins_of_words(engine: Any) -> list[tuple[int, str]]:
    """For each word a token that its requests (of more than forty tokens) make likeliest, and the word's text.

    The random model writes none of the words themselves.
    """
    tokenizer = engine.get_tokenizer()
    words = embedding_map.choose_tokens(tokenizer, WORDS)
    every_token: dict[int, list[Any]] = {token: [] for token in range(len(tokenizer))}
    embedding_map.LIKELIEST.update(every_token)
    seen = embedding_map.contexts(engine, words, SAMPLING.seed, {})

    def occurrences(token: int) -> int:
        return sum(position > 40 for _, position in seen[token])

    most_frequent = sorted(seen, key=occurrences, reverse=True)
    return [(token, text) for token, (_, text) in zip(most_frequent, words)]


def samples_of(folder: Path) -> dict[str, list[Sample]]:
    """The samples of each strategy, by its name."""
    samples: dict[str, list[Sample]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = Sample.from_json(json.loads(line))
        samples.setdefault(sample.strategy, []).append(sample)
    return samples


def test_every_number_is_there(diagnosed: Diagnosed) -> None:
    for name, row in diagnosed.rows().items():
        diversity = row["diversity"]
        validity = row["validity"]
        assert diversity["distinct_answers"] is not None
        assert diversity["edit_distance"] is not None
        shares = [*diversity.values(), validity["parseable"], validity["repetition"], validity["score"]]
        for share in shares:
            assert share is None or 0.0 <= share <= 1.0, (name, row)
        assert validity["perplexity"] >= 1.0
        assert row["tokens_per_second"] > 0.0
        assert set(row["pass_at_k"]) == {"1", "2", "4"}
        for axis in ("diversity", "validity"):
            low, high = row["intervals"][axis]
            assert low <= row[axis]["score"] <= high
        perturbed = row["perturbation"] is not None
        assert (row["rate"] > 0.0) is perturbed
        assert (row["record_bytes_per_token"] is not None) is perturbed
        assert (row["relative_shift"] is not None) is perturbed
        assert (validity["anchor_nearest"] is not None) is perturbed
    assert diagnosed.rows()["gumbel"]["rate"] == 1.0
    assert 0.1 < diagnosed.rows()["neighbor rate=0.3"]["rate"] < 0.5


def test_none_and_rate_zero_are_equal(diagnosed: Diagnosed) -> None:
    plain = dict(diagnosed.rows()["none"])
    zero = dict(diagnosed.rows()["neighbor rate=0"])
    assert plain.pop("name") != zero.pop("name")
    assert plain.pop("tokens_per_second")
    assert zero.pop("tokens_per_second")
    no_difference = {"value": 0.0, "low": 0.0, "high": 0.0, "within_noise": True}
    assert plain.pop("difference") is None
    assert zero.pop("difference") == {
        "diversity": no_difference,
        "validity": no_difference,
        "reward": no_difference,
    }
    assert plain == zero
    assert plain["rate"] == 0.0

    samples = samples_of(diagnosed.folder)
    plain_tokens = [sample.tokens for sample in samples["none"]]
    assert [sample.tokens for sample in samples["neighbor rate=0"]] == plain_tokens
    gumbel_tokens = [sample.tokens for sample in samples["gumbel"]]
    assert gumbel_tokens != plain_tokens, "if all strategies were equal, this test could not fail"


def test_noise_of_twenty_times_the_embedding_is_not_valid(diagnosed: Diagnosed) -> None:
    plain = diagnosed.rows()["none"]["validity"]
    gaussian = diagnosed.rows()["gaussian"]["validity"]
    wild_row = diagnosed.rows()[WILD]
    wild = wild_row["validity"]
    assert wild["score"] < plain["score"] - 0.2
    assert wild["perplexity"] > 3 * plain["perplexity"]
    assert wild["anchor_nearest"] < 0.5 < gaussian["anchor_nearest"]
    assert 10.0 < wild_row["relative_shift"] < 30.0
    difference = wild_row["difference"]["validity"]
    assert difference["high"] < 0.0
    assert not difference["within_noise"]


def test_perplexity_is_that_of_a_hugging_face_forward(diagnosed: Diagnosed, hf_model: Any, engine: Any) -> None:
    problems = {problem.id: problem for problem in load_task("arithmetic", limit=PROMPTS)}
    for name in ("none", WILD):
        samples = samples_of(diagnosed.folder)[name]
        for sample in samples[::4]:
            prompt = prompt_tokens(engine.get_tokenizer(), problems[sample.problem])
            sequence = torch.tensor([[*prompt, *sample.tokens]])
            with torch.no_grad():
                logits = hf_model(sequence).logits[0, len(prompt) - 1 : -1].float()
            nll = cross_entropy(logits, torch.tensor(sample.tokens), reduction="sum").item()
            assert sample.nll == pytest.approx(nll, abs=2e-3)
        tokens = sum(len(sample.tokens) for sample in samples)
        mean = sum(sample.nll for sample in samples) / tokens
        assert diagnosed.rows()[name]["validity"]["perplexity"] == pytest.approx(math.exp(mean))


def test_the_same_seed_gives_the_same_samples(diagnosed: Diagnosed, engine: Any, model: str, tmp_path: Path) -> None:
    name = "neighbor rate=0.3"
    problems = load_task("arithmetic", limit=PROMPTS)
    strategies = parse_arms("neighbor:rate=0.3")
    diagnose(model, problems, strategies, out=tmp_path / "again", sampling=SAMPLING, llm=engine)
    before = samples_of(diagnosed.folder)[name]
    again = samples_of(tmp_path / "again")[name]
    assert [sample.tokens for sample in again] == [sample.tokens for sample in before]
    assert [sample.record for sample in again] == [sample.record for sample in before]


def test_embedding_map(diagnosed: Diagnosed) -> None:
    drawn_map = diagnosed.result["embedding_map"]
    assert [token["text"].strip() for token in drawn_map["tokens"]] == WORDS.split(",")
    assert 0.0 < sum(drawn_map["explained_variance"]) <= 1.0
    perturbations = {perturbation["strategy"]: perturbation for perturbation in drawn_map["perturbations"]}
    assert list(perturbations) == ["neighbor rate=0.3", "gaussian", WILD, "gumbel"]
    for perturbation in perturbations.values():
        points = perturbation["points"]
        assert len(points) == 3 * drawn_map["copies"]
        unrelated = sum(not point["related"] for point in points)
        changed = sum(point["changed"] for point in points)
        assert perturbation["unrelated_share"] == unrelated / len(points)
        assert perturbation["changed_share"] == changed / len(points)
    # A mixture with its own nearest neighbors stays among them; noise of twenty times the embedding does not.
    assert perturbations["neighbor rate=0.3"]["unrelated_share"] == 0.0
    assert perturbations["gaussian"]["unrelated_share"] < 0.1
    assert perturbations[WILD]["unrelated_share"] > 0.9
