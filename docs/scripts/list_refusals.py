"""List each message with which a command rejects its input, and build the site's page of error messages from the list.

python docs/scripts/list_refusals.py

The script reads the source files and imports none of them. A message is the argument of an exception for wrong input,
or a sentence that a check of flags returns. Values that the program fills in are shown as an ellipsis. The hook
docs/hooks/built_pages.py adds the page to the site; run by itself, the script prints the page.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.scripts.markdown_cells import code, flags_as_code, prose  # noqa: E402

MISTAKES = ROOT / "tests" / "unit" / "config" / "frozen_mistakes.json"
VALUE = "…"
# A ValueError of the library becomes the end of the message that names the flag.
BASES = ("InputError", "TrainingError", "ValueError")
CHECKING_FILES = (
    "megatron/config/", "megatron/core/config_base.py", "megatron/core/parallel_config.py",
    "megatron/core/pipeline_parallel/stage_layout.py",
)  # fmt: skip
"""In these files every formatted sentence is a message about a command line, whatever the function's name."""
OTHER_SENTENCES = ("megatron/config/deprecated_names.py", "megatron/config/printed_config.py")
_CHECKING = re.compile(r"problem|check|conflict|refus|mistake|unknown|wrong")
_FEWEST_WORDS = 2

SUBJECTS = {
    "Flags": ("megatron/config/", "megatron/core/config_base.py", "megatron/core/parallel_config.py"),
    "Model and parallel layout": ("megatron/core/",),
    "Data and tokenizers": (
        "megatron/core/datasets/", "megatron/core/tokenizers/", "megatron/data/", "megatron/training/data_plan.py",
        "megatron/training/batch_source.py", "megatron/cli/preprocess_data.py", "megatron/cli/clean_dataset.py",
        "megatron/cli/inspect_batch.py", "megatron/cli/merge_datasets.py", "megatron/cli/inspect_dataset.py",
    ),
    "Checkpoints": ("megatron/core/dist_checkpointing/", "megatron/checkpoint/", "megatron/cli/convert.py"),
    "Files and object stores": (
        "megatron/core/object_store.py", "megatron/core/safe_io.py", "megatron/core/ranged_file.py",
    ),
    "Training": ("megatron/training/",),
    "Planning and simulation": (
        "megatron/planner/", "megatron/cli/plan", "megatron/cli/calibrate.py", "megatron/cli/simulate.py",
        "megatron/cli/explain.py", "megatron/cli/report_theoretical_memory.py", "megatron/cli/visualize_pipeline.py",
    ),
    "Scripts of other trainers": ("megatron/cli/adopt/",),
    "Text generation and serving": (
        "megatron/serving/", "megatron/core/inference/", "megatron/cli/generation_arguments.py",
        "megatron/cli/serve.py", "megatron/cli/chat.py", "megatron/cli/evaluate.py",
        "megatron/cli/text_generation_cli.py", "megatron/cli/run_text_generation_server.py",
    ),
    "Plots": ("megatron/plotting/", "megatron/cli/plot.py", "megatron/cli/dashboard.py"),
    "Other commands": ("megatron/", "pretrain_gpt.py"),
}  # fmt: skip
"""The source files of each section of the page; the longest matching path decides."""

