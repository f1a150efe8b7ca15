"""Tasks of lm-evaluation-harness from files, one of each kind of request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("local_choice", "local_rolling", "local_text")
WORDS = ("hello", "he", "ll", "castle", "stone", "a", "river runs", "the end", "hell", "o no")


def write_tasks(folder: Path, max_gen_toks: int = 7) -> Path:
    """Write three tasks with twelve questions each, and return their folder."""
    folder.mkdir(parents=True)
    rows = [
        {
            "question": f"{WORDS[i % 10]} and {WORDS[(i * 3 + 1) % 10]} is",
            "choices": [f"{WORDS[(i + j * 4 + 2) % 10]}{j}" for j in range(3)],
            "answer": i % 3,
            "text": " ".join(WORDS[(i + j) % 10] for j in range(4 + i)),
            "reply": WORDS[i % 10][:1],
        }
        for i in range(12)
    ]
    data = _lines(folder / "questions.jsonl", rows)
    shared = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
"""
    (folder / "choice.yaml").write_text(
        f"""task: {NAMES[0]}
{shared}output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
num_fewshot: 0
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    (folder / "rolling.yaml").write_text(
        f"""task: {NAMES[1]}
{shared}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
    )
    (folder / "text.yaml").write_text(
        f"""task: {NAMES[2]}
{shared}output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{reply}}}}"
generation_kwargs:
  until: ["l", "\\n\\n"]
  max_gen_toks: {max_gen_toks}
  do_sample: false
metric_list:
  - metric: exact_match
"""
    )
    return folder


def _lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
