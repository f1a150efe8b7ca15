"""Values that follow from several parts of a run's configuration, fields that are whole flags, and model sizes."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.config_changes import compare_configs
from megatron.checkpoint.formats.huggingface.family import model_features
from megatron.checkpoint.formats.megatron.arguments import arguments_of_config, config_of_arguments
from megatron.config.arguments import build_parser, resolve_arguments
from megatron.config.resolution import resolve
from megatron.config.run_config import RunConfig, read_data_list, read_per_split_lists
from megatron.core.config_base import NOT_NEGATIVE, flag
from megatron.core.device import Device
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, describe_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.initialize import Runtime
from pretrain_gpt import provide_model
from tests.unit.checkpoint.toy_checkpoint import CONFIG, load, save
from tests.unit.config.command_lines import MINIMAL, TRAINING


def config_of(text: str, world_size: int = 1) -> RunConfig:
    return resolve_arguments([*MINIMAL, *text.split()], world_size).config


def test_batch_and_positions_have_defaults_from_elsewhere() -> None:
    config = config_of("", world_size=3)
    assert config.data_parallel_size == 3
    assert config.training.global_batch_size == 6
    assert config.model.max_position_embeddings == 40
    assert config.data.split == "969, 30, 1"


def test_warmup_as_a_share_of_the_decay_is_not_rounded() -> None:
    config = config_of("--lr-decay-iters 9 --lr-warmup-fraction 0.05 --global-batch-size 6")
    assert config.schedule_lengths.lr_warmup_steps == pytest.approx(2.7)


def test_precision_reaches_the_optimizer() -> None:
    config = config_of("--bf16")
    assert config.optimizer.params_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "world_size", "shards", "shards_gradients"),
    [
        ("--use-distributed-optimizer", 2, True, False),
        ("--data-parallel-sharding-strategy optim", 2, True, False),
        ("--data-parallel-sharding-strategy optim_grads --overlap-param-gather", 2, True, True),
        ("--data-parallel-sharding-strategy optim_grads_params", 2, True, True),
        ("--overlap-grad-reduce", 2, False, False),
    ],
)
def test_sharding_strategies_and_the_distributed_optimizer_agree(
    text: str, world_size: int, shards: bool, shards_gradients: bool
) -> None:
    resolved = resolve_arguments([*MINIMAL, *text.split()], world_size)
    assert resolved.notes == ()
    config = resolved.config
    assert (config.ddp.shards_optimizer, config.ddp.shards_gradients) == (shards, shards_gradients)
    assert config.ddp.use_distributed_optimizer == shards
    assert config.ddp.overlap_param_gather == ("overlap-param-gather" in text)


@pytest.mark.parametrize(
    "text", ["--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads --overlap-param-gather"]
)
def test_sharding_over_one_rank_says_that_it_has_no_effect(text: str) -> None:
    resolved = resolve_arguments([*MINIMAL, *text.split()], 1)
    (note,) = resolved.notes
    assert note.endswith("have no effect with one data-parallel rank: turned off")
    assert not resolved.config.ddp.shards_optimizer
    assert not resolved.config.ddp.overlap_param_gather
    resolved = resolve_arguments([*MINIMAL, *text.split(), "--tensor-model-parallel-size", "2"], 2)
    assert len(resolved.notes) == 1


def test_gathering_while_computing_needs_the_distributed_optimizer() -> None:
    resolved = resolve_arguments([*MINIMAL, "--overlap-param-gather"], 2)
    assert resolved.notes == ("--overlap-param-gather has no effect without --use-distributed-optimizer: turned off",)
    assert not resolved.config.ddp.overlap_param_gather


def test_weight_decay_is_constant_unless_said_otherwise() -> None:
    config = config_of("--weight-decay 0.3")
    assert (config.scheduler.start_weight_decay, config.scheduler.end_weight_decay) == (0.3, 0.3)


def test_schedule_lengths_in_iterations() -> None:
    lengths = config_of("--global-batch-size 8 --lr-warmup-iters 3").schedule_lengths
    assert (lengths.lr_warmup_steps, lengths.lr_decay_steps, lengths.weight_decay_steps) == (24, 80, 80)
    assert lengths.wsd_decay_steps is None
    other = config_of("--global-batch-size 8 --lr-decay-iters 320 --lr-warmup-fraction .05").schedule_lengths
    assert (other.lr_warmup_steps, other.lr_decay_steps, other.weight_decay_steps) == (128, 2560, 80)


def test_schedule_lengths_in_samples() -> None:
    config = config_of(
        "--train-iters 0 --train-samples 1000 --global-batch-size 8 --lr-warmup-samples 50 "
        "--lr-decay-style WSD --lr-wsd-decay-samples 120"
    )
    lengths = config.schedule_lengths
    assert (lengths.lr_warmup_steps, lengths.lr_decay_steps, lengths.wsd_decay_steps) == (50, 1000, 120)
    assert config.train_iters == 125
    assert config.train_samples == 1000


def test_ramp_up_counts_in_the_length_of_a_run() -> None:
    ramp = "--global-batch-size 16 --rampup-batch-size 4 4 60"
    assert config_of(f"{ramp} --train-iters 11").train_samples == 84
    assert config_of(f"{ramp} --train-iters 0 --train-samples 84").train_iters == 11


def test_resolving_twice_changes_nothing() -> None:
    config = config_of("--bf16 --sequence-parallel")
    again = resolve(config)
    assert again.config == config
    assert again.notes == ()


def test_metrics_file_stands_beside_the_checkpoints() -> None:
    assert config_of("").metrics_jsonl is None
    assert config_of("--save runs/a").metrics_jsonl == "runs/a/metrics.jsonl"
    assert config_of("--save runs/a --metrics-jsonl m.jsonl").metrics_jsonl == "m.jsonl"


def test_json_round_trip() -> None:
    config = config_of(
        "--swiglu --group-query-attention --num-query-groups 2 --rampup-batch-size 2 2 8 --global-batch-size 4 --bf16",
        world_size=1,
    )
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_configuration_of_an_earlier_release_reads_back_without_its_retired_field() -> None:
    values = config_of("").to_dict()
    values["optimizer"]["use_distributed_optimizer"] = True
    assert RunConfig.from_dict(values) == config_of("")
    values["optimizer"]["use_distributed_optimiser"] = True
    with pytest.raises(ConfigurationError, match="unknown field use_distributed_optimiser"):
        RunConfig.from_dict(values)


def test_list_files(tmp_path: Path) -> None:
    words = tmp_path / "list"
    words.write_text("0.5 a\n0.5 b\n")
    assert read_data_list(str(words), "--data-args-path") == ("0.5", "a", "0.5", "b")
    words.write_text(" \n")
    with pytest.raises(ConfigurationError, match="empty"):
        read_data_list(str(words), "--data-args-path")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_data_list(str(tmp_path / "none"), "--data-args-path")
    lists = tmp_path / "lists.json"
    lists.write_text('{"train": ["0.5", "a", 0.5, "b"], "valid": ["c"], "test": null}')
    assert read_per_split_lists(str(lists), "--x") == {
        "train": ("0.5", "a", "0.5", "b"),
        "valid": ("c",),
        "test": (),
    }
    for text in ("[1]", '{"training": []}', '{"train": "a"}', "{"):
        lists.write_text(text)
        with pytest.raises(ConfigurationError):
            read_per_split_lists(str(lists), "--x")


def test_a_flag_beside_what_it_needs_is_not_said_to_have_no_effect() -> None:
    """The values and companions are those of the end-to-end tests, which show that each flag has an effect."""
    folder = Path(__file__).parents[2] / "e2e" / "flags"
    with open(folder / "flag_values.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    checked = 0
    for row in rows:
        words = [row["flag"], *row["value"].split(), *row["companions"].split()]
        if row["without"] or not row["companions"] or any("{" in word for word in words):  # "{": a file
            continue
        try:
            resolved = resolve_arguments([*MINIMAL, *words], int(row["processes"]))
        except ConfigurationError:  # made for the sizes of the end-to-end tests
            continue
        assert not [note for note in resolved.notes if note.startswith(f"{row['flag']} ") and "no effect" in note]
        checked += 1
    assert checked > 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderConfig(GPTConfig, in_args=True):
    """Hold a model with three fields more."""

    num_memory_tokens: int = flag(0, role="shape", bounds=NOT_NEGATIVE)
    """Number of tokens that every layer sees."""
    memory_scale: float = flag(1.0, role="meaning", needs="num_memory_tokens")
    """Factor of the memory tokens."""
    memory_layers: int = flag(0, role="weights", excludes=("qk_layernorm",))
    """Number of layers with memory tokens."""


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model of a run be the wider one."""
    monkeypatch.setitem(RunConfig.__annotations__, "model", WiderConfig)


