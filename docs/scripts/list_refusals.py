"""Write docs/messages.md: each message with which a command refuses its input; with --check, compare.

python docs/scripts/list_refusals.py

A message is what an error of the input is made of, wherever that is, and what a check of flags answers. Values that
are put in are shown as an ellipsis.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.scripts.markdown_cells import code  # noqa: E402

DOCUMENT = ROOT / "docs" / "messages.md"
VALUE = "…"
# A ValueError of the library becomes the end of the message that names the flag.
BASES = ("InputError", "TrainingError", "ValueError")
CHECKING_FILES = (
    "megatron/config/", "megatron/core/config_base.py", "megatron/core/model_parallel_config.py",
    "megatron/core/pipeline_parallel/stage_layout.py",
)  # fmt: skip
"""Here every sentence that is put together is an answer to a command line, whatever the function is called."""
OTHER_SENTENCES = ("megatron/config/deprecated_names.py", "megatron/config/printed_config.py")
_CHECKING = re.compile(r"problem|check|conflict|refus|mistake|unknown|wrong")
_FEWEST_WORDS = 2

SUBJECTS = {
    "Flags": ("megatron/config/", "megatron/core/config_base.py", "megatron/core/model_parallel_config.py"),
    "The layout, the model and its parts": ("megatron/core/",),
    "Data and tokenizers": (
        "megatron/core/datasets/", "megatron/core/tokenizers/", "megatron/data/", "megatron/training/data_plan.py",
        "megatron/training/batch_source.py", "megatron/cli/preprocess_data.py", "megatron/cli/clean_dataset.py",
        "megatron/cli/inspect_batch.py", "megatron/cli/merge_datasets.py", "megatron/cli/inspect_dataset.py",
    ),
    "Checkpoints": ("megatron/core/dist_checkpointing/", "megatron/checkpoint/", "megatron/cli/convert.py"),
    "Files and object stores": (
        "megatron/core/object_store.py", "megatron/core/safe_io.py", "megatron/core/ranged_file.py",
    ),
    "While a run starts, trains and ends": ("megatron/training/",),
    "Planning and explaining": (
        "megatron/planner/", "megatron/cli/plan", "megatron/cli/calibrate.py", "megatron/cli/simulate.py",
        "megatron/cli/explain.py", "megatron/cli/report_theoretical_memory.py", "megatron/cli/visualize_pipeline.py",
    ),
    "Other trainers' scripts": ("megatron/cli/adopt/",),
    "Generating and serving": (
        "megatron/serving/", "megatron/core/inference/", "megatron/cli/generation_arguments.py",
        "megatron/cli/serve.py", "megatron/cli/chat.py", "megatron/cli/evaluate.py",
        "megatron/cli/text_generation_cli.py", "megatron/cli/run_text_generation_server.py",
    ),
    "Pictures": ("megatron/plotting/", "megatron/cli/plot.py", "megatron/cli/dashboard.py"),
    "Other commands": ("megatron/", "pretrain_gpt.py"),
}  # fmt: skip
"""Where the messages of each section of the page come from; the longest path that fits decides."""

_ANOTHER = "what a checkpoint holds is shown by `megatron inspect FOLDER`; load an intact one, or save it anew"
_NOTE = "a note, and the run continues: omit the flag, or set what it requires; [its meaning](arguments.md)"
ADVICE = {
    "megatron/": "change what is named; `megatron COMMAND --help` says what a command takes",
    "pretrain_gpt.py": "change what is named; `--help` says what the flags take",
    "megatron/config/": "change the flag that is named; [its meaning and values](arguments.md)",
    "megatron/config/resolution.py": _NOTE,
    "megatron/config/megatron_flags.py": "do what the message says after its colon, or omit the flag",
    "megatron/config/checks/model.py": "change the flag that is named; see [FP8](fp8.md), "
    "[mixture of experts](mixture_of_experts.md), "
    "[multi-head latent attention](attention.md#multi-head-latent-attention-mla)",
    "megatron/config/checks/run_checks.py": "change the flag that is named, or name files that exist; "
    "see [the flags](arguments.md) and [data sets](datasets.md)",
    "megatron/config/checkpoint_arguments.py": "name a checkpoint that knows its model, or give its flags",
    "megatron/config/config_sources.py": "fix the line of the file; see [files](running.md#configuration-files)",
    "megatron/core/config_base.py": "fix the field or its value in the file, or in the class where you add one",
    "megatron/core/": "change the size or setting that is named; `tools/explain.py` shows a layout without running it",
    "megatron/core/pipeline_parallel/": "see [pipelines](parallelism.md#pipeline-parallelism)",
    "megatron/core/datasets/": "look at the file that is named; damaged token files: run `megatron preprocess` again",
    "megatron/core/datasets/conversation": "fix the conversation or its template; see [fine-tuning](fine_tuning.md)",
    "megatron/core/datasets/data_history.py": "resume with the data the run began with, or use `--finetune`",
    "megatron/core/tokenizers/": "name the tokenizer's own files; `--tokenizer-type` says of which kind they are",
    "megatron/core/object_store.py": "look at the path, its permissions, and the store's own message",
    "megatron/core/safe_io.py": "look at the path, its permissions, and the store's own message",
    "megatron/core/ranged_file.py": "look at the path, its permissions, and the store's own message",
    "megatron/core/dist_checkpointing/": _ANOTHER,
    "megatron/core/inference/": "change the request; see [generation](text_generation.md)",
    "megatron/data/": "fix the input that is named, or leave it out; see [preparing text](preprocessing.md)",
    "megatron/cli/preprocess_data.py": "fix the input or the flag that is named; see [data](preprocessing.md)",
    "megatron/cli/clean_dataset.py": "fix the input or the flag that is named; see [data](preprocessing.md)",
    "megatron/cli/merge_datasets.py": "fix the input or the flag that is named; see [data](preprocessing.md)",
    "megatron/training/": "the log before it has the iteration; see [fault tolerance](fault_tolerance.md)",
    "megatron/training/data_plan.py": "look at the data that is named; see [data sets](datasets.md)",
    "megatron/training/batch_source.py": "look at the data that is named; see [data sets](datasets.md)",
    "megatron/checkpoint/checkpoint_folder.py": "see what the file system says; [checkpoints](checkpoint_format.md)",
    "megatron/checkpoint/save.py": "see what the file system says; [checkpoints](checkpoint_format.md)",
    "megatron/checkpoint/conversion": "see [converting](converting.md)",
    "megatron/training/fault_tolerance/": "see [hangs](hangs.md)",
    "megatron/checkpoint/": _ANOTHER,
    "megatron/checkpoint/formats/huggingface/": "take a folder as its author published it, see [here](huggingface.md)",
    "megatron/checkpoint/formats/adapters.py": "see [adapters](lora.md)",
    "megatron/checkpoint/formats/megatron/": "see [what of Megatron's checkpoints is read](megatron_checkpoints.md)",
    "megatron/cli/convert.py": "see [converting](converting.md)",
    "megatron/planner/": "see [what is planned and what is not](planning.md)",
    "megatron/cli/plan": "see [what is planned and what is not](planning.md)",
    "megatron/cli/explain.py": "see [what is planned and what is not](planning.md)",
    "megatron/planner/simulation/": "see [simulation](simulation.md)",
    "megatron/cli/adopt/": "change the script, or give the flag by hand; see [adopting](adopting_scripts.md)",
    "megatron/serving/": "change the request or the flag that is named; see [serving](serving.md)",
    "megatron/cli/generation_arguments.py": "change the request or the flag; see [generation](text_generation.md)",
    "megatron/plotting/": "name a run's `--save` folder; see [plots](plots.md)",
    "megatron/verification/": "see [layout verification](verification.md)",
    "megatron/verification/faults/": "see [fault injection](fault_tolerance.md#on-your-own-cluster)",
}
"""What to do where a message does not say it itself; the longest path that fits decides."""

PARTICULAR = dict(
    line.split("\t")
    for line in Path(__file__).with_name("advice_on_messages.tsv").read_text(encoding="utf-8").splitlines()
)
"""What to do about some messages that do not say it themselves."""

_HEAD = """# Messages and what to do

