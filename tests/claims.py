# SPDX-License-Identifier: Apache-2.0
"""What `make test` shows with engines and trainings: a file for each claim. All other such tests are marked ``more``.

``python -m tests.claims stack`` prints the files of a folder that show a claim, so that no other file is imported.
"""

import sys

CLAIMS = {
    "tests/stack/test_v2.py": "Both of vLLM's model runners are replayed exactly, and their records are the same.",
    "tests/stack/test_invariance.py": "A record depends on no batch, chunk, prefix cache or preemption.",
    "tests/stack/test_exactness.py": "The replay is exact on the pretrained model, and leaving it out shows.",
    "tests/stack/test_density.py": "A density's value is that of the draw, and its gradient reaches the policy.",
    "tests/stack/test_sampling_mask.py": "The trainer's corrected log-probability is that of the masked draw.",
    "tests/stack/test_custom.py": "A user's own perturbation and gate reach the engines' processes.",
    "tests/stack/test_gradients.py": "The gradient through a replayed position is the plain one.",
    "tests/stack/test_replay_check.py": "A wrong replay is named, for each way in which an architecture embeds.",
    "tests/stack/test_config.py": "What a perturbed engine is not combined with is refused before a model loads.",
    "tests/pipeline/test_training.py": "A whole training replays in actor and reference, and writes its report.",
    "tests/pipeline/test_compare.py": "A comparison survives a kill, and equal arms come out equal.",
}
"""File: the claim. Options and further cases of a file are marked ``more`` one by one."""


if __name__ == "__main__":
    print(*(file for file in CLAIMS if file.startswith(f"tests/{sys.argv[1]}/")))
