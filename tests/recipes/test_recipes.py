"""Recipes of docs/how_to_add.md: each touches the files that it names, and what it adds works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.training_run import REPOSITORY, run_command
from tests.unit.config.command_lines import MINIMAL

DOCUMENT = (REPOSITORY / "docs" / "how_to_add.md").read_text(encoding="utf-8")
PATCHES = Path(__file__).parent

# What is run in the patched copy. ``flags`` is a whole command line, without what the recipe adds.
USES = {
    "flag": """
import torch
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.checkpoint.config_changes import compare_configs
plain, doubled = (parse_arguments([*flags, "--deepnorm-alpha", value]) for value in ("1", "2"))
changes = compare_configs(plain.to_dict(), doubled.to_dict())
assert [str(change) for change in changes.other] == ["model.deepnorm_alpha: 1.0 -> 2.0"]
torch.manual_seed(3)
x = torch.randn(5, 1, plain.model.hidden_size)
found = []
for config in (plain, doubled):
    layer = TransformerLayer(config.model, 0, single_rank_group(), "cpu").eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(7))
    torch.nn.init.zeros_(layer.mlp.linear_fc2.weight)
    torch.nn.init.zeros_(layer.mlp.linear_fc2.bias)
    found.append(layer(x, CAUSAL, None).hidden)
# x -> 2 x + attention, then twice that, as the feed-forward adds zeros.
torch.testing.assert_close(found[1], 2 * (found[0] + x))
""",
    "layer_kind": """
import pretrain_gpt
from megatron.planner.communication import step_traffic
from megatron.verification.cells import Layout, make_cell
from megatron.verification.collective_recorder import record_step
from megatron.verification.run_cell import resolve_cell
from megatron.verification.verifier import Verifier
from megatron.verification.worker_pool import WorkerPool
parts = (pretrain_gpt.provide_model, pretrain_gpt.forward_step)
cell = make_cell("gpt2", Layout(tp=2, sequence_parallel=True), extra=["--parametric-relu"], num_layers=1)
with WorkerPool(2) as pool:
    report = Verifier(pool, *parts).check(cell)