def test_a_model_field_is_refused_until_it_has_a_role() -> None:
    with pytest.raises(TypeError, match=r"Unfinished\.num_memory_tokens has the role None; declare it as flag\("):

        class Unfinished(GPTConfig):
            num_memory_tokens: int = 0


@pytest.mark.usefixtures("wider")
def test_it_is_on_the_command_line_with_its_bounds_exclusions_and_needs() -> None:
    assert "--num-memory-tokens N" in build_parser().format_help()
    assert "Number of tokens that every layer sees." in build_parser().format_help()
    config = resolve_arguments([*MINIMAL, "--num-memory-tokens", "3", "--memory-scale", "2"], 1).config
    assert isinstance(config.model, WiderConfig)
    assert (config.model.num_memory_tokens, config.model.memory_scale) == (3, 2.0)
    words = "--num-memory-tokens -1 --memory-layers 2 --qk-layernorm"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *words.split()], 1)
    assert caught.value.problems == (
        "--num-memory-tokens -1: a value of 0 or more is expected",
        "--memory-layers 2 and --qk-layernorm exclude each other; omit one of them",
    )
    with pytest.raises(
        ConfigurationError, match=r"^--memory-scale 2\.0 has no effect without --num-memory-tokens N; add it$"
    ):
        resolve_arguments([*MINIMAL, "--memory-scale", "2"], 1)


