# SPDX-License-Identifier: Apache-2.0
"""The sandbox model's tokens: whole numbers from -36 to 99 and the few words of its tasks, one token each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN, END = "<|unknown|>", "<|im_end|>"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
NUMBERS = tuple(str(number) for number in range(-36, 100))
# What the model may say before it settles on a way; none of these bears on the answer.
FILLERS = ("well", "so", "now", "let", "me", "see")
WORDS = ("sum", "ponder", "pick", "signs", "path", "copy", "count", "to", "through", *FILLERS)
TOKENS = (UNKNOWN, END, USER, ASSISTANT, *NUMBERS, *WORDS)

# One turn after another; texts are joined by single spaces, as the tokenizer joins what it decodes.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '" + ASSISTANT.replace("\n", "\\n") + " ' + message['content'] + ' " + END + "' }}"
    "{%- else -%}"
    "{{ '" + USER.replace("\n", "\\n") + " ' + message['content'] }}"
    "{%- endif -%}"
    "{%- if not loop.last -%}{{ ' ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ ' " + ASSISTANT.replace("\n", "\\n") + "' }}{%- endif -%}"
)


def ids() -> dict[str, int]:
    """Each token's id."""
    return {token: index for index, token in enumerate(TOKENS)}


def tokenizer(longest: int) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at spaces and knows :data:`TOKENS`; any other word is unknown.

    Args:
        longest: the longest text in tokens that the model was made for.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel(ids(), unk_token=UNKNOWN))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens([AddedToken(text, special=True) for text in (UNKNOWN, END, USER, ASSISTANT)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=UNKNOWN,
        bos_token=USER,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )
