"""The choice of what computes: CPU products, the chunks of --tp-comm-overlap, --transformer-impl, and DeepEP."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.arguments import resolve_arguments
from megatron.config.checkpoint_arguments import recorded_config
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.ops import gemm
from megatron.core.process_group import single_rank_group
from megatron.training import autotune, model_setup
from megatron.training.autotune import choose_library, choose_tp_overlap, is_quicker, measure_libraries
from megatron.training.initialize import LaunchEnvironment, make_runtime
from megatron.training.model_setup import with_token_dispatcher, with_transformer_impl
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.distributed import run_distributed
from tests.harness.forked_training import fork_training
from tests.harness.toy_model import make_model
from tests.unit.config.command_lines import MINIMAL

LARGE = [*MINIMAL, "--hidden-size", "192", "--seq-length", "512", "--ffn-hidden-size", "768"]
needs_both = pytest.mark.skipif(
    not all(gemm.has_library(name, torch.float32) for name in ("onednn", "mkl")),
    reason="this torch has one library only",
)


def choose(argv: list[str], *more: str, lines: list[str] | None = None) -> str:
    """Return what a run on one CPU process chooses."""
    config = resolve_arguments([*argv, *more], 1).config
    return chosen_by(config, [] if lines is None else lines)


def chosen_by(config: RunConfig, lines: list[str]) -> str:
    return choose_library(config, make_runtime(config, Device("cpu")), lines.append).model.cpu_gemm_backend


def let_measure(
    monkeypatch: pytest.MonkeyPatch, onednn: float, mkl: float, mixed: float = 9.0
) -> list[tuple[Any, ...]]:
    """Let every measurement find these times; return the list of what is measured."""
    measured: list[tuple[Any, ...]] = []

    def measure(*sizes: Any) -> dict[str, list[list[float]]]:
        measured.append(sizes)
        return {"onednn": [[onednn] * 6], "mkl": [[mkl] * 6], "mixed": [[mixed] * 6]}

    monkeypatch.setattr(autotune, "measure_libraries", measure)
    return measured


@needs_both
@pytest.mark.parametrize(
    ("flags", "onednn", "mkl", "mixed", "expected"),
    [
        ("", 1.0, 0.9, 0.92, "mkl"),
        ("", 1.0, 0.97, 0.96, "auto"),
        ("", 0.5, 1.0, 0.6, "auto"),
        ("", 1.0, 0.9, 0.8, "mixed"),
        ("--bf16", 0.9, 1.0, 0.95, "onednn"),
        ("--bf16", 1.0, 0.5, 0.6, "auto"),
        ("--bf16", 1.2, 1.0, 0.9, "mixed"),
    ],
)
def test_the_default_stays_unless_the_other_is_clearly_quicker(
    flags: str, onednn: float, mkl: float, mixed: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "has_library", lambda library, dtype: True)
    measured, lines = let_measure(monkeypatch, onednn, mkl, mixed), list[str]()
    assert choose(LARGE, *flags.split(), lines=lines) == expected
    sizes = [(192, 512), (512, 192), (192, 512), (192, 192)]
    assert measured == [(512, sizes, torch.bfloat16 if flags else torch.float32, None)]
    assert lines == ([] if expected == "auto" else [f" > GEMMs on CPU: {expected} (measured)"])


@needs_both
def test_what_is_measured_of_a_model_with_experts_are_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = let_measure(monkeypatch, 1.0, 1.0)
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 384 --micro-batch-size 2 --global-batch-size 2"
    assert choose([*LARGE, "--num-layers", "2"], *experts.split()) == "auto"
    # 1024 tokens, 2 choices each, over 8 experts, of which two have 512 rows.
    assert measured == [(256, [(192, 384), (384, 192)], torch.float32, 2)]


@pytest.mark.parametrize(("argv", "flags"), [(MINIMAL, ""), (LARGE, "--deterministic-mode"), (LARGE, "--fp16")])
def test_small_models_and_deterministic_runs_do_not_depend_on_a_measurement(
    argv: list[str], flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = let_measure(monkeypatch, 1.0, 0.1)
    assert choose(argv, *flags.split()) == "auto"
    assert not measured


def test_a_disturbed_round_does_not_decide() -> None:
    quiet, disturbed = [1.0, 2.0], [9.0, 2.0]
    assert is_quicker([[0.9, 1.8], disturbed], [quiet, quiet])
    assert not is_quicker([quiet, quiet], [disturbed, quiet])
    assert not is_quicker([[0.98, 1.96]], [quiet])


@needs_both
@pytest.mark.parametrize("groups", [None, 3])
def test_a_measurement_computes_six_products_by_each_library_and_draws_no_random_number(groups: int | None) -> None:
    state = torch.get_rng_state()
    times = measure_libraries(40, [(8, 24), (24, 8)], torch.float32, groups)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(times) == {"onednn", "mkl", "mixed"}
    for mixed, onednn, mkl in zip(times["mixed"], times["onednn"], times["mkl"]):
        assert mixed == [*onednn[:2], mkl[2], *onednn[3:5], mkl[5]]
    for rounds in times.values():
        assert len(rounds) >= 3
        assert {len(products) for products in rounds} == {6}
        assert min(map(min, rounds)) > 0


def test_a_library_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--cpu-gemm-backend onednn: .* float16 .* use --cpu-gemm-backend auto"
    ):
        choose(MINIMAL, "--fp16", "--cpu-gemm-backend", "onednn")
    assert choose(MINIMAL, "--fp16", "--cpu-gemm-backend", "mkl") == "mkl"


def test_cuda_runs_choose_nothing() -> None:
    config = resolve_arguments([*LARGE, "--cpu-gemm-backend", "onednn", "--fp16"], 1).config
    runtime = dataclasses.replace(make_runtime(config, Device("cpu")), device=Device("cuda"))
    assert choose_library(config, runtime, lambda line: None) is config


def choose_against_each_other() -> str:
    """Choose where each rank finds another library quicker."""
    config = resolve_arguments([*LARGE, "--distributed-backend", "gloo"], 2).config
    runtime = make_runtime(config, Device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        let_measure(patch, 1.0 if runtime.is_reporter else 0.1, 0.5)
        return choose_library(config, runtime, lambda line: None).model.cpu_gemm_backend


@needs_both
def test_all_ranks_take_the_same_library() -> None:
    assert run_distributed(2, choose_against_each_other) == ["mkl", "mkl"]


@pytest.mark.parametrize("untie", [False, True])
def test_every_linear_map_of_a_model_takes_the_library(untie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def note(x: torch.Tensor, library: str = "auto") -> bool:
        seen.append(library)
        return False

    monkeypatch.setattr(gemm, "uses_onednn", note)
    model = make_model(single_rank_group(("tp",)), cpu_gemm_backend="mkl", untie_embeddings_and_output_weights=untie)
    tokens = torch.arange(14).view(1, 14)
    model(tokens, tokens, labels=tokens).sum().backward()
    # Two layers of four maps and the output layer: forward, input gradient, weight gradient.
    assert seen == ["mkl"] * 27


@pytest.mark.full
@needs_both
@pytest.mark.parametrize(
    "checkpoint_format",
    ["", *(pytest.param(f"--ckpt-format {name}", marks=pytest.mark.long) for name in ("torch", "torch_dist"))],
)
def test_a_run_goes_on_with_the_library_of_its_checkpoint(checkpoint_format: str, tmp_path: Path) -> None:
    flags = f"--train-iters 4 --lr-warmup-iters 1 {checkpoint_format}"
    whole = fork_training(toy_args(tmp_path / "whole", flags, "--cpu-gemm-backend mkl")).check()
    fork_training(toy_args(tmp_path / "parts", flags, "--cpu-gemm-backend mkl --exit-interval 2")).check()
    second = fork_training(toy_args(tmp_path / "parts", flags)).check()
    assert " > GEMMs on CPU: mkl (as in the checkpoint)" in second.stdout
    assert "configuration changed since the checkpoint: model.cpu_gemm_backend" not in second.stdout
    assert exact_figures(second.metrics)[-2:] == exact_figures(whole.metrics)[-2:]

    config = resolve_arguments(toy_args(tmp_path / "parts", flags), 1).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "has_library", lambda library, dtype: library != "mkl")
        lines: list[str] = []
        assert chosen_by(config, lines) == "auto"
    assert [line[:61] for line in lines] == ["WARNING: the checkpoint's run computed GEMMs with mkl, which "]
    fresh = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, finetune=True))
    assert chosen_by(fresh, []) == "auto"


def test_a_checkpoint_without_a_record_goes_on_with_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--train-iters 2 --lr-warmup-iters 1"
    fork_training(toy_args(tmp_path, flags)).check()
    index = next(newest(tmp_path / "checkpoints").glob("*.json"))
    stored = json.loads(index.read_text())
    assert stored["common"]["config"]["model"].pop("cpu_gemm_backend") == "auto"
    index.write_text(json.dumps(stored))
    measured = let_measure(monkeypatch, 1.0, 0.1)
    assert (
        choose(
            toy_args(tmp_path, flags),
            *["--hidden-size", "512", "--micro-batch-size", "64", "--global-batch-size", "64"],
        )
        == "auto"
    )
    assert not measured


LAYOUT = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--distributed-backend", "gloo")


def choices(times: list[tuple[float, float] | None], flags: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Return what this rank chooses and says where a measurement finds these times on it; None measures."""
    lines: list[str] = []
    config = resolve_arguments([*MINIMAL, *LAYOUT, "--tp-comm-overlap", *flags], 2).config
    runtime = make_runtime(config, Device("cpu"))
    chosen = []
    for found in times:
        if found is not None:
            mine = found[runtime.state.rank], 1.0
            autotune.measure_overlap = lambda *_, mine=mine: mine  # type: ignore[assignment]
        chosen.append(choose_tp_overlap(config, runtime, lines.append).model.tp_comm_overlap_impl)
    return chosen, lines