assert report.outcome == "passed", report.describe()
sharded = make_cell("gpt2", Layout(tp=2, dp=2, sharding="optim"), extra=["--parametric-relu"], num_layers=1)
config = resolve_cell(sharded.flags, 4, "float32")
assert record_step(config, 0, *parts) == step_traffic(config, 0, (9, 0))
""",
    "recurrent_layer": """
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
import pretrain_gpt
from megatron.core.config_base import from_fields
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.lightning_attention import LightningAttention
from megatron.planner.communication import step_traffic
from megatron.verification.cells import Layout
from megatron.verification.collective_recorder import record_step
from megatron.verification.hybrid_cells import make_hybrid_cell
from megatron.verification.run_cell import resolve_cell
from megatron.verification.verifier import Verifier
from megatron.verification.worker_pool import WorkerPool
from tests.unit.core.inference.small_models import build, odd_config, whole_logits
variant = ["--experimental-attention-variant", "lightning_attention"]
torch.set_default_dtype(torch.float64)  # Theirs computes the decays in the default type.
heads, dim, hidden, layers = 3, 4, 24, 5
sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_key_head_dim": dim}
fields = {**sizes, "linear_value_head_dim": dim, "num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4}
fields |= {"hybrid_override_pattern": "L" * layers, "params_dtype": "float64", "norm_epsilon": 1e-4}
ours = LightningAttention(from_fields(GPTConfig, **fields), 2, single_rank_group(), "cpu")
for name, parameter in ours.named_parameters():
    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
settings = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": dim}
settings |= {"num_hidden_layers": layers, "rms_norm_eps": 1e-4, "block_size": 16}
theirs = MiniMaxLightningAttention(MiniMaxConfig(**settings), 2).double()
theirs.norm = torch.nn.RMSNorm(heads * dim, eps=1e-4)  # Theirs is computed in float32.
# Their rows are stacked per head.
*qkv, gate = (part.detach() for part in ours.in_proj.weight.chunk(4))
of_heads = torch.stack([part.view(heads, dim, hidden) for part in qkv], dim=1).flatten(0, 2)
with torch.no_grad():
    theirs.qkv_proj.weight.copy_(of_heads)
    theirs.output_gate.weight.copy_(gate)
    theirs.norm.weight.copy_(ours.out_norm.weight)
    theirs.out_proj.weight.copy_(ours.out_proj.weight)
inputs = [torch.randn(2, 71, hidden, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
expected, _ = theirs(inputs[0], None, None)[:2]
actual = ours(inputs[1].transpose(0, 1), CAUSAL, None).hidden.transpose(0, 1)
torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
weights = torch.randn_like(expected)
for output in (actual, expected):
    (output * weights).sum().backward()
torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-11, atol=1e-11)
torch.testing.assert_close(ours.out_norm.weight.grad, theirs.norm.weight.grad, rtol=1e-11, atol=1e-11)
torch.set_default_dtype(torch.float32)
alone = describe_parallel_state(0, 1)
fields |= {"linear_num_value_heads": 6, "hybrid_override_pattern": "L*L-L"}
model = build(odd_config(**fields), alone.tp)
engine, prompts = InferenceEngine(model, alone), ((3, 1, 4), (15, 92, 6, 53, 58), (9,))
request = GenerationRequest(prompts=prompts, max_new_tokens=6, sampling=SamplingConfig(greedy=True))
for prompt, found in zip(prompts, engine.generate(request), strict=True):
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(whole_logits(model, torch.tensor([tokens]))[-1, 0, :101].argmax()))
    assert found.tokens == tokens[len(prompt):], found
layouts = (Layout(tp=2, sequence_parallel=True), Layout(cp=2), Layout(cp=2, passes_states=True))
parts = (pretrain_gpt.provide_model, pretrain_gpt.forward_step)
with WorkerPool(2) as pool:
    for layout in layouts:
        report = Verifier(pool, *parts).check(make_hybrid_cell("delta-net", layout, "packed", extra=variant))
        assert report.outcome == "passed", report.describe()
sharded = make_hybrid_cell("delta-net", Layout(tp=2, dp=2, sharding="optim"), extra=variant)
config = resolve_cell(sharded.flags, 4, "float32")
assert record_step(config, 0, *parts) == step_traffic(config, 0, (9, 0))
more = [*variant, "--linear-attention-freq", "2"]
check_other_formats(flags, ["--hybrid-override-pattern", "L*"], "hybrid_layers 'L *'")
check_rejected([*flags, *more, "--linear-conv-kernel-dim", "3"], "--linear-conv-kernel-dim 3 has no effect")
""",
    "linear_feature": """
import torch
from megatron.core.parallel_config import ParallelConfig
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel import ColumnShardedLinear, RowShardedLinear
for kind in (ColumnShardedLinear, RowShardedLinear):
    layer = kind(5, 3, single_rank_group(), config=ParallelConfig(params_dtype="float64"), has_scale=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(7))
    x = torch.randn(4, 2, 5, dtype=torch.float64)
    expected = (x @ layer.weight.t()) * layer.scale + layer.bias
    torch.testing.assert_close(layer(x), expected)
    leaves = [layer.weight, layer.scale, layer.bias]
    weights = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (layer(x), expected))):
        torch.testing.assert_close(one, other)
check_feature(flags, "--linear-output-scale", {2: 144 + 48 + 192 + 48, 3: 144 + 48 + 2 * 96 + 48})
""",
    "attention_feature": """
