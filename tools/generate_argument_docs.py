"""Write docs/arguments.md from the configuration classes; with --check, only report whether the page is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.scripts.markdown_cells import code, prose  # noqa: E402
from megatron.config import NO_EFFECT, NOT_SUPPORTED, command_line_fields, config_parts  # noqa: E402
from megatron.core.config_base import FieldSpec, field_docs, field_specs  # noqa: E402

DOCUMENT = ROOT / "docs" / "arguments.md"

GROUPS = {
    "TransformerConfig": "Model",
    "GPTConfig": "Vocabulary and positions",
    "MoEConfig": "Mixture of experts",
    "MLAConfig": "Multi-head latent attention",
    "RotaryConfig": "Multi-head latent attention",
    "MTPConfig": "Multi-token prediction",
    "MupConfig": "muP",
    "Fp8Config": "FP8",
    "ModelParallelConfig": "Parallelism and precision",
    "DistributedDataParallelConfig": "Data parallelism and FSDP",
    "TrainingConfig": "Training",
    "OptimizerConfig": "Optimizer",
    "SchedulerConfig": "Learning rate and weight decay schedules",
    "DataConfig": "Data",
    "FineTuningConfig": "Fine-tuning",
    "FillInTheMiddleConfig": "Fill-in-the-middle",
    "TokenizerConfig": "Tokenizer",
    "ValidationConfig": "Validation",
    "CheckpointConfig": "Checkpoints",
    "LoggingConfig": "Logging",
    "InitializationConfig": "Initialization",
    "FaultConfig": "Fault tolerance",
    "RestartConfig": "In-process restart",
    "SourceConfig": "Presets and configuration files",
}
"""The section of the page for each class that defines flags, in the order of the page."""

_HEAD = """---
search:
  boost: 0.2
---

# Flags of pretrain_gpt.py

This page lists all training flags by topic. `python pretrain_gpt.py --help` prints the most used flags, and
`--help-all` all of them.

- `N` is an integer and `X` a number. `{a,b}` lists the accepted values. A flag without a value is a switch.
- A flag without a stated default is off, 0, or depends on other flags.
- If a flag occurs twice, the last value counts, unless the text says that the flag may be repeated.
- Write the whole name of a flag: abbreviations and unknown flags are errors.
- Each flag has an anchor with its name, for example [`--num-layers`](#--num-layers).

`tools/generate_argument_docs.py` generates this page from the configuration classes. Do not edit the page.
"""


def document() -> str:
    """Return the page in Markdown."""
    by_owner: dict[str, list[str]] = {owner: [] for owner in GROUPS}
    for config_class in config_parts().values():
        docs = field_docs(config_class)
        # Required flags and sizes open a section, not the flags that --help lists first.
        for spec in sorted(field_specs(config_class), key=lambda spec: spec.options.listed_first):
            if spec.options.cli:
                by_owner.setdefault(spec.owner, []).append(_entry(spec, spec.help_text(docs[spec.name])))
    groups: dict[str, list[str]] = {}
    for owner, entries in by_owner.items():
        groups.setdefault(GROUPS.get(owner, owner.removesuffix("Config")), []).extend(entries)
    sections = ["\n".join([f"## {title}\n", *entries]) for title, entries in groups.items() if entries]
    return "\n".join([_HEAD, *sections, _no_effect_section(), _not_supported_section()])


def _entry(spec: FieldSpec, doc: str) -> str:
    value = "" if spec.is_bool else f" {spec.metavar}" + (" ..." if spec.options.nargs == "+" else "")
    names = "\n".join(f"`{name}{value}`" for name in spec.flags)
    default = "" if spec.is_bool else _default(spec)
    facts = " Required." if spec.is_required else f" Default: {default}." if default else ""
    return f"{names}\n: {prose(doc)}{facts}\n"


def _default(spec: FieldSpec) -> str:
    # As in --help: 0 means that the flag is off, or that its value depends on others.
    if spec.default in (None, (), "", 0):
        return ""
    if isinstance(spec.default, tuple):
        return " ".join(code(str(value)) for value in spec.default)
    return code(str(spec.default))


def _no_effect_section() -> str:
    lines = ["## Accepted without effect\n", "Each of these flags prints one line that says why it has no effect.\n"]
    flags: dict[str, list[str]] = {}
    for name, note in sorted(NO_EFFECT.items()):
        flags.setdefault(note.reason, []).append(f"`{name}`\n")
    lines += [f"{''.join(names)}: {prose(reason)}\n" for reason, names in flags.items()]
    return "\n".join(lines)


def _not_supported_section() -> str:
    lines = ["## Not supported yet\n", "The program rejects these flags of Megatron-LM by name:\n"]
    lines.append(", ".join(f"`{name}`" for name in sorted(NOT_SUPPORTED)) + ".\n")
    lines.append("The program rejects these values of Megatron-LM by name:\n")
    for spec in sorted((spec for _, spec in command_line_fields() if spec.options.not_built), key=lambda s: s.name):
        lines.append(f"- `{spec.flags[0]}`: {', '.join(f'`{value}`' for value in spec.options.not_built)}")
    return "\n".join([*lines, ""])


def main() -> int:
    """Write or check the page, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    arguments = parser.parse_args()
    text = document()
    if not arguments.check:
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != text:
        print(f"{DOCUMENT.name} is out of date; run python tools/generate_argument_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
