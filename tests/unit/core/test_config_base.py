"""Tests of the helpers for frozen configuration dataclasses."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from megatron.core.config_base import (
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Config,
    FlagOptions,
    config_from_dict,
    config_to_dict,
    excesses,
    field_docs,
    field_specs,
    field_value,
    flag,
    from_fields,
    group,
    idle_with,
    idle_without,
    with_current_names,
    with_fields,
)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Config, role="shape"):
    """Hold the fields of a group."""

    depth: int = 2
    """How deep."""
    steps: tuple[int, ...] = flag((), nargs="+", where=("depth", 2))
    """Some steps."""

    def __post_init__(self) -> None:
        """Derive the steps."""
        object.__setattr__(self, "steps", self.steps or (self.depth,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped(Base, role="layout"):
    """Hold fields and a group of fields."""

    early: bool = flag(False, listed_first=True)
    """Listed in front of inherited fields."""
    part: Part = group(Part)
    late: int | None = None
    """Listed after inherited fields."""


GROUPED = Grouped(width=1, part=Part(depth=5))


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


def test_fields_of_a_group_are_listed_in_front_of_inherited_ones() -> None:
    specs = field_specs(Grouped)
    assert [spec.name for spec in specs] == ["early", "depth", "steps", "width", "ratio", "late"]
    assert [spec.owner for spec in specs] == ["Grouped", "Part", "Part", "Base", "Base", "Grouped"]
    assert [spec.options.role for spec in specs] == ["layout", "shape", "shape", "run", "run", "layout"]
    assert field_docs(Grouped) == {
        "width": "How wide it is.",
        "ratio": "How steep.",
        "early": "Listed in front of inherited fields.",
        "late": "Listed after inherited fields.",
        "depth": "How deep.",
        "steps": "Some steps.",
    }


def test_the_dict_of_a_configuration_with_a_group_is_flat() -> None:
    values = {"early": False, "depth": 5, "steps": [5], "width": 1, "ratio": 0.5, "late": None}
    assert config_to_dict(GROUPED) == values
    assert list(config_to_dict(GROUPED)) == list(values)
    assert config_from_dict(Grouped, values) == GROUPED
    assert config_from_dict(Grouped, {"width": 1}) == Grouped(width=1)
    with pytest.raises(ConfigurationError) as caught:
        config_from_dict(Grouped, {"part": {}, "depth": "5", "steps": 3})
    assert list(caught.value.problems) == [
        "Grouped: unknown field part",
        "Grouped.depth: '5' is not a value of type int",
        "Grouped: field width is missing",
    ]
    deep = from_fields(Grouped, width=1, depth=2**25, steps=(1,))
    assert excesses(deep) == [f"depth {2**25}: a number of at most {2**24} is expected"]


def test_fields_are_read_and_set_by_name_in_a_group_or_not() -> None:
    assert from_fields(Grouped, width=1, depth=5) == GROUPED
    assert from_fields(Grouped, width=1, part=Part(depth=5)) == GROUPED
    assert [field_value(GROUPED, name) for name in ("depth", "width", "part")] == [5, 1, Part(depth=5)]
    changed = with_fields(GROUPED, depth=6, late=7)
    assert changed == Grouped(width=1, part=Part(depth=6, steps=(5,)), late=7)
    assert with_fields(changed, depth=5, late=None) == GROUPED
    assert hash(with_fields(changed, depth=5, late=None)) == hash(GROUPED)
    assert pickle.loads(pickle.dumps(changed)) == changed
    with pytest.raises(AttributeError, match="missing"):
        field_value(GROUPED, "missing")
    with pytest.raises(TypeError, match="missing"):
        with_fields(GROUPED, missing=1)
    with pytest.raises(TypeError, match="width"):
        from_fields(Grouped, depth=1)


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
    return from_fields(GPTConfig, **{**shape, **changes})


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


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (POSITIVE, (1, 1e-9), (0, -1)),
        (NOT_NEGATIVE, (0, 1), (-1, -1e-9)),
        (FRACTION, (0, 0.5, 1), (-0.1, 1.1)),
        (BELOW_ONE, (0, 0.999), (-0.1, 1)),
    ],
    ids=lambda value: getattr(value, "words", None),
)
def test_bounds_hold_what_their_words_say(
    bounds: Bounds, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert all(map(bounds.hold, inside))
    assert not any(map(bounds.hold, outside))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Config, role="run", retired=("former",)):
    """Hold numbers that have a largest value."""

    seeds: tuple[int, ...] = ()
    layers: int = flag(0, role="shape")
    ranks: int = flag(0, role="layout")
    heads: int = flag(0, role="weights")
    workers: int = flag(0, most=64)
    rate: float = 1e30
    kind: str = flag("a", choices=("a", "b"))
    path: str = flag("", metavar="FILE")


@pytest.mark.parametrize(
    ("name", "most"), [("seeds", 2**63 - 1), ("workers", 64), *((name, 2**24) for name in ("layers", "ranks", "heads"))]
)
def test_a_whole_number_has_a_largest_value_by_what_it_is_about(name: str, most: int) -> None:
    spec = next(spec for spec in field_specs(Sized) if spec.name == name)
    assert [spec.excess(value) for value in (most, -most, 0, True, 1e40, "x")] == [None] * 6
    for value in (most + 1, -most - 1):
        assert spec.excess(value) == f"{value}: a number of at most {most} is expected"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**20 - 1, "9" * 20),
        (-(10**20) + 1, "-" + "9" * 20),
        (10**20, "1e+20"),
        (10**300 - 10**290, "1e+300"),
        (10**300, "the number"),
    ],
)
def test_a_very_large_number_is_shown_in_few_characters(value: int, shown: str) -> None:
    spec = next(spec for spec in field_specs(Sized) if spec.name == "workers")
    assert spec.excess(value) == f"{shown}: a number of at most 64 is expected"


def test_numbers_that_are_too_large_are_found_wherever_they_come_from() -> None:
    assert excesses(Sized()) == []
    assert excesses(Sized(seeds=(1, 2**63), workers=65)) == [
        f"seeds {2**63}: a number of at most {2**63 - 1} is expected",
        "workers 65: a number of at most 64 is expected",
    ]
    with pytest.raises(ConfigurationError, match=r"Sized\.workers 65: a number of at most 64"):
        config_from_dict(Sized, {"workers": 65})
    assert config_from_dict(Sized, {"former": 3, "workers": 64}) == Sized(workers=64)
    # Too large for a float, it stays the whole number that is no value of the field.
    with pytest.raises(ConfigurationError, match=r"Sized\.rate: 1000"):
        config_from_dict(Sized, {"rate": 10**400})
    with pytest.raises(ConfigurationError, match=r"Sized\.rate: True is not a value of type float"):
        config_from_dict(Sized, {"rate": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Renamed(Config, role="run"):
    """Hold fields that had other names."""

    width: int = flag(1, deprecated=("--breadth", "--full-breadth"))
    order: str = flag("pre", deprecated_values=(("before", "pre"), ("after", "post")), choices=("pre", "post"))


def test_stored_names_of_an_earlier_release_are_replaced() -> None:
    assert config_from_dict(Renamed, {"full_breadth": 3, "order": "after"}) == Renamed(width=3, order="post")
    stored = {"order": "before", "breadth": 2}
    assert list(with_current_names(Renamed, stored).items()) == [("order", "pre"), ("width", 2)]
    assert list(stored) == ["order", "breadth"]
    with pytest.raises(ConfigurationError, match="unknown field breadth"):
        config_from_dict(Renamed, {"breadth": 2, "width": 3})
    assert all("--breadth" not in spec.flags for spec in field_specs(Renamed))


def test_help_names_what_stands_for_a_value() -> None:
    specs = {spec.name: spec for spec in field_specs(Sized)}
    shown = {name: specs[name].metavar for name in ("seeds", "rate", "kind", "path")}
    assert shown == {"seeds": "N", "rate": "X", "kind": "{a,b}", "path": "FILE"}
    assert specs["workers"].typed(3) == "--workers 3"
    assert next(spec for spec in field_specs(Derived) if spec.name == "fused").typed(False) == "--no-fused"
    assert next(spec for spec in field_specs(Derived) if spec.name == "names").metavar == "TEXT"


def test_fields_are_in_no_args_and_have_nothing_further_by_default() -> None:
    options = next(spec for spec in field_specs(Sized) if spec.name == "rate").options
    assert options == FlagOptions(role="run", in_args=())
    assert not options.append
    assert options.cli


def test_a_field_is_idle_with_or_without_others() -> None:
    specs = {spec.name: spec for spec in field_specs(Derived)}
    none, some = [(specs["ratio"], 0.5), (specs["limit"], None)], [(specs["ratio"], 0.5), (specs["limit"], 3)]
    condition = idle_without("ratio", "limit")
    assert condition.reason(none) == "without --ratio X or --limit N"
    assert condition.reason(some) is None
    condition = idle_without("ratio", value=0.25)
    assert condition.reason(none[:1]) == "without --ratio 0.25"
    assert condition.reason([(specs["ratio"], 0.25)]) is None
    condition = idle_with("ratio", 0.5, because=": it is flat")
    assert condition.reason(none[:1]) == "with --ratio 0.5: it is flat"
    assert condition.reason([(specs["ratio"], 0.25)]) is None
    assert idle_with("limit").reason(some[1:]) == "with --limit"
    assert idle_with("limit").reason(none[1:]) is None
    # A switch has no value to name.
    assert idle_without("fused").reason([(specs["fused"], True)]) == "without --no-fused"
