# SPDX-License-Identifier: Apache-2.0
"""The packaged model, made for real: it answers, it knows its chat template, and it ends its answers."""

import pytest


@pytest.fixture(scope="module")
def loaded(smollm2: str):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(smollm2)


def test_tokenizer_and_configs_agree(loaded) -> None:
    model, tokenizer = loaded
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer) == 49152


def test_answers_a_question(loaded) -> None:
    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    (prompt,) = encoded["input_ids"]
    assert tokenizer.decode(prompt) == text

    (tokens,) = model.generate(**encoded, max_new_tokens=32, do_sample=False)
    answer = tokens[len(prompt) :]
    assert "Paris" in tokenizer.decode(answer)
    assert tokenizer.eos_token_id in answer
