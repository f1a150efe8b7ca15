"""Layer patterns in Megatron's notation, and back."""

from __future__ import annotations

import pytest

from megatron.core.transformer.layer_pattern import _MOST_LAYERS, format_layer_pattern, parse_layer_pattern


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("1", "000000"),
        ("2", "101010"),
        ("4", "111011"),
        ("([1]*2+[0])*2", "110110"),
        ("[0, 0, 1, 1, 1, 1]", "001111"),
    ],
)
def test_a_pattern_names_layers_and_is_found_again(text: str, kinds: str) -> None:
    layers = tuple(kind == "1" for kind in kinds)
    assert parse_layer_pattern(text, 6) == layers
    assert parse_layer_pattern(format_layer_pattern(layers), 6) == layers
    assert format_layer_pattern((True, True, False, True)) == "3"


def test_a_list_is_as_long_as_any_model_has_layers_and_no_longer() -> None:
    assert len(parse_layer_pattern(f"[1]*{_MOST_LAYERS}", _MOST_LAYERS)) == _MOST_LAYERS
    with pytest.raises(ValueError, match="expected"):
        parse_layer_pattern(f"[1]*{_MOST_LAYERS + 1}", _MOST_LAYERS + 1)


BIG = "[1]*100000*100000*100000"
NESTED = "[1, 0, [1, 0], 1, 0, 1, 0]"


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "[1]*7", "[2]*6", "1.5", "[1]*10**9", "()", "[[1]]*6", "2*[1]", "True", BIG, NESTED],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|the list is of"):
        parse_layer_pattern(text, 6)
