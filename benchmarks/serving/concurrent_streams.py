"""Streams of the OpenAI server, one at a time and all at once in turn, and what clients that leave cost the next one.

    OMP_NUM_THREADS=1 python benchmarks/serving/concurrent_streams.py [--streams 200] [--tokens 64] [--rounds 3]

A small untrained model is saved by pretrain_gpt.py and served by the command serve, in a process of its own. The two
ways alternate. A stream counts where it has ended as it should, with all its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --seq-length 64 --max-position-embeddings 512 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 1000"
)
TRAINING = "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0"
SERVING = "--port 0 --inference-max-requests 64 --max-tokens-to-oom 60000 --max-waiting 400"
_NUM_ALONE = 12
_NUM_LEAVING = 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    environment = os.environ | {"MEGATRON_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        words = [*SHAPE.split(), *TRAINING.split(), "--save", folder]
        subprocess.run(
            [sys.executable, "pretrain_gpt.py", *words],
            cwd=REPOSITORY,
            env=environment,
            check=True,
            capture_output=True,
        )
        command = [sys.executable, "-m", "megatron", "serve", "--load", folder, *SERVING.split()]
        server = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            reader = asyncio.new_event_loop()
            reader.run_in_executor(None, server.stdout.read)
            found = asyncio.run(measure(port, arguments.streams, arguments.tokens, arguments.rounds))
        finally:
            server.terminate()
            server.wait()
    found["configuration"] = f"{SHAPE} | {SERVING} | {arguments.streams} streams of {arguments.tokens} tokens"
    found["machine"] = describe()
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def describe() -> str:
    """Return the machine and how busy it is."""
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.machine import describe_machine

    return f"{describe_machine()}, load {os.getloadavg()[0]:.1f}"


async def measure(port: int, num_streams: int, num_tokens: int, num_rounds: int) -> dict[str, object]:
    """Return tokens per second of both ways by round, and the waits of a client with and without others that leave."""
    await streams(port, 2, num_tokens, at_once=True)
    alone, together = [], []
    for _ in range(num_rounds):
        alone.append(await streams(port, _NUM_ALONE, num_tokens, at_once=False))
        together.append(await streams(port, num_streams, num_tokens, at_once=True))
    quiet, after, token_times = [], [], []
    for _ in range(10):
        quiet.append(await first_token(port))
        wait, token_time = await first_token_after_leaving(port)
        after.append(wait)
        token_times.append(token_time)
    return {
        "tokens per second, one at a time": alone,
        "tokens per second, all at once": together,
        "ratio of medians": round(statistics.median(together) / statistics.median(alone), 2),
        "lost": 0,
        "ms to a first token, on a quiet server": spread(quiet),
        "ms to a first token, 20 clients having just left": spread(after),
        "ms a token while those 20 ran": spread(token_times),
    }


def spread(values: Sequence[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


async def streams(port: int, number: int, num_tokens: int, *, at_once: bool) -> float:
    """Read so many streams to their ends and return tokens per second; a lost one is an error."""
    begin = time.perf_counter()
    if at_once:
        counts = await asyncio.gather(*(read_stream(port, n, num_tokens) for n in range(number)))
    else:
        counts = [await read_stream(port, n, num_tokens) for n in range(number)]
    assert counts == [num_tokens] * number, "streams are lost"
    return round(number * num_tokens / (time.perf_counter() - begin), 1)


async def open_stream(port: int, prompt: int, num_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and return its connection, the head of the response read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"prompt": [prompt, prompt + 1, 7], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def read_stream(port: int, prompt: int, num_tokens: int) -> int:
    """Return how many tokens a stream had, by its own count, once it has ended."""
    reader, writer = await open_stream(port, prompt, num_tokens)
    content = await reader.read(-1)
    writer.close()
    assert b"data: [DONE]" in content, "a stream has no end"
    usage = next(line for line in content.splitlines() if b'"usage": {' in line)
    return int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])


async def first_token(port: int) -> float:
    """Return the milliseconds until a stream's first token."""
    begin = time.perf_counter()
    reader, writer = await open_stream(port, 3, 1)
    await reader.readuntil(b"data: ")
    wait = time.perf_counter() - begin
    await reader.read(-1)
    writer.close()
    return 1000.0 * wait


async def first_token_after_leaving(port: int) -> tuple[float, float]:
    """Let clients ask and leave, and return the next one's wait and the time of a token before, in milliseconds."""
    connections = [await open_stream(port, n, 400) for n in range(_NUM_LEAVING)]
    times = []
    for _ in range(20):
        await connections[0][0].readuntil(b"data: ")
        times.append(time.perf_counter())
    for _, writer in connections:
        writer.transport.abort()
    wait = await first_token(port)
    return wait, 1000.0 * statistics.median(after - before for before, after in itertools.pairwise(times[5:]))


if __name__ == "__main__":
    main()
