"""Models of the Hugging Face Hub: downloaded files, the cache, the recorded commit, and one line for errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint.formats.huggingface.hub import (
    HubModel,
    fetch_model,
    fetch_on_every_node,
    find_hub_model,
    hub_origin,
)
from megatron.checkpoint.formats.huggingface.model_record import HUB, MODEL_RECORD, decode_record
from megatron.checkpoint.formats.huggingface.parallelize import parallelize
from megatron.checkpoint.formats.native import NativeSource
from megatron.cli import convert, evaluate, inspect_checkpoint, text_generation_cli
from megatron.cli.generation_arguments import model_request
from megatron.cli.serve import build_parser, model_name
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.serving import open_checkpoint
from megatron.training import LaunchEnvironment
from tests.harness.hub_server import Hub, serve_hub
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, launch_prefix
from tests.unit.checkpoint.formats.huggingface.tiny_models import folder_bytes, save_model

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

SMALL = ["config.json", "generation_config.json", "model.safetensors.index.json", "vocab.json"]
PARTS = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
LAUNCH = LaunchEnvironment()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in five files, with further files that must not be downloaded."""
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model("llama31", folder, max_shard_size="60KB")
    (folder / "vocab.json").write_text("{}")  # no tokenizer without merges: token ids are used
    for name in ("pytorch_model.bin", "modeling_custom.py", "consolidated.safetensors", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not for us")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty Hub, and an empty cache."""
    with serve_hub() as hub:
        constants = huggingface_hub.constants
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.chdir(tmp_path)
        yield hub


def fetched(text: str) -> tuple[Path, list[str]]:
    """Return the folder of a model and the lines about it."""
    lines: list[str] = []
    named = find_hub_model(text)
    assert named is not None
    return fetch_model(named, lines.append), lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", HubModel("Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        ("name", None),
        ("a/b/c", None),
        ("/org/name", None),
        ("./name", None),
        ("../name", None),
        ("org/", None),
        ("org/name@", None),
        ("org/name@-x", None),
    ],
)
def test_names(text: str, expected: HubModel | None) -> None:
    assert find_hub_model(text) == expected


def test_only_settings_and_safetensors_are_downloaded_and_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    commit = hub.add("org/name", model, "main")
    folder, lines = fetched("org/name")
    assert folder == tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    assert lines == [f"org/name: downloading it from {hub.url}", f"org/name: revision {commit}"]
    assert hub.downloads() == sorted(SMALL + PARTS)
    assert sorted(path.name for path in folder.iterdir()) == sorted(SMALL + PARTS)
    assert hub_origin(folder) == {"name": "org/name", "revision": commit}
    assert hub_origin(model) is None
    hub.requests.clear()
    assert fetched("org/name") == (folder, [f"org/name: revision {commit}, from the cache"])
    assert fetched(f"org/name@{commit}")[0] == folder
    assert hub.requests == []


def test_parallelize_takes_names_of_the_hub(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"^org/name is neither a folder here nor a model at "):
        parallelize("org/name", num_gpus=2)
    commit = hub.add("org/name", model, "main")
    assert parallelize("org/name").config.num_layers == 3
    said = capsys.readouterr().err.splitlines()
    assert {f"org/name: downloading it from {hub.url}", f"org/name: revision {commit}"} <= set(said)
    with pytest.raises(ConfigurationError, match="are not divisible by tensor-parallel size 5"):
        parallelize(f"org/name@{commit}", num_gpus=5)
    assert capsys.readouterr().err == f"org/name: revision {commit}, from the cache\n"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"needs the package huggingface_hub, which is not installed; run pip"):
        parallelize("org/name", num_gpus=2)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_model("gpt2", other)
    (other / "vocab.json").write_text("{}")
    first = hub.add("org/name", model, "main", "v1")
    assert fetched("org/name")[0].name == first
    second = hub.add("org/name", other, "main", "v2")
    assert first != second
    assert fetched("org/name")[0].name == first, "the cache is used although the branch has moved"
    assert fetched("org/name@v2")[0].name == second
    assert fetched("org/name@v1")[0].name == first
    assert fetched(f"org/name@{second}")[0].name == second


def test_what_the_cache_lacks_is_downloaded(hub: Hub, model: Path) -> None:
    """As when only the tokenizer was loaded before, or a download was interrupted."""
    commit = hub.add("org/name", model, "main")
    huggingface_hub.snapshot_download("org/name", allow_patterns=["config.json", "vocab.json", PARTS[1]])
    hub.requests.clear()
    hub.branches["org/name", "main"] = commit
    folder, _ = fetched("org/name")
    assert all((folder / name).is_file() for name in SMALL[:-2])
    assert sorted(set(hub.downloads())) == sorted(
        {*SMALL, *PARTS} - {"config.json", "vocab.json", PARTS[1]},
    )


def test_a_model_without_a_tokenizer_works_without_the_hub(hub: Hub, model: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "vocab.json").unlink()
    commit = hub.add("org/bare", bare, "main")
    folder, _ = fetched("org/bare")
    hub.commits.clear()
    assert fetched("org/bare")[0] == folder
    assert folder.name == commit