def test_the_slowest_rank_decides_whether_chunks_gain() -> None:
    for chosen, lines in run_distributed(2, choices, [None, (0.5, 0.9), (0.5, 1.2)]):
        assert chosen[0] in ("ring", "whole")
        assert chosen[1:] == ["ring", "whole"]
        said = " > tensor-parallel communication overlapped with GEMMs: "
        assert lines[1:] == [
            f"{said}in chunks, in a ring (measured: chunks take 90% of the time without chunks)",
            f"{said}not in chunks (measured: chunks take 120% of the time without chunks)",
        ]


@pytest.mark.long
def test_nothing_is_measured_where_the_choice_is_made() -> None:
    for impl in ("ring", "whole"):
        [(chosen, lines), _] = run_distributed(2, choices, [(9.0, 9.0)], ("--tp-comm-overlap-impl", impl))
        assert (chosen, lines) == ([impl], [])
    for flags, why in (
        (("--tp-comm-overlap-impl", "symmetric-memory"), "there is no symmetric memory on CPU"),
        (("--deterministic-mode",), "nothing is measured with --deterministic-mode"),
    ):
        [(chosen, [line]), _] = run_distributed(2, choices, [(9.0, 9.0)], flags)
        assert chosen == ["ring"]
        assert line.endswith(f"({why})")