_ANOTHER = (
    "list what the checkpoint contains with `megatron inspect FOLDER`; load an intact checkpoint or save a new one"
)
_NOTE = "this is a note and the run continues: omit the flag, or set what the flag requires; see [flags](arguments.md)"
_PLANNING = "see [planning](planning.md)"
_FILE_SYSTEM = "check the path, its permissions, and the error of the file system or the store"
_DATA = "check the data files that the message names; see [data sets](datasets.md)"
_PREPARING = "fix the input or the flag that the message names; see [preparing text](preprocessing.md)"
ADVICE = {
    "megatron/": "change the value that the message names; `megatron COMMAND --help` lists the flags of a command",
    "pretrain_gpt.py": "change the value that the message names; `--help` lists the flags",
    "megatron/config/": "change the flag that the message names; see [flags](arguments.md)",
    "megatron/config/resolution.py": _NOTE,
    "megatron/config/megatron_flags.py": "do what the message says after its colon, or omit the flag",
    "megatron/config/checks/model.py": "change the flag that the message names; see [FP8](fp8.md), "
    "[mixture of experts](mixture_of_experts.md), [MLA](attention.md#multi-head-latent-attention-mla)",
    "megatron/config/checks/run_checks.py": "change the flag that the message names, or name files that exist; "
    "see [flags](arguments.md) and [data sets](datasets.md)",
    "megatron/config/checkpoint_arguments.py": "name a checkpoint that records its model, or pass the model's flags",
    "megatron/config/config_sources.py": "fix the line of the file; see "
    "[configuration files](running.md#configuration-files)",
    "megatron/core/config_base.py": "fix the field or its value in the configuration file, or in a class of your own",
    "megatron/core/": "change the size or setting that the message names; `megatron explain` shows a layout",
    "megatron/core/pipeline_parallel/": "see [pipeline parallelism](parallelism.md#pipeline-parallelism)",
    "megatron/core/datasets/": "check the file that the message names; if token files are damaged, run "
    "`megatron preprocess` again",
    "megatron/core/datasets/conversation": "fix the conversation or its template; see [fine-tuning](fine_tuning.md)",
    "megatron/core/datasets/data_history.py": "resume with the data that the run started with, or use `--finetune`",
    "megatron/core/tokenizers/": "name the tokenizer's own files, and their kind with `--tokenizer-type`",
    "megatron/core/object_store.py": _FILE_SYSTEM,
    "megatron/core/safe_io.py": _FILE_SYSTEM,
    "megatron/core/ranged_file.py": _FILE_SYSTEM,
    "megatron/core/dist_checkpointing/": _ANOTHER,
    "megatron/core/inference/": "change the request; see [text generation](text_generation.md)",
    "megatron/data/": "fix the input that the message names, or omit it; see [preparing text](preprocessing.md)",
    "megatron/cli/preprocess_data.py": _PREPARING,
    "megatron/cli/clean_dataset.py": _PREPARING,
    "megatron/cli/merge_datasets.py": _PREPARING,
    "megatron/training/": "find the iteration in the log before the message; see [fault tolerance](fault_tolerance.md)",
    "megatron/training/data_plan.py": _DATA,
    "megatron/training/batch_source.py": _DATA,
    "megatron/checkpoint/checkpoint_folder.py": "read the file system's error; see [checkpoints](checkpoint_format.md)",
    "megatron/checkpoint/save.py": "read the file system's error; see [checkpoints](checkpoint_format.md)",
    "megatron/checkpoint/conversion": "see [converting checkpoints](converting.md)",
    "megatron/training/fault_tolerance/": "see [hangs](hangs.md)",
    "megatron/checkpoint/": _ANOTHER,
    "megatron/checkpoint/formats/huggingface/": "use the folder as its author published it; see "
    "[Hugging Face models](huggingface.md)",
    "megatron/checkpoint/formats/adapters.py": "see [LoRA adapters](lora.md)",
    "megatron/checkpoint/formats/megatron/": "see [Megatron checkpoints](megatron_checkpoints.md)",
    "megatron/cli/convert.py": "see [converting checkpoints](converting.md)",
    "megatron/planner/": _PLANNING,
    "megatron/cli/plan": _PLANNING,
    "megatron/cli/explain.py": _PLANNING,
    "megatron/planner/simulation/": "see [simulation](simulation.md)",
    "megatron/cli/adopt/": "change the script, or pass the flag yourself; see [adopting scripts](adopting_scripts.md)",
    "megatron/serving/": "change the request or the flag that the message names; see [serving](serving.md)",
    "megatron/cli/generation_arguments.py": "change the request or the flag; see [text generation](text_generation.md)",
    "megatron/plotting/": "pass the `--save` folder of a run; see [plots](plots.md)",
    "megatron/verification/": "see [layout verification](verification.md)",
    "megatron/verification/faults/": "see [your own cluster](fault_tolerance.md#on-your-own-cluster)",
}
"""Advice for messages that contain none, by source file; the longest matching path decides."""

