"""What ``megatron`` itself says: its commands, their completion, how they end, and what a wheel holds for them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron.cli import chat, explain, plan, serve, simulate, text_generation_cli, train
from megatron.cli.__main__ import COMMANDS, DEPRECATED, GROUPS, SCRIPTS, main
from megatron.cli.arguments import Parser, exit_status_of
from megatron.cli.completion import print_completion
from tests.harness.training_run import REPOSITORY, CommandResult, run_command

FRONT = ("train", "preprocess", "generate", "serve", "convert", "inspect", "plan", "verify", "doctor", "adopt")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_has_a_line_for_every_command_once_in_its_group(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron", *words])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: megatron COMMAND …")
    assert [line for line in lines if line.endswith(":")] == [f"{title}:" for title in GROUPS]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert len(set(COMMANDS.values())) == len(COMMANDS) == len(set(listed))
    assert not any("_" in name or "." in name for name in listed)
    assert max(map(len, lines)) <= 135
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
        ("megatron veri", {"verify"}),
        ("megatron train --tensor-model-p", {"--tensor-model-parallel-size"}),
        ("megatron train --npr", {"--nproc", "--nproc-per-node"}),
        ("megatron train --resum", {"--resume"}),
        ("megatron doctor --js", {"--json"}),
        ("megatron serve --load", {"--load", "--load-hf"}),
        ("megatron simulate --memory-p", {"--memory-plot"}),
        ("megatron run-text-generation-server --hang", {"--hang-timeout-seconds"}),
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
            "unrecognized arguments: --laod; there is no --laod; did you mean --load?",
        ),
        (
            "convert --load a --save-dr=b",
            "the following arguments are required: --save-dir/--save; there is no --save-dr; did you mean --save-dir?",
        ),
        ("verify --lsit", "unrecognized arguments: --lsit; there is no --lsit; did you mean --list?"),
        ("verify nowhere", "unrecognized arguments: nowhere; see --help"),
        ("inspect", "one of the arguments DIR --load is required; see --help"),
        (
            "serve --load runs --prompt text",
            "argument DIR: not allowed with argument --load; there is no --prompt; see --help",
        ),
        ("serve --prompt text", "unrecognized arguments: --prompt; see --help"),
        ("serve", "one of the arguments DIR --load --load-hf is required; see --help"),
        ("convert --save-dir out", "one of the arguments DIR --load-dir/--load is required; see --help"),
        ("evaluate runs --load others", "argument --load: not allowed with argument DIR; see --help"),
        (
            "evaluate runs text.jsonl",
            "unrecognized arguments: text.jsonl; pass texts with --text FILE … and tasks with --tasks TASK …",
        ),
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


def test_deprecated_names_of_a_command_work_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="program")
    parser.add_argument("--size", type=int)
    parser.add_argument("--kind", choices=["small", "large"])
    parser.add_deprecated_flag("--extent", "--size")
    parser.add_deprecated_value("--kind", "big", "large")
    assert parser.parse_args(["--extent=3"]).size == 3
    end = "; the next release removes the old name\n"
    assert capsys.readouterr().err == f"WARNING: --extent is now --size{end}"
    known, others = parser.parse_known_args(["--kind", "big", "--further", "--", "--extent"])
    assert (known.kind, [word for word in others if word != "--"]) == ("large", ["--further", "--extent"])
    assert capsys.readouterr().err == f"WARNING: --kind big is now --kind large{end}"
    assert "--extent" not in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--extent", "3", "--kidn", "large"])
    assert capsys.readouterr().err.endswith("there is no --kidn; did you mean --kind?\n")


def test_the_deprecated_name_of_the_memory_plot_works(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = simulate.build_parser().parse_known_args(["--memory-picture", "step.svg"])
    assert found.memory_plot == Path("step.svg")
    assert capsys.readouterr().err.startswith("WARNING: --memory-picture is now --memory-plot; ")


@pytest.mark.parametrize(
    ("parser", "name", "flags"),
    [
        (train.build_parser(), "nproc", ("--nproc", "--nproc-per-node")),
        (train.build_parser(), "resume", ("--resume", "--continue")),
        (plan.build_parser(), "gpus", ("--gpus", "--world-size")),
        (explain.build_parser(1), "world_size", ("--world-size", "--gpus")),
        (chat.build_parser(), "max_tokens", ("--max-tokens", "--tokens-to-generate")),
        (text_generation_cli.build_parser(), "max_tokens", ("--tokens-to-generate", "--max-tokens")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_both_names_of_a_flag_are_accepted(
    parser: ArgumentParser, name: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in flags:
        found, others = parser.parse_known_args([flag, "7", "--load", "runs", "--prompt=text"])
        assert str(getattr(found, name)) == "7"
        assert flag not in others
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_a_server_prints_the_warning(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    arguments = serve.build_parser().parse_args(["--load", "runs", "--hang-report-seconds", "5"])
    assert arguments.hang_timeout_seconds == 5
    warning = "WARNING: --hang-report-seconds is now --hang-timeout-seconds; the next release removes the old name\n"
    assert capsys.readouterr().err == ("" if rank else warning)


PRINTED = (
    "--model-preset gpt2-345m --global-batch-size 8 --micro-batch-size 8 --train-iters 1 --mock-data --print-config"
)

COMMAND = """
import sys
from megatron.cli.arguments import exit_status_of