def choices_after(recorded: str) -> tuple[list[str], list[str]]:
    """Choose as a run that goes on from a checkpoint with this choice in it."""
    autotune.recorded_choice = lambda config, runtime, field: recorded if field == "tp_comm_overlap_impl" else None
    return choices([(9.0, 9.0)])


def test_a_checkpoint_keeps_the_choice() -> None:
    for recorded, chosen, why in (
        ("ring", "ring", "in a ring (as in the checkpoint)"),
        ("whole", "whole", "not in chunks (as in the checkpoint)"),
        ("auto", "whole", "measured: chunks take 900% of the time without chunks)"),
    ):
        for chose, [line] in run_distributed(2, choices_after, recorded):
            assert chose == [chosen]
            assert line.endswith(why)


def test_a_run_without_the_flag_is_left_alone() -> None:
    config = resolve_arguments([*MINIMAL], 1).config
    assert choose_tp_overlap(config, make_runtime(config, Device("cpu")), [].append) is config
    assert not Device("cpu").has_peers()


@pytest.mark.parametrize(
    ("flags", "chosen", "why"),
    [
        ((), "symmetric-memory", "of its devices"),
        (("--inprocess-restart", "--save", "checkpoints"), "ring", "names that groups have again after a restart"),
    ],
)
def test_symmetric_memory_is_not_kept_over_a_restart(
    flags: tuple[str, ...], chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "why_no_symmetric_memory", lambda tp, has_peers: None)
    monkeypatch.setattr(Device, "has_peers", lambda device: True)
    config = resolve_arguments([*MINIMAL, *LAYOUT, "--tp-comm-overlap", *flags], 2).config
    runtime = make_runtime(resolve_arguments([*MINIMAL], 1).config, Device("cpu"))
    lines: list[str] = []
    config = choose_tp_overlap(config, replace(runtime, device=Device("cuda")), lines.append)
    assert config.model.tp_comm_overlap_impl == chosen
    assert why in lines[0]


