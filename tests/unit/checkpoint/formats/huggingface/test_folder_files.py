"""The files of a Hugging Face folder: safetensors with and without an index, and the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.checkpoint.checkpoint_source import SourceView
from megatron.checkpoint.formats.huggingface.families import FAMILIES
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.model_record import MODEL_RECORD
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.tokenizer_files import (
    complete_model_folder,
    copy_into_checkpoint,
    copy_into_model_folder,
    end_of_text,
    tokenizer_settings,
    write_chat_template,
)
from megatron.checkpoint.formats.huggingface.weight_files import WeightFiles, WeightInfo, plan_files, write_weights
from megatron.core.datasets.chat_template import NAMED_TEMPLATES
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT, byte_characters
from megatron.core.tokenizers.tokenizer_record import load_recorded_tokenizer, record_tokenizer
from tests.unit.checkpoint.formats.huggingface.tiny_models import import_transformers, save_model
from tests.unit.core.datasets.small_chat import TEMPLATE, write_chat_folder

VALUES = {
    "a": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c": torch.tensor(3.5, dtype=torch.float64),
}
NESTED = '{"weight_map": {}, "a": ' + "[" * 900 + "]" * 900 + "}"


def save_two_files(folder: Path) -> dict[str, str]:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in weight_map.items():
        save_file({name: VALUES[name]}, folder / file, metadata={"format": "pt"})
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_boxes_of_a_single_file(tmp_path: Path) -> None:
    save_file(VALUES, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("a", Box((1, 2), (3, 4))), VALUES["a"][1:4, 2:6])
    assert files.read("a", Box((1, 2), (3, 4))).is_contiguous()
    assert torch.equal(files.read("b", Box((0,), (6,))), VALUES["b"])
    assert torch.equal(files.read("c", Box((), ())), VALUES["c"])
    assert files.bytes_read == 2 * 48 + 12 + 8
    assert files.names_in("model.safetensors") == ("c", "a", "b")
    files.close()
    assert torch.equal(files.read("b", Box((4,), (2,))), VALUES["b"][4:])


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save_two_files(tmp_path)
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("b", Box((2,), (3,))), VALUES["b"][2:5])
    assert sorted(files.entries) == ["a", "b"]


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "pytorch_model.bin"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, file: str) -> None:
    write_index(tmp_path, {"a": file})
    with pytest.raises(CheckpointError, match="in the same folder is expected"):
        WeightFiles(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    weight_map = save_two_files(tmp_path)
    write_index(tmp_path, weight_map | {"d": weight_map["a"]})
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors does not contain d"):
        WeightFiles(tmp_path)
    save_file({"b": VALUES["b"], "e": VALUES["a"]}, tmp_path / weight_map["b"])
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="does not list e"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}', NESTED])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        WeightFiles(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    weight_map = save_two_files(tmp_path)
    (tmp_path / weight_map["b"]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        WeightFiles(tmp_path)


def test_files_without_their_index_are_named(tmp_path: Path) -> None:
    save_two_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"only model-00001-of-00002\.safetensors, .*index\.json too"):
        WeightFiles(tmp_path)


def test_a_pointer_of_git_is_no_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("kept", [3, 50, -1])
def test_a_truncated_file_is_named_with_its_sizes(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(VALUES, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    size = len(whole[:kept])
    needed = len(whole) if kept == -1 else 8 + int.from_bytes(whole[:kept][:8], "little")
    with pytest.raises(
        CheckpointError,
        match=rf"is truncated: it has {size} bytes, but needs at least {needed}; copy or download",
    ):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}and more"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read as a safetensors file: .*; copy or download it again"):
        WeightFiles(tmp_path)


def test_pickled_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin: pickle files can run code") as caught:
        WeightFiles(tmp_path)
    assert "\n" not in str(caught.value)


def test_written_files_are_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    values = VALUES | {"layer.ü": torch.ones(2, 3, dtype=torch.float16), "none": torch.empty(0, 4)}
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    weights = {name: WeightInfo(tuple(value.shape), value.dtype) for name, value in values.items()}
    ((name, planned),) = plan_files(weights, max_file_bytes=1000).items()
    assert name == "model.safetensors"
    write_weights(tmp_path / "ours", planned.tensors, planned.metadata, weights, values.__getitem__)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_files_are_filled_up_to_the_limit(tmp_path: Path) -> None:
    weights = {name: WeightInfo((size,), torch.float32) for name, size in {"a": 3, "b": 2, "c": 9, "d": 1}.items()}
    planned = plan_files(weights, max_file_bytes=20)
    assert {name: file.tensors for name, file in planned.items()} == {
        "model-00001-of-00003.safetensors": ("a", "b"),
        "model-00002-of-00003.safetensors": ("c",),
        "model-00003-of-00003.safetensors": ("d",),
    }


WORDS = {"a": 0, "b": 1, "ab": 2, "<end>": 3}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Write the tokenizer's files of a model folder, every kind that there is, each with bytes of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE(WORDS, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "special_tokens_map.json").write_text('{"eos_token":  "<end>"}')
    (folder / "added_tokens.json").write_text("{}")
    (folder / "vocab.json").write_text(json.dumps(WORDS))
    (folder / "merges.txt").write_bytes(b"#version: 0.2\r\na b\n")
    (folder / "generation_config.json").write_text('{"eos_token_id":  [3, 1]}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_every_file_comes_back_and_the_checkpoint_can_use_it(model_folder: Path, tmp_path: Path) -> None:
    settings = tokenizer_settings(model_folder, 4)
    assert copy_into_checkpoint(model_folder, settings, tmp_path / "checkpoint")
    expected = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    for name in ("config.json", "model.safetensors"):
        del expected[name]
    (tmp_path / "again").mkdir()
    copy_into_model_folder(tmp_path / "checkpoint" / "tokenizer", tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == expected
    for path in model_folder.iterdir():
        path.unlink()
    tokenizer = load_recorded_tokenizer(tmp_path / "checkpoint")
    assert (tokenizer.tokenize("ab b"), tokenizer.eod_id) == ([2, 1], 3)
    assert end_of_text(tmp_path / "checkpoint" / "tokenizer") == [3, 1]


def test_every_file_survives_training_and_the_torch_format(model_folder: Path, tmp_path: Path) -> None:
    """A run knows the tokenizer's flags alone; Megatron's files have no place for the record of the folder."""
    wanted = {path.name for path in model_folder.iterdir()} - {"config.json", "model.safetensors"}
    record_tokenizer(build_tokenizer(**tokenizer_settings(model_folder, 4)), tmp_path / "run")
    (tmp_path / "again").mkdir()
    copy_into_model_folder(tmp_path / "run" / "tokenizer", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == wanted
    for name in wanted:
        assert (tmp_path / "again" / name).read_bytes() == (model_folder / name).read_bytes()


def test_a_folder_with_vocabulary_and_merges_only_has_gpt2s(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    assert tokenizer_settings(model_folder, 4)["tokenizer_type"] == "GPT2BPETokenizer"


def test_a_folder_without_a_tokenizer_has_bare_ids(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "vocab.json"):
        (model_folder / name).unlink()
    settings = tokenizer_settings(model_folder, 4)
    assert build_tokenizer(**settings).vocab_size == 4
    assert copy_into_checkpoint(model_folder, settings, tmp_path / "checkpoint")
    copies = tmp_path / "checkpoint" / "tokenizer"
    assert load_recorded_tokenizer(tmp_path / "checkpoint").vocab_size == 4
    for path in model_folder.iterdir():
        assert (copies / path.name).exists() == (path.name not in ("config.json", "model.safetensors"))
        path.unlink()
    assert not copy_into_checkpoint(model_folder, settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_files_of_a_run_get_the_names_that_are_looked_for(tmp_path: Path) -> None:
    """A run's own files have any names: gpt2-vocab.json and gpt2-merges.txt here."""
    vocabulary = {character: i for i, character in enumerate(byte_characters())} | {END_OF_TEXT: 256}
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    files = {"vocab_file": tmp_path / "gpt2-vocab.json", "merge_file": tmp_path / "gpt2-merges.txt"}
    record_tokenizer(build_tokenizer(tokenizer_type="GPT2BPETokenizer", **files), tmp_path / "checkpoint")
    (tmp_path / "model").mkdir()
    copy_into_model_folder(tmp_path / "checkpoint" / "tokenizer", tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["merges.txt", "vocab.json"]
    assert (tmp_path / "model" / "vocab.json").read_bytes() == (tmp_path / "gpt2-vocab.json").read_bytes()


def test_transformers_loads_what_a_run_of_our_own_becomes(tmp_path: Path) -> None:
    """The run has a Llama model, GPT-2's vocabulary files, and nothing from Hugging Face."""
    import_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    byte_level = [*byte_characters(), "th", "the", END_OF_TEXT]
    vocabulary = {token: number for number, token in enumerate(byte_level)}
    (tmp_path / "my-vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "my-merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    tokenizer = build_tokenizer(vocab_file=tmp_path / "my-vocab.json", merge_file=tmp_path / "my-merges.txt")
    save_model("llama31", tmp_path / "model", vocab_size=tokenizer.vocab_size)
    record_tokenizer(tokenizer, tmp_path / "run")
    source = HuggingFaceSource(tmp_path / "model")
    # Of a run of our own: no record of a model folder.
    common = {name: value for name, value in source.common.items() if name != MODEL_RECORD} | {"tokenizer": "tokenizer"}
    run = SourceView(source, common)
    source.folder = tmp_path / "run"
    write_hugging_face(run, tmp_path / "exported")
    source.close()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "the wörld's\n\n  thë 123 你好 "
    assert theirs.encode(text) == tokenizer.tokenize(text)
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (END_OF_TEXT, 258, 259)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.config.eos_token_id == 258
    assert model.config.vocab_size == 259


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_bytes_become_files_with_the_same_ids(model_type: str, tmp_path: Path) -> None:
    record_tokenizer(build_tokenizer(tokenizer_type="ByteTokenizer"), tmp_path)
    (tmp_path / "model").mkdir()
    copy_into_model_folder(tmp_path / "tokenizer", tmp_path / "model")
    complete_model_folder(tmp_path / "tokenizer", tmp_path / "model", model_type)
    assert end_of_text(tmp_path / "tokenizer") == 256
    again = build_tokenizer(**tokenizer_settings(tmp_path / "model", 257))
    assert (again.name, again.vocab_size, again.eod_id) == ("HuggingFaceTokenizer", 257, 256)
    text = "the wörld's\n\n  123 你好 "
    assert again.tokenize(text) == list(text.encode())
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT


@pytest.mark.parametrize("kind", ["ByteTokenizer", "GPT2BPETokenizer"])
def test_transformers_builds_the_same_tokenizer_in_a_folder_of_every_family(kind: str, tmp_path: Path) -> None:
    transformers = import_transformers()
    files = {}
    if kind == "GPT2BPETokenizer":
        files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
        characters = [*byte_characters(), "th", END_OF_TEXT]
        Path(files["vocab_file"]).write_text(json.dumps({text: number for number, text in enumerate(characters)}))
        Path(files["merge_file"]).write_text("#version: 0.2\nt h\n")
    tokenizer = build_tokenizer(tokenizer_type=kind, **files)
    record_tokenizer(tokenizer, tmp_path)
    text = "the wörld's\n\n  thë 123 你好 "
    for family in FAMILIES:
        folder = tmp_path / family.architecture
        folder.mkdir()
        copy_into_model_folder(tmp_path / "tokenizer", folder)
        complete_model_folder(tmp_path / "tokenizer", folder, family.model_type)
        settings = {"model_type": family.model_type, "architectures": [family.architecture]}
        (folder / "config.json").write_text(json.dumps(settings))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs.encode(text) == tokenizer.tokenize(text), family.architecture
        assert theirs.eos_token == END_OF_TEXT, family.architecture


@pytest.mark.parametrize(("kind", "begins"), [("Llama2Tokenizer", True), ("GPTSentencePieceTokenizer", False)])
def test_pieces_get_the_class_that_reads_them(kind: str, begins: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "run" / "my.model").write_bytes(b"pieces")
    record = {"record_version": 1, "tokenizer_type": kind, "files": [{"name": "my.model"}]}
    (tmp_path / "run" / "tokenizer_record.json").write_text(json.dumps(record))
    copy_into_model_folder(tmp_path / "run", tmp_path / "model")
    complete_model_folder(tmp_path / "run", tmp_path / "model", "llama")
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == b"pieces"
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["add_bos_token"]) == ("LlamaTokenizer", begins)


@pytest.mark.parametrize(
    ("own", "data", "expected"),
    [
        (None, {}, None),
        (None, {"sft": False, "chat_template": None}, None),
        (None, {"sft": True, "chat_template": None}, NAMED_TEMPLATES["chatml"]),
        (TEMPLATE, {"sft": True, "chat_template": None}, None),
        (TEMPLATE, {"sft": True, "chat_template": "plain"}, NAMED_TEMPLATES["plain"]),
    ],
)
def test_a_folder_gets_the_chat_template_of_a_fine_tuning(
    own: str | None, data: dict[str, object], expected: str | None, tmp_path: Path
) -> None:
    record_tokenizer(write_chat_folder(tmp_path / "model", own), tmp_path)
    (tmp_path / "out").mkdir()
    write_chat_template(tmp_path / "tokenizer", tmp_path / "out", data)
    file = tmp_path / "out" / "chat_template.jinja"
    assert (file.read_text() if file.exists() else None) == expected


def test_a_chat_template_that_is_gone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_tokenizer(write_chat_folder(tmp_path / "model", None), tmp_path)
    write_chat_template(tmp_path / "tokenizer", tmp_path, {"sft": True, "chat_template": "gone.jinja"})
    warning = (
        f"WARNING: the chat template of the fine-tuning is not written to {tmp_path}: --chat-template gone.jinja is"
    )
    assert capsys.readouterr().err.startswith(warning)
    assert not (tmp_path / "chat_template.jinja").exists()