def work():
    sys.stdin.read()
    for number in range({lines}):
        print(number)

sys.exit(exit_status_of(work))
"""


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "at once"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_command_whose_reader_has_gone_ends_without_a_word(lines: int, options: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, *options, "-c", COMMAND.format(lines=lines)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    assert exit_status_of(work) == 1
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "words",
    ["--help", "--print-completion bash", "verify --list", "train --help", f"train {PRINTED}"],
)
def test_what_a_command_is_asked_for_may_be_read_in_part(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "megatron", *words.split()]
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert ended.stderr == b""
    assert ended.returncode == 128 + signal.SIGPIPE


ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds what a wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so which files belong to the project is not known")
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    run_command([*build, folder / "source"], timeout_s=300.0).check()
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    shutil.rmtree(folder / "source")
    return folder / "installed"


def run_module(installed: Path, *words: str) -> CommandResult:
    return run_command([sys.executable, "-m", *words], cwd=installed.parent, env={"PYTHONPATH": str(installed)})


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_runs_from_the_wheel_alone(installed: Path, name: str) -> None:
    result = run_module(installed, "megatron", name, "--help").check()
    assert result.stdout.startswith("usage: ")


@pytest.mark.long
def test_the_training_script_and_the_extensions_are_in_the_wheel(installed: Path) -> None:
    assert "--num-layers" in run_module(installed, "pretrain_gpt", "--help").check().stdout
    program = "from megatron.core import errors; print(errors.__file__)"
    found = run_command([sys.executable, "-c", program], cwd=installed.parent, env={"PYTHONPATH": str(installed)})
    assert found.check().stdout.startswith(str(installed))
    assert list(installed.glob("megatron/core/datasets/_helpers*"))
    assert list(installed.glob("megatron/data/_json_lines*"))


def test_every_script_of_the_tools_has_a_command_and_new_commands_have_no_script() -> None:
    named = {
        line.split()[1].removeprefix("megatron.cli.")
        for script in (ROOT / "tools").rglob("*.py")
        for line in script.read_text().splitlines()
        if line.startswith("from megatron.cli.")
    }
    # Megatron-LM's names for what clean-dataset does.
    without_a_command = {f"openwebtext.{name}" for name in ("blacklist_urls", "cleanup_dataset", "merge_jsons")}
    without_a_script = {COMMANDS[name] for name in ("train", "serve", "chat", "evaluate", "plot", "dashboard")}
    assert not named & without_a_script
    assert named | without_a_script == set(COMMANDS.values()) | without_a_command


@pytest.mark.parametrize(("script", "command"), SCRIPTS.items())
def test_the_name_of_a_script_is_accepted_as_a_command(
    script: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (ROOT / "tools" / f"{script.replace('.', '/')}.py").is_file()
    assert script not in COMMANDS
    monkeypatch.setattr(sys, "argv", ["megatron", script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr()
    assert said.err == ""
    assert " ".join(said.out.split()).startswith(f"usage: megatron {command} ")


@pytest.mark.parametrize(("old", "new"), DEPRECATED.items())
def test_a_deprecated_command_works_with_one_warning(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old not in COMMANDS
    monkeypatch.setattr(sys, "argv", ["megatron", old, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr()
    assert said.err == f"WARNING: megatron {old} is now megatron {new}; the next release removes the old name\n"
    assert said.out.startswith(f"usage: megatron {new} ")
    assert (ROOT / "tools" / f"{old}.py").is_file()


def test_an_unknown_command_is_one_line_and_status_2() -> None:
    result = run_command([sys.executable, "-m", "megatron", "preproces"], cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr == "error: there is no command 'preproces'; did you mean preprocess?\n"
