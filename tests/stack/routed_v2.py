# SPDX-License-Identifier: Apache-2.0
"""Run by test_routed_experts.py, in a process of its own: routing replay in the V2 model runner.

Arguments: the folder of a mixture of experts. Prints the runner, and the largest gap of shared prompts with and without
the replay.
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
    model, shared = load_in_float32(folder), prompts(1, 40, seed=1)[0]
    found = [each for tail in (5, 6) for each in answers(llm, [[*shared, tail]], 8)]
    print(model_runner(llm), *(max(gap(model, each, replay) for each in found) for replay in (True, False)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
