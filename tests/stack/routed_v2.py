# SPDX-License-Identifier: Apache-2.0
"""Run by test_routed_experts.py, in a process of its own: routing replay in the V2 model runner.

Argument: the folder of a mixture of experts. Prints the runner, and the largest gap with and without the replay, of
answers to prompts that share a prefix.
"""

import os
import sys

from tests.stack import as_on_cuda

if __name__ == "__main__":  # before torch, which loads Triton
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    as_on_cuda.interpret_triton()

from ngrpo.rollout.records import model_runner
from tests.stack.harness import build_engine, load_in_float32
from tests.stack.test_routed_experts import NEIGHBOR, answers, gap, prompts


def main(folder: str) -> None:
    config = {"perturbation": NEIGHBOR, "routed_experts": True}
    options = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 32, "enable_prefix_caching": True}
    llm = build_engine(folder, None, additional_config=config, **options)
    model = load_in_float32(folder)
    (prefix,) = prompts(1, 40, seed=1)
    sampled = []
    for last in (5, 6):
        sampled += answers(llm, [[*prefix, last]], 8)
    gaps_with_replay = [gap(model, answer, True) for answer in sampled]
    gaps_without_replay = [gap(model, answer, False) for answer in sampled]
    print(model_runner(llm), max(gaps_with_replay), max(gaps_without_replay))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
