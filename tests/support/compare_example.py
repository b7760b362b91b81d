# SPDX-License-Identifier: Apache-2.0
"""A comparison's plan and its runs, small enough for results by hand."""

from ngrpo.workbench.compare.plan import Plan, read_plan

MODEL = ["--model", "smollm2-135m", "--task", "arithmetic", "--diagnose.prompts", "0"]


def plan(*words: str) -> Plan:
    return read_plan([*MODEL, *words])[0]
