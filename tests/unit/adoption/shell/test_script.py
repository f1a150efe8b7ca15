"""Scripts are read as bash expands them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash", reason="tree-sitter-bash is not installed")

from tests.unit.adoption.shell.bash_oracle import started_by_bash, started_by_reading

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
