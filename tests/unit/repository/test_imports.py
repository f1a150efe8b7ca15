"""Who may import what: owners of third-party modules, no cycles, no torch before the command line is checked."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from megatron.cli.__main__ import COMMANDS
from tests.unit.repository.source_tree import (
    PACKAGE,
    REPOSITORY,
    exposed_names,
    module_name,
    names_by_definition,
    package_files,
    relative,
    runtime_nodes,
    syntax_tree,
)

# Which files and folders may use what. After a colon is the only function or class of a file that may use it.
# Imports for type checkers only are free.
OWNERS: dict[str, tuple[str, ...]] = {
    # A command may use it as well, if it defines `build_parser`: see `offences`.
    "argparse": (
        "megatron/config/arguments.py",
        "megatron/config/extra_arguments.py",
        "megatron/training/extending.py:get_args",
        "megatron/training/extending.py:_Arguments",
        "megatron/cli/arguments.py",
        "megatron/cli/drawing.py",
        "megatron/cli/generation_arguments.py",
        "megatron/cli/planner_arguments.py",
        "megatron/checkpoint/formats/megatron/torch_file_writer.py:namespace",
    ),
    "os.environ": (
        "megatron/cli/doctor/doctor.py:main",
        "megatron/cli/preprocess_data.py",
        "megatron/cli/verify_parallelism.py",
        "megatron/training/initialize.py",
        "megatron/core/device.py",
        "megatron/core/hyper_comm_grid.py",
        "megatron/checkpoint/formats/huggingface/parallelize.py:_occupy_device",
        "megatron/checkpoint/formats/huggingface/parallelize.py:_fetch_on_every_node",
        "megatron/checkpoint/formats/huggingface/worker_pool.py:_start",
    ),
    "os.getenv": (),
    "torch.cuda": (
        "megatron/core/host_memory.py:Copied",
        "megatron/core/host_memory.py:CudaHostCopies",
        "megatron/core/cuda_graph.py",
        "megatron/core/device.py",
        "megatron/core/distributed/user_buffers.py:UserBuffers",
        "megatron/cli/doctor/gpus.py:query_torch",
        "megatron/planner/simulation/fake_device.py:without_driver",
    ),
    "torch.distributed": (
        "megatron/core/collectives.py",
        "megatron/core/distributed/user_buffers.py",
        "megatron/core/hyper_comm_grid.py",
        "megatron/core/parallel_state.py",
        "megatron/core/process_state.py",
        "megatron/core/shared_memory.py",
        "megatron/core/pipeline_parallel/p2p_communication.py",
        "megatron/core/tensor_parallel/symmetric_memory.py:_has_operators",
        "megatron/planner/simulation/fake_device.py",
        "megatron/checkpoint/formats/huggingface/parallelize.py:parallelize",
        "megatron/checkpoint/formats/huggingface/parallelize.py:_fetch_on_every_node",
        "megatron/checkpoint/formats/huggingface/tp_worker.py:main",
        "megatron/checkpoint/formats/huggingface/tp_worker.py:_open_store",
        "megatron/checkpoint/formats/huggingface/tp_worker.py:TensorParallelWorker",
        "megatron/checkpoint/formats/megatron/torch_dist_writer.py:build_metadata",
        "megatron/training/initialize.py",
        "megatron/training/fault_tolerance/rendezvous.py",
        "megatron/verification/collective_recorder.py",
        "megatron/verification/worker_pool.py:_serve",
        "megatron/cli/rank_launcher.py:launch",
        "megatron/cli/rank_launcher.py:_open_store",
    ),
    # Optional or heavy packages: each is known to one place, so that its absence is handled there.
    "apex": ("megatron/core/optimizer/inner_optimizer.py:load_fused_adam",),
    "flash_attn": ("megatron/core/ops/attention_backend.py:load_flash_attention",),
    "flash_attn_interface": ("megatron/core/ops/attention_backend.py:load_flash_attention_3",),
    "transformer_engine": ("megatron/core/ops/transformer_engine.py:load_transformer_engine",),
    "deep_ep": ("megatron/core/transformer/moe/deepep.py:load_deepep",),
    "bitsandbytes": ("megatron/core/ops/four_bit.py:load_bitsandbytes",),
    "fsspec": ("megatron/core/object_store.py:open_store",),
    # fsspec imports it.
    "s3fs": (),
    "fastapi": ("megatron/serving/openai/application.py",),
    "uvicorn": ("megatron/serving/openai/http_server.py",),
    "mlflow": (
        "megatron/training/loggers/experiment_loggers.py:check_server",
        "megatron/training/loggers/experiment_loggers.py:MlflowLogger",
    ),
    "wandb": (
        "megatron/training/loggers/experiment_loggers.py:check_login",
        "megatron/training/loggers/experiment_loggers.py:WandbLogger",
    ),
    "lm_eval": ("megatron/evaluation/harness_model.py", "megatron/evaluation/harness_tasks.py"),
    "jinja2": ("megatron/core/datasets/chat_template.py:ChatTemplate",),
    "triton": ("megatron/core/ops/triton/", "megatron/planner/simulation/fake_triton.py:_program_type"),
    "huggingface_hub": ("megatron/checkpoint/formats/huggingface/hub.py",),
    # What it computes is compared with: in tests, and after a conversion where that is asked for. A parallel model
    # returns its kind of output.
    "transformers": (
        "megatron/checkpoint/comparison.py:transformers_logits",
        "megatron/checkpoint/formats/huggingface/parallel_model.py:ParallelModel",
    ),
    # Checkpoints hold no pickles, Megatron's excepted: those are written by one class and never run.
    "pickle": ("megatron/checkpoint/formats/megatron/torch_file_writer.py:_Pickler",),
    # The entries of torch.distributed.checkpoint's files are what it makes of tensors.
    "torch.save": ("megatron/checkpoint/formats/megatron/torch_dist_writer.py:ChunkFile",),
    "torch.load": (),
}
# These run before torch is imported, so that a wrong command line or wrong data is answered at once.
TORCH_FREE_PATTERNS = (
    "megatron/core/errors.py",
    "megatron/core/config_base.py",
    "megatron/core/**/*_config.py",
    "megatron/core/datasets/blended_megatron_dataset_builder.py",
    "megatron/core/tokenizers/*.py",
    "megatron/core/dist_checkpointing/index.py",
    "megatron/checkpoint/formats/huggingface/families.py",
    "megatron/checkpoint/checkpoint_folder.py",
    "megatron/training/data_plan.py",
    "megatron/training/initialize.py",
    "megatron/training/preflight.py",
    "megatron/training/exit_reason.py",
    "megatron/training/fault_tolerance/supervisor.py",
    "megatron/config/*.py",
    "megatron/config/checks/*.py",
    "megatron/planner/*.py",
    "megatron/planner/simulation/fake_cuda.py",
)
# megatron-core's configurations, which have torch dtypes and functions as values and are not used by commands.
WITH_TORCH = (
    "megatron/core/model_parallel_config.py",
    "megatron/core/process_groups_config.py",
    "megatron/core/transformer/transformer_config.py",
)


# Which modules may know process-wide groups: those with megatron-core's names, and functions that take them as the
# default for a group that is not passed.
PROCESS_STATE_USERS = {
    "megatron/core/parallel_state.py",
    "megatron/core/process_groups_config.py",
    "megatron/core/utils.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/pipeline_parallel/schedules.py",
    "megatron/core/pipeline_parallel/utils.py",
    "megatron/core/transformer/moe/experts.py",
    "megatron/core/transformer/moe/moe_layer.py",
    "megatron/core/transformer/moe/moe_utils.py",
    "megatron/core/transformer/moe/token_dispatcher.py",
    "megatron/core/tensor_parallel/cross_entropy.py",
    "megatron/core/tensor_parallel/data.py",
    "megatron/core/tensor_parallel/layers.py",
    "megatron/core/tensor_parallel/mappings.py",
    "megatron/core/tensor_parallel/random.py",
    "megatron/core/tensor_parallel/utils.py",
}


def uses(path: Path, owned: str) -> set[str]:
    """Return which functions and classes of a file use what belongs to others; keys as in `names_by_definition`."""
    return {
        definition
        for definition, names in names_by_definition(path).items()
        if any(name == owned or name.startswith(f"{owned}.") for name in names)
    }


def owned_by(path: Path, owner: str) -> set[str]:
    """Return which definitions of a file an owner stands for: "*" for all of them."""
    place, _, definition = owner.partition(":")
    if not definition:
        return {"*"} if relative(path).startswith(place) else set()
    # An import at the top of the file is for the definition.
    return {definition, "import"} if relative(path) == place else set()


def offences(path: Path) -> list[str]:
    """Return what a file uses that belongs to others."""
    found = []
    for owned, owners in OWNERS.items():
        users = uses(path, owned)
        own = set().union(*(owned_by(path, owner) for owner in owners))
        is_command = relative(path).startswith("megatron/cli/") and "build_parser" in names_by_definition(path)
        if users - own and "*" not in own and not (owned == "argparse" and is_command):
            found.append(f"{relative(path)} uses {owned}, which only {' and '.join(owners) or 'nobody'} may")
    return found


def test_third_party_modules_are_touched_by_their_owners_only() -> None:
    assert [offence for path in package_files() for offence in offences(path)] == []


def test_owners_use_what_they_own() -> None:
    idle = []
    for owned, owners in OWNERS.items():
        users = {path: found for path in package_files() if (found := uses(path, owned))}
        for owner in owners:
            own = {path: owned_by(path, owner) for path in users}
            if not any("*" in own[path] or users[path] & own[path] - {"import"} for path in users):
                idle.append(f"{owner} does not use {owned}")
    assert idle == []


@pytest.mark.parametrize(
    ("source", "owned"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda"),
        ("import torch.distributed as dist\ndist.barrier()", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("from os import environ as e\ne['A']", "os.environ"),
        ("import os as system\nsystem.getenv('A')", "os.getenv"),
        ("import importlib\nimportlib.import_module('flash_attn.ops')", "flash_attn"),
        ("def f():\n    import argparse", "argparse"),
        ("def f():\n    load_package('jinja2.sandbox', 'a template')", "jinja2"),
    ],
)
def test_ownership_is_seen_through_aliases(tmp_path: Path, monkeypatch, source: str, owned: str) -> None:
    monkeypatch.setattr("tests.unit.repository.source_tree.REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [offence.split(", ")[0] for offence in offences(path)] == [f"module.py uses {owned}"]


def test_an_owner_is_one_definition_of_a_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.unit.repository.source_tree.REPOSITORY", tmp_path)
    monkeypatch.setitem(OWNERS, "pickle", ("module.py:Writer",))
    path = tmp_path / "module.py"
    path.write_text("import pickle\nclass Writer(pickle.Pickler):\n    pass")
    assert offences(path) == []
    path.write_text("import pickle\nclass Writer(pickle.Pickler):\n    pass\ndef read():\n    pickle.load()")
    syntax_tree.cache_clear()
    names_by_definition.cache_clear()
    assert len(offences(path)) == 1


def test_imports_for_type_checkers_are_free(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.unit.repository.source_tree.REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed as dist\n")
    assert offences(path) == []


def imports_among(paths: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return which of these modules each imports, within functions and for type checkers as well."""
    exposed = {name: exposed_names(path) for name, path in paths.items() if path.name == "__init__.py"}
    graph: dict[str, list[str]] = {}
    for name, path in paths.items():
        found: set[str] = set()
        if name in exposed:
            # What it exposes is imported when somebody asks for it: see below.
            continue
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = exposed.get(node.module, {})
                found |= {names.get(alias.name, f"{node.module}.{alias.name}") for alias in node.names} & paths.keys()
                found |= {node.module}
        graph[name] = sorted((found & paths.keys()) - {name})
    return graph