PARTICULAR = dict(
    line.split("\t")
    for line in Path(__file__).with_name("advice_on_messages.tsv").read_text(encoding="utf-8").splitlines()
)
"""Advice for single messages that contain none."""

_HEAD = """---
search:
  boost: 0.2
---

# Error messages

This page lists every message with which a command rejects its input or ends a run, and how to fix the cause. Search the
page for a few words of your message. `…` stands for a value, or for text from a library or the operating system. A fix
in code font is the second half of the message itself. See also [hangs](hangs.md).

| exit status | meaning |
|---|---|
| 0 | success, or a run that was stopped by a signal and saved a checkpoint |
| 1 | the run failed, or a check found an error |
| 2 | the input is invalid: fix it and start again |
| 128 + N | signal N ended the process |
"""

_MISTAKES_HEAD = """## Typical mistakes

The program reports each of these in one line, before it imports torch, and exits with status 2. Each example adds flags
to the following valid command line, or removes flags from it:

```
{command}
```
"""


@dataclass(frozen=True)
class Message:
    """A message without its values, and the file that contains it."""

    text: str
    path: str

    @property
    def subject(self) -> str:
        """Return the section of the page that lists the message."""
        fitting = [(len(p), name) for name, paths in SUBJECTS.items() for p in paths if self.path.startswith(p)]
        return max(fitting)[1]

    @property
    def what(self) -> str:
        """Return what is wrong: the text before the semicolon, or the whole text if it begins with a semicolon."""
        return self.text.partition("; ")[0].strip() or self.text

    @property
    def advice(self) -> str:
        """Return how to fix the cause: from the message if it says so, else from the advice for its file."""
        message, _, said = self.text.partition("; ")
        if said and said != VALUE:
            return code(said)
        if message in PARTICULAR:
            return PARTICULAR[message]
        if said:
            return "what the message says"
        return max((len(p), text) for p, text in ADVICE.items() if self.path.startswith(p))[1]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return an expression that finds the message with any values."""
        return re.compile(".*".join(re.escape(part) for part in self.text.split(VALUE)), re.DOTALL)


def templates(node: ast.expr) -> list[str]:
    """Return each possible text of an expression, with an ellipsis for each value known only at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(templates(value)[0] for value in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in templates(node.left) for right in templates(node.right)]
    if isinstance(node, ast.IfExp):
        return [*templates(node.body), *templates(node.orelse)]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [text for item in node.elts for text in templates(item)]
    return templates(node.elt) if isinstance(node, ast.ListComp) else [VALUE]


def error_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names of the exception classes that are shown without a traceback or end a run."""
    names, bases = set(BASES), {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while more := {name for name, of in bases.items() if of & names} - names:
        names |= more
    return names


def messages_of(path: str, tree: ast.Module, errors: set[str]) -> Iterator[Message]:
    """Yield the messages of a source file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and name_of(node.func) in errors:
            for text in templates(node.args[0]):
                yield Message(tidy(text), path)
        if isinstance(node, ast.FunctionDef) and _CHECKING.search(node.name):
            for text in answers(node):
                yield Message(tidy(text), path)
    if path.startswith(CHECKING_FILES) and path not in OTHER_SENTENCES:
        for text in sentences(tree):
            yield Message(tidy(text), path)


def name_of(function: ast.expr) -> str:
    """Return the last part of the name of a called function."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def answers(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the texts that a check yields, returns or appends to a list."""
    for node in ast.walk(function):
        found: ast.expr | None = None
        if isinstance(node, (ast.Yield, ast.Return, ast.AugAssign)):
            found = node.value
        elif isinstance(node, ast.Call) and name_of(node.func) == "append":
            found = node.args[0]
        yield from templates(found) if found is not None else ()


