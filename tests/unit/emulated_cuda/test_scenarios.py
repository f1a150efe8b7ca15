"""Every synchronization is necessary or known, and so is every line for CUDA that no scenario executes."""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.cuda_lines import __main__ as cuda_lines
from tests.emulated_cuda.cuda_lines.argued import ARGUED
from tests.emulated_cuda.cuda_lines.finding import scopes_of, truth_on_cuda
from tests.emulated_cuda.scenarios.changed_source import REPOSITORY, statements_of, with_probes
from tests.emulated_cuda.scenarios.listed import SCENARIOS, prepared, training
from tests.emulated_cuda.scenarios.observed_calls import with_observed_calls
from tests.emulated_cuda.scenarios.running import CALLS, Result, Scenario, Servers, difference
from tests.emulated_cuda.synchronizations import __main__ as synchronizations
from tests.emulated_cuda.synchronizations.calls import all_calls, calls_in, removable_calls
from tests.emulated_cuda.synchronizations.known import APART

# The checks that need no emulator are cheap; the others carry marks.
SEED = 20261126
HANDFUL = 2


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Start servers of ranks when they are needed, or skip where the emulator cannot be built."""
    try:
        built_libraries()
    except BuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))
    with Servers(observes=CALLS) as started:
        yield started


def scenario_of(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def test_scenarios_have_names_of_their_own() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert sorted(set(names)) == sorted(names)


def test_calls_are_found_and_removed() -> None:
    source = "def f(work, stream):\n    a = work.wait()\n    stream.wait_stream(other(1))\n    names.sort()\n"
    calls = calls_in("megatron/x.py", source)
    assert [(call.line, call.key) for call in calls] == [
        (2, "megatron/x.py:f: work.wait()"),
        (3, "megatron/x.py:f: stream.wait_stream(other(1))"),
    ]
    observed = with_observed_calls(source, [(i, each.start, each.name_end, each.end) for i, each in enumerate(calls)])
    assert observed.splitlines()[1:3] == [
        "    a = emulated_cuda_call(0, work, 'wait')",
        "    emulated_cuda_call(1, stream, 'wait_stream', other(1))",
    ]


def test_equal_calls_of_a_function_have_names_of_their_own() -> None:
    source = "class A:\n    def f(self):\n        work.wait()\n        work.wait()\n"
    assert [call.key for call in calls_in("m.py", source)] == ["m.py:A.f: work.wait()", "m.py:A.f: work.wait() #2"]


def test_probes_are_in_front_of_the_statements() -> None:
    source = (
        'def f(x):\n    """Text."""\n    if x:\n        return 1\n    try:\n        y()\n    except E:\n        z()\n'
    )
    tree = ast.parse(source)
    lines = [statement.lineno for statement in statements_of(tree)]
    assert lines == [3, 5, 4, 6, 8]
    assert with_probes(tree, 10) == 15
    assert ast.unparse(tree).splitlines()[2:5] == [
        "    emulated_cuda_hits[10] = 1",
        "    if x:",
        "        emulated_cuda_hits[12] = 1",
    ]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("x.is_cuda", True),
        ("not x.is_cuda", False),
        ("device.type != 'cuda'", False),
        ("device.type != 'cpu' and fits", True),
        ("device.type != 'cuda' or not fits", False),
        ("x.is_cuda or fits", None),
        ("fits", None),
        ("all(p.is_cuda for p in parameters)", True),
    ],
)
def test_conditions_on_the_device_are_understood(condition: str, expected: bool | None) -> None:
    assert truth_on_cuda(ast.parse(condition, mode="eval").body) is expected


@pytest.mark.full
def test_every_call_has_a_result_or_a_reason() -> None:
    assert synchronizations.unexplained(synchronizations.read()) == []
    keys = [call.key for call in all_calls()]
    assert [start for start in APART if not any(key.startswith(start) for key in keys)] == []


def test_every_line_for_cuda_that_does_not_run_has_a_reason() -> None:
    assert cuda_lines.unexplained(json.loads(cuda_lines.RESULTS.read_text())) == []


def test_reasons_and_results_name_functions_that_exist() -> None:
    missing = json.loads(cuda_lines.RESULTS.read_text())["missing"]
    named = {*ARGUED, *map(cuda_lines.key_of, missing)}
    paths = {key.partition(":")[0] for key in named}
    existing = {f"{path}:" for path in paths} | {
        f"{path}:{scope}" for path in paths for _, scope in scopes_of(ast.parse((REPOSITORY / path).read_text()))
    }
    assert sorted(named - existing) == []


@pytest.mark.full
def test_a_handful_of_calls_is_reported_without_them(servers: Servers) -> None:
    rows = [row for row in synchronizations.read() if row["scenario"]]
    calls = {call.key: call for call in removable_calls()}
    expected: dict[str, Result] = {}
    for row in random.Random(SEED).sample(rows, HANDFUL):
        scenario = scenario_of(str(row["scenario"]))
        if scenario.name not in expected:
            expected[scenario.name] = servers.of(scenario).run(scenario)
            assert expected[scenario.name].fault == ""
        found = synchronizations.examine(calls[str(row["call"])], servers, [scenario], expected)
        assert found["scenario"] == scenario.name, row


@pytest.mark.full
def test_the_norm_of_parameters_waits_for_their_gather(servers: Servers) -> None:
    scenario = scenario_of("evaluation")
    assert "--log-params-norm" in scenario.launches[0].arguments
    assert servers.of(scenario).run(scenario).fault == ""


@pytest.mark.full
def test_a_captured_loss_keeps_the_logits_that_its_backward_pass_reads(servers: Servers) -> None:
    scenario = scenario_of("graphs of the loss, chunks, pipeline")
    assert servers.of(scenario).run(scenario).fault == ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--bf16", 1),
        ("--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        ("--cuda-graph-impl local --cuda-graph-warmup-steps 1", 1),
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --fp8-format hybrid --fp8-recipe delayed",
            2,
            marks=pytest.mark.long,
        ),
        pytest.param("--pipeline-model-parallel-size 2 --bf16", 2, marks=pytest.mark.long),
    ],
)
def test_the_host_waits_as_often_in_a_step_of_more_layers_and_micro_batches(
    servers: Servers, flags: str, ranks: int
) -> None:
    of_a_step = []
    for more in ("--num-layers 2 --global-batch-size 4", "--num-layers 4 --global-batch-size 8"):
        waits = []
        for num_steps in (4, 5):
            scenario = training("waits", f"{flags} {more} --train-iters {num_steps}", ranks)
            result = servers.of(scenario).run(scenario)
            assert result.fault == ""
            assert len(result.host_waits) == ranks
            assert result.devices == tuple((rank,) for rank in range(ranks))
            waits.append(result.host_waits)
        of_a_step.append([after - before for before, after in zip(*waits)])
    assert of_a_step[0] == of_a_step[1]
    assert min(of_a_step[0]) > 0


EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 16 --swiglu --disable-bias-linear --expert-model-parallel-size 2 "
    "--moe-router-dtype fp32 --bf16 --moe-router-score-function sigmoid"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "is_same"),
    [
        ("--moe-router-topk 1", True),  # no sum of several ranks is rounded
        ("--moe-router-topk 2 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap", False),
        ("--moe-router-topk 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", False),
    ],
)
def test_deepep_trains_as_alltoall(servers: Servers, flags: str, is_same: bool) -> None:
    """The stand-in for DeepEP runs on a stream of its own, so that a missing wait would be reported."""
    flags = f"{EXPERTS} {flags} --moe-token-dispatcher-type"
    mine = prepared("DeepEP", "deepep", f"{flags} flex", 2)
    found, known = (servers.of(each).run(each) for each in (mine, training("alltoall", f"{flags} alltoall", 2)))
    assert (found.fault, known.fault) == ("", "")
    assert len(found.metrics) == len(known.metrics) > 0
    for row, other in zip(found.metrics, known.metrics):
        for key in ("lm_loss", "grad_norm"):
            assert row.get(key) == (other.get(key) if is_same else pytest.approx(other.get(key), rel=5e-3))


@pytest.mark.full
def test_a_model_that_deepep_does_not_support_ends_with_one_line(servers: Servers) -> None:
    flags = EXPERTS.replace(" --bf16", "") + " --moe-token-dispatcher-type flex"
    ended = prepared("DeepEP, float32", "deepep", flags, 2)
    fault = servers.of(ended).run(ended).fault
    # A rank may be killed because the other has ended.
    assert "[2, " in fault or ", 2]" in fault
    assert ": error: --moe-token-dispatcher-type flex: DeepEP sends bfloat16, and the model is in float32" in fault


def test_metrics_that_differ_are_shown() -> None:
    known = Result("", ({"lm_loss": 1.0, "iteration": 1},), 1.0)
    assert difference(known, known) == ""
    assert difference(Result("", ({"lm_loss": 2.0, "iteration": 1},), 1.0), known) == "lm_loss is 2.0 instead of 1.0"
    assert difference(Result("race", (), 1.0), known) == "race"
    waiting = Result("", ({"lm_loss": 1.0, "iteration": 1},), 1.0, host_waits=(3, 3))
    assert difference(waiting, known) == "the host waits for its device (3, 3) times instead of ()"


NOT_ON_CPU = (
    "--bf16",
    "--fp16",
    "--cuda-graph-impl",
    "--profile",
    "--record-memory-history",
    "symmetric-memory",
    "small",
    "look-at-device",
)
"""Words of the command lines of scenarios whose losses are others on the CPU, or that do not run there."""


def are_comparable(scenario: Scenario) -> bool:
    """Return whether a scenario computes the same on the CPU: in float32 or float64, and without a fault.

    Attention kernels of a GPU draw other random numbers for dropout.
    """
    drops_scores = any(
        ("--attention-dropout", "0.1") in itertools.pairwise(launch.arguments) for launch in scenario.launches
    )
    words = {word for launch in scenario.launches for word in launch.arguments}
    has_metrics = any("--metrics-jsonl" in launch.arguments for launch in scenario.launches)
    may_fail = any(any(launch.expected) for launch in scenario.launches)
    return has_metrics and not (may_fail or drops_scores or scenario.triton) and words.isdisjoint(NOT_ON_CPU)


@pytest.mark.long
def test_scenarios_have_the_losses_of_the_cpu(servers: Servers) -> None:
    chosen = [scenario for scenario in SCENARIOS if are_comparable(scenario)]
    differing = {}
    with Servers(emulated=False) as on_cpu:
        for scenario in chosen:
            found, known = (each.of(scenario).run(scenario) for each in (servers, on_cpu))
            losses, expected = ([row["lm_loss"] for row in each.metrics if "lm_loss" in row] for each in (found, known))
            if found.fault or known.fault or losses != pytest.approx(expected, rel=1e-4):
                differing[scenario.name] = (found.fault, known.fault, losses, expected)
    assert differing == {}
    assert len(chosen) > 60


@pytest.mark.long
def test_every_removal_is_reported_or_known(tmp_path: Path) -> None:
    assert synchronizations.unexplained(synchronizations.run(tmp_path / "results.jsonl")) == []


@pytest.mark.long
def test_every_line_for_cuda_runs_or_is_known() -> None:
    assert cuda_lines.unexplained(cuda_lines.measure()) == []
