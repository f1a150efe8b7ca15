"""Print the resolved configuration: as Megatron-LM's dotted list, and as a TOML file that --config reads back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.config.megatron_flags import FUSIONS
from megatron.config.run_config import RunConfig, config_parts
from megatron.core.config_base import FieldSpec, field_docs, field_specs, field_value

_DOTS_END = 48
_NO_BREAK = "\0"
_MOST_CHARACTERS = 80
"""A brief log cuts longer values of arguments."""


def format_arguments(config: RunConfig) -> str:
    """Return the list of arguments at the start of every log: one line per argument, sorted by name.

    Dots fill each line up to column 51, where the value follows.
    """
    lines = ["------------------------ arguments ------------------------"]
    values = argument_values(config)
    for name in sorted(values, key=str.lower):
        lines.append(f"  {name} {'.' * (_DOTS_END - len(name))} {values[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def summarize(config: RunConfig, record: str | None = None) -> str:
    """Return the summary of a brief log: the run in a few lines, and the arguments that differ from their defaults.

    ``record`` is the file with all arguments, or None if there is none.
    """
    model, training, checkpoint = config.model, config.training, config.checkpoint
    saved = "nowhere" if checkpoint.save is None else checkpoint.save
    if checkpoint.save is not None and checkpoint.save_interval is not None:
        saved += f", every {checkpoint.save_interval:,} iterations"
    sizes = [f"{axis.upper()} {size}" for axis, size in config.parallel_sizes.grid.items() if size > 1]
    processes = f", {config.world_size} processes ({', '.join(sizes)})" if sizes else ""
    listed = "--log-arguments prints all" if record is None else f"all are in {record}"
    # A flag and its value stay on one line.
    words = " ".join(word.replace(" ", _NO_BREAK) for word in given_arguments(config))
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(words, _WIDTH, initial_indent="     ", subsequent_indent="     ", **options)
    return "\n".join(
        [
            f" > model: {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
            f"sequences of {config.data.seq_length:,} tokens, {model.params_dtype}",
            f" > run: {config.train_iters:,} iterations of {training.global_batch_size:,} samples in micro-batches of "
            f"{training.micro_batch_size}{processes}",
            f" > checkpoints: {saved}",
            f" > arguments that differ from their defaults ({listed}):",
            *(line.replace(_NO_BREAK, " ") for line in lines),
        ]
    )


def given_arguments(config: RunConfig) -> list[str]:
    """Return each given flag whose value differs from its default, as typed; long values are cut.

    Values that are derived from others are left out.
    """
    found = []
    for spec, value in config.flags():
        is_default = value is None or (value == spec.default and not spec.is_required)
        is_chosen_by_run = spec.name == "log_interval" and value == 0
        is_given = spec.name in config.logging.given_arguments and spec.name not in _NEVER
        if is_default or is_chosen_by_run or not is_given:
            continue
        text = " ".join(" ".join(map(str, value if isinstance(value, tuple) else (value,))).split())
        found.append(spec.typed(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"))
    return found


def argument_values(config: RunConfig) -> dict[str, Any]:
    """Return every argument of a run by Megatron's name, including derived arguments, as rank 0 prints them."""
    values = {spec.name: list(value) if isinstance(value, tuple) else value for spec, value in config.flags()}
    model = config.model
    num_chunks = config.stage_layout.num_chunks
    return values | {
        "world_size": config.world_size,
        "rank": 0,
        "data_parallel_size": config.data_parallel_size,
        "virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None,
        "params_dtype": model.params_dtype,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": config.data.seq_length,
        "layernorm_epsilon": model.norm_epsilon,
        "consumed_train_samples": 0,
        "eval_iters": config.validation.most_eval_iters,
        "attention_softmax_in_fp32": True,
        **{name: name not in config.logging.unused_fusions for name in FUSIONS.values()},
    }


_WIDTH = 118
_ALWAYS = ("tokenizer_type",)
"""Fields whose default depends on other fields, so that an explicit default has a meaning."""
_NEVER = ("config", "model_preset", "print_config", "explain", "use_checkpoint_args")
"""Fields that name sources of other values, which are resolved here, or an action instead of training."""


def format_config(config: RunConfig, heading: Sequence[str] = (), with_help: bool = True) -> str:
    """Return TOML with every flag below its help text; flags at their defaults are comments.

    Read back for the same world size, it resolves to the same configuration.
    """
    lines = [f"# {line}" for line in heading]
    for part, config_class in config_parts().items():
        specs = [spec for spec in field_specs(config_class) if spec.options.cli and spec.name not in _NEVER]
        if not specs:
            continue
        docs, values = field_docs(config_class), getattr(config, part)
        lines += ["", f"[{part}]"]
        for spec in specs:
            lines += _entry(spec, field_value(values, spec.name), docs[spec.name] if with_help else None)
    return "\n".join([*lines, ""])


def _entry(spec: FieldSpec, value: Any, doc: str | None) -> Iterator[str]:
    """Yield the lines of one field; without ``doc``, no lines for a field at its default."""
    is_given = value is not None and (value != spec.default or spec.is_required or spec.name in _ALWAYS)
    if doc is not None:
        yield from ("", *textwrap.wrap(doc, _WIDTH, initial_indent="# ", subsequent_indent="# "))
    if is_given:
        yield f"{spec.name} = {_toml(value)}"
    elif doc is not None:
        yield f"# {spec.name} = {'' if value is None else _toml(value)}".rstrip()


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
