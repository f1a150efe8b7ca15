"""A tokenizer of words with special tokens, in a model folder with a chat template, and conversations in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
TEMPLATE = """{% for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
MARKED = """{% for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}
    {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def write_chat_folder(
    folder: Path, template: str | None = TEMPLATE, characters: Sequence[str] = ()
) -> HuggingFaceTokenizer:
    """Write a model folder whose tokenizer knows each character of ASCII, special tokens and more; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: i for i, character in enumerate([*map(chr, range(128)), *characters])}
    added = [
        {"id": len(vocabulary) + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, token in enumerate(SPECIAL)
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None, "fuse_unk": False}
        | {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings = {"eos_token": "<|end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return HuggingFaceTokenizer(folder)


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """Write a file of jsonl; text is taken as a line."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def sums(numbers: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a question and its answer for each pair."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{left}+{right}"},
                {"role": "assistant", "content": f"={left + right}"},
            ]
        }
        for left, right in numbers
    ]
