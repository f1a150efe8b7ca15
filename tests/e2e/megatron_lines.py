"""The forms of the lines in Megatron's logs, and a parser that knows no others."""

from __future__ import annotations

import re

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
EXPONENT = r"-?\d\.\d{6}E[+-]\d\d"
TIMER = r"    {} \.+: \(\d+\.\d\d, \d+\.\d\d\)"
BILLIONS = r"\d+\.\d\d"

# From the world to the first iteration, in the order of Megatron's log.
BEFORE = {
    "world": r"using world size: \d+, data-parallel size: \d+, context-parallel size: \d+, "
    r"tensor-model-parallel size: \d+, pipeline-model-parallel size: \d+",
    "precision": r"using torch\.(float16|bfloat16|float32) for parameters \.\.\.",
    "arguments": "------------------------ arguments ------------------------",
    "argument": r"  \w+ \.* .*",
    "end of arguments": "-------------------- end of arguments ---------------------",
    "micro-batches": r"setting number of micro-batches to constant \d+",
    "tokenizer": r"> building \w+ tokenizer \.\.\.",
    "vocabulary": r" > padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: \d+\)",
    "distributed": r"> initializing torch distributed \.\.\.",
    "tensor parallel": r"> initialized tensor model parallel with size \d+",
    "pipeline parallel": r"> initialized pipeline model parallel with size \d+",
    "seeds": r"> setting random seeds to \d+ \.\.\.",
    "index builder": r"> compiling dataset index builder \.\.\.",
    "index builder done": r">>> done with dataset index builder\. Compilation time: \d+\.\d{3} seconds",
    "fused kernels": r"> compiling and loading fused kernels \.\.\.",
    "fused kernels done": r">>> done with compiling and loading fused kernels\. Compilation time: \d+\.\d{3} seconds",
    "time to initialize": r"time to initialize megatron \(seconds\): \d+\.\d{3}",
    "initialized": rf"\[after megatron is initialized\] datetime: {DATE}",
    "model": r"building GPT model \.\.\.",
    "parameters": r" > number of parameters on \(tensor, pipeline\) model parallel rank \(\d+, \d+\): \d+",
    "buckets": r"Number of buckets for gradient all-reduce / reduce-scatter: \d+",
    "bucket": r"Params for bucket \d+ \(\d+ elements, \d+ padded size\):",
    "bucket's parameter": r"\tmodule\.[\w.]+",
    "decay style": r"> learning rate decay style: (constant|linear|cosine|inverse-square-root|WSD)",
    "no checkpoint": r"WARNING: could not find the metadata file \S+/latest_checkpointed_iteration\.txt",
    "random": "    will not load any checkpoints and will start from random",
    "loading": r" loading checkpoint from \S+ at iteration \d+",
    "version": r" checkpoint version \d\.\d",
    "kept value": r" > using checkpoint value \S+ for (learning rate|minimum learning rate|warmup iterations|"
    r"total number of iterations|learning rate decay style|start weight decay|end weight decay|"
    r"total number of weight decay iterations|weight decay incr style)",
    "new value": r" > overriding [a-z ]+ value to \S+",
    "loaded": r"  successfully loaded checkpoint from \S+ at iteration \d+",
    "load time": TIMER.format("load-checkpoint"),
    "model is built": rf"\[after model, optimizer, and learning rate scheduler are built\] datetime: {DATE}",
    "building data": r"> building train, validation, and test datasets \.\.\.",
    "targets": r" > datasets target sizes \(minimum size\):",
    "target": r"    [\w-]+: +(\d+|all)",
    "building GPT data": r"> building train, validation, and test datasets for GPT \.\.\.",
    "prefix": r"data_prefix: \['.+'\]",
    "index": r" > building dataset index \.\.\.",
    "reading": r"    reading (sizes|pointers|document index)\.\.\.",
    "documents": r"    number of documents: \d+",
    "split": " > dataset split:",
    "split's name": "    (train|validation|test):",
    "range": r"     document indices in \[\d+, \d+\) total of \d+ documents",
    "index is built": r" > WARNING: could not find index map files, building the indices on rank 0 \.\.\.",
    "epochs": r" > only one epoch required, setting separate_last_epoch to False",
    "last epoch": r" > last epoch number of samples \(-?\d+\) is (smaller|larger) than 80% of number of samples "
    r"per epoch \(\d+\), setting separate_last_epoch to (True|False)",
    "index time": r" > elasped time to build and save (doc|sample|shuffle)-idx mapping \(seconds\): \d+\.\d{6}",
    "using": "    using:",
    "used": r"     (number of documents|number of epochs|sequence length|total number of samples): +\d+",
    "shuffle": r" > building shuffle index with split \[0, \d+\) and \[\d+, \d+\) \.\.\.",
    "mapping": r" > loading (doc|sample|shuffle)-idx mapping from \S+\.npy",
    "index is loaded": r"    loaded indexed file in \d+\.\d{3} seconds",
    "samples": r"    total number of samples: \d+",
    "number of epochs": r"    total number of epochs: \d+",
    "data are built": r"> finished creating GPT datasets \.\.\.",
    "loaders are built": rf"\[after dataloaders are built\] datetime: {DATE}",
    "done": r"done with setup \.\.\.",
    "model time": TIMER.format("model-and-optimizer-setup"),
    "data time": TIMER.format("train/valid/test-data-iterators-setup"),
    "training": r"training \.\.\.",
    "start": rf"\[before the start of training step\] datetime: {DATE}",
}
DURING = {
    "iteration": rf" \[{DATE}\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \| elapsed time per iteration \(ms\): "
    rf"\d+\.\d \|( throughput per GPU \(TFLOP/s/GPU\): \d+\.\d+ \|)? learning rate: {EXPONENT} \| global batch size: +"
    rf"\d+ \|( lm loss: {EXPONENT} \|)? loss scale: \d+\.\d \|( grad norm: \d+\.\d{{3}} \|)?( num zeros: \d+ \|)?"
    r"( params norm: \d+\.\d{3} \|)?( max attention logit: -?\d+\.\d{3} \|)? number of skipped iterations: +\d+ \|"
    r" number of nan iterations: +\d+ \|",
    "block": rf"Number of parameters in transformer block in billions:  {BILLIONS}",
    "embedding": rf"Number of parameters in embedding layers in billions: {BILLIONS}",
    "total": rf"Total number of parameters in billions: {BILLIONS}",
    "shard": r"Number of parameters in most loaded shard in billions: \d+\.\d{4}",
    "other shards": r"Number of parameters in other shards in billions: \d+\.\d{4}",
    "footprints": r"Theoretical memory footprints: weight and optimizer=\d+\.\d\d MB"
    r"(, activation=\d+\.\d\d MB, total=\d+\.\d\d MB)?",
    "memory": r"\[Rank \d+\] \(after \d+ iterations\) memory \(MB\) \| allocated: \d+\.\d\d \| max allocated: "
    r"\d+\.\d\d \| reserved: \d+\.\d \| max reserved: \d+\.\d",
    "times": r"\(min, max\) time across ranks \(ms\):",
    "step time": TIMER.format(
        "(forward-backward|forward-compute|backward-compute|batch-generator|forward-recv|forward-send|backward-recv|"
        "backward-send|layernorm-grads-all-reduce|embedding-grads-all-reduce|all-grads-sync|params-all-gather|"
        "optimizer-copy-to-main-grad|optimizer-unscale-and-check-inf|optimizer-clip-main-grad|optimizer-count-zeros|"
        "optimizer-inner-step|optimizer-copy-main-to-model-params|optimizer)"
    ),
    "evaluation time": TIMER.format("evaluate"),
    "rule": "-+",
    "validation": rf" validation loss at iteration \d+ on [\w ]+ set( \w+)? \| lm loss value: {EXPONENT} \| lm loss PPL"
    rf": {EXPONENT} \|",
    "saving": r"saving checkpoint at iteration +\d+ to \S+",
    "saved": r"  successfully saved checkpoint at iteration +\d+ to \S+",
    "save time": TIMER.format("save-checkpoint"),
    "after": rf"\[after training is done\] datetime: {DATE}",
    "evaluated samples": r"Evaluating on \d+ samples",
    "evaluated": r"Evaluating iter \d+/\d+",
    "end of training": r" validation loss at the end of training for (val|test) data \| lm loss value: "
    rf"{EXPONENT} \| lm loss PPL: {EXPONENT} \|",
}
# What this project says beside.
OWN = {
    "threads": r" > CPU threads per process: \d+ \(.+\)",
    "kernels": "attention kernels?: .+",
    "note": r"--[\w-]+.* (has|have) no effect.*",
    "warning": r"WARNING: --.+",
    "other kernel": ".+ is not used, because .+",
    "tokenizer of a model": r"using the tokenizer of --load \S+: \w+",
    "documents apart": r"--reset-position-ids also limits attention to each document.+ --reset-attention-mask is added",
    "chunks": r"( > tensor-parallel communication overlapped with GEMMs|--tp-comm-overlap): .+",
    "fp8": "fp8: .+",
    "offload": "optimizer offload: .+",
    "finished": r"training finished, evaluating(, about \d+ s)?",
    "all done": r"all \d+ iterations are done; a larger --train-iters continues the run",
    "read once": r" > (valid|test) data: each evaluation reads all \d+ samples once; .+",
    "extended": r"--train-(iters|samples) \d+ → \d+ extends the learning-rate decay to the new length, .+",
    "pinned memory": r"\[Rank \d+\] \(after \d+ iterations\) pinned host memory of the node \(MB\): \d+\.\d\d",
    "no data": " > no (train|valid|test) data: .+",
    "changes": "configuration changed since the checkpoint: .+",
    "layer norms": rf" iteration +\d+ \| +(embedding|layer \d+|output) \| params norm: {EXPONENT} \| grad norm: "
    rf"{EXPONENT} \|",
}
_PREFIX = re.compile(r"^\[default\d+\]:", re.MULTILINE)  # of torchrun --tee
FORMS = {name: re.compile(form) for name, form in {**BEFORE, **DURING, **OWN}.items()}


def parse(log: str) -> list[str]:
    """Return the name of each line's form; fail with the lines that have none."""
    names, unknown = [], []
    for line in _PREFIX.sub("", log).splitlines():
        name = next((name for name, form in FORMS.items() if form.fullmatch(line)), None)
        if name is None:
            unknown.append(line)
        else:
            names.append(name)
    assert not unknown, "\n".join(unknown)
    return names


def assert_in_order(names: list[str], missing: set[str]) -> None:
    """Assert that the forms before the first iteration come first in Megatron's order, all but the missing ones."""
    expected = [name for name in BEFORE if name not in missing]
    first = dict.fromkeys(name for name in names if name in BEFORE)
    assert list(first) == expected