def sentences(node: ast.AST) -> Iterator[str]:
    """Yield each outermost text below a node, except docstrings and the help texts of fields."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.JoinedStr, ast.BinOp)) and templates(child) != [VALUE]:
            yield from templates(child)
        elif isinstance(child, (ast.Return, ast.Yield)) and isinstance(child.value, ast.Constant):
            yield from templates(child.value)
        elif not isinstance(child, ast.AnnAssign):
            yield from sentences(child)


def tidy(text: str) -> str:
    """Return a text on one line, with adjacent ellipses merged."""
    return re.sub(f"(?:{VALUE} ?)+{VALUE}", VALUE, " ".join(text.split()))


def is_message(message: Message) -> bool:
    """Tell whether a text has words besides its values and the names of flags."""
    return len(re.findall(r"[a-z]{2,}", re.sub(r"--[\w-]+", "", message.text))) >= _FEWEST_WORDS and " " in message.text


@functools.cache
def all_messages() -> tuple[Message, ...]:
    """Return all messages in the order of the page."""
    paths = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "megatron").rglob("*.py"))]
    trees = {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}
    errors = error_names(trees)
    found = {each for path, tree in trees.items() for each in messages_of(path, tree, errors) if is_message(each)}
    return tuple(sorted(found, key=lambda each: (each.path, each.text)))


def anchors(messages: Iterable[Message]) -> Iterator[str]:
    """Yield the anchor of each message: its first words, and a number if an earlier message has the same words."""
    taken: dict[str, int] = {}
    for message in messages:
        words = re.findall(r"[a-z0-9]+", message.text.lower())[:8]
        name = "m-" + "-".join(words)
        taken[name] = taken.get(name, 0) + 1
        yield name if taken[name] == 1 else f"{name}-{taken[name]}"


def document(messages: Sequence[Message], mistakes: dict[str, Any]) -> str:
    """Return the page in Markdown: typical mistakes first, then all messages by subject."""
    entries: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for message, anchor in zip(messages, anchors(messages), strict=True):
        entries[message.subject].append(f"{code(message.what)} {{#{anchor}}}\n:   {message.advice}\n")
    sections = [f"## {subject}\n\n" + "\n".join(lines) for subject, lines in entries.items() if lines]
    return "\n".join([_HEAD, mistakes_section(mistakes), *sections])


def mistakes_section(mistakes: dict[str, Any]) -> str:
    """Return the section of typical mistakes and their messages."""
    command = mistakes["command_line"].replace(" --", " \\\n  --")
    parts = [_MISTAKES_HEAD.format(command=command)]
    for title, examples in mistakes["mistakes"].items():
        lines = [f"{mistake_title(each)}\n:   {shown_messages(each)}\n" for each in examples]
        parts.append(f"### {title}\n\n" + "\n".join(lines))
    return "\n".join(parts)


def mistake_title(mistake: dict[str, Any]) -> str:
    """Return a mistake in Markdown: the added flags, the removed flags and the number of processes."""
    removed = "".join(f" without {flag}" for flag in mistake["without"])
    processes = f" on {mistake['processes']} processes" if mistake["processes"] > 1 else ""
    added = code(mistake["added"]) if mistake["added"] else ""
    return (added + prose(removed + processes)).strip()


def shown_messages(mistake: dict[str, Any]) -> str:
    """Return the messages about a mistake in Markdown, one per line."""
    return "<br>".join(flags_as_code(prose(message)) for message in mistake["messages"])


def page() -> str:
    """Return the page of error messages as the site shows it."""
    return document(all_messages(), json.loads(MISTAKES.read_text(encoding="utf-8")))


if __name__ == "__main__":
    print(page(), end="")
