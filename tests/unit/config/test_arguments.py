"""The command line: what each flag does and is refused with, that each is read, and that none disappears."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from pathlib import Path

import pytest

from megatron.config.arguments import ESSENTIAL, all_flags, parse_arguments, resolve_arguments
from megatron.config.deprecated_names import deprecated_flags
from megatron.config.megatron_flags import NO_EFFECT, NOT_SUPPORTED, REASONS, ForeignFlag, foreign_flags, refusal_reason
from megatron.config.printed_config import argument_values, format_arguments
from megatron.config.run_config import RunConfig, TokenizerConfig, command_line_fields, config_parts
from megatron.config.translated_flags import translate_flags
from megatron.core.config_base import field_docs, field_specs, field_value
from megatron.core.errors import ConfigurationError
from megatron.core.transformer.decoder_config import _PLAIN_ACTIVATIONS, GATED_ACTIVATIONS
from megatron.training.exit_reason import parse_arguments_or_exit
from tests.unit.config.command_lines import MINIMAL, SHAPE, TRAINING, write_data_set

ROOT = Path(__file__).parents[3]
FROZEN = Path(__file__).with_name("frozen_flags.txt")
DEFAULTS = Path(__file__).with_name("frozen_defaults.json")


def config_of(text: str, world_size: int = 1) -> RunConfig:
    return resolve_arguments([*MINIMAL, *text.split()], world_size).config


def problems_of(text: str, world_size: int = 1) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *text.split()], world_size)
    return caught.value.problems


def test_no_flag_of_the_frozen_list_has_disappeared() -> None:
    frozen = set(FROZEN.read_text(encoding="utf-8").split())
    now = set(all_flags())
    assert frozen - now == set(), "users type these flags: they must stay"
    assert now - frozen == set(), "run make generate"


def test_every_flag_is_in_one_class_and_every_name_belongs_to_one_field() -> None:
    names = [spec.name for _, spec in command_line_fields()]
    flags = [flag for _, spec in command_line_fields() for flag in spec.flags]
    assert len(names) == len(set(names))
    assert len(flags) == len(set(flags))
    assert set(flags).isdisjoint(NO_EFFECT)
    assert set(flags).isdisjoint(NOT_SUPPORTED)
    assert set(NO_EFFECT).isdisjoint(NOT_SUPPORTED)
    assert all(set(spec.options.not_built).isdisjoint(spec.options.choices or ()) for _, spec in command_line_fields())


def test_what_a_field_says_of_others_names_fields_and_attributes_that_there_are() -> None:
    names = {spec.name for _, spec in command_line_fields()}
    for part, spec in command_line_fields():
        options = spec.options
        assert names.issuperset(options.excludes), spec.name
        needs = (options.needs,) if isinstance(options.needs, str) else options.needs or ()
        assert names.issuperset(needs), spec.name
        config_class = config_parts()[part]
        assert options.where is None or options.where[0] in {other.name for other in field_specs(config_class)}
        if options.seen_as is not None:
            field_value(config_of("").model, options.seen_as)  # It raises AttributeError for another name.


def test_every_field_has_a_help_text() -> None:
    for config_class in config_parts().values():
        docs = field_docs(config_class)
        for spec in field_specs(config_class):
            text = spec.help_text(docs[spec.name])
            assert text.endswith("."), spec.name
            assert text[0].isupper(), spec.name
            assert ("Off:" in docs[spec.name]) == (spec.options.negative is not None), spec.name


def test_the_last_value_wins() -> None:
    assert config_of("--train-iters 20 --train-iters 30").training.train_iters == 30
    assert config_of("--split 9,1,0 --split 8,1,1").data.split == "8,1,1"
    assert config_of("--rampup-batch-size 1 1 1 --rampup-batch-size 2 2 8 --global-batch-size 4").training == (
        config_of("--rampup-batch-size 2 2 8 --global-batch-size 4").training
    )


def test_extra_validation_sets_accumulate(tmp_path: Path) -> None:
    write_data_set(tmp_path / "text")
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"1 {tmp_path / 'text'}")
    flags = (
        f"--extra-valid-datalist {tmp_path}/a --extra-valid-data-samples 3 --extra-valid-data-names n "
        f"--extra-valid-datalist {tmp_path}/b --extra-valid-data-samples 4 --extra-valid-data-names m"
    )
    validation = config_of(flags).validation
    assert validation.extra_valid_datalist == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert (validation.extra_valid_data_samples, validation.extra_valid_data_names) == ((3, 4), ("n", "m"))
    assert problems_of(f"{flags} --eval-iters 0") == (
        "--extra-valid-datalist has no effect with --eval-iters 0, which turns evaluation off; use --eval-iters 1 "
        "or more",
    )
    (tmp_path / "b").write_text(f"-1 {tmp_path / 'text'} 1 {tmp_path / 'nothing'}")
    assert problems_of(flags) == (
        f"validation set m: the weight of {tmp_path}/text is -1; use a positive weight",
        f"validation set m: data file {tmp_path}/nothing.idx does not exist; pass the data path without .bin or "
        ".idx, as in my-corpus_text_document",
    )


def test_switches_negative_flags_and_aliases() -> None:
    config = config_of("--no-bias-gelu-fusion --disable-bias-linear --swiglu --layernorm-epsilon 1e-6 --bf16")
    assert not config.model.bias_gelu_fusion
    assert not config.model.add_bias_linear
    assert config.model.activation == "swiglu"
    assert config.model.norm_epsilon == 1e-6
    assert config.model.params_dtype == "bfloat16"
    assert config_of("--no-check-for-nan-in-loss-and-grad").ddp.check_for_nan_in_loss_and_grad is False


@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ("", "gelu_tanh"),
        ("--disable-bias-linear", "gelu"),
        ("--disable-bias-linear --openai-gelu", "gelu_tanh"),
        ("--disable-bias-linear --geglu", "geglu"),
        ("--no-bias-gelu-fusion", "gelu"),
    ],
)
def test_gelu_without_biases_is_the_exact_form_as_in_megatron(flags: str, activation: str) -> None:
    assert config_of(flags).model.activation == activation


def test_equals_sign_and_local_rank_spellings() -> None:
    config = config_of("--seed=7 --local_rank=0")
    assert config.initialization.seed == 7
    assert config.initialization.local_rank == 0


def test_defaults_are_megatrons() -> None:
    config = config_of("")
    assert config.optimizer.weight_decay == 0.01
    assert config.optimizer.initial_loss_scale == 2**32
    assert config.optimizer.adam_beta2 == 0.999
    assert config.scheduler.lr_decay_style == "linear"
    assert (config.validation.eval_interval, config.validation.most_eval_iters) == (1000, 100)
    assert (config.logging.log_interval, config.data.num_workers) == (100, 2)
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.1
    assert config.initialization.seed == 1234
    assert config.tokenizer.tokenizer_type == "NullTokenizer"


def test_no_default_differs_from_the_frozen_ones() -> None:
    """A default decides about every run whose command line lacks the flag."""
    assert config_of("").to_dict() == json.loads(DEFAULTS.read_text(encoding="utf-8"))


def test_abbreviations_are_unknown_flags_with_the_nearest_match() -> None:
    assert problems_of("--train-iter 3") == ("unknown flag --train-iter; did you mean --train-iters?",)
    assert problems_of("--train_iters 3") == ("unknown flag --train_iters; did you mean --train-iters?",)
    assert problems_of("--hiden-size=3") == ("unknown flag --hiden-size; did you mean --hidden-size?",)
    assert problems_of("--zzqqxx") == ("unknown flag --zzqqxx; see --help",)


def test_flags_without_their_value_hide_no_other_problem() -> None:
    words = "--num-layers --lr -1 --fp8-format --bf16=yes --hiden-size 3 --adam-beta2 --rampup-batch-size"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *words.split()], 1)
    problems = caught.value.problems
    assert set(problems[:5]) == {
        "--num-layers: a value is missing; pass --num-layers N",
        "--fp8-format: a value is missing; pass --fp8-format {hybrid,e4m3}",
        "--bf16 is a switch and takes no value; pass --bf16 without a value, or omit it",
        "--adam-beta2: a value is missing; pass --adam-beta2 X",
        "--rampup-batch-size: a value is missing; pass --rampup-batch-size N",
    }
    assert problems[5:] == (
        "unknown flag --hiden-size; did you mean --hidden-size?",
        "--lr -1.0: a value of 0 or more is expected",
    )


def test_a_stray_value_is_refused() -> None:
    assert problems_of("--lr 1 true") == ("unexpected value 'true'; a value must follow its flag",)
    assert problems_of("--swiglu true") == (
        "--swiglu is a switch and takes no value; pass --swiglu without a value, or omit it",
    )


def test_all_problems_are_reported_together() -> None:
    problems = problems_of("--hiden-size 3 --spec hybrid --lr x --fp16 --bf16 --num-attention-heads 5")
    assert len(problems) == 5
    assert all("\n" not in problem for problem in problems)


def without_fusions(config: RunConfig) -> RunConfig:
    """Return the configuration without the fusions that only the list of arguments has."""
    return dataclasses.replace(config, logging=dataclasses.replace(config.logging, unused_fusions=()))


@pytest.mark.default(75)
@pytest.mark.parametrize("flag", sorted(NO_EFFECT))
def test_flags_without_effect_are_accepted_with_one_line(flag: str) -> None:
    note = NO_EFFECT[flag]
    value = "" if note.arity == 0 else (*note.accepted, "7")[0]
    parsed = resolve_arguments([*MINIMAL, flag, *value.split()], 1)
    assert parsed.notes == (f"{flag} {value}".strip() + f" has no effect: {note.reason}",)
    assert without_fusions(parsed.config) == config_of("")


def test_values_that_ask_for_what_is_done_anyway_make_no_line() -> None:
    parsed = resolve_arguments([*MINIMAL, *["--transformer-impl", "local", "--num-dataset-builder-threads", "1"]], 1)
    assert parsed.notes == ()


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_whose_layers_is_a_field_and_makes_no_line_of_its_own(impl: str) -> None:
    parsed = resolve_arguments([*MINIMAL, "--transformer-impl", impl], 1)
    assert parsed.config.model.transformer_impl == impl
    assert parsed.notes == ()
    assert config_of("").model.transformer_impl == "local"


def test_values_that_would_change_the_result_are_refused() -> None:
    assert problems_of("--position-embedding-type mrope") == (
        "--position-embedding-type mrope is not supported yet; possible: learned_absolute, rope, alibi, sinusoidal, "
        "none",
    )


@pytest.mark.parametrize("flag", sorted(NOT_SUPPORTED))
def test_flags_not_supported_yet_are_refused_by_name_unless_default(flag: str) -> None:
    refused = NOT_SUPPORTED[flag]
    words = [] if refused.arity == 0 else ["77"]
    (problem,) = problems_of(" ".join([flag, *words]))
    assert problem.startswith(" ".join([flag, *words]) + " is not supported yet")
    if refused.default is not None:
        assert resolve_arguments([*MINIMAL, flag, refused.default], 1).notes == ()


def test_default_values_of_unbuilt_features_are_accepted() -> None:
    config = config_of(
        "--pipeline-model-parallel-size 1 --context-parallel-size 1 --cp-comm-type p2p "
        "--data-parallel-sharding-strategy no_shard --expert-model-parallel-size 1"
    )
    assert config == config_of("")


def test_values_of_megatron_that_are_not_built_are_told_from_wrong_ones() -> None:
    assert problems_of("--optimizer cpu_adam") == (
        "--optimizer cpu_adam is not supported yet; possible: adam, sgd, hybridadam, muon, dist_muon, lion",
    )
    assert problems_of("--optimizer adm") == (
        "--optimizer adm: possible values are adam, sgd, hybridadam, muon, dist_muon, lion; a script that registers "
        "adm adds it (--script FILE)",
    )


def test_flags_of_loading_without_anything_to_load_say_so() -> None:
    words = ["--no-load-optim", "--no-load-rng", "--no-verify-checkpoint", "--dist-ckpt-strictness", "log_all"]
    assert [note for note in resolve_arguments([*MINIMAL, *words], 1).notes if "without --load" in note] == [
        "--no-load-optim has no effect without --load DIR",
        "--no-load-rng has no effect without --load DIR",
        "--no-verify-checkpoint has no effect without --load DIR",
        "--dist-ckpt-strictness log_all has no effect without --load DIR",
    ]
    assert not [note for note in resolve_arguments([*MINIMAL, *words, "--load", "x"], 1).notes if "--load" in note]


@pytest.mark.parametrize("name", ["torch", "torch_dist"])
def test_checkpoint_formats_of_megatron_are_accepted(name: str) -> None:
    assert resolve_arguments([*MINIMAL, "--ckpt-format", name], 1).notes == ()


def test_sequence_parallel_is_turned_off_without_tensor_parallelism() -> None:
    parsed = resolve_arguments([*MINIMAL, "--sequence-parallel"], 1)
    assert not parsed.config.model.sequence_parallel
    assert len(parsed.notes) == 1
    assert config_of("--sequence-parallel --tensor-model-parallel-size 2", 2).model.sequence_parallel


def test_flash_attention_with_packed_documents_says_that_it_is_not_used() -> None:
    packed = [*MINIMAL, "--use-flash-attn", "--reset-attention-mask"]
    assert resolve_arguments(packed, 1).notes == (
        "flash-attn is not used with packed documents: --reset-attention-mask uses torch's attention",
    )
    assert resolve_arguments([*MINIMAL, "--attention-backend", "flash"], 1).notes == ()


def test_flash_attention_with_a_ring_says_that_it_is_not_used() -> None:
    ring = [*MINIMAL, "--use-flash-attn", "--context-parallel-size", "2"]
    note = "flash-attn is not used with --cp-comm-type p2p: merged blocks use torch's attention"
    assert resolve_arguments(ring, 2).notes == (note,)
    assert resolve_arguments([*ring, "--cp-comm-type", "a2a"], 2).notes == ()


@pytest.mark.parametrize("words", ["--window-size 4,0", "--attn-logit-softcapping 30"])
def test_flash_attention_does_windows_and_capped_scores(words: str) -> None:
    assert resolve_arguments([*MINIMAL, "--use-flash-attn", *words.split()], 1).notes == ()


@pytest.mark.parametrize("pattern", ["1", "[0,0]"])
def test_a_window_that_no_layer_has_says_so(pattern: str) -> None:
    words = ["--num-layers", "2", "--window-size", "4,0", "--window-attn-skip-freq", pattern]
    assert resolve_arguments([*MINIMAL, *words], 1).notes == (
        f"--window-size 4,0 has no effect: --window-attn-skip-freq {pattern} selects no layer",
    )
    words[-1] = "2"
    assert resolve_arguments([*MINIMAL, *words], 1).notes == ()


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ("--kv-channels 16", "--kv-channels 16"),
        ("--rope-type rope --rotary-scaling-factor 4", "--rotary-scaling-factor 4.0"),
        ("--rope-type rope --rotary-scaling-factor 4 --mscale-all-dim 1", None),
        ("--mscale-all-dim 1", "--mscale-all-dim 1.0"),
        ("--beta-fast 3", "--beta-fast 3.0"),
        ("--rotary-scaling-factor 4 --beta-fast 3 --mscale-all-dim 1", None),
    ],
)
def test_what_counts_for_nothing_beside_latent_attention_is_said(given: str, idle: str | None) -> None:
    latent = ["--multi-latent-attention", "--position-embedding-type", "rope", *given.split()]
    notes = [note for note in resolve_arguments([*MINIMAL, *latent], 1).notes if "no effect with" in note]
    assert [note.partition(" has no effect")[0] for note in notes] == ([] if idle is None else [idle])


def test_flags_of_another_kind_of_positions_say_that_they_have_no_effect() -> None:
    words = ["--rotary-base", "7", "--window-size", "4,0", "--rotary-base-local", "5", "--rope-scaling-factor", "2"]
    local = "--rotary-base-local 5 has no effect without --position-embedding-type rope"
    rope = ["--position-embedding-type", "rope", "--use-rope-scaling"]
    assert resolve_arguments([*MINIMAL, *words], 1).notes == (
        "--rotary-base 7 has no effect without --position-embedding-type rope",
        "--rope-scaling-factor 2.0 has no effect without --use-rope-scaling",
        local,
    )
    assert resolve_arguments([*MINIMAL, *words, *rope, "--max-position-embeddings", "64"], 1).notes == ()


def test_data_lists_from_files(tmp_path: Path) -> None:
    for name in "ab":
        write_data_set(tmp_path / name)
    words = tmp_path / "list"
    words.write_text(f"0.3 {tmp_path}/a\n0.7 {tmp_path}/b")
    argv = [*(word for word in MINIMAL if word != "--mock-data"), "--eval-iters", "0"]
    config = resolve_arguments([*argv, "--data-args-path", str(words)], 1).config
    assert config.data.data_path == ("0.3", f"{tmp_path}/a", "0.7", f"{tmp_path}/b")
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"train": [f"{tmp_path}/a"], "valid": [f"{tmp_path}/b"]}))
    config = resolve_arguments([*argv, "--per-split-data-args-path", str(lists)], 1).config
    assert config.data.train_data_path == (f"{tmp_path}/a",)
    assert config.data.valid_data_path == (f"{tmp_path}/b",)
    assert config.data.split is None


def test_a_list_in_a_file_excludes_another_one(tmp_path: Path) -> None:
    for name in "ab":
        write_data_set(tmp_path / name)
    words, lists = tmp_path / "list", tmp_path / "lists.json"
    words.write_text(f"{tmp_path}/a")
    lists.write_text(json.dumps({"train": [f"{tmp_path}/a"]}))
    argv = [*(word for word in MINIMAL if word != "--mock-data"), "--eval-iters", "0"]
    for flag, file, other in (
        ("--data-args-path", words, "--data-path"),
        ("--per-split-data-args-path", lists, "--train-data-path"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            resolve_arguments([*argv, flag, str(file), other, f"{tmp_path}/b"], 1)
        assert caught.value.problems == (f"{other} and {flag} {file} exclude each other; omit one of them",)


def test_a_tokenizer_model_of_no_kind_is_named(tmp_path: Path) -> None:
    argv = list(MINIMAL)
    place = argv.index("--tokenizer-type")
    del argv[place : place + 2]
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*argv, "--tokenizer-model", str(tmp_path)], 1)
    assert caught.value.problems == (
        f"--tokenizer-model {tmp_path} is not a folder with tokenizer.json or tokenizer.model, so its type is not "
        "known; add --tokenizer-type",
    )


def test_the_train_command_reads_a_text_without_a_tokenizer_as_bytes(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("a\n")
    argv = [*SHAPE, *TRAINING, "--train-data", str(text)]
    parsed = resolve_arguments(argv, 1, is_train_command=True)
    assert parsed.config.tokenizer == TokenizerConfig(tokenizer_type="ByteTokenizer")
    assert parsed.notes == (
        "no tokenizer is given: using ByteTokenizer, one token per byte of the text (another: --tokenizer-type)",
    )
    assert resolve_arguments(argv, 1, needs_files=False).config.tokenizer == parsed.config.tokenizer  # for the planner
    given = resolve_arguments([*argv, "--tokenizer-type", "ByteTokenizer"], 1)
    assert (given.config.tokenizer, given.notes) == (parsed.config.tokenizer, ())
    # Megatron's script, data that is tokenized already and half a tokenizer still need the files.
    for words, is_train_command in (
        (argv, False),
        ([*argv[:-2], "--mock-data"], True),
        ([*argv, "--merge-file", str(text)], True),
    ):
        with pytest.raises(ConfigurationError) as caught:
            resolve_arguments(words, 1, is_train_command=is_train_command)
        assert caught.value.problems[0].startswith("--vocab-file is missing; --tokenizer-type GPT2BPETokenizer needs")
        assert "and ByteTokenizer no flag)" in caught.value.problems[0]


def test_flags_of_other_tokenizers_are_named() -> None:
    notes = resolve_arguments([*MINIMAL, "--merge-file", "m", "--tiktoken-pattern", "v1"], 1).notes
    kind = resolve_arguments(MINIMAL, 1).config.tokenizer.tokenizer_type
    assert notes == tuple(
        f"{flag} has no effect: the tokenizer is {kind}" for flag in ("--merge-file", "--tiktoken-pattern")
    )


def test_print_config_prints_what_reads_back_and_ends_with_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([*MINIMAL, "--print-config", "--use-mcore-models"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    path = tmp_path / "run.toml"
    path.write_text(printed.out)
    assert resolve_arguments(["--config", str(path)], 1).config.model == config_of("").model
    assert "--use-mcore-models has no effect" in printed.err


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.training.exit_reason._WAIT_FOR_REPORT_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    for argv, status in (([*MINIMAL, "--print-config"], 0), (["--help"], 0), (["--help-all"], 0), (["--lr"], 2)):
        with pytest.raises(SystemExit) as ended:
            parse_arguments_or_exit(argv, world_size=2, rank=1)
        assert ended.value.code == status
    assert signal.signal(signal.SIGTERM, before) != before  # a rank that refuses dies of torchrun's signal as it wants
    parse_arguments([*MINIMAL, "--use-mcore-models"], world_size=2, rank=1)
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


def help_of(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_whole_help_shows_every_effective_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("--help-all", capsys)
    for _, spec in command_line_fields():
        assert all(flag in text for flag in spec.flags)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_the_essential_flags_in_groups(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(flag, capsys)
    shown = re.findall(r"^  (--[a-z0-9-]+)", text, flags=re.MULTILINE)
    specs = {spec.name: spec for _, spec in command_line_fields()}
    assert shown == [specs[name].flags[0] for names in ESSENTIAL.values() for name in names]
    assert shown[0] == "--num-layers"
    assert 40 <= len(shown) <= 50
    assert [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)] == list(ESSENTIAL)
    assert text.splitlines()[-1] == f"--help-all shows all {len(specs)} flags."


def test_dotted_block_is_sorted_and_reaches_column_51() -> None:
    lines = format_arguments(config_of("--lr 3e-3")).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert "  adam_beta1 ...................................... 0.9" in lines
    assert "  lr .............................................. 0.003" in lines
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names, key=str.lower)
    # As in Megatron, a name that fills the column by itself pushes its value out.
    assert {line[50:52] for line in lines[1:-1] if len(line.split()[0]) < 48} == {". "}
    values = dict(line.split()[::2] for line in lines[1:-1] if len(line.split()) == 3)
    assert (
        values.items()
        >= {
            "world_size": "1",
            "rank": "0",
            "data_parallel_size": "1",
            "params_dtype": "float32",
            "encoder_num_layers": "2",
            "encoder_seq_length": "40",
            "virtual_pipeline_model_parallel_size": "None",
            "layernorm_epsilon": values["norm_epsilon"],
            "consumed_train_samples": "0",
            "attention_softmax_in_fp32": "True",
            "masked_softmax_fusion": "True",
            "bias_dropout_fusion": "True",
            "eval_iters": "100",
        }.items()
    )


def test_the_list_of_arguments_has_the_fusions_as_given() -> None:
    fusions = {
        "--no-masked-softmax-fusion": "masked_softmax_fusion",
        "--no-bias-gelu-fusion": "bias_gelu_fusion",
        "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
        "--no-bias-dropout-fusion": "bias_dropout_fusion",
        "--no-rope-fusion": "apply_rope_fusion",
        "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    }
    for flags, expected in (([], True), ([*fusions], False)):
        values = argument_values(resolve_arguments([*MINIMAL, *flags, "--eval-iters", "7"], 1).config)
        assert {name: values[name] for name in fusions.values()} == dict.fromkeys(fusions.values(), expected)
        assert values["eval_iters"] == 7


def test_levels_of_context_parallelism_count_for_their_exchange_only() -> None:
    sizes = ["--hierarchical-context-parallel-sizes", "2", "1"]
    flags = [*MINIMAL, "--context-parallel-size", "2", *sizes]
    assert resolve_arguments(flags, 2).notes == (
        "--hierarchical-context-parallel-sizes 2 1 has no effect without --cp-comm-type a2a+p2p",
    )
    parsed = resolve_arguments([*flags, "--cp-comm-type", "a2a+p2p"], 2)
    assert (parsed.notes, parsed.config.model.cp_inner_size) == ((), 2)


PLAIN = resolve_arguments(MINIMAL, 1)
FOREIGN = [row for row in foreign_flags().values() if " " not in row.flag and not row.flag.endswith("*")]


def words_of(name: str, arity: int | str, value: str = "7") -> list[str]:
    return [name] if arity == 0 else [name, value]


def problems_of_flag_classes(words: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *words], 1)
    return caught.value.problems


def test_no_flag_is_in_two_classes() -> None:
    fields = {name for _, spec in command_line_fields() for name in spec.flags}
    assert (
        fields & NO_EFFECT.keys() == fields & NOT_SUPPORTED.keys() == NO_EFFECT.keys() & NOT_SUPPORTED.keys() == set()
    )
    deprecated = deprecated_flags().keys()
    assert deprecated.isdisjoint(fields | NO_EFFECT.keys() | NOT_SUPPORTED.keys())
    assert all_flags().keys() == fields | deprecated | NO_EFFECT.keys() | NOT_SUPPORTED.keys()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_flag_without_effect_leaves_the_run_as_it_is_and_says_so(name: str) -> None:
    note = NO_EFFECT[name]
    for value in note.accepted or note.quiet or ("7",):
        words = words_of(name, note.arity, value)
        parsed = resolve_arguments([*MINIMAL, *words], 1)
        assert without_fusions(parsed.config) == PLAIN.config
        assert len(parsed.notes) == (0 if value in note.quiet else 1)
    if note.accepted:
        assert problems_of_flag_classes([name, "something-else"]) == (
            f"{name} something-else is not supported yet; possible: {', '.join(note.accepted)}",
        )


def test_every_reason_is_of_a_flag_that_is_refused() -> None:
    reached = {
        next(beginning for beginning, _ in REASONS if name.startswith(beginning))
        for name in NOT_SUPPORTED
        if refusal_reason(name)
    }
    assert [beginning for beginning, _ in REASONS if beginning not in reached] == []


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_a_flag_that_is_not_supported_is_refused_with_a_reason(name: str) -> None:
    refused = NOT_SUPPORTED[name]
    (problem,) = problems_of_flag_classes(words_of(name, refused.arity))
    assert problem.startswith(name)
    reason = refused.instead or refusal_reason(name)
    assert reason, f"{name}: say what to do in its place, or why there is nothing to do"
    assert problem.endswith(f" is not supported yet; {reason}")
    if refused.default is not None:
        assert resolve_arguments([*MINIMAL, name, refused.default], 1).config == PLAIN.config


@pytest.mark.parametrize("row", FOREIGN, ids=lambda row: row.flag)
def test_another_trainers_flag_is_refused_by_name_with_what_stands_for_it(row: ForeignFlag) -> None:
    words = words_of(row.flag, row.arity)
    if row.flag in all_flags() or translate_flags(words).words != words:
        return
    (problem,) = problems_of_flag_classes(words)
    assert row.flag in problem
    assert (row.trainer in problem) == (row.trainer != "several trainers")
    assert row.becomes.replace("{}", "7") in problem
    assert row.becomes or row.change in problem


@pytest.mark.full
def test_each_spelling_of_a_field_is_the_same_flag() -> None:
    for _, spec in command_line_fields():
        value = [] if spec.is_bool else ["7"]
        answers = set()
        for name in spec.flags:
            try:
                answers.add(repr(resolve_arguments([*MINIMAL, name, *value], 1).config))
            except ConfigurationError as error:
                answers.add(repr(error.problems).replace(name, spec.flags[0]))
        assert len(answers) == 1, spec.flags


ENTRY_SCRIPT = ROOT / "pretrain_gpt.py"
DECLARE_OR_CHECK_ONLY = (
    "config/checks/",
    "config/megatron_flags.py",
    "config/printed_config.py",
)


def test_every_accepted_field_is_read_somewhere() -> None:
    assert all((ROOT / "megatron" / name).exists() for name in DECLARE_OR_CHECK_ONLY)
    sources = [path for path in (ROOT / "megatron").rglob("*.py") if not _only_declares(path)]
    program = "\n".join(path.read_text(encoding="utf-8") for path in (*sources, ENTRY_SCRIPT))
    unread = [
        spec.flags[0]
        for part, spec in command_line_fields()
        if not re.search(rf"\.{spec.name}\b", program) and f"asdict(config.{part})" not in program
        # `DecoderConfig.activation` reads the flags of these tuples by name.
        if spec.name not in (*GATED_ACTIVATIONS, *_PLAIN_ACTIVATIONS)
    ]
    assert unread == [], "build what these flags ask for, or move them to config/megatron_flags.py"


def _only_declares(path: Path) -> bool:
    relative = path.relative_to(ROOT / "megatron").as_posix()
    return relative.startswith(DECLARE_OR_CHECK_ONLY)


def test_a_plan_needs_no_learning_rate() -> None:
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 9"
    assert resolve_arguments(flags.split(), 1, needs_files=False).config.optimizer.lr == 0
    with pytest.raises(ConfigurationError, match="--lr is missing"):
        resolve_arguments(flags.split(), 1)
