"""Shell scripts are read as bash expands them, arithmetic included; what only a run could tell is named."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from megatron.cli.adopt import shell_syntax
from megatron.cli.adopt.shell_expansion import Arithmetic, UnknownNumber
from megatron.cli.adopt.shell_script import ShellScript
from megatron.cli.adopt.shell_values import readable
from megatron.core.errors import ConfigurationError
from tests.unit.cli.adopt.bash_oracle import started_by_bash, started_by_reading

pytest.importorskip("tree_sitter_bash", reason="tree-sitter-bash is not installed")

SCRIPTS = {
    "defaults": """
        A=${X:-y z} B="${X:-y z}"
        C=${EMPTY-set} D=${B:+yes} E=${NOT:+no}
        : ${F:=given}
        torchrun $A "$A" "$B" $C "$D" $E "$E" $F ${G:-${H:-deep er}} ${I:-"one word"} "${J:-"in quotes"}" K${L:-}M
    """,
    "positional": """
        echo "$#"; ALL=$#
        torchrun "$1" "${2}" ${9:-none} "$@" n$ALL
        shift; shift 2
        torchrun "$@" "${@:2}" "$*"
        set -- a "b c"
        torchrun "$@" $2 ${#}
    """,
    "arrays": """
        ARGS=( --a 1
            # a comment
            --b "two words" )
        ARGS+=(--c)
        MORE=($(echo x y))
        ARGS[1]=9
        declare -A SIZE=([small]=1 [large]=2)
        torchrun "${ARGS[@]}" ${ARGS[3]} "${#ARGS[@]}" "${ARGS[*]}" \\
            ${SIZE[large]} "${ARGS[@]:1:2}" "${MORE[@]}" "${NONE[@]}"
    """,
    "strings of flags": """
        ARGS="--a 1 \\
            --b '2' "
        ARGS+=" --c"
        ARGS="$ARGS
              --d"
        torchrun $ARGS "$ARGS"
    """,
    "conditions": """
        N=4
        if [ $N -gt 8 ]; then A=large; elif [ "$N" = 4 ]; then A=four; else A=other; fi
        if [[ $A == f* && -n $N ]]; then B=glob; fi
        if [ -z "$NONE" ] && ! [ $A = x ]; then C=both; fi
        [ $N = 5 ] && D=five || D=not
        if [[ $A =~ ^fo.r$ ]]; then E=regex; fi
        if [ -n $NONE ]; then F=one-word-test; fi
        if test "$A" != four; then G=1; else G=2; fi
        if [[ "$A" == "f*" ]]; then H=1; else H=quoted; fi
        if (( N > 3 && N < 5 )); then I=inside; fi
        if [ $N -eq 4 -a "$A" = four ]; then J=and; fi
        torchrun $A $B $C $D $E $F $G $H $I $J
    """,
    "case": """
        for size in 7B 13B x1 other; do
            case $size in
                7B) L=32 H=4096 ;;
                13B|14B) L=40
                    H=5120 ;;
                x[0-9]*) L=1 ;;
                *) L=$size; ;;
            esac
            torchrun $L "$H"
        done
    """,
    "arithmetic": """
        A=7; ((A += 3)); let B=A*2
        for ((i = 0; i < 3; i++)); do C="$C $((i * A))"; done
        torchrun $((A / 3)) $((-A / 3)) $(( A % 4 )) $((2 ** 10)) $B $C \\
            $(( A > 3 ? 1 : 0 )) $((0x10 + 010)) $(( (A+1)*2 )) $((${A}*$B))
    """,
    "text": """
        P=/a/b/model.tar.gz; W=Hello
        torchrun ${P%.*} ${P%%.*} ${P##*/} ${P#/a} ${P/b/c} ${P//a/A} ${#P} ${W^^} ${W,,} ${W:1:3} ${P:2} "${P: -2}"
        N=W; torchrun ${!N} $(dirname $P) $(basename $P .gz) `basename "$P"` a{b,c}d n{1..3} '$P' \\$P "\\$P" $'a\\tb'
    """,
    "functions and files": """
        . "$(dirname "$0")/other.sh"
        launch_it() { local x=$1; torchrun "$x" "$FROM_OTHER" "$@"; }
        launch_it one "two three"
        HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
        torchrun $HERE/x.py $( dirname $( dirname ${HERE}))
        [ $UNSET_BEFORE ] && exit 1
        echo "cat" > /dev/null
        bash other.sh
        (A=inside; torchrun $A); torchrun "$A"
    """,
    "eval and wrappers": """
        run_cmd="torchrun --nproc_per_node 2 pretrain_gpt.py
         --a ${X:-1} \\
         --b"
        echo ${run_cmd}
        eval ${run_cmd}
        set -x
        export A=1 B=2
        FOO=$A torchrun $FOO $B 2>&1 | tee log.txt
        nice=1
        srun -N 2 torchrun x.py &
        wait
        cat <<EOF > written.txt
torchrun not.py
EOF
        deepspeed --num_gpus 2 y.py > out.txt
    """,
    "assignments on several lines": """
        TP=${TP:-1} PP=${PP:-2}
        CP=3 DP=$PP
        NEXT=$TP
        torchrun $TP $PP $CP $DP $NEXT \\
            --a 1 \\
            --last
        A=1 B=2
        torchrun $A $B
    """,
    "loops that take arguments apart": """
        LR=1
        while [[ $# -gt 0 ]]; do
            case "$1" in
                --lr) LR="$2"; shift 2 ;;
                --flag) FLAG=on; shift ;;
                *) REST+=("$1"); shift ;;
            esac
        done
        torchrun $LR $FLAG "${REST[@]}"
        for x in 1 2 3 4; do
            if [ $x = 2 ]; then continue; fi
            if [ $x = 4 ]; then break; fi
            torchrun $x
        done
    """,
    "bash -c": """
        MASTER=host
        bash -c "torchrun --x $MASTER 'a b'"
        sh -c 'Y=2; torchrun $Y'
    """,
}


@pytest.mark.default(12)
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("parameters", [[], ["--lr", "2 3", "c", "--flag", "e"]], ids=["bare", "with arguments"])
def test_words_are_those_that_bash_makes(name: str, parameters: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.sh"
    script.write_text("#!/bin/bash\n" + SCRIPTS[name])
    (tmp_path / "other.sh").write_text("FROM_OTHER='from other'\n")
    expected = started_by_bash(script, parameters, {"TP": "5"}, tmp_path)
    assert expected
    # A variable that nothing sets is empty for bash and named here.
    read = started_by_reading(script, parameters, {"TP": "5"})
    assert [words_known(words) for words in read] == [[word for word in words if word] for words in expected]


def words_known(words: list[str]) -> list[str]:
    return [word for word in words if not (word.startswith("<") and word.endswith(">")) and word]


VALUES = {"A": "7", "B": "A + 1", "N": "-3"}
BINARY = ["+", "-", "*", "/", "%", "<<", ">>", "<", "<=", "==", "!=", ">", ">=", "&", "|", "^", "&&", "||"]


def random_expression(source: random.Random, depth: int) -> str:
    if depth == 0:
        return source.choice(["1", "2", "010", "0x1f", "2#101", *VALUES])
    left, right = (random_expression(source, source.randrange(depth)) for _ in range(2))
    kind = source.randrange(8)
    if kind == 0:
        return f"({left} {source.choice(BINARY)} {right})"
    if kind == 1:
        return f"{source.choice(['-', '!', '~', '+'])} ({left})"
    if kind == 2:
        return f"({left} ? {right} : {left})"
    operator = source.choice(BINARY)
    # Divisors are not 0 and shifts are short.
    return f"{left} {operator} {source.randrange(1, 9) if operator in ('/', '%', '<<', '>>') else right}"


def value_of(expression: str) -> int | None:
    try:
        return Arithmetic(expression, VALUES.get, lambda name, value: None).value()
    except UnknownNumber:
        return None


def test_random_expressions_are_what_bash_computes() -> None:
    source = random.Random(1)
    drawn = [random_expression(source, 3) for _ in range(300)]
    expressions = [expression for expression in drawn if value_of(expression) is not None]
    assert len(expressions) > 250
    script = "".join(f"{name}='{value}'\n" for name, value in VALUES.items())
    script += "".join(f"echo $(({expression}))\n" for expression in expressions)
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert [str(value_of(expression)) for expression in expressions] == result.stdout.split()


def test_assignments_are_given_back() -> None:
    values = dict(VALUES)
    assert Arithmetic("A += 2, C = A++ * 2, --A", values.get, values.__setitem__).value() == 9
    assert (values["A"], values["C"]) == ("9", "18")


@pytest.mark.parametrize(
    "text", ["NONE + 1", "1 +", "1 / 0", "(1", "1 ? 2", "$X", "2 ** -1", "2 ** 63", "1 << 64", "09"]
)
def test_what_cannot_be_computed_is_unknown(text: str) -> None:
    with pytest.raises(UnknownNumber):
        Arithmetic(text, VALUES.get, lambda name, value: None).value()


pytest.importorskip("tree_sitter_bash", reason="tree-sitter-bash is not installed")


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
    assert "$1 is not set" in script.state.unknowns["ARG1"]


def test_parameters_and_variables_are_taken_from_the_user() -> None:
    text = "N=4; if [ $1 = big ]; then N=8; fi; torchrun $N $HOSTS ${HOSTS}1"
    assert started(text, "big", HOSTS="h") == ["torchrun 8 h h1"]
    # What the user sets, the script does not change.
    assert started(text, "big", HOSTS="h", N="3") == ["torchrun 3 h h1"]


def test_a_script_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not end within"):
        followed("while true; do N=1; done")
    with pytest.raises(ConfigurationError, match="calls itself endlessly"):
        followed("again() { again; }; again")


def test_what_cannot_be_read_is_noted() -> None:
    assert followed("torchrun x\nif then fi done (\n").notes
    assert followed(". missing.sh\ntorchrun x").notes == [
        "line 1 reads missing.sh, which is missing here: the variables that it sets are not known"
    ]


def test_without_the_parser_one_line_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(shell_syntax, "_HAS_PARSER", False)
    with pytest.raises(ConfigurationError, match="pip install tree-sitter tree-sitter-bash"):
        shell_syntax.require_parser()
