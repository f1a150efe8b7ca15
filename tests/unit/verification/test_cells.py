"""The matrix covers what it must, and random configurations are the same each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli.verify_parallelism import choose_cells, main, parse_arguments
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.verification.cells import DATA, EXCHANGES, MAX_WORLD_SIZE, Cell, Layout, make_cell, matrix
from megatron.verification.hybrid_cells import hybrid_matrix
from megatron.verification.model_cells import attention_matrix, expert_matrix, latent_matrix, prediction_matrix
from megatron.verification.random_cells import fuzz
from megatron.verification.run_cell import resolve_cell
from megatron.verification.training_cells import hybrid, odd_matrix, recipe_matrix, sharding_matrix

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def configs() -> list[RunConfig]:
    return [resolve_arguments(cell.flags, cell.world_size).config for cell in matrix()]


def test_the_matrix_has_150_cells_or_more_each_once_on_up_to_eight_ranks() -> None:
    cells = matrix()
    assert len(cells) >= 150
    assert len({cell.name for cell in cells}) == len({(cell.flags, cell.data, cell.world_size) for cell in cells})
    assert len({cell.name for cell in cells}) == len(cells)
    assert max(cell.world_size for cell in cells) == MAX_WORLD_SIZE


def refused(cells: list[Cell]) -> dict[str, str]:
    """Return why cells are refused, by their names."""
    found = {}
    for cell in cells:
        try:
            resolve_cell(cell.flags, cell.world_size, "float64")
        except ConfigurationError as error:
            found[cell.name] = str(error)
    return found


def test_no_cell_with_copies_of_what_is_sharded_is_refused() -> None:
    cells = [cell for cell in sharding_matrix() if cell.name.endswith("copies")]
    assert len(cells) > 20
    assert refused(cells) == {}
    assert len(refused([hybrid(make_cell("gpt2", Layout(cp=2, sharding="optim")))])) == 1


@pytest.mark.long
def test_no_cell_of_any_matrix_is_refused() -> None:
    cells = choose_cells(parse_arguments([]))
    assert len(cells) > 900
    assert refused(cells) == {}


@pytest.mark.long
def test_the_matrix_covers_every_way_to_cut_a_model(configs: list[RunConfig]) -> None:
    models = [config.model for config in configs]
    assert {m.tensor_model_parallel_size for m in models} >= {1, 2, 4}
    assert {(m.tensor_model_parallel_size, m.sequence_parallel) for m in models} >= {(2, False), (2, True), (4, True)}
    assert {m.pipeline_model_parallel_size for m in models} >= {1, 2, 4}
    assert {config.stage_layout.num_chunks for config in configs} >= {1, 2}
    assert {(m.context_parallel_size, m.cp_comm_type[0]) for m in models} >= {(c, e) for c in (2, 4) for e in EXCHANGES}
    shardings = {
        (config.data_parallel_size, config.ddp.shards_optimizer, config.ddp.shards_gradients) for config in configs
    }
    assert shardings >= {(d, *kind) for d in (2, 4) for kind in ((False, False), (True, False), (True, True))}
    assert {m.recompute_granularity for m in models} == {None, "selective", "full"}
    assert {m.untie_embeddings_and_output_weights for m in models} == {False, True}
    assert {m.num_query_groups < m.tensor_model_parallel_size for m in models} == {False, True}
    assert any(len({len(stage.layer_numbers) for stage in config.stage_layout.stages}) > 1 for config in configs)
    assert {cell.data for cell in matrix()} == set(DATA)
    assert "zero-bubble" in {config.pipeline_schedule for config in configs}


@pytest.mark.long
def test_the_matrix_covers_every_way_to_spread_experts() -> None:
    cells = expert_matrix()
    assert len(cells) >= 120
    assert len({cell.name for cell in cells}) == len({(cell.flags, cell.data, cell.world_size) for cell in cells})
    found = [resolve_arguments(cell.flags, cell.world_size).config for cell in cells]
    sizes = [(config.parallel_sizes, config.ddp.shards_optimizer) for config in found]
    assert {s.ep for s, _ in sizes} == {1, 2, 4}
    for tp, pp, cp, ep, etp in ((2, 1, 1, 2, 2), (1, 2, 1, 2, 1), (1, 1, 2, 2, 1), (2, 1, 1, 2, 1), (2, 1, 1, 1, 1)):
        assert any((s.tp, s.pp, s.cp, s.ep, s.expert_tp) == (tp, pp, cp, ep, etp) for s, _ in sizes)
    assert {(s.num_expert_replicas > 1, is_sharded) for s, is_sharded in sizes} >= {(True, True), (False, True)}
    assert {kind for config in found for kind in config.model.moe.moe_router_load_balancing_type} == {
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
    }


def test_nothing_of_the_layout_is_in_the_reference() -> None:
    cell = make_cell("llama", Layout(tp=2, pp=2, cp=2), "packed", ("--global-batch-size", "6"))
    assert cell.world_size == 8
    assert not any("parallel" in flag for flag in cell.reference_flags)
    assert "--reset-position-ids" in cell.reference_flags
    assert cell.reference_flags == cell.flags[: len(cell.reference_flags)]
    resolve_arguments(cell.reference_flags, 1)


def test_random_configurations_follow_from_the_seed_and_their_number() -> None:
    assert fuzz(3, 40) == fuzz(3, 40)
    assert fuzz(3, 60)[:40] == fuzz(3, 40)
    assert fuzz(4, 40) != fuzz(3, 40)


def test_random_configurations_have_sharded_weights_and_copies_with_experts_and_without() -> None:
    flags = [" ".join(cell.layout_flags) for cell in fuzz(0, 300)]
    sharded = [each for each in flags if "optim_grads_params" in each]
    copied = [each for each in flags if "--num-distributed-optimizer-instances" in each]
    for chosen in (sharded, copied, set(sharded) & set(copied)):
        with_experts = sum("--moe-token-dispatcher-type" in each for each in chosen)
        assert 2 <= with_experts < len(chosen) - 10


def test_random_configurations_have_other_recipes_with_experts_and_without() -> None:
    cells = fuzz(0, 300)
    for words in ("--optimizer muon", "--lora-rank", "--clip-grad-matrices", "optimizer-cpu-offload"):
        chosen = [cell for cell in cells if words in cell.name]
        assert len(chosen) > 3, words
        assert {"--num-experts" in cell.flags for cell in chosen} == {False, True}, words
    # Where the state lies is the layout's; everything else is the training's, which one process does too.
    assert not any("--optimizer-cpu-offload" in cell.reference_flags for cell in cells)
    assert all(("--optimizer" in cell.reference_flags) == ("--optimizer muon" in cell.name) for cell in cells)


@pytest.mark.full
def test_most_random_configurations_run_and_a_refusal_says_what_would_work() -> None:
    runs = 0
    for cell in fuzz(0, 100):
        try:
            resolve_arguments(cell.flags, cell.world_size)
            runs += 1
        except ConfigurationError as error:
            for problem in error.problems:
                assert any(word in problem for word in ("work", "use ", "omit it", "omit", "raise", "lower")), problem
    assert 75 <= runs < 100


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "verify_parallelism.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_the_command_lists_the_cells_that_every_word_fits() -> None:
    listed = tool("--list", "--filter", "gpt2 zero-bubble dp2").stdout.splitlines()
    everything = tool("--list").stdout.splitlines()
    special = (*expert_matrix(), *prediction_matrix(), *latent_matrix(), *attention_matrix(), *hybrid_matrix())
    proved = (*matrix(), *special, *sharding_matrix(), *recipe_matrix(), *odd_matrix())
    assert [cell.name for cell in proved] == everything
    assert listed == [name for name in everything if all(word in name for word in ("gpt2", "zero-bubble", "dp2"))]
    assert 0 < len(listed) < len(everything)
    assert tool("--list", "--fuzz", "3").stdout.splitlines() == [cell.name for cell in fuzz(0, 3)]
    assert tool("--list", "--fuzz", "30", "--filter", "#2").stdout.splitlines() == [fuzz(0, 3)[2].name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fuzz 0", "--fuzz 0 selects no configuration; use 1 or more, or omit it"),
        ("--fuzz -3", "--fuzz -3 selects no configuration"),
        ("--tolerance nan", "--tolerance nan is not a number of 0 or more"),
        ("--tolerance -1", "--tolerance -1.0 is not a number of 0 or more"),
        ("--tolerance inf", "--tolerance inf is not a number of 0 or more"),
    ],
)
def test_a_wrong_value_is_answered_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_seed_without_random_cells_says_that_it_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--seed", "3"]) == 0
    assert capsys.readouterr().err == "--seed has no effect without --fuzz\n"
    assert main(["--list", "--seed", "3", "--fuzz", "1"]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_says_that_no_cell_fits() -> None:
    result = tool("--filter", "no such layout")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--list" in result.stderr