UNSPLIT = "; FP8 GEMMs are not split into chunks"


@pytest.mark.parametrize(
    ("flags", "has_memory", "has_products", "ends"),
    [
        ("--fp8-recipe tensorwise", True, True, "(of its devices)"),
        ("--fp8-recipe tensorwise", True, False, UNSPLIT),
        ("--fp8-recipe tensorwise", False, True, UNSPLIT),
        ("--fp8-recipe blockwise", True, True, UNSPLIT),
        ("--fp8-recipe rowwise", True, True, "; FP8 GEMMs of row-parallel layers are not split into chunks"),
        ("--no-fp8-wgrad", True, True, "; FP8 GEMMs of row-parallel layers are not split into chunks"),
    ],
)
def test_the_line_names_the_fp8_gemms_without_chunks(
    flags: str, has_memory: bool, has_products: bool, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "why_no_symmetric_memory", lambda tp, peers: None if has_memory else "of a test")
    monkeypatch.setattr(autotune, "has_scaled_products", lambda blocks, weight_blocks, device: has_products)
    monkeypatch.setattr(Device, "has_peers", lambda device: True)
    sizes = ["--kv-channels", "16", "--seq-length", "64", "--max-position-embeddings", "64"]
    fp8 = ("--bf16", "--fp8-format", "hybrid", *flags.split())
    config = resolve_arguments([*MINIMAL, *LAYOUT, *sizes, "--tp-comm-overlap", *fp8], 2).config
    runtime = make_runtime(resolve_arguments([*MINIMAL], 1).config, Device("cpu"))
    lines: list[str] = []
    choose_tp_overlap(config, replace(runtime, device=Device("cuda")), lines.append)
    assert len(lines) == 1
    assert lines[0].endswith(ends)


FLAG = "--transformer-impl transformer_engine"


def line(reason: str) -> str:
    return f"transformer-engine is not used, because {reason}; this project's own layers are used instead"


def chosen(flags: str, reason: str | None, world_size: int = 1) -> tuple[str, list[str]]:
    """Return what this rank's model has and what is said, where transformer-engine is kept back by a reason."""
    config = resolve_arguments([*MINIMAL, *flags.split()], world_size).config
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_setup, "why_no_transformer_engine", lambda dtype, device: reason)
        config = with_transformer_impl(config, make_runtime(config, Device("cpu")), lines.append)
    return config.model.transformer_impl, lines


