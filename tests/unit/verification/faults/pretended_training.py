"""A training without a model: it prints, saves, goes on and ends as one does, or does one of these things wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ITERATIONS = 30


def option(name: str) -> Path:
    """Return the last value of a flag."""
    return Path(sys.argv[len(sys.argv) - sys.argv[::-1].index(name)])


def main(fault: str) -> None:
    """Train; ``fault`` is what is wrong with it when it goes on."""
    checkpoints, metrics = option("--save"), option("--metrics-jsonl")
    folders = sorted(checkpoints.glob("iter_*"))
    loaded = int(folders[-1].name[5:]) if folders else 0
    if folders:
        print(f"successfully loaded checkpoint from {checkpoints} at iteration {loaded}", flush=True)
    if fault == "fails" and loaded:
        sys.exit("error: something is wrong")
    if fault == "leaves" and not loaded:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    print("[before the start of training step]", flush=True)
    for iteration in range(loaded + 1, ITERATIONS + 1):
        time.sleep(0.03)
        loss = int(hashlib.sha256(str(iteration).encode()).hexdigest()[:6], 16) / 1e6
        if fault == "forgets" and loaded:
            loss += 1e-12
        with metrics.open("a") as file:
            file.write(json.dumps({"iteration": iteration, "lm_loss": loss}) + "\n")
        unfinished = checkpoints / f".{iteration}"
        # A kill may have left it.
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / "model.safetensors").write_bytes(bytes(1000))
        (unfinished / "config.json").write_text("{}")
        os.rename(unfinished, checkpoints / f"iter_{iteration:07d}")


if __name__ == "__main__":
    main(sys.argv[1])
