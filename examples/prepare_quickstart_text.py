"""Make real English text, and a small GPT-2 vocabulary for it, from the documentation that comes with Python.

Writes quickstart.jsonl (one document for each language topic and each module of the standard library, read
from their sources without importing them), vocab.json and merges.txt. The same Python gives the same bytes
every time.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
MIN_BYTES = 2_000_000
MIN_COMMENT_LINES = 3
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}


def read_topics() -> Iterator[tuple[str, str]]:
    """Give the topics of the language reference that `help()` shows."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        return
    module = ast.parse(Path(spec.origin).read_bytes())
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield f"topics/{name}", text.strip()


def read_modules() -> Iterator[tuple[str, str]]:
    """Give the documentation of each module of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            try:
                source = path.read_text(encoding="utf-8")
                text = "\n\n".join([*docstrings(ast.parse(source), ()), *comment_blocks(source)])
            except (
                SyntaxError,
                ValueError,
            ):  # a template, or another encoding
                continue
            yield (
                name.as_posix(),
                f"{name.with_suffix('').as_posix().replace('/', '.')}\n\n{text}" if text else "",
            )


def docstrings(node: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
    """Give the docstrings below a node in the order of the source, each under the name of what it documents."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield f"{'.'.join(path)}\n{text}".strip()
        for child in node.body:
            child_name = getattr(child, "name", None)
            yield from docstrings(child, (*path, child_name) if child_name else path)


def comment_blocks(source: str) -> Iterator[str]:
    """Give the comments that take several lines, copyright notices left out."""
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#").removeprefix(" "))
            continue
        text = "\n".join(block).strip()
        if len(block) >= MIN_COMMENT_LINES and "copyright" not in text.lower():
            yield text
        block = []


def gather_documents() -> list[tuple[str, str]]:
    """List (source, text) of all documents, each text once.

    The order is that of a hash of the names: alphabetical order would leave one kind of text for validation.
    """
    documents = {text: name for name, text in sorted([*read_topics(), *read_modules()], reverse=True) if text}
    ordered = sorted(documents.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest())
    return [(name, text) for text, name in ordered]


def train_vocabulary(texts: list[str], vocab_size: int) -> Any:
    """Train byte-level BPE as GPT-2's, with "<|endoftext|>" as id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="prepare_quickstart_text.py", description=__doc__)
    parser.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="folder for the three files")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, metavar="N", help="entries of the vocabulary")
    arguments = parser.parse_args()
    documents = gather_documents()
    num_bytes = sum(len(text.encode()) for _, text in documents)
    if num_bytes < MIN_BYTES:
        print(f"error: this Python documents itself in {num_bytes} bytes, need {MIN_BYTES}", file=sys.stderr)
        return 2
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "source": name}) + "\n" for name, text in documents]
    (arguments.output_dir / "quickstart.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = train_vocabulary([text for _, text in documents], arguments.vocab_size)
    tokenizer.model.save(str(arguments.output_dir))
    print(
        f"Wrote {len(documents)} documents ({num_bytes / 1e6:.1f} MB) and a vocabulary of "
        f"{tokenizer.get_vocab_size()} entries to {arguments.output_dir}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
