"""Launch scripts become this project's command, and every flag of theirs is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash", reason="tree-sitter-bash is not installed")

from megatron.cli.adopt.adopt import CHECKS, main
from megatron.cli.adopt.adopted_command import _TOOLS, CONVERT, PRETRAIN, AdoptedCommand, launch_of
from megatron.cli.adopt.adoption import adopt_file, report_data
from megatron.cli.adopt.shell_values import without_placeholders
from megatron.cli.adopt.translation import flag_groups, translate
from megatron.config.arguments import all_flags
from megatron.config.megatron_flags import foreign_flags
from tests.unit.cli.adopt.bash_oracle import started_by_bash, started_by_reading
from tests.unit.cli.adopt.example_scripts import DEEPSPEED, MEGATRON, PAI, TWO_STEPS

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 100 "
    "--tokenizer-type NullTokenizer"
)
USER_SCRIPTS = Path(__file__).parents[4].parent / "shared" / "user_scripts"


def adopted(folder: Path, text: str, *parameters: str, **variables: str) -> tuple[AdoptedCommand, ...]:
    path = folder / "run.sh"
    path.write_text(text)
    return adopt_file(path, parameters, variables, CHECKS).commands


def values_of(command: AdoptedCommand) -> dict[str, tuple[str, ...]]:
    return {group.name: group.values for group in command.groups}


def kinds_of(command: AdoptedCommand) -> dict[str, str]:
    return {finding.flag.split()[0]: finding.kind for finding in command.findings}


def test_a_patch_script_with_its_parameters(tmp_path: Path) -> None:
    (command,) = adopted(tmp_path, PAI, "dsw", "0.5B", "1", "8", "2", "true", "full", "/qwen", "1000000", "/out")
    values = values_of(command)
    assert command.head[:3] == ("torchrun", "--nproc_per_node", "8")
    assert command.head[-1] == "pretrain_gpt.py"
    assert values["--num-layers"] == ("24",)
    assert values["--train-iters"] == ("30",)
    assert values["--tensor-model-parallel-size"] == ("2",)
    assert values["--num-query-groups"] == ("2",)
    assert "--sequence-parallel" in values
    assert "--untie-embeddings-and-output-weights" not in values
    # The tokenizer is taken from the folder of the weights, here as there.
    assert values["--load"] == ("/qwen",)
    assert "--patch-tokenizer-type" in values
    assert "--tokenizer-model" not in values
    assert set(command.placeholders) == {"MASTER_PORT", "current_time"}
    assert command.refused == ()
    assert values["--dataset"] == ("MMAP",)


def test_a_patch_script_without_its_parameters_names_them(tmp_path: Path) -> None:
    (command,) = adopted(tmp_path, PAI)
    assert {"ARG2", "ARG5", "NUM_LAYERS", "TRAIN_ITERS", "GPUS", "TOKENIZER_FOLDER"} <= set(command.placeholders)
    assert "'<NUM_LAYERS>'" in command.text
    assert not command.is_world_size_known
    assert not command.would_run


def test_a_megatron_script(tmp_path: Path) -> None:
    (command,) = adopted(tmp_path, MEGATRON, "ck", "logs")
    values = values_of(command)
    assert command.world_size == 16
    assert values["--global-batch-size"] == ("32",)
    assert values["--split"] == ("99,1,0",)
    assert values["--save"] == ("ck",)
    assert values["--tensorboard-dir"] == ("logs/tensorboard",)
    assert "--mock-data" not in values
    assert command.would_run
    # Files are looked for on this machine, which need not be the one of the run.
    assert [line.split()[0] for line in command.absent] == ["--data-path", "--vocab-file", "--merge-file"]


def test_a_deepspeed_script(tmp_path: Path) -> None:
    (command,) = adopted(tmp_path, DEEPSPEED)
    values = values_of(command)
    assert command.head == ("torchrun", "--nproc_per_node", "4", "--master_port", "29500", "pretrain_gpt.py")
    assert values["--tensor-model-parallel-size"] == ("2",)
    assert values["--micro-batch-size"] == ("4",)
    assert values["--lr-warmup-fraction"] == (".01",)
    assert values["--normalization"] == ("RMSNorm",)
    assert values["--recompute-num-layers"] == ("1",)
    assert {"--use-distributed-optimizer", "--group-query-attention"} <= set(values)
    kinds = kinds_of(command)
    assert kinds["--model-parallel-size"] == "renamed"
    assert kinds["--deepspeed"] == "no effect"
    assert kinds["--deepspeed_config"] == "no counterpart"
    assert command.refused == ()
    assert not command.would_run


def test_every_command_of_a_script_is_adopted(tmp_path: Path) -> None:
    commands = adopted(tmp_path, TWO_STEPS)
    assert [command.head[-1] for command in commands] == ["tools/preprocess_data.py"] * 2 + ["pretrain_gpt.py"]
    assert commands[2].head == ("torchrun", "--nproc_per_node", "2", "pretrain_gpt.py")
    assert [command.would_run for command in commands] == [True] * 3


def test_what_is_not_pretraining_is_to_be_decided(tmp_path: Path) -> None:
    (command,) = adopted(tmp_path, TWO_STEPS.partition("done")[2].replace("pretrain_gpt.py", "finetune_gpt.py"))
    assert command.head[-1] == "pretrain_gpt.py"
    assert [finding.flag for finding in command.findings if finding.needs_decision] == ["finetune_gpt.py"]


def test_a_shell_that_srun_starts_is_looked_into(tmp_path: Path) -> None:
    text = (
        'CMD="torchrun --nproc_per_node 2 pretrain_gpt.py --mock-data"\nsrun -l --mpi pmix bash -c "${CMD}" &\nwait\n'
    )
    (command,) = adopted(tmp_path, text)
    assert " ".join(command.head) == "srun -l --mpi pmix torchrun --nproc_per_node 2 pretrain_gpt.py"
    assert any("--num-layers is missing" in line for line in command.refused)
    (command,) = adopted(tmp_path, "srun -n 8 python pretrain_gpt.py --mock-data\n")
    assert [finding.flag for finding in command.findings] == ["srun python"]


def test_line_ends_of_other_systems_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(MEGATRON.replace("\n", "\r\n").encode())
    (command,) = adopt_file(tmp_path / "run.sh", ["ck", "logs"], {}, CHECKS).commands
    assert command.would_run


@pytest.mark.full
def test_the_tool_as_users_call_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(TWO_STEPS)
    tool = Path(__file__).parents[4] / "tools" / "adopt.py"
    result = subprocess.run([sys.executable, tool, "run.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("# run.sh, line 4\npython tools/preprocess_data.py \\\n    --input a.jsonl \\\n")


@pytest.mark.parametrize("text", [MEGATRON, DEEPSPEED, TWO_STEPS], ids=["Megatron-LM", "DeepSpeed", "two steps"])
def test_example_scripts_are_read_as_bash_reads_them(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    read = started_by_reading(script, ["ck", "logs"], {})
    assert read == started_by_bash(script, ["ck", "logs"], {}, tmp_path)
    assert read


def test_what_the_parsers_refuse_is_listed(tmp_path: Path) -> None:
    text = TWO_STEPS.replace("--num-attention-heads 2", "--num-attention-heads 3").replace("--append-eod", "--color")
    commands = adopted(tmp_path, text)
    assert "--color" in commands[0].refused[0]
    assert any("3" in line for line in commands[2].refused)


def test_every_tool_is_held_against_its_own_parser(tmp_path: Path) -> None:
    server = "torchrun --nproc_per_node 2 tools/run_text_generation_server.py --load ck"
    merge = "python tools/merge_datasets.py --input a --output-prefix b"
    commands = adopted(tmp_path, f"{server} --num-layers 24\n{merge} --color\n{server}\n{merge}\n")
    assert [command.would_run for command in commands] == [False, False, True, True]
    assert "there is no --num-layers" in commands[0].refused[0]
    assert "--color" in commands[1].refused[0]
    assert set(CHECKS) == {PRETRAIN, CONVERT, *_TOOLS.values()}


def test_a_variable_that_the_script_does_not_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("GPUS=1\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py --mock-data\n")
    notes = adopt_file(path, [], {"GPUS": "2", "GPUZ": "4"}, CHECKS).notes
    assert notes == ("--set GPUZ=4 has no effect: the parts of the script that were followed never read GPUZ",)


def test_flags_are_renamed_left_out_or_listed() -> None:
    words = "--zero-stage 3 --fp8-hybrid --checkpoint-activations --recompute-num-layers 4 --invented 1 2 --keep-last"
    translation = translate(words.split())
    groups = {group.name: group.values for group in translation.groups}
    # What the command has itself goes before what a renamed flag brings along.
    assert groups["--recompute-num-layers"] == ("4",)
    assert groups["--data-parallel-sharding-strategy"] == ("optim_grads_params",)
    found = {finding.flag: finding for finding in translation.findings}
    assert not found["--zero-stage 3"].needs_decision
    assert found["--invented 1 2"].kind == "no counterpart"
    assert found["--keep-last"].kind == "no effect"
    assert "--keep-last" not in groups


def test_values_stay_with_their_flags() -> None:
    words = "--a=1 loose --data-path 0.5 x -1 y --bf16 loose --num-layers 2 loose"
    groups = list(flag_groups(words.split()))
    assert [group.words for group in groups][1:] == [
        ("--data-path", "0.5", "x", "-1", "y"),
        ("--bf16",),
        ("loose",),
        ("--num-layers", "2"),
        ("loose",),
    ]
    assert groups[0].words == ("--a", "1", "loose")


@pytest.mark.parametrize(
    ("words", "script", "world_size", "wrapper"),
    [
        ("torchrun --nproc_per_node=2 --nnodes 3 x/pretrain_gpt.py --a", "x/pretrain_gpt.py", 6, ()),
        ("torchrun pretrain_gpt.py", "pretrain_gpt.py", 1, ()),
        ("torchrun --standalone --nproc-per-node gpu pretrain_gpt.py", "pretrain_gpt.py", None, ()),
        ("python3 -u pretrain_gpt.py", "pretrain_gpt.py", 1, ()),
        ("python -m torch.distributed.run --nproc_per_node 2 pretrain_gpt.py", "pretrain_gpt.py", 2, ()),
        ("srun -N 2 torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py", "pretrain_gpt.py", 8, ("srun", "-N", "2")),
        ("deepspeed --num_nodes 2 --num_gpus 2 pretrain_gpt.py", "pretrain_gpt.py", 4, ()),
        ("deepspeed pretrain_gpt.py", "pretrain_gpt.py", None, ()),
    ],
)
def test_launchers_are_taken_apart(words: str, script: str, world_size: int | None, wrapper: tuple[str, ...]) -> None:
    launch = launch_of(words.split())
    assert launch is not None
    assert (launch.script, launch.world_size, launch.wrapper) == (script, world_size, wrapper)


@pytest.mark.parametrize("words", ["ls -l", "python -c print()", "torchrun --nproc_per_node 2", "python"])
def test_what_is_no_launch_is_none(words: str) -> None:
    assert launch_of(words.split()) is None


def test_the_table_names_flags_that_exist() -> None:
    known = set(all_flags())
    named = {word for row in foreign_flags().values() for word in row.becomes.split() if word.startswith("--")}
    assert named <= known
    for row in foreign_flags().values():
        assert row.change
        assert row.trainer
        assert row.arity in (0, 1, "+")


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, [], "No such file"),
        (b"\x7fELF\x00\xff\xfe", [], "is not text"),
        (b"echo hello\nls -l\n", [], "launches no supported script"),
        (b"torchrun pretrain_bert.py --a\n", [], "it starts pretrain_bert.py"),
        (b"", [], "it starts nothing"),
        (b"torchrun pretrain_gpt.py", ["--set", "X"], "--set X is not NAME=VALUE"),
    ],
)
def test_bad_input_gets_one_line(tmp_path: Path, capsys, content: bytes | None, words: list[str], message: str) -> None:
    path = tmp_path / "run.sh"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert message in said.err


def test_the_command_line(tmp_path: Path, capsys) -> None:
    path, data = tmp_path / "run.sh", tmp_path / "adopted.json"
    path.write_text(MEGATRON)
    assert main([str(path), "--json", str(data), "--set", "NUM_NODES=1", "--", "ck", "logs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "torchrun --nproc_per_node 8 --nnodes 1 --master_addr localhost pretrain_gpt.py \\"
    assert "    --num-layers 4 \\" in lines
    assert "    --profile-step-start 4" in (line.removesuffix(" \\") for line in lines)
    assert "pretrain_gpt.py accepts this command (8 ranks)." in lines
    written = json.loads(data.read_text())
    assert written["would_run"] is True
    assert written["commands"][0]["world_size"] == 8
    assert written["commands"][0]["words"][:3] == ["torchrun", "--nproc_per_node", "8"]
    assert main([str(path)]) == 1


SOURCED = ("common_gpt2", "common_choices")


@pytest.mark.default(13)
@pytest.mark.skipif(not USER_SCRIPTS.is_dir(), reason=f"{USER_SCRIPTS} is not on this machine")
@pytest.mark.parametrize("name", sorted({path.stem for path in USER_SCRIPTS.glob("*.sh")} - set(SOURCED)) or ["none"])
@pytest.mark.parametrize("extra", [{}, {"PR": "bf16", "TP": "2", "AC": "sel"}], ids=["plain", "set"])
def test_scripts_of_users_are_read_as_bash_reads_them(
    name: str, extra: dict[str, str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = USER_SCRIPTS / f"{name}.sh"
    parameters = ["--workers", "3"] if name == "preprocess" else ["--seed", "7"]
    (expected,) = started_by_bash(script, parameters, extra, tmp_path)
    assert started_by_reading(script, parameters, extra) == [expected]
    (command,) = adopt_file(script, parameters, extra, CHECKS).commands
    assert command.refused == ()
    assert command.is_world_size_known
    # Each word of the script is in the command or in a finding.
    (data,) = report_data([command], [])["commands"]
    accounted = {*data["words"], *(word for flag in data["flags"] for word in flag["flag"].split())}
    assert set(expected) - accounted == set()


@pytest.mark.parametrize(
    "script",
    [
        "read -r -d '' CMD <<EOF\n{}\nEOF\nbash -c \"$CMD\"",
        'CMD="$(cat <<EOF\n{}\nEOF\n)"\neval $CMD',
        "sbatch <<-EOF\n\t#!/bin/bash\n\t#SBATCH --nodes=1\n\t{}\n\tEOF",
        'sbatch --nodes 1 --wrap="{}"',
        "ssh host bash -s <<EOF\n{}\nEOF",
    ],
    ids=["read", "cat", "sbatch", "wrap", "ssh"],
)
def test_here_documents_are_followed(tmp_path: Path, script: str) -> None:
    launched = "torchrun --nproc_per_node $N pretrain_gpt.py --mock-data --save '/a b'"
    (command,) = adopted(tmp_path, f"N=2\n{script.format(launched)}\n")
    assert command.world_size == 2
    assert values_of(command)["--save"] == ("/a b",)


def test_a_quoted_here_document_is_taken_as_it_stands(tmp_path: Path) -> None:
    (command,) = adopted(
        tmp_path, "N=2\nbash <<'EOF'\nN=3\ntorchrun --nproc_per_node $N pretrain_gpt.py \"a b\"\nEOF\n"
    )
    assert command.world_size == 3


def test_other_starters_of_ranks_are_named(tmp_path: Path) -> None:
    (command,) = adopted(tmp_path, "mpirun -np 4 python pretrain_gpt.py --mock-data\n")
    assert [finding.flag for finding in command.findings] == ["mpirun python"]
    path = tmp_path / "run.sh"
    path.write_text("accelerate launch pretrain_gpt.py --mock-data\npython pretrain_gpt.py --mock-data\n")
    adoption = adopt_file(path, (), {}, CHECKS)
    assert len(adoption.commands) == 1
    assert adoption.notes[0].startswith("line 1 starts pretrain_gpt.py with accelerate, whose flags are not translated")


SWITCH_THEN = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} --bf16 "


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("<load_options>", "load_options"),
        ("'<load_options>'", "load_options"),
        ("{{ load_options }}", "load_options"),
        ("${{ inputs.more }}", "inputs.more"),
        ("$LOAD_OPTIONS", "LOAD_OPTIONS"),
        ("${LOAD_OPTIONS[@]}", "LOAD_OPTIONS"),
        ("...", "MORE"),
    ],
)
def test_what_is_to_be_filled_in_is_no_value_of_a_switch(tmp_path: Path, words: str, name: str) -> None:
    (command,) = adopted(tmp_path, f"{SWITCH_THEN}{words} --swiglu\n")
    assert command.refused == ()
    assert values_of(command)["--bf16"] == values_of(command)["--swiglu"] == ()
    assert "" not in values_of(command)
    assert [finding.flag for finding in command.findings if finding.kind == "unresolved"] == [f"<{name}>"]
    assert not command.would_run


def test_options_that_one_way_through_the_script_sets_are_no_value_of_a_switch(tmp_path: Path) -> None:
    (command,) = adopted(
        tmp_path,
        f'[ -d "$OUT" ] && load_options="--load $OUT" || load_options=""\n{SWITCH_THEN}$load_options --swiglu\n',
    )
    assert command.refused == ()
    assert kinds_of(command)["<load_options>"] == "unresolved"


def test_values_that_are_to_be_filled_in_are_named(tmp_path: Path) -> None:
    text = f"""# don't read this: <comment>