def test_where_it_works_nothing_is_said() -> None:
    assert chosen(FLAG, None) == ("transformer_engine", [])


def test_where_it_does_not_work_one_line_says_why() -> None:
    assert chosen(FLAG, "it needs CUDA") == ("local", [line("it needs CUDA")])


@pytest.mark.parametrize("flags", ["", "--transformer-impl local"])
def test_who_does_not_ask_for_it_is_told_nothing(flags: str) -> None:
    assert chosen(flags, "it needs CUDA") == ("local", [])


def chosen_where_the_second_lacks_it(flags: str) -> tuple[str, list[str]]:
    lacks_it = torch.distributed.get_rank() == 1
    return chosen(flags, "the package cannot be imported" if lacks_it else None, 2)


def test_ranks_agree() -> None:
    first, second = run_distributed(2, chosen_where_the_second_lacks_it, FLAG)
    assert first == ("local", [line("another process of this run cannot import the package")])
    assert second == ("local", [line("the package cannot be imported")])


def test_a_run_says_it_and_its_checkpoint_has_what_it_used(tmp_path: Path) -> None:
    flags = "--train-iters 1 --lr-warmup-iters 0 --bf16 --ckpt-format torch"
    run = fork_training(toy_args(tmp_path, flags, FLAG)).check()
    assert run.stdout.count(line("it needs CUDA")) == 1
    file = tmp_path / "checkpoints" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    assert torch.load(file, weights_only=False)["args"].transformer_impl == "local"


def let_threads_be_chosen(monkeypatch: pytest.MonkeyPatch, cores: int = 4, idle: float | None = 4.0) -> list[int]:
    """Let a machine have these cores and torch two threads per core; return the list of the numbers that are set."""
    taken: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(autotune, "count_cores", lambda: cores)
    monkeypatch.setattr(autotune, "measure_idle_cores", lambda: idle)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * cores)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    return taken


def threads_of(*flags: str, processes: int = 1) -> tuple[int | None, str]:
    """Return the number of threads that a process on a CPU records, and its log line."""
    config, lines = resolve_arguments([*MINIMAL, *flags], 1).config, list[str]()
    launch = LaunchEnvironment(local_world_size=processes)
    chosen = autotune.choose_num_threads(config, make_runtime(config, Device("cpu")), launch, lines.append)
    (line,) = lines
    return chosen.initialization.used_threads, line.removeprefix(" > CPU threads per process: ")


