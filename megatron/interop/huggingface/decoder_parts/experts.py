"""What families with experts share: which layers have them, how tokens are routed, and the names of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.tensor_link import TensorLink, one_of, rows, whole

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ExpertNames:
    """Hold what a layer's router is called, its experts, and the three maps of each."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_IN_MEMORY = ExpertNames()
"""The names of router and experts in transformers' own modules, whatever their files call them."""


def expert_fields(settings: Settings, num_experts: int, width: int, default_choices: int) -> dict[str, Any]:
    """Return the fields of a GPTConfig that any kind of experts has; note more choices a token than experts."""
    chosen = settings.integer("num_experts_per_tok", default_choices)
    if chosen > num_experts and not settings.problems:
        settings.refuse(f"num_experts_per_tok is {chosen}, but there are {num_experts} experts")
        chosen = num_experts
    return {"num_experts": num_experts, "moe_ffn_hidden_size": width, "moe_router_topk": chosen}


def is_unnormalized(settings: Settings) -> bool:
    """Return whether scores of all experts weigh the chosen ones as they are.

    Divided by their sum, as by ``norm_topk_prob``, they are the softmax over the chosen ones.
    """
    return not settings.switch("norm_topk_prob", False)


def layer_frequency(has_experts: Sequence[bool]) -> str:
    """Return the value of ``--moe-layer-freq`` that stands for these layers."""
    return "1" if all(has_experts) else str([int(has) for has in has_experts])


def expert_links(config: GPTConfig, names: ExpertNames, ours: str, theirs: str) -> Iterator[TensorLink]:
    """Return the links of a layer's router and experts, each of which is a tensor of its own in files."""
    assert config.num_experts is not None
    count, width, ffn = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
    yield whole(f"{ours}mlp.router.weight", f"{theirs}{names.router}.weight", (count, width))
    for expert in range(count):
        of_expert = f"{theirs}{names.experts}.{expert}."
        gated = f"{ours}mlp.experts.linear_fc1.weight"
        yield one_of(gated, expert, 0, f"{of_expert}{names.gate}.weight", (ffn, width))
        yield one_of(gated, expert, ffn, f"{of_expert}{names.up}.weight", (ffn, width))
        yield one_of(f"{ours}mlp.experts.linear_fc2.weight", expert, 0, f"{of_expert}{names.down}.weight", (width, ffn))


def shared_expert_links(config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
    """Return the links of a layer's shared expert."""
    width, ffn = config.hidden_size, config.moe_shared_expert_intermediate_size
    assert ffn is not None
    gated, of_shared = f"{ours}mlp.shared_experts.linear_fc1.weight", f"{theirs}mlp.shared_experts."
    yield rows(gated, 0, f"{of_shared}gate_proj.weight", 0, ffn, (width,))
    yield rows(gated, ffn, f"{of_shared}up_proj.weight", 0, ffn, (width,))
    yield whole(f"{ours}mlp.shared_experts.linear_fc2.weight", f"{of_shared}down_proj.weight", (width, ffn))


def weights_as_in_files(weights: Mapping[str, torch.Tensor], names: ExpertNames) -> dict[str, torch.Tensor]:
    """Return a loaded model's weights as its files have them: the experts, which it stacks in memory, each on its own.

    All are views of the same memory.
    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer, of_router, kind = name.partition(f".{_IN_MEMORY.router}.")
        if of_router:
            found[f"{layer}.{names.router}.{kind}"] = weight
            continue
        layer, of_experts, kind = name.partition(f".{_IN_MEMORY.experts}.")
        parts = {"gate_up_proj": (names.gate, names.up), "down_proj": (names.down,)}.get(kind)
        if not of_experts or parts is None:
            found[name] = weight
            continue
        for expert, of_expert in enumerate(weight):
            for part, values in zip(parts, of_expert.chunk(len(parts)), strict=True):
                found[f"{layer}.{names.experts}.{expert}.{part}.weight"] = values
    return found