@pytest.mark.usefixtures("wider")
def test_it_is_part_of_what_a_checkpoint_is_of() -> None:
    old, new = (
        resolve_arguments([*MINIMAL, *words.split()], 1).config
        for words in (
            "--num-memory-tokens 3 --memory-layers 1",
            "--num-memory-tokens 4 --memory-scale 2 --memory-layers 2",
        )
    )
    changes = compare_configs(old.to_dict(), new.to_dict())
    assert [str(change) for change in changes.shape] == ["model.num_memory_tokens: 3 -> 4"]
    assert [str(change) for change in changes.weights] == ["model.memory_layers: 1 -> 2"]
    assert [str(change) for change in changes.other] == ["model.memory_scale: 1.0 -> 2.0"]
    assert model_features(new.model)["num_memory_tokens"] == 4
    assert model_features(new.model)["memory_scale"] == 2.0
    arguments = arguments_of_config(new.to_dict())
    assert arguments["num_memory_tokens"] == 4
    assert config_of_arguments(arguments)["model"]["memory_scale"] == 2.0


@pytest.mark.usefixtures("wider")
def test_a_run_that_goes_on_with_another_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setitem(CONFIG, "model", {**CONFIG["model"], "num_memory_tokens": 3})
    save(tmp_path, 10, lines)
    load(tmp_path, lines)
    with pytest.raises(CheckpointError, match=r"from a different model .*: model\.num_memory_tokens: 3 -> 4$"):
        load(tmp_path, lines, config=CONFIG | {"model": {**CONFIG["model"], "num_memory_tokens": 4}})


GPT2_345M = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
VOCABULARY = "--max-position-embeddings 1024 --tokenizer-type NullTokenizer --vocab-size 50256 --mock-data"


class MetaDevice(Device):
    """Stand where nothing has memory: a model on it has shapes only."""

    @property
    def torch_device(self) -> torch.device:
        """Return the device of parameters."""
        return torch.device("meta")


def count_parameters(layout: str, state: ParallelState) -> int:
    words = f"{GPT2_345M} {VOCABULARY} {layout}".split()
    config = resolve_arguments([*words, *TRAINING], state.world_size).config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=50257))
    rng = RngStreams(Device("cpu"), 1, state.place)
    runtime = Runtime(MetaDevice("cpu"), state, rng)
    chunks = [provide_model(config, runtime, contents) for contents in config.stage_layout.chunks(state.pp.rank)]
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


@pytest.mark.parametrize(
    ("tp", "pp", "expected"),
    [
        (1, 1, (354_871_296,)),
        (2, 2, (102_483_968, 101_437_440)),
        (1, 4, (128_137_216, 75_577_344, 75_577_344, 127_090_688)),
        (2, 3, (77_279_232, 50_409_472, 76_232_704)),
    ],
)
def test_stages_of_gpt2_345m_have_the_logged_sizes(tp: int, pp: int, expected: tuple[int, ...]) -> None:
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    for rank in range(tp * pp):
        state = describe_parallel_state(rank, tp * pp, ParallelSizes(tp=tp, pp=pp))
        assert count_parameters(layout, state) == expected[state.pp.rank], rank


def test_virtual_stages_share_a_ranks_layers_out() -> None:
    layout = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    counts = [count_parameters(layout, describe_parallel_state(rank, 4, ParallelSizes(pp=4))) for rank in range(4)]
    assert counts == [128_137_216, 75_577_344, 75_577_344, 127_090_688]