import torch
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.attention import SelfAttention
plain, gated = (parse_arguments([*flags, *more]).model for more in ((), ("--headwise-attention-gate",)))
layers = [SelfAttention(config, 0, single_rank_group(), "cpu").eval() for config in (plain, gated)]
for layer in layers:
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    torch.nn.init.zeros_(layer.linear_proj.bias)
x = torch.randn(5, 2, plain.hidden_size)
torch.nn.init.zeros_(layers[1].linear_gate.weight)
torch.testing.assert_close(layers[1](x, CAUSAL, None).hidden, layers[0](x, CAUSAL, None).hidden / 2)
torch.nn.init.normal_(layers[1].linear_gate.weight)
context = layers[0].context(x, CAUSAL, None, None, None)
gates = torch.sigmoid(x @ layers[1].linear_gate.weight.t()).repeat_interleave(plain.kv_channels, dim=-1)
expected = layers[0].linear_proj(context * gates)
torch.testing.assert_close(layers[1](x, CAUSAL, None).hidden, expected)
check_feature(flags, "--headwise-attention-gate", dict.fromkeys((2, 3), 48 * plain.num_attention_heads))
""",
    "learning_rate_schedule": """
from megatron.checkpoint.formats.megatron.common_state import stored_schedule
from megatron.core.errors import ConfigurationError
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleConfig, learning_rate
config = parse_arguments([*flags, "--lr-decay-style", "quadratic"])
assert config.scheduler.lr_decay_style == "quadratic"
schedule = ScheduleConfig(max_lr=1.0, min_lr=0.2, lr_warmup_steps=10, lr_decay_steps=110, lr_decay_style="quadratic")
rates = [learning_rate(schedule, count) for count in (5, 10, 60, 110, 200)]
assert all(abs(one - other) < 1e-12 for one, other in zip(rates, (0.5, 1.0, 0.4, 0.2, 0.2), strict=True)), rates
saved = ["--save", "x", "--ckpt-format", "torch"]
check_rejected([*flags, *saved, "--lr-decay-style", "quadratic"], "--lr-decay-style quadratic")
try:
    stored_schedule({"num_samples": 0, "schedule": vars(schedule)})
except ConfigurationError as error:
    assert str(error) == "Megatron's format cannot store --lr-decay-style quadratic; use the native format"
else:
    raise AssertionError("Megatron has no such schedule")
""",
    "library_optimizer": """
import torch
from megatron.core.optimizer.inner_optimizer import InnerOptimizer, examine_rule
from megatron.core.optimizer.optimizer_config import state_bytes
config = parse_arguments([*flags, "--optimizer", "adafactor"]).optimizer
assert not examine_rule(config).is_elementwise
assert examine_rule(config).unsaved == ()
assert state_bytes(config, is_matrix=True) == 0
start = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
own, theirs = start.clone().flatten(), start.clone().requires_grad_()
optimizer = InnerOptimizer(config, [([own], 1.0)], shapes={id(own): start.shape})
reference = torch.optim.Adafactor([theirs], lr=0.02, weight_decay=0.1)
optimizer.set_learning_rate(0.02, 0.1)
for seed in range(3):
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    own.grad, theirs.grad = gradient.flatten() * 8, gradient.clone()
    optimizer.step([own], grad_multiplier=0.125)
    reference.step()
torch.testing.assert_close(own.view(6, 4), theirs.detach(), rtol=0, atol=0)
assert sorted(optimizer.names_of_state(own)) == ["col_var", "row_var"]
saved = ["--save", "x", "--ckpt-format", "torch_dist"]
check_rejected([*flags, *saved, "--optimizer", "adafactor"], "--optimizer adafactor")
""",
    "checkpoint_format": """
from megatron.cli import convert
from megatron.cli import diff_checkpoints
from tests.unit.checkpoint.small_checkpoint import small_common, write_small
write_small(pathlib.Path("native"), small_common())
assert convert.main("--load-dir native --saver raw --save-dir raw".split()) == 0
assert len(list(pathlib.Path("raw").glob("iter_0000003/*.bin"))) > 100
assert convert.main("--load-dir raw --loader raw --saver native --save-dir again".split()) == 0
assert diff_checkpoints.main(["native", "again"]) == 0
""",
    "family": """
