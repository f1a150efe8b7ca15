"""What a wheel of the tracked files holds is enough for every command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.cli.__main__ import COMMANDS
from tests.harness.training_run import CommandResult, run_command

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
    without_a_script = {COMMANDS[name] for name in ("train", "serve", "chat", "evaluate", "plot", "dashboard")}
    assert not named & without_a_script
    assert named | without_a_script == set(COMMANDS.values())


def test_an_unknown_command_is_one_line_and_status_2() -> None:
    result = run_command([sys.executable, "-m", "megatron", "preproces"], cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr == "error: there is no command 'preproces'; did you mean preprocess?\n"