def find_cycle(graph: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the nodes of a cycle; none where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return tuple(error.args[1])
    return ()


def test_no_modules_import_each_other_in_a_cycle() -> None:
    names = {
        relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in package_files()
    }
    graph = imports_among(names)
    assert graph["megatron.cli.preprocess_data"]
    assert find_cycle(graph) == ()


def names_from_faces(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return for each module the modules that define the names that it imports from packages."""
    exposed = {name: exposed_names(path) for name, path in paths.items() if path.name == "__init__.py"}
    return {
        name: {
            exposed[node.module][alias.name]
            for node in runtime_nodes(syntax_tree(path))
            if isinstance(node, ast.ImportFrom) and node.module in exposed
            for alias in node.names
            if alias.name in exposed[node.module]
        }
        for name, path in paths.items()
        if name not in exposed
    }


def inverted_imports(
    container: str, layers: Sequence[str], ignored: Sequence[str], graph: Mapping[str, set[str]]
) -> list[str]:
    """Return the imports of a container's modules that go from a layer to one that is not below it."""
    height = {part: -number for number, layer in enumerate(layers) for part in re.findall(r"\w+", layer)}
    independent = {part for layer in layers if "|" in layer for part in re.findall(r"\w+", layer)}

    def part_of(module: str) -> str | None:
        return module.removeprefix(f"{container}.").split(".")[0] if module.startswith(f"{container}.") else None

    found = []
    for module, targets in graph.items():
        for target in targets:
            upper, lower = part_of(module), part_of(target)
            if upper is None or lower is None or upper == lower or height[upper] > height[lower]:
                continue
            if height[upper] == height[lower] and upper not in independent:
                continue
            if not any(f"{module} -> {target}".startswith(each) for each in ignored):
                found.append(f"{module} -> {target}")
    return found


def test_layers_hold_for_names_that_packages_expose() -> None:
    """The linter sees an import from a package as an import of its `__init__.py`, which is in no layer."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    graph = names_from_faces({module_name(path): path for path in package_files()})
    layered = [each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    assert layered
    for contract in layered:
        for container in contract["containers"]:
            ignored = contract.get("ignore_imports", [])
            assert inverted_imports(container, contract["layers"], ignored, graph) == [], contract["id"]


def test_an_inverted_import_of_an_exposed_name_is_found() -> None:
    graph = {"a.low": {"a.high.module"}, "a.high.module": {"a.low"}, "a.left": {"a.right"}}
    layers = ["high", "left | right", "low"]
    assert inverted_imports("a", layers, [], graph) == ["a.low -> a.high.module", "a.left -> a.right"]
    assert inverted_imports("a", layers, ["a.low -> a.high"], graph) == ["a.left -> a.right"]


def modules_of_others(path: Path, modules: Collection[str]) -> list[str]:
    """Return the modules, and names that begin with an underscore, that a file imports from packages of others."""
    own = module_name(path).rpartition(".")[0]
    return [
        f"{relative(path)}: {alias.name} of {node.module}"
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == PACKAGE.name
        for alias in node.names
        if (f"{node.module}.{alias.name}" in modules and node.module != own)
        or (alias.name.startswith("_") and not f"{node.module}.".startswith(f"{own}."))
    ]


def test_packages_share_names_and_no_modules() -> None:
    modules = {module_name(path) for path in package_files()}
    # A simulated GPU replaces functions in the modules that define them.
    paths = [path for path in package_files() if not relative(path).startswith("megatron/planner/simulation/")]
    paths += [REPOSITORY / "pretrain_gpt.py", *(REPOSITORY / "tools").rglob("*.py")]
    assert [found for path in paths for found in modules_of_others(path, modules)] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from megatron.core import device", ["device of megatron.core"]),
        ("def f():\n    from megatron.cli import plan as command", ["plan of megatron.cli"]),
        ("from megatron.core.device import _queue", ["_queue of megatron.core.device"]),
        ("from megatron.core.device import Device\nfrom megatron.data import reader, _compiled", []),
    ],
)
def test_an_imported_module_of_another_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: list[str]
) -> None:
    monkeypatch.setattr("tests.unit.repository.source_tree.REPOSITORY", tmp_path)
    path = tmp_path / "megatron/data/module.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    modules = {"megatron.core.device", "megatron.cli.plan", "megatron.data.reader"}
    assert modules_of_others(path, modules) == [f"megatron/data/module.py: {each}" for each in found]


def test_packages_import_what_others_expose_and_nothing_else() -> None:
    exposing = {path.parent: exposed_names(path) for path in PACKAGE.rglob("__init__.py") if exposed_names(path)}
    own_files = [path for path in package_files() if path.parent in exposing and path.name != "__init__.py"]
    modules = {module_name(path): path for path in own_files}
    wrong = []
    for path in [*package_files(), REPOSITORY / "pretrain_gpt.py", *(REPOSITORY / "tools").rglob("*.py")]:
        for node in ast.walk(syntax_tree(path)):
            if not isinstance(node, ast.ImportFrom) or node.module not in modules:
                continue
            package = modules[node.module].parent
            # A function that is called as its module cannot be exposed: the module would hide it.
            own = {alias.name for alias in node.names} - {each.stem for each in package.glob("*.py")}
            if path.parent != package and own:
                wrong += [f"{relative(path)}: {name} of {node.module}" for name in sorted(own)]
    assert wrong == []


def test_process_wide_state_is_read_under_megatron_cores_names_only() -> None:
    users = {
        relative(path)
        for path in package_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ImportFrom)
        and (
            node.module == "megatron.core.process_state"
            or (node.module == "megatron.core" and any(alias.name == "process_state" for alias in node.names))
        )
    }
    assert users == PROCESS_STATE_USERS


def test_a_cycle_of_imports_is_found_within_functions(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.py" for name in ("a", "b", "c")}
    paths["a"].write_text("import b")
    paths["b"].write_text("def f():\n    from c import g")
    paths["c"].write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import f")
    assert set(find_cycle(imports_among(paths))) == {"a", "b", "c"}
    paths["c"].write_text("import os")
    syntax_tree.cache_clear()
    assert find_cycle(imports_among(paths)) == ()


def test_configuration_and_its_checks_import_no_torch() -> None:
    found = {pattern: list(REPOSITORY.glob(pattern)) for pattern in TORCH_FREE_PATTERNS}
    assert [pattern for pattern, paths in found.items() if not paths] == []
    paths = sorted(
        {path for several in found.values() for path in several} - {REPOSITORY / path for path in WITH_TORCH}
    )
    modules = [module_name(path) for path in paths]
    assert "megatron.core.errors" in modules
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_help_waits_for_nothing_that_only_a_run_needs() -> None:
    late = ("megatron.training.preflight", "megatron.training.fault_tolerance.supervisor", "lm_eval", "torch")
    program = f"import sys, pretrain_gpt\nprint([name for name in {late} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.stdout == "[]\n", result.stderr


def test_help_of_commands_imports_no_torch() -> None:
    modules = sorted(set(COMMANDS.values()))
    program = (
        "import contextlib, importlib, io, sys\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "        importlib.import_module(f'megatron.cli.{name}').main(['--help'])\n"
        "    assert 'usage:' in text.getvalue(), name\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
