"""The layouts of models with experts that are verified.

Routing is a choice: where two experts score alike, rounding decides, and layouts may differ. In float64 with weights
drawn at random no two of these cells' scores are as near as that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.verification.cells import SHAPES, Cell, Layout, make_cell

_EXPERTS = (
    *("--num-experts", "8", "--moe-ffn-hidden-size", "12", "--moe-router-topk", "2"),
    *("--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01"),
)
EXPERT_SHAPES: dict[str, tuple[str, ...]] = {
    "mixtral": (*SHAPES["llama"], *_EXPERTS),
    "gpt2-experts": (*_EXPERTS, "--moe-layer-freq", "2"),
    "qwen3-moe": (
        *SHAPES["qwen"],
        *_EXPERTS,
        *("--moe-router-pre-softmax", "--moe-router-topk", "3", "--moe-router-load-balancing-type", "seq_aux_loss"),
    ),
    "deepseek-experts": (
        *SHAPES["llama"],
        *_EXPERTS,
        *("--moe-router-score-function", "sigmoid", "--moe-router-num-groups", "4", "--moe-router-group-topk", "2"),
        *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.02"),
        *("--moe-router-topk-scaling-factor", "1.5", "--moe-layer-freq", "([0]+[1]*3)"),
        *("--moe-shared-expert-intermediate-size", "16"),
    ),
    "dropping": (
        # Positions are learned: with rotary ones two equal tokens at the start of a sequence weigh the same.
        *("--swiglu", "--disable-bias-linear"),
        *_EXPERTS,
        *("--moe-expert-capacity-factor", "0.75", "--moe-shared-expert-intermediate-size", "16"),
        *("--moe-shared-expert-gate", "--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type"),
        "alltoall",
    ),
}
"""Model shapes with experts by name: what each adds to the base command line."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout(Layout):
    """Hold one way to shard a model with experts over processes."""

    ep: int = 1
    etp: int | None = None
    dispatcher: str = "alltoall"
    expert_flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the layout in short."""
        cut = "" if self.etp is None else f" etp{self.etp}"
        further = "".join(" " + flag.removeprefix("--") for flag in self.expert_flags)
        return f"{super().name} ep{self.ep}{cut} {self.dispatcher}{further}"

    def to_flags(self, num_layers: int = 4) -> tuple[str, ...]:
        """Return the layout as flags of the training command."""
        flags = ["--expert-model-parallel-size", str(self.ep), "--moe-token-dispatcher-type", self.dispatcher]
        flags += [] if self.etp is None else ["--expert-tensor-parallel-size", str(self.etp)]
        return (*super().to_flags(num_layers), *flags, *self.expert_flags)


def make_expert_cell(shape: str, layout: ExpertLayout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Return the cell of a shape with experts at a layout; ``extra`` flags go to the reference too."""
    cell = make_cell("gpt2", layout, data, (*EXPERT_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


DISPATCHERS = ("alltoall", "allgather")


def expert_matrix() -> list[Cell]:
    """Return the layouts of models with experts that every release must pass, each once."""
    cells = [cell for family in (_spread, _mixed, _kept, _dropped, _global, _at_random) for cell in family()]
    return list({cell.name: cell for cell in cells}.values())


_SPREAD = (
    ExpertLayout(),
    ExpertLayout(dp=2, ep=2),
    ExpertLayout(dp=4, ep=2),
    ExpertLayout(dp=4, ep=4),
    ExpertLayout(tp=2, ep=2),
    ExpertLayout(tp=2, etp=1),
    ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True),
    ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
    ExpertLayout(pp=2, dp=2, ep=2),
    ExpertLayout(cp=2, ep=2),
    ExpertLayout(cp=2, dp=2, ep=4),
    ExpertLayout(cp=2, dp=2, etp=2),
)


def _spread() -> Iterator[Cell]:
    """Yield every shape at every way to spread experts, by both dispatchers."""
    for shape, layout, dispatcher in itertools.product(EXPERT_SHAPES, _SPREAD, DISPATCHERS):
        if layout.tp > 1 and not layout.sequence_parallel and layout.ep * (layout.etp or layout.tp) > layout.world_size:
            continue
        if shape != "dropping" or dispatcher == "alltoall":
            yield make_expert_cell(shape, replace(layout, dispatcher=dispatcher))


def _mixed() -> Iterator[Cell]:
    """Yield several kinds of parallelism together, with sharded state."""
    for sharding, shape in itertools.product(("optim", "optim_grads"), ("mixtral", "deepseek-experts")):
        for layout in (
            ExpertLayout(dp=4, ep=2),
            ExpertLayout(dp=4, ep=4),
            ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
            ExpertLayout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True),
            ExpertLayout(pp=2, virtual_stages=2, dp=4, ep=2),
            ExpertLayout(pp=2, schedule="zero-bubble", dp=2, ep=2),
            ExpertLayout(cp=2, dp=4, ep=4),
            ExpertLayout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        ):
            yield make_expert_cell(shape, replace(layout, sharding=sharding, overlap=True))
    for data in ("packed", "uneven"):
        yield make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True), data)
        yield make_expert_cell("gpt2-experts", ExpertLayout(cp=2, dp=2, ep=4), data)