@pytest.mark.parametrize(
    ("flags", "idle", "processes", "number", "why"),
    [
        ("", 4.0, 1, 4, "4 cores, 0.0 of them busy"),
        ("", 1.6, 1, 1, "4 cores, 2.4 of them busy"),
        ("", 4.0, 2, 2, "4 cores, 0.0 of them busy, 2 processes"),
        ("", None, 1, 4, "4 cores"),
        ("--deterministic-mode", 0.0, 1, 4, "4 cores"),
        ("--num-threads 7", 0.0, 1, 7, "--num-threads"),
    ],
)
def test_a_process_takes_its_share_of_the_idle_cores(
    flags: str, idle: float | None, processes: int, number: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = let_threads_be_chosen(monkeypatch, idle=idle)
    assert threads_of(*flags.split(), processes=processes) == (number, f"{number} ({why})")
    assert taken == [number]


def test_the_environment_decides_the_threads_if_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = let_threads_be_chosen(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads_of() == (8, "8 (OMP_NUM_THREADS)")
    assert taken == []


@pytest.mark.parametrize(
    ("recorded", "cores", "world_size", "number", "why"),
    [
        (
            2,
            4,
            1,
            2,
            "as in the checkpoint; 4 cores, 3.0 of them busy: --num-threads 1 may be faster, and rounds differently",
        ),
        (1, 4, 1, 1, "as in the checkpoint; 4 cores, 3.0 of them busy"),
        # Fewer cores, or other processes.
        (8, 4, 1, 1, "4 cores, 3.0 of them busy"),
        (2, 4, 2, 1, "4 cores, 3.0 of them busy"),
        ("two", 4, 1, 1, "4 cores, 3.0 of them busy"),
    ],
)
def test_a_resumed_run_has_the_threads_of_its_checkpoint(
    recorded: object, cores: int, world_size: int, number: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"world_size": world_size, "initialization": {"used_threads": recorded}}
    monkeypatch.setattr(autotune, "candidate_folders", lambda folder, step: [Path("iter_0000001")])
    monkeypatch.setattr(autotune, "recorded_config", lambda folder: record)
    let_threads_be_chosen(monkeypatch, cores, idle=1.0)
    assert threads_of("--load", "somewhere") == (number, f"{number} ({why})")


def test_a_checkpoint_records_the_threads_of_its_run(tmp_path: Path) -> None:
    fork_training(toy_args(tmp_path, "--train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --num-threads 1")).check()
    record = recorded_config(newest(tmp_path / "checkpoints"))
    assert (record["initialization"]["used_threads"], record["world_size"]) == (1, 1)


FLEX = "--num-experts 4 --moe-token-dispatcher-type flex --expert-model-parallel-size 2"


def exchanged(flags: str, reasons: tuple[str | None, ...]) -> tuple[str, list[str]]:
    """Return this rank's dispatcher and what is said, if DeepEP is kept back on each rank by a reason or None."""
    config = resolve_arguments([*MINIMAL, *flags.split()], len(reasons)).config
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_setup, "why_no_deepep", lambda num_ranks, device: reasons[torch.distributed.get_rank()])
        patched.setattr(model_setup, "check_deepep", lambda model, groups: None)
        config = with_token_dispatcher(config, make_runtime(config, Device("cpu")), lines.append)
    return config.model.moe.moe_token_dispatcher_type, lines


def without_deepep(reason: str) -> str:
    return f"DeepEP is not used, because {reason}; tokens are exchanged with alltoall, with the same results"


def test_one_line_says_that_deepep_is_used() -> None:
    said = "tokens are exchanged with DeepEP on 24 multiprocessors of a GPU"
    for of_rank in run_distributed(2, exchanged, f"{FLEX} --moe-deepep-num-sms 24", (None, None)):
        assert of_rank == ("flex", [said])


def test_ranks_agree_on_deepep() -> None:
    lacking = "the package deep_ep cannot be imported"
    first, second = run_distributed(2, exchanged, f"{FLEX} --moe-deepep-num-sms 24", (None, lacking))
    unused = "--moe-deepep-num-sms 24 has no effect without DeepEP"
    of_other = "another process of this run cannot import the package deep_ep"
    assert first == ("alltoall", [without_deepep(of_other), unused])
    assert second == ("alltoall", [without_deepep(lacking), unused])


@pytest.mark.parametrize("flags", ["--num-experts 4 --moe-token-dispatcher-type alltoall", f"{FLEX} {{}} hybridep"])
def test_who_does_not_ask_for_deepep_is_told_nothing(flags: str) -> None:
    flags = flags.format("--moe-flex-dispatcher-backend")
    for kind, lines in run_distributed(2, exchanged, flags, (None, None)):
        assert kind in ("alltoall", "flex")
        assert lines == []


def restart_with_deepep() -> str:
    """Return the error of a run with DeepEP whose processes are to restart."""
    config = resolve_arguments([*MINIMAL, *FLEX.split()], 2).config
    config = replace(config, restart=replace(config.restart, inprocess_restart=True))
    runtime = make_runtime(config, Device("cpu"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_setup, "why_no_deepep", lambda num_ranks, device: None)
        with pytest.raises(ConfigurationError) as caught:
            with_token_dispatcher(config, runtime, lambda line: None)
    return str(caught.value)


def test_deepep_is_rejected_with_restarts_of_processes() -> None:
    assert "DeepEP does not support --inprocess-restart" in run_distributed(2, restart_with_deepep)[0]