Generated by `docs/scripts/list_refusals.py` from the code; do not edit. It has every message with which a command
refuses its input or ends a run that is written in the code. `…` stands for values, and for what other libraries and
the operating system say. Search this page for some words of yours. Most messages say what to do behind their
semicolon, which is shown as code here. What is answered to typical mistakes, with values, is in
[Mistakes and answers](mistakes.md); what to do about a run that hangs or is slow in
[Hangs](hangs.md) and [Low throughput](low_throughput.md).

| exit status | meaning |
|---|---|
| 0 | done; also a run that was asked to stop and saved |
| 1 | a run failed, or a check found something wrong |
| 2 | the input cannot be used: fix it and start again |
| 128 + N | ended by signal N |
"""


@dataclass(frozen=True)
class Message:
    """Hold a message with its values left out, and the file that it is made in."""

    text: str
    path: str

    @property
    def subject(self) -> str:
        """Return the section of the page that it belongs to."""
        fitting = [(len(p), name) for name, paths in SUBJECTS.items() for p in paths if self.path.startswith(p)]
        return max(fitting)[1]

    @property
    def what(self) -> str:
        """Return what is wrong: the text in front of its semicolon, or all of one that begins with it."""
        return self.text.partition("; ")[0].strip() or self.text

    @property
    def advice(self) -> str:
        """Return what to do: what the message says, else what is said for its files."""
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
        """Return what finds the message with its values."""
        return re.compile(".*".join(re.escape(part) for part in self.text.split(VALUE)), re.DOTALL)


def templates(node: ast.expr) -> list[str]:
    """Return each text that an expression may be, with an ellipsis for what is known only when it runs."""
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
    """Return the names of the classes of errors that are shown without a traceback, or end a run."""
    names, bases = set(BASES), {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while more := {name for name, of in bases.items() if of & names} - names:
        names |= more
    return names


def messages_of(path: str, tree: ast.Module, errors: set[str]) -> Iterator[Message]:
    """Yield the messages that a file makes."""
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
    """Return the last word of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def answers(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the texts that a check yields, returns or gathers."""
    for node in ast.walk(function):
        found: ast.expr | None = None
        if isinstance(node, (ast.Yield, ast.Return, ast.AugAssign)):
            found = node.value
        elif isinstance(node, ast.Call) and name_of(node.func) == "append":
            found = node.args[0]
        yield from templates(found) if found is not None else ()


def sentences(node: ast.AST) -> Iterator[str]:
    """Yield each text below a node that is not a part of another one, nor a docstring or a field's help."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.JoinedStr, ast.BinOp)) and templates(child) != [VALUE]:
            yield from templates(child)
        elif isinstance(child, (ast.Return, ast.Yield)) and isinstance(child.value, ast.Constant):
            yield from templates(child.value)
        elif not isinstance(child, ast.AnnAssign):
            yield from sentences(child)


def tidy(text: str) -> str:
    """Return a text on one line, without two ellipses beside each other."""
    return re.sub(f"(?:{VALUE} ?)+{VALUE}", VALUE, " ".join(text.split()))


def is_message(message: Message) -> bool:
    """Tell whether a text says something: words of its own beside its values and the names of flags."""
    return len(re.findall(r"[a-z]{2,}", re.sub(r"--[\w-]+", "", message.text))) >= _FEWEST_WORDS and " " in message.text


def all_messages() -> list[Message]:
    """Return the messages of the project's code, in the order of the page."""
    paths = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "megatron").rglob("*.py"))]
    trees = {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}
    errors = error_names(trees)
    found = {each for path, tree in trees.items() for each in messages_of(path, tree, errors) if is_message(each)}
    return sorted(found, key=lambda each: (each.path, each.text))


def anchors(messages: list[Message]) -> Iterator[str]:
    """Yield the anchor of each message: its first words, with a number where another one begins alike."""
    taken: dict[str, int] = {}
    for message in messages:
        words = re.findall(r"[a-z0-9]+", message.text.lower())[:8]
        name = "m-" + "-".join(words)
        taken[name] = taken.get(name, 0) + 1
        yield name if taken[name] == 1 else f"{name}-{taken[name]}"


def document(messages: list[Message]) -> str:
    """Return the whole page."""
    rows: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for message, anchor in zip(messages, anchors(messages), strict=True):
        what = message.what
        cells = (f'<a id="{anchor}"></a>{code(what)}', message.advice, code(message.path))
        rows[message.subject].append(f"| {' | '.join(cells)} |")
    parts = [_HEAD]
    for subject, lines in rows.items():
        if lines:
            table = ["| message | what to do | file |", "|---|---|---|", *lines]
            parts.append("\n".join([f"## {subject}", "", *table, ""]))
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Write the page, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    text = document(all_messages())
    if not parser.parse_args(argv).check:
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != text:
        print(f"{DOCUMENT.name} is out of date; run python docs/scripts/list_refusals.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