def _kept() -> Iterator[Cell]:
    """Yield the ways in which activations are kept."""
    of_parts = ("selective", "core_attn", "layernorm", "moe_act", "shared_experts")
    for recompute in (("selective", "core_attn", "layernorm", "mlp", "moe"), of_parts, ("full", "uniform", "1")):
        for layout in (
            ExpertLayout(dp=2, ep=2),
            ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
            ExpertLayout(pp=2, schedule="zero-bubble", dp=2, ep=2),
            ExpertLayout(pp=2, virtual_stages=2, dp=2, ep=2),
        ):
            yield make_expert_cell("deepseek-experts", replace(layout, recompute=recompute))
    shared = ("--moe-shared-expert-overlap",)
    for layout in (ExpertLayout(dp=2, ep=2), ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True)):
        yield make_expert_cell("deepseek-experts", replace(layout, expert_flags=shared))


def _dropped() -> Iterator[Cell]:
    """Yield experts of limited capacity, padded and not, by both policies."""
    by_position = ("--moe-token-drop-policy", "position")
    padded = ("--moe-pad-expert-input-to-capacity",)
    for extra, flags in itertools.product(((), by_position), ((), padded)):
        for layout in (
            ExpertLayout(dp=2, ep=2),
            ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
            ExpertLayout(cp=2, dp=2, ep=4),
        ):
            yield make_expert_cell("dropping", replace(layout, expert_flags=flags), extra=extra)


def _global() -> Iterator[Cell]:
    """Yield the loss of the global batch: one process takes the batch as one micro-batch, and so do all ranks."""
    extra = ("--moe-router-load-balancing-type", "global_aux_loss", "--micro-batch-size", "8")
    for layout in (ExpertLayout(dp=2, ep=2), ExpertLayout(dp=4, ep=2), ExpertLayout(tp=2, cp=2, dp=2, ep=2)):
        flags = ("--micro-batch-size", str(8 // layout.dp))
        yield make_expert_cell("mixtral", replace(layout, expert_flags=flags), extra=extra)


def _at_random() -> Iterator[Cell]:
    """Yield experts that random numbers choose, which every layout draws alike."""
    for shape in ("mixtral", "deepseek-experts"):
        for layout in (
            ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True),
            ExpertLayout(tp=2, etp=1, dispatcher="allgather", recompute=("full", "uniform", "1")),
            ExpertLayout(pp=2, virtual_stages=2, dp=2, ep=2),
            ExpertLayout(cp=2, dp=2, ep=4, recompute=("selective", "core_attn", "moe")),
        ):
            yield make_expert_cell(shape, layout, extra=("--moe-router-force-load-balancing",))
