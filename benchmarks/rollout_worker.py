"""One engine that `benchmarks.rollout --against` times: run as a file, so that PYTHONPATH says whose code it is.

A line of JSON asks for a perturbation (`{"set": name, "rate": rate}`) or a rollout (`{"batch": 16, "tokens": 48}`);
the answer is a line, the seconds it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
warnings.simplefilter("ignore")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed

from vllm import LLM, SamplingParams  # noqa: E402

from ngrpo.rollout import set_perturbation, take_records  # noqa: E402

QUESTION = "Explain step by step how to find the sum of the first hundred odd numbers."


def main() -> None:
    llm = LLM(sys.argv[1], additional_config={"perturbation": {"name": "gumbel"}}, **json.loads(sys.argv[2]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        if "set" in asked:
            set_perturbation(llm, asked["set"], rate=asked["rate"])
        else:
            messages = [[{"role": "user", "content": f"{QUESTION} ({i})"}] for i in range(asked["batch"])]
            llm.chat(messages, SamplingParams(max_tokens=asked["tokens"], ignore_eos=True), use_tqdm=False)
        spent = time.perf_counter() - began
        take_records(llm)  # before the answer: the other engine's turn begins with it
        print(spent, file=answers, flush=True)


if __name__ == "__main__":
    main()
