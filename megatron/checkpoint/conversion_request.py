"""Options of a conversion, and the options without effect for its two formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats import idle_lines


@dataclass(frozen=True, kw_only=True)
class Target:
    """Changes made by a conversion; None keeps the checkpoint's value."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    make_vocab_size_divisible_by: int | None = None
    params_dtype: str | None = None
    keeps_optimizer: bool = True


@dataclass(frozen=True)
class Upcycling:
    """Experts that replace each dense feed-forward layer; each has 1 / ``granularity`` of the layer's channels."""

    num_experts: int
    topk: int = 2
    granularity: int = 1

    def problem(self) -> str | None:
        """Return why no dense model can be upcycled in this way, or None."""
        experts, topk, granularity = self.num_experts, self.topk, self.granularity
        if granularity < 1:
            return f"--moe-upcycling-granularity {granularity} is not positive; use 1 or more"
        if experts < 2 or experts % granularity:
            return (
                f"--num-experts {experts} is not a multiple of --moe-upcycling-granularity {granularity} that is at "
                f"least 2; use for example {8 * granularity}"
            )
        if topk < 2:
            return (
                f"--moe-router-topk {topk}: the weight of a single expert is always 1, so the router could not learn; "
                "use 2 or more"
            )
        if topk > experts or topk % granularity:
            step = max(granularity, 2)
            return (
                f"--moe-router-topk {topk} is not a multiple of --moe-upcycling-granularity {granularity} up to "
                f"--num-experts {experts}; use for example {step}"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """Source, target and verification of a conversion.

    Attributes:
        loader: format to read, a key of `FORMATS`.
        saver: format to write, a key of `FORMATS`.
        ckpt_step: iteration to convert; None is the newest.
        target: changes to make; the optimizer state is kept only if both formats can hold it.
        true_vocab_size: vocabulary size without padding rows, for Megatron-LM's files.
        tokenizer: keywords of `build_tokenizer` for the tokenizer to record; empty for the checkpoint's own.
        told: model settings that a torchtitan folder does not record.
        verify: read the result again and compare it.
        test_logits: compare the logits with the transformers package's.
        merges_adapters: merge the LoRA adapters into the weights.
        takes_averages: write the EMA of the weights instead of the weights.
        base_model: folder of the base model of PEFT adapters, or of adapters of quantized weights that are merged.
        upcycling: experts that replace the dense feed-forward layers.
    """

    load_dir: Path
    save_dir: Path
    loader: str
    saver: str
    ckpt_step: int | None
    target: Target
    true_vocab_size: int | None
    tokenizer: Mapping[str, Any]
    told: Mapping[str, Any]
    verify: bool
    test_logits: bool
    merges_adapters: bool = False
    takes_averages: bool = False
    base_model: Path | None = None
    upcycling: Upcycling | None = None


def idle_flags(request: ConversionRequest, found: str, saver: str) -> list[str]:
    """Return a line for each flag that has no effect, or a reduced effect, for these two formats."""
    target = request.target
    layout = {
        "--target-tensor-parallel-size": target.tensor_parallel_size,
        "--target-pipeline-parallel-size": target.pipeline_parallel_size,
        "--target-expert-parallel-size": target.expert_parallel_size,
        "--target-num-layers-per-virtual-pipeline-stage": target.num_layers_per_virtual_pipeline_stage,
        "--make-vocab-size-divisible-by": target.make_vocab_size_divisible_by,
    }
    given = [f"{flag} {value}" for flag, value in layout.items() if value is not None]
    lines: list[str] = []
    if request.base_model is not None and "peft" not in (found, saver) and not request.merges_adapters:
        lines.append(f"--base-model {request.base_model} has no effect: only adapters have a base model")
    if saver in ("hf", "peft"):
        lines += [f"{flag} has no effect: a Hugging Face folder has no layout and no padding" for flag in given]
        lines += [
            f"--{name.replace('_', '-')} {value} has no effect: a Hugging Face folder gets the tokenizer files of the "
            "checkpoint"
            for name, value in request.tokenizer.items()
        ]
        if not target.keeps_optimizer:
            lines.append("--no-save-optim has no effect: a Hugging Face folder never contains optimizer state")
    elif saver == "native":
        lines += [
            (f"{flag} changes only the recorded configuration: native checkpoints can be loaded with any layout")
            for flag in given
        ]
    if found not in ("torch", "torch_dist") and request.true_vocab_size is not None:
        lines.append(
            f"--true-vocab-size {request.true_vocab_size} has no effect: only Megatron's files contain padding"
        )
    return lines + (idle_lines(request.told) if found != "torchtitan" else [])