VOCAB=<Specify path to file>/vocab.json
MERGES="<Specify path to file>/merges.txt"
cat > hosts <<EOF
node slots=8
EOF
torchrun --nproc_per_node <GPUS> pretrain_gpt.py {SMALL} --tokenizer-type GPT2BPETokenizer --vocab-file $VOCAB \\
    --merge-file $MERGES --save <your dir> --load "<other>" --seed {{{{ seed }}}} 2>&1 | tee log.txt
"""
    (command,) = adopted(tmp_path, text)
    assert command.refused == ()
    assert set(command.placeholders) == {"GPUS", "Specify_path_to_file", "your_dir", "other", "seed"}
    assert command.placeholders["your_dir"] == "<your dir> must be replaced in the file"
    assert "'<Specify_path_to_file>/merges.txt'" in command.text


def test_tokens_between_angles_are_values(tmp_path: Path) -> None:
    flags = "--fim-data --fim-rate 0.5 --fim-prefix-token '<fim_prefix>' --fim-middle-token '<m>'"
    (command,) = adopted(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} {flags}\n")
    assert values_of(command)["--fim-prefix-token"] == ("<fim_prefix>",)
    assert command.placeholders == {}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model '<path>'", "path"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model '<my folder>/model'", "my_folder"),
        ("--tokenizer-name-or-path '<path>'", "path"),
        ("--moe-token-dispatcher-type '<type>'", "type"),
    ],
)
def test_a_quoted_placeholder_of_a_flag_about_tokens_is_named(tmp_path: Path, flags: str, name: str) -> None:
    (command,) = adopted(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} {flags}\n")
    assert name in command.placeholders


@pytest.mark.parametrize(
    "script",
    [
        "sort <in>out",
        "while read x; do :; done <list.txt>out.txt",
        "cat > page <<EOF\n<html> {{ title }} <a b>\nEOF\n",
        "cat <<-'END' > page\n\t<html> don't <a b>\n\tEND\n",
        "echo $((1 <<3)); sort <in>out",
    ],
)
def test_redirections_and_here_documents_are_no_placeholders(script: str) -> None:
    assert without_placeholders(script, lambda name, reason: f"[{name}]") == script


def test_placeholders_around_a_here_document_are_marked() -> None:
    marked = without_placeholders("cat <<EOF > <file>\n<body>\nEOF\nrun <name>\n", lambda name, reason: f"[{name}]")
    assert marked == "cat <<EOF > [file]\n<body>\nEOF\nrun [name]\n"


@pytest.mark.parametrize("script", ["bash <<EOF\n{}\nEOF\n", "bash <<'EOF'\n{}\nEOF\n"])
def test_placeholders_of_a_here_document_that_a_shell_runs_are_named(tmp_path: Path, script: str) -> None:
    launched = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} --save <your dir>"
    (command,) = adopted(tmp_path, script.format(launched))
    assert set(command.placeholders) == {"your_dir"}
