"""What a run alone could tell is named and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash", reason="tree-sitter-bash is not installed")

from megatron.cli.adopt import shell_syntax
from megatron.cli.adopt.shell_script import ShellScript
from megatron.cli.adopt.shell_values import readable
from megatron.core.errors import ConfigurationError


def followed(text: str, *parameters: str, **variables: str) -> ShellScript:
    script = ShellScript(Path("run.sh"), parameters, variables)
    script.follow(text)
    return script


def started(text: str, *parameters: str, **variables: str) -> list[str]:
    return [readable(" ".join(found.words)) for found in followed(text, *parameters, **variables).programs]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchrun $NEVER x", "torchrun <NEVER> x"),
        ("torchrun $1 --a", "torchrun <ARG1> --a"),
        ("X=$(hostname); torchrun $X $X/y", "torchrun <X> <X>/y"),
        ("torchrun $(date +%s)", "torchrun <OUTPUT_date>"),
        ("N=$((GPUS * 2)); torchrun $N", "torchrun <N>"),
        ("read -r A B; torchrun $A", "torchrun <A>"),
        ("if [ $1 = big ]; then N=8; M=1; else N=4; M=1; fi; torchrun $N $M", "torchrun <N> 1"),
        ("case $KIND in a) N=1 ;; b) N=2 ;; esac; torchrun $N", "torchrun <N>"),
        ("if [ -f data.bin ]; then N=1; fi; torchrun $N", "torchrun <N>"),
        ("torchrun data/*.bin", "torchrun <data/*.bin>"),
        ("torchrun ~/data", "torchrun <HOME>/data"),
        ("[ $# -eq 9 ] || exit 1; torchrun x", ""),
        ("test -d out || exit 1; torchrun x", "torchrun x"),
        ("for x in $LIST; do torchrun $x; done", "torchrun <LIST>"),
        ('ARGS="$ARGS --a"; ARGS="$ARGS --b"; torchrun $ARGS', "torchrun --a --b"),
        ("while true; do case $1 in -x) N=1 ;; *) break ;; esac; done; torchrun x", "torchrun x"),
        ("for x in 1 2; do for y in 3 4; do [ -f $y ] && break; done; torchrun $x; done", "torchrun 1torchrun 2"),
        ("if [ $TP = 2 ]; then OPTION=--sp; fi; torchrun $OPTION", "torchrun <OPTION>"),
    ],
)
def test_unknown_values_are_named(text: str, expected: str) -> None:
    assert "".join(started(text)) == expected


def test_every_unknown_has_a_reason() -> None:
    script = followed("A=$(hostname)\nif [ $1 = x ]; then B=1; fi\ntorchrun $A $B $C")
    assert script.state.unknowns["A"] == "is the output of $(hostname)"
    assert "[ $1 = x ] (line 2)" in script.state.unknowns["B"]
    assert "--set C=VALUE" in script.state.unknowns["C"]
    assert "$1 is not given" in script.state.unknowns["ARG1"]


def test_parameters_and_variables_are_taken_from_the_user() -> None:
    text = "N=4; if [ $1 = big ]; then N=8; fi; torchrun $N $HOSTS ${HOSTS}1"
    assert started(text, "big", HOSTS="h") == ["torchrun 8 h h1"]
    # What the user sets, the script does not change.
    assert started(text, "big", HOSTS="h", N="3") == ["torchrun 3 h h1"]


def test_a_script_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not end within"):
        followed("while true; do N=1; done")
    with pytest.raises(ConfigurationError, match="calls itself over and over"):
        followed("again() { again; }; again")


def test_what_cannot_be_read_is_noted() -> None:
    assert followed("torchrun x\nif then fi done (\n").notes
    assert followed(". missing.sh\ntorchrun x").notes == [
        "line 1 reads missing.sh, which is not here: what it sets is not known"
    ]


def test_without_the_parser_one_line_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(shell_syntax, "_HAS_PARSER", False)
    with pytest.raises(ConfigurationError, match="pip install tree-sitter tree-sitter-bash"):
        shell_syntax.require_parser()