import torch, transformers
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.inference_model import streamed_logits
sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "vocab_size": 101, "head_dim": 12}
config = transformers.GlmConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, pad_token_id=None)
model = transformers.GlmForCausalLM(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
model.save_pretrained("theirs")
tokens = torch.arange(60).reshape(2, 30)
with torch.no_grad():
    expected = model(tokens).logits
source = HuggingFaceSource("theirs")
assert (streamed_logits(source, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
write_hugging_face(source, "again")
for path in pathlib.Path("theirs").iterdir():
    assert path.read_bytes() == pathlib.Path("again", path.name).read_bytes(), path
""",
    "model": """
import json
import subprocess
import sys
more = ("--eval-iters", "0", "--metrics-jsonl", "metrics.jsonl")
subprocess.run([sys.executable, "pretrain_bigram.py", *flags, *more], check=True)
losses = [json.loads(line)["lm_loss"] for line in open("metrics.jsonl")]
assert len(losses) == 10
assert min(losses[5:]) < losses[0]
""",
    "activation": """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from megatron.core.config_base import with_fields
from megatron.core.ops import triton_support
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.mlp import FeedForward
config = with_fields(parse_arguments([*flags, "--mish"]).model, num_experts=None)
assert config.activation == "mish"
triton_support._DEVICE = "cpu"
mlp = FeedForward(config, single_rank_group(), "cpu")
for parameter in mlp.parameters():
    torch.nn.init.normal_(parameter)
first, second = mlp.linear_fc1, mlp.linear_fc2
leaves = [p.detach().double().requires_grad_() for p in (first.weight, first.bias, second.weight, second.bias)]
x = torch.randn(5, 1, config.hidden_size)
expected = torch.nn.functional.mish(x.double() @ leaves[0].t() + leaves[1]) @ leaves[2].t() + leaves[3]
actual = mlp(x).hidden
torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-3)
grads = torch.autograd.grad(actual.sum(), [first.weight, first.bias, second.weight, second.bias])
for one, other in zip(grads, torch.autograd.grad(expected.sum(), leaves)):
    torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)
check_other_formats(flags, ["--mish"], "activation 'mish'")
""",
    "normalization": """
import torch
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.norm import Norm
assert parse_arguments([*flags, "--normalization", "MeanAbsNorm"]).model.normalization == "MeanAbsNorm"
options = {"partial_gradient": False, "centered_weight": True, "dtype": torch.float64, "device": "cpu"}
norm = Norm("MeanAbsNorm", 4, 0.0, single_rank_group(), **options)
torch.nn.init.zeros_(norm.weight)
assert norm(torch.tensor([1.0, -3.0, 0.0, 4.0], dtype=torch.float64)).tolist() == [0.5, -1.5, 0.0, 2.0]
check_other_formats(flags, ["--normalization", "MeanAbsNorm"], "normalization 'MeanAbsNorm'")
""",
    "optimizer": """
import torch
from megatron.core.optimizer.inner_optimizer import InnerOptimizer
config = parse_arguments([*flags, "--optimizer", "signum"]).optimizer
weight = torch.tensor([1.0, -2.0, 3.0])
optimizer = InnerOptimizer(config, [([weight], 1.0)])
optimizer.set_learning_rate(0.5, 0.0)
weight.grad = torch.tensor([8.0, -8.0, 0.0])
optimizer.step([weight], grad_multiplier=0.25)
assert weight.tolist() == [0.5, -1.5, 3.0], weight
torch.testing.assert_close(optimizer.state_of(weight, "exp_avg"), torch.tensor([0.2, -0.2, 0.0]))
""",
    "pipeline_schedule": """
from megatron.core.pipeline_parallel.schedule_actions import build_schedule
from megatron.core.pipeline_parallel.simulator import simulate
assert parse_arguments([*flags, "--pipeline-schedule", "gpipe"]).model.pipeline_schedule == "gpipe"
timeline = simulate(build_schedule("gpipe", 3, 8))
assert timeline.worst_bubble == 2 / 8
assert [rank.peak_activations for rank in timeline.ranks] == [8, 8, 8]
""",
    "tokenizer": """
import dataclasses
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer_record import describe_tokenizer, rebuild_tokenizer
pathlib.Path("characters.txt").write_text("éba\\n", encoding="utf-8")
words = [*flags, "--tokenizer-type", "CharacterTokenizer", "--vocab-file", "characters.txt"]
settings = dataclasses.asdict(parse_arguments(words).tokenizer) | {"vocab_size": None}
tokenizer = rebuild_tokenizer(describe_tokenizer(build_tokenizer(**settings)))
assert (tokenizer.name, tokenizer.vocab_size) == ("CharacterTokenizer", 5)
assert tokenizer.tokenize("aé\\n") == [1, 3, 0]
assert tokenizer.detokenize([*tokenizer.tokenize("aé"), tokenizer.eod_id]) == "aé"
""",
}
TRAINED = (
    *("flag", "layer_kind", "recurrent_layer", "linear_feature", "attention_feature", "model", "checkpoint_format"),
    "family",
)
"""Recipes whose use takes the longest; by default their patches are only compared with the files."""
MOST_FILES = 5
PREAMBLE = """
import pathlib, sys
import megatron
sys.path.append(sys.argv.pop(1))
from megatron.config.arguments import parse_arguments
assert pathlib.Path(megatron.__file__).is_relative_to(pathlib.Path.cwd()), megatron.__file__
flags = sys.argv[1:]
"""
CHECKS = "from tests.recipes.checks import check_feature, check_other_formats, check_rejected\n"


def files_named(recipe: str) -> set[str]:
    """Return the files that a recipe's section names at the beginning of its steps."""
    (section,) = [part for part in re.split(r"^## ", DOCUMENT, flags=re.MULTILINE) if f"/{recipe}.patch)" in part]
    return set(re.findall(r"^\d+\. `([^`]+)`", section, flags=re.MULTILINE))


@pytest.mark.default
def test_every_recipe_has_its_patch_and_is_used() -> None:
    linked = re.findall(r"tests/recipes/(\w+)\.patch\)", DOCUMENT)
    assert sorted(linked) == sorted(path.stem for path in PATCHES.glob("*.patch")) == sorted(USES)
    assert len(linked) == len(re.findall(r"^## ", DOCUMENT, flags=re.MULTILINE))


@pytest.mark.default
@pytest.mark.parametrize("recipe", USES)
def test_a_recipe_touches_the_files_that_it_names(recipe: str) -> None:
    patch = PATCHES / f"{recipe}.patch"
    touched = set(re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert touched == files_named(recipe)
    assert len(touched) <= MOST_FILES
    assert not any(path.startswith("megatron/planner/") for path in touched)
    command = ["git", "apply", "--check", str(patch)]
    checked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{checked.stderr}fix the recipe and its patch"


@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=pytest.mark.long if recipe in TRAINED else ()) for recipe in USES]
)
def test_what_a_recipe_adds_works(recipe: str, tmp_path: Path) -> None:
    patch = PATCHES / f"{recipe}.patch"
    shutil.copytree(REPOSITORY / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pretrain_gpt.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    # Below a repository, git would leave out every path that is not in it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    command = ["git", "apply", str(patch)]
    applied = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, f"{applied.stderr}fix the recipe and its patch"
    program = PREAMBLE + (CHECKS if "check_" in USES[recipe] else "") + USES[recipe]
    run_command([sys.executable, "-B", "-c", program, REPOSITORY, *MINIMAL], cwd=tmp_path).check()
