# SPDX-License-Identifier: Apache-2.0
"""`ngrpo diagnose` on a real engine: four prompts of the arithmetic task, four answers each."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo.config.arms import parse_arms
from ngrpo.rollout import set_perturbation
from ngrpo.workbench.diagnose import embedding_map, group_sampling
from ngrpo.workbench.diagnose.diagnosis import diagnose
from ngrpo.workbench.diagnose.group_sampling import GroupSampling, Sample, prompt_tokens
from ngrpo.workbench.evaluate import load_task

NAMES = "none,neighbor:rate=0,neighbor:rate=0.3,gaussian,gaussian:sigma=20,gumbel"
WILD = "gaussian sigma=20"
SAMPLING = GroupSampling(group=4, max_tokens=16)
WORDS = "because,number,green"


@pytest.fixture(scope="module")
def made(engine: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The diagnosis, and its folder."""
    out = tmp_path_factory.mktemp("diagnosis") / "out"
    problems = load_task("arithmetic", limit=4)
    with pytest.MonkeyPatch.context() as patch:  # speed is not tested here, and three tokens need no long texts
        patch.setattr(group_sampling, "_WARM_UP_TOKENS", 1)
        patch.setattr(embedding_map, "_LENGTH", 24)
        # The random model writes none of the words: each represents a token that their requests (of more than forty
        # tokens) make likeliest.
        words = embedding_map.choose_tokens(engine.get_tokenizer(), WORDS)
        embedding_map.LIKELIEST.update({token: [] for token in range(len(engine.get_tokenizer()))})
        seen = embedding_map.contexts(engine, words, SAMPLING.seed, {})
        often = sorted(seen, key=lambda token: -sum(position > 40 for _, position in seen[token]))
        stand_ins = [(token, text) for token, (_, text) in zip(often, words)]
        patch.setattr(embedding_map, "choose_tokens", lambda *_: stand_ins)
        try:
            yield diagnose(model, problems, parse_arms(NAMES), out=out, sampling=SAMPLING, dataset="arithmetic",
                           with_map=True, map_words=WORDS, llm=engine), out  # fmt: skip
        finally:
            set_perturbation(engine, "neighbor", rate=0.1)


def rows(made: Any) -> dict[str, Any]:
    return {row["name"]: row for row in made[0]["strategies"]}


def samples_of(out: Path) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for line in (out / "samples.jsonl").read_text().splitlines():
        sample = Sample.from_json(json.loads(line))
        found.setdefault(sample.strategy, []).append(sample)
    return found


def test_every_number_is_there(made: Any) -> None:
    for name, row in rows(made).items():
        diversity, validity = row["diversity"], row["validity"]
        for value in (*diversity.values(), validity["parseable"], validity["repetition"], validity["score"]):
            assert value is None or 0.0 <= value <= 1.0, (name, row)
        assert diversity["distinct_answers"] is not None and diversity["edit_distance"] is not None
        assert validity["perplexity"] >= 1.0 and row["tokens_per_second"] > 0.0
        assert set(row["pass_at_k"]) == {"1", "2", "4"}
        for axis in ("diversity", "validity"):
            low, high = row["intervals"][axis]
            assert low <= row[axis]["score"] <= high
        perturbed = row["perturbation"] is not None
        assert (row["rate"] > 0.0) is perturbed and (row["record_bytes_per_token"] is not None) is perturbed
        assert (validity["anchor_nearest"] is not None) is perturbed is (row["relative_shift"] is not None)
    assert rows(made)["gumbel"]["rate"] == 1.0
    assert 0.1 < rows(made)["neighbor rate=0.3"]["rate"] < 0.5


