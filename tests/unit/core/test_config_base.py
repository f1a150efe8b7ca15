"""Tests of the helpers for frozen configuration dataclasses."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.core.config_base import Config, config_from_dict, config_to_dict, field_docs, field_specs, flag
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig, padded_vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base(Config, role="run"):
    """Hold a first part."""

    width: int
    """How wide
    it is."""
    ratio: float = 0.5
    """How steep."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Base, role="layout"):
    """Hold a second part."""

    fused: bool = flag(True, negative="--no-fused")
    """Fuse everything. Off: fuse nothing."""
    names: tuple[str, ...] = flag((), nargs="+")
    """Some names."""
    limit: int | None = flag(None, aliases=("--cap",))
    """A limit."""
    internal: str = flag("x", cli=False)
    """No flag sets it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """Hold a nested part."""

    part: Derived
    world_size: int = 1


def test_docs_come_from_the_literal_under_each_field_with_inherited_ones() -> None:
    assert field_docs(Derived) == {
        "width": "How wide it is.",
        "ratio": "How steep.",
        "fused": "Fuse everything. Off: fuse nothing.",
        "names": "Some names.",
        "limit": "A limit.",
        "internal": "No flag sets it.",
    }


def test_specs_describe_types_owners_and_flags() -> None:
    specs = {spec.name: spec for spec in field_specs(Derived)}
    assert specs["width"].is_required
    assert specs["width"].owner == "Base"
    assert specs["width"].flags == ("--width",)
    assert specs["fused"].flags == ("--no-fused",)
    assert specs["fused"].is_bool
    assert specs["names"].is_sequence
    assert specs["names"].item_type is str
    assert specs["limit"].is_optional
    assert specs["limit"].flags == ("--limit", "--cap")
    assert specs["internal"].flags == ()


def test_a_default_true_switch_needs_a_negative_flag() -> None:
    made = dataclasses.make_dataclass(
        "Made", [("on", bool, flag(True, role="run"))], bases=(Config,), namespace={"__module__": __name__}
    )
    with pytest.raises(AssertionError, match="negative flag"):
        field_specs(made)
    unset = dataclasses.make_dataclass(
        "Unset", [("on", bool, flag(True, role="run", cli=False))], bases=(Config,), namespace={"__module__": __name__}
    )
    assert [spec.flags for spec in field_specs(unset)] == [()]


def test_the_help_of_a_negative_flag_is_what_happens_without_the_field() -> None:
    specs = {spec.name: spec for spec in field_specs(Derived)}
    docs = field_docs(Derived)
    assert specs["fused"].help_text(docs["fused"]) == "Fuse nothing."
    assert specs["width"].help_text(docs["width"]) == "How wide it is."


def test_a_field_has_the_role_that_it_says_or_else_its_class() -> None:
    class Mixed(Config, role="output", in_args=True):
        plain: int = 3
        own: int = flag(4, role="shape", in_args=False)
        renamed: int = flag(5, in_args=("their_name",))

    options = [spec.options for spec in field_specs(dataclasses.dataclass(Mixed))]
    assert [option.role for option in options] == ["output", "shape", "output"]
    assert [option.in_args for option in options] == [("plain",), (), ("their_name",)]


@pytest.mark.parametrize("value", [dataclasses.MISSING, 3, flag(3), flag(3, role="form")])
def test_a_field_without_a_role_is_refused_where_its_class_is_defined(value: object) -> None:
    with pytest.raises(TypeError, match=r"Made\.extra has the role (None|form); declare it .* R of weights, shape"):
        type("Made", (GPTConfig,), {"__annotations__": {"extra": "int"}, "extra": value})


def test_dict_round_trip_through_json() -> None:
    whole = Whole(part=Derived(width=3, names=("a", "b"), fused=False), world_size=4)
    assert config_from_dict(Whole, json.loads(json.dumps(config_to_dict(whole)))) == whole


def test_an_absent_optional_key_takes_its_default_and_an_integer_may_stand_for_a_float() -> None:
    built = config_from_dict(Derived, {"width": 3, "ratio": 2})
    assert built == Derived(width=3, ratio=2.0)
    assert type(built.ratio) is float


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"width": 3, "wdith": 4}, "unknown field wdith"),
        ({}, "field width is missing"),
        ({"width": "3"}, "'3' is not a value of type int"),
        ({"width": True}, "True is not a value of type int"),
        ({"width": 3, "names": ["a", 1]}, "1 is not a value of type str"),
        ({"width": None}, "None is not a value of type int"),
        ({"width": [3]}, "[3] is not a value of type int"),
        ({"width": 3, "names": 4}, "4 is not a value of type str"),
    ],
)
def test_from_dict_is_strict(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_dict(Derived, values)
    assert any(problem in line for line in caught.value.problems)


def test_from_dict_reports_all_problems_of_all_parts() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_dict(Whole, {"part": {"widht": 1}, "worldsize": 2})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigurationError, match="is not an object"):
        config_from_dict(Whole, {"part": 3})


def make(**changes: object) -> GPTConfig:
    shape: dict[str, object] = {"num_layers": 3, "hidden_size": 96, "num_attention_heads": 6}
    return GPTConfig(**{**shape, **changes})  # type: ignore[arg-type]


def test_derived_shape() -> None:
    plain = make()
    assert (plain.ffn_hidden_size, plain.kv_channels, plain.num_query_groups) == (384, 16, 6)
    assert make(swiglu=True).ffn_hidden_size == 256
    assert make(swiglu=True, hidden_size=4096).ffn_hidden_size == 10880
    assert make(group_query_attention=True).num_query_groups == 1
    grouped = make(group_query_attention=True, num_query_groups=2, kv_channels=20)
    assert (grouped.query_projection_size, grouped.kv_projection_size) == (120, 40)
    assert make().output_init_method_std == pytest.approx(0.02 / 6**0.5)


def test_activation_follows_the_gelu_rule() -> None:
    assert make().activation == "gelu_tanh"
    assert make(bias_gelu_fusion=False).activation == "gelu"
    assert make(bias_gelu_fusion=False, openai_gelu=True).activation == "gelu_tanh"
    assert make(swiglu=True).activation == "swiglu"
    assert make(squared_relu=True).activation == "squared_relu"


def test_position_type_from_megatrons_three_flags() -> None:
    assert make().position_embedding_type == "learned_absolute"
    assert make(use_rotary_position_embeddings=True).position_embedding_type == "rope"
    assert make(add_position_embedding=False).position_embedding_type == "none"
    both = make(add_position_embedding=False, use_rotary_position_embeddings=True)
    assert both.position_embedding_type == "rope"


def test_params_dtype_follows_the_precision_flags() -> None:
    assert make().params_dtype == "float32"
    assert make(fp16=True).params_dtype == "float16"
    assert make(bf16=True).params_dtype == "bfloat16"
    assert make(params_dtype="float64").params_dtype == "float64"
    assert dataclasses.replace(make(), bf16=True).params_dtype == "bfloat16"


def test_shortcuts() -> None:
    assert make(recompute_activations=True).recompute_granularity == "selective"
    experts = make(num_experts=2, moe_layer_recompute=True)
    assert (experts.recompute_granularity, experts.recomputed_modules) == ("selective", ("core_attn", "moe"))
    assert dataclasses.replace(experts).recompute_modules == ("core_attn", "moe")
    assert make(use_flash_attn=True).attention_backend == "flash"
    assert make(add_bias_linear=False, add_qkv_bias=True).has_qkv_bias
    assert not make(add_bias_linear=False).has_qkv_bias
    assert make().has_qkv_bias
    assert not make(disable_qkv_bias=True).has_qkv_bias


def test_padded_vocab_size_is_megatrons() -> None:
    assert [padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]
    assert make(vocab_size=50257, tensor_model_parallel_size=4).padded_vocab_size == 50688
    assert padded_vocab_size(256, 128, 2) == 256
