# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter of an image-text model, and prints what came of it.

A process of its own, since torchvision is on its path alone.
"""

import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from benchmarks.models import tiny
from ngrpo.machine.models import adapters, packaged
from tests.support.own_process import RESULT


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        adapter = Path(folder, "adapter")
        whole = Path(folder, "whole")
        base.mkdir()
        tiny.build("qwen2_5_vl", base, Path(packaged.resolve("smollm2-135m")), torch.float32)
        lora = LoraConfig(r=4, target_modules="all-linear")
        model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), lora).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(adapter)
        adapters.merge(str(base), adapter, whole)
        merged = AutoModelForImageTextToText.from_pretrained(whole).eval()
        tokens = torch.arange(3, 27).view(2, 12)
        with torch.no_grad():
            expected = model(tokens).logits
            difference = (merged(tokens).logits - expected).abs().max().item()
        files = sorted(file.name for file in whole.iterdir())
    print(RESULT + json.dumps({"difference": difference, "logits": expected.abs().max().item(), "files": files}))


if __name__ == "__main__":
    main()
