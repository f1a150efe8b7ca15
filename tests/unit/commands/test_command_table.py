"""What ``megatron`` itself says: its commands, and what completes them in a shell."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from megatron.cli import plan
from megatron.cli.__main__ import COMMANDS, main
from megatron.cli.completion import print_completion

FRONT = ("train", "preprocess", "generate", "serve", "convert", "inspect", "plan", "verify", "doctor", "adopt")


def test_help_has_a_line_for_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron", "--help"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: megatron NAME …")
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert set(FRONT) <= set(listed)
    assert all(len(line.split()) > 3 for line in lines if line.startswith("  "))


@pytest.mark.parametrize(
    ("called", "usage"),
    [
        (["/usr/bin/megatron", "plan"], "usage: megatron plan ["),
        (["/a/megatron/cli/__main__.py", "chat"], "usage: python -m megatron chat ["),
        (["tools/plan.py"], "usage: plan.py ["),
    ],
)
def test_help_of_a_command_names_it_as_it_was_called(
    called: list[str], usage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*called, "--help"])
    with pytest.raises(SystemExit, match="0"):
        plan.main(["--help"]) if len(called) == 1 else main()
    assert " ".join(capsys.readouterr().out.split()).startswith(usage)


@pytest.mark.default(5)
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("megatron veri", {"verify", "verify_parallelism"}),
        ("megatron train --tensor-model-p", {"--tensor-model-parallel-size"}),
        ("megatron train --npr", {"--nproc"}),
        ("megatron doctor --js", {"--json"}),
        ("megatron serve --load", {"--load", "--load-hf"}),
        ("megatron run_text_generation_server --hang", {"--hang-report-seconds"}),
        ("megatron evaluate --rotary-int", {"--rotary-interleaved"}),
        ("megatron preprocess --vocab-f", {"--vocab-file"}),
    ],
)
def test_bash_completes_commands_and_flags(typed: str, expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None, "the project's own scripts need bash"
    assert print_completion(["bash"], COMMANDS) == 0
    words = typed.split()
    asks = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _megatron; echo ${{COMPREPLY[@]}}"
    program = f"{capsys.readouterr().out}\n{asks}"
    found = subprocess.run([bash, "-s"], input=program, capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == expected


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_completion(["fish"], COMMANDS) == 2
    assert capsys.readouterr().err == "usage: megatron --print-completion bash|zsh\n"
    assert print_completion(["zsh"], COMMANDS) == 0
    assert "bashcompinit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "serve --laod runs",
            "one of the arguments --load --load-hf is required; there is no --laod, did you mean --load?",
        ),
        (
            "convert --load a --save-dr=b",
            "the following arguments are required: --load-dir, --save-dir; "
            "there is no --load, did you mean --load-dir?",
        ),
        ("verify --lsit", "unrecognized arguments: --lsit; there is no --lsit, did you mean --list?"),
        ("verify nowhere", "unrecognized arguments: nowhere; see --help"),
        ("inspect", "the following arguments are required: DIR; see --help"),
        ("plot", "the following arguments are required: RUN; see --help"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flag_that_was_meant(
    typed: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"