def test_none_and_rate_zero_are_equal(made: Any) -> None:
    found, samples = rows(made), samples_of(made[1])
    plain, zero = dict(found["none"]), dict(found["neighbor rate=0"])
    assert plain.pop("name") != zero.pop("name")
    assert plain.pop("tokens_per_second") and zero.pop("tokens_per_second")
    same = {"value": 0.0, "low": 0.0, "high": 0.0, "within_noise": True}
    assert plain.pop("difference") is None
    assert zero.pop("difference") == dict.fromkeys(("diversity", "validity", "reward"), same)
    assert plain == zero and plain["rate"] == 0.0
    assert [s.tokens for s in samples["none"]] == [s.tokens for s in samples["neighbor rate=0"]]
    # The test could not fail if all strategies were equal.
    assert [s.tokens for s in samples["none"]] != [s.tokens for s in samples["gumbel"]]


def test_noise_of_twenty_times_the_embedding_is_not_valid(made: Any) -> None:
    plain, wild = rows(made)["none"], rows(made)[WILD]
    assert wild["validity"]["score"] < plain["validity"]["score"] - 0.2
    assert wild["validity"]["perplexity"] > 3 * plain["validity"]["perplexity"]
    assert wild["validity"]["anchor_nearest"] < 0.5 < rows(made)["gaussian"]["validity"]["anchor_nearest"]
    assert 10.0 < wild["relative_shift"] < 30.0
    assert wild["difference"]["validity"]["high"] < 0.0 and not wild["difference"]["validity"]["within_noise"]


def test_perplexity_is_that_of_a_hugging_face_forward(made: Any, hf_model: Any, engine: Any) -> None:
    problems = {problem.id: problem for problem in load_task("arithmetic", limit=4)}
    for name in ("none", WILD):
        samples = samples_of(made[1])[name]
        for sample in samples[::4]:
            prompt = prompt_tokens(engine.get_tokenizer(), problems[sample.problem])
            sequence = torch.tensor([[*prompt, *sample.tokens]])
            with torch.no_grad():
                log_p = hf_model(sequence).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
            nll = -log_p.gather(-1, torch.tensor(sample.tokens).unsqueeze(-1)).sum().item()
            assert sample.nll == pytest.approx(nll, abs=2e-3)
        mean = sum(sample.nll for sample in samples) / sum(len(sample.tokens) for sample in samples)
        assert rows(made)[name]["validity"]["perplexity"] == pytest.approx(math.exp(mean))


def test_the_same_seed_gives_the_same_samples(made: Any, engine: Any, model: str, tmp_path: Path) -> None:
    problems, strategies = load_task("arithmetic", limit=4), parse_arms("neighbor:rate=0.3")
    diagnose(model, problems, strategies, out=tmp_path / "again", sampling=SAMPLING, llm=engine)
    again, before = samples_of(tmp_path / "again")["neighbor rate=0.3"], samples_of(made[1])["neighbor rate=0.3"]
    assert [(s.tokens, s.record) for s in again] == [(s.tokens, s.record) for s in before]


def test_embedding_map(made: Any) -> None:
    found = made[0]["embedding_map"]
    assert [token["text"].strip() for token in found["tokens"]] == WORDS.split(",")
    assert 0.0 < sum(found["explained_variance"]) <= 1.0
    perturbations = {perturbation["strategy"]: perturbation for perturbation in found["perturbations"]}
    assert list(perturbations) == ["neighbor rate=0.3", "gaussian", WILD, "gumbel"]
    for perturbation in perturbations.values():
        points = perturbation["points"]
        assert len(points) == 3 * found["copies"]
        assert perturbation["unrelated_share"] == sum(not p["related"] for p in points) / len(points)
        assert perturbation["changed_share"] == sum(p["changed"] for p in points) / len(points)
    # A mixture with its own nearest neighbors stays among them; noise of twenty times the embedding does not.
    assert perturbations["neighbor rate=0.3"]["unrelated_share"] == 0.0
    assert perturbations["gaussian"]["unrelated_share"] < 0.1 < 0.9 < perturbations[WILD]["unrelated_share"]
