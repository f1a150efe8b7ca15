"""Build the site's page of training flags from the configuration classes.

python docs/scripts/list_flags.py

The hook docs/hooks/built_pages.py adds the page to the site; run by itself, the script prints the page. Each flag has
an anchor with its name, such as ``arguments.md#--num-layers``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.scripts.markdown_cells import code, flags_as_code, prose
from megatron.config import NO_EFFECT, NOT_SUPPORTED, command_line_fields, config_parts
from megatron.core.config_base import FieldSpec, field_docs, field_specs

GROUPS = {
    "DecoderConfig": "Model",
    "GPTConfig": "Vocabulary and positions",
    "MoEConfig": "Mixture of experts",
    "MLAConfig": "Multi-head latent attention",
    "RotaryConfig": "Multi-head latent attention",
    "MTPConfig": "Multi-token prediction",
    "MupConfig": "muP",
    "Fp8Config": "FP8",
    "ParallelConfig": "Parallelism and precision",
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
    "VariantConfig": "Hybrid",
    "LinearAttentionConfig": "Hybrid",
    "PatternConfig": "Hybrid",
    "MambaConfig": "Hybrid",
    "HybridConfig": "Hybrid",
}
"""The section of the page for each class that defines flags, in the order of the page."""

_HEAD = """---
search:
  boost: 0.2
---

# Flags of pretrain_gpt.py

All training flags by topic, as `python pretrain_gpt.py --help-all` prints them. `--help` prints the most used flags.

- `N` is an integer and `X` a number. `{a,b}` lists the accepted values. A flag without a value is a switch.
- A flag without a stated default is off, 0, or depends on other flags.
- If a flag occurs twice, the last value counts, unless the text says that the flag may be repeated.
- Abbreviations and unknown flags are errors.
- Each flag has an anchor with its name, for example [`--num-layers`](#--num-layers).
"""


def page() -> str:
    """Return the page of flags in Markdown."""
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
    names = "\n".join(f"`{name}{value}` {{#{name}}}" for name in spec.flags)
    default = "" if spec.is_bool else _default(spec)
    facts = " Required." if spec.is_required else f" Default: {default}." if default else ""
    return f"{names}\n: {flags_as_code(prose(doc))}{facts}\n"


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
        flags.setdefault(note.reason, []).append(f"`{name}` {{#{name}}}\n")
    lines += [f"{''.join(names)}: {flags_as_code(prose(reason))}\n" for reason, names in flags.items()]
    return "\n".join(lines)


def _not_supported_section() -> str:
    lines = ["## Not supported yet\n", "The program rejects these flags of Megatron-LM by name:\n"]
    lines.append(", ".join(f"`{name}`" for name in sorted(NOT_SUPPORTED)) + ".\n")
    lines.append("The program rejects these values of Megatron-LM by name:\n")
    for spec in sorted((spec for _, spec in command_line_fields() if spec.options.not_built), key=lambda s: s.name):
        lines.append(f"- `{spec.flags[0]}`: {', '.join(f'`{value}`' for value in spec.options.not_built)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