def test_a_conversion_records_the_commit_and_training_would_keep_it(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add("org/name", model, "main")
    words = ("--loader", "hf", "--load-dir", "org/name", "--save-dir", str(tmp_path / "native"))
    assert convert.main([*words]) == 0
    said = capsys.readouterr().out
    assert f"org/name: revision {commit}\n" in said
    source = NativeSource(next(path for path in (tmp_path / "native").iterdir() if path.is_dir()))
    record = decode_record(source.common)
    assert record is not None
    assert record.hub == {"name": "org/name", "revision": commit}
    assert inspect_checkpoint.main([str(tmp_path / "native")]) == 0
    assert f"from the Hugging Face Hub: org/name, revision {commit}\n" in capsys.readouterr().out
    back = ("--saver", "hf", "--load-dir", str(tmp_path / "native"), "--save-dir", str(tmp_path / "back"))
    assert convert.main([*back]) == 0
    restored = folder_bytes(tmp_path / "back")
    assert restored == {name: (model / name).read_bytes() for name in restored}
    assert set(restored) == {*SMALL, *PARTS}


def test_a_record_of_the_commit_alone_is_no_record_of_files() -> None:
    """Of quantized weights, which are not written back."""
    assert decode_record({MODEL_RECORD: {HUB: {"name": "org/name", "revision": "0" * 40}}}) is None


def test_texts_and_figures_are_those_of_the_folder(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/name", model, "main")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "3 14 15 92 6"}))
    outputs = []
    for folder in ("org/name", str(model)):
        assert text_generation_cli.main(["--load-hf", folder, "--prompt", "3 14", "--greedy"]) == 0
        assert evaluate.main(["--load-hf", folder, "--text", str(tmp_path / "text.jsonl")]) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out
    assert "org/name: revision " in outputs[0].err
    assert "org/name" not in outputs[1].err


def test_a_folder_of_that_name_wins(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.add("org/name", model, "main")
    (tmp_path / "org").mkdir()
    save_model("gpt2", tmp_path / "org" / "name")
    arguments = build_parser().parse_args(["--load-hf", "org/name"])
    assert open_checkpoint(model_request(arguments), LAUNCH).config.position_embedding_type == "learned_absolute"
    assert model_name(arguments) == "name"
    assert hub.requests == []


def test_a_served_model_has_the_name_of_the_hub(hub: Hub) -> None:
    assert model_name(build_parser().parse_args(["--load-hf", "org/name@v1"])) == "org/name"


def test_what_cannot_be_downloaded_is_refused_in_one_line(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", model, "main")
    hub.add("org/gated", model, "main")
    hub.gated.add("org/gated")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(model / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    hub.add("org/pickled", pickled, "main")
    wild = Path(shutil.copytree(pickled, tmp_path / "wild"))
    (wild / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "pytorch_model.bin"}}))
    hub.add("org/wild", wild, "main")
    for text, said in (
        (
            "org/nothing",
            r"^org/nothing is neither a folder here nor a model at http://\S+; check the name, or set HF_T",
        ),
        ("org/name@v9", r"^org/name has no revision v9; name a branch, tag or commit$"),
        ("org/gated", r"^org/gated is gated: accept its conditions at http://\S+/org/gated, and set HF_TOKEN$"),
        (
            "org/pickled",
            r"^org/pickled has no model\.safetensors at http://\S+: only safetensors weights can be read; ",
        ),
        ("org/wild", r"index\.json names 'pytorch_model\.bin', which is no safetensors file of the folder$"),
    ):
        with pytest.raises(CheckpointError, match=said):
            fetched(text)
    assert "pytorch_model.bin" not in hub.downloads()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"^org/name is not a folder here, .* run pip install huggingface_hub$"):
        fetched("org/name")


def test_a_hub_that_cannot_be_reached_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"^org/name is not a folder here, and cannot be downloaded from http://"):
        fetched("org/name")


def fetch_on_ranks(refuses: int | None) -> tuple[list[tuple[int, str | None]], list[Path | CheckpointError]]:
    """Run four ranks on two nodes, of which one may not reach the Hub; return who fetched what, and the results."""
    store = dist.HashStore()
    calls: list[tuple[int, str | None]] = []
    results: list[Path | CheckpointError] = [Path()] * 4

    def run(rank: int) -> None:
        def fetch(model: HubModel) -> Path:
            calls.append((rank, model.revision))
            if rank == refuses:
                raise CheckpointError("the Hub is gone")
            return Path(f"node{rank // 2}") / (model.revision or "commit7")

        try:
            results[rank] = fetch_on_every_node(
                HubModel("org/name"), fetch, store, rank=rank, local_rank=rank % 2, world_size=4
            )
        except CheckpointError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return calls, results


def test_one_rank_of_each_node_downloads_the_commit_of_rank_0() -> None:
    calls, results = fetch_on_ranks(None)
    assert calls == [(0, None), (2, "commit7")]
    assert results == [Path("node0/commit7")] * 2 + [Path("node1/commit7")] * 2


@pytest.mark.parametrize(("refuses", "calls"), [(0, [(0, None)]), (2, [(0, None), (2, "commit7")])])
def test_a_node_that_cannot_download_fails_on_every_rank(refuses: int, calls: list[tuple[int, str | None]]) -> None:
    found, results = fetch_on_ranks(refuses)
    assert found == calls
    assert [str(result) for result in results] == ["the Hub is gone"] * 4


@pytest.mark.full
def test_two_processes_download_a_model_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    """With the variables that users set, by ``torchrun``."""
    commit = hub.add("org/name", model, "main")
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment = kept | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    words = ["-m", "megatron.cli", "generate", "--load-hf", "org/name", "--prompt", "3 14", "--greedy"]
    command = [*launch_prefix(2), *words]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 14 ")
    assert result.stderr.count(f"org/name: revision {commit}\n") == 1
    assert hub.downloads() == sorted(SMALL + PARTS)
    wrong = subprocess.run(
        [word if word != "org/name" else "org/none" for word in command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert wrong.returncode != 0
    errors = {line for line in wrong.stderr.splitlines() if line.startswith("error: ")}
    assert len(errors) == 1, "rank 0 says it, at once and again after torchrun's report"
    assert errors.pop().startswith("error: org/none is neither a folder here nor a model at")
