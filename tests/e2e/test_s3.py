"""Training with data, cache and checkpoints in s3://, on a mock (moto's server) and a real server (Swift)."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import DATA, exact_figures, toy_args
from tests.harness.free_port import free_port
from tests.harness.swift_store import PASSWORD, swift_store
from tests.harness.training_run import REPOSITORY, run_command, run_training

pytestmark = pytest.mark.long

SHORT = "--train-iters 6 --save-interval 2 --lr-decay-iters 6 --eval-iters 0 --keep-last 2"
URL = "s3://bucket/team/run"
_START_S = 60.0
_RUN_S = 600.0
"""A command takes seconds on a machine that does nothing else."""


@dataclass(frozen=True)
class Store:
    """Hold the environment in which ``s3://`` is a server here, and a way to run a script in it.

    ``is_atomic`` says that of several who create an object at one moment it lets one have its way.
    """

    environment: Mapping[str, str]
    is_atomic: bool

    def run(self, script: str) -> str:
        """Return what a Python script prints there."""
        return run_command([sys.executable, "-c", script], env=self.environment, timeout_s=_RUN_S).check().stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install s3fs and moto into a folder."""
    return install(tmp_path_factory.mktemp("packages"), "object_storage.txt")


def install(folder: Path, requirements: str) -> Path:
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
    run_command([*words, "-r", REPOSITORY / "requirements" / requirements], timeout_s=_RUN_S).check()
    return folder


@contextmanager
def moto_store(packages: Path) -> Iterator[Mapping[str, str]]:
    """Run moto's server; yield the environment in which it is s3://."""
    port = free_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        env={**os.environ, **environment, "PYTHONPATH": str(packages)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(f"{environment['AWS_ENDPOINT_URL']}/moto-api/")
        yield environment
    finally:
        server.terminate()
        server.wait(20.0)


@pytest.fixture(scope="module", params=["moto", "swift"])
def store(request: pytest.FixtureRequest, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Start a server, and put the data there."""
    folder = tmp_path_factory.mktemp("store")
    if request.param == "swift":
        server = swift_store(install(tmp_path_factory.mktemp("swift"), "object_store_server.txt"), folder)
    else:
        server = moto_store(packages)
    with server as settings:
        found = Store({**settings, "PYTHONPATH": str(packages), "HOME": str(folder)}, request.param == "moto")
        found.run(
            "import s3fs; store = s3fs.S3FileSystem(); store.mkdir('bucket')\n"
            f"for end in ('bin', 'idx'): store.put_file(f'{DATA}.{{end}}', f'bucket/data/text.{{end}}')"
        )
        yield found


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)


def stored_args(folder: Path, *more: str) -> list[str]:
    args = [*toy_args(folder, SHORT, save=False), "--save", URL, "--load", URL, "--data-path", "s3://bucket/data/text"]
    return [*args, "--data-cache-path", "s3://bucket/cache", "--metrics-jsonl", str(folder / "metrics.jsonl"), *more]


@pytest.fixture(scope="module")
def outputs(store: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train in two parts on two ranks, the second with saves beside training; return what was printed."""
    folder = tmp_path_factory.mktemp("run")
    local = run_training(toy_args(folder, SHORT), nproc=2, timeout_s=_RUN_S).check()
    on_store = {"nproc": 2, "env": store.environment, "timeout_s": _RUN_S}
    first = run_training(stored_args(folder, "--exit-interval", "4"), **on_store).check()
    second = run_training(stored_args(folder, "--async-save"), **on_store).check()
    assert f"loading checkpoint from {URL} at iteration 4" in second.stdout
    assert exact_figures(second.iterations()) == exact_figures(local.iterations())
    return first.stdout + first.stderr + second.stdout + second.stderr


def test_a_run_goes_on_bitwise_and_its_checkpoints_are_whole(outputs: str, store: Store) -> None:
    words = [sys.executable, "tools/checkpoint/inspect.py", URL, "--verify"]
    said = run_command(words, env=store.environment, timeout_s=_RUN_S).check().stdout
    assert "match their checksums" in said
    names = store.run("import s3fs; print(*s3fs.S3FileSystem().ls('bucket/team/run'))").split()
    assert sorted(name.rpartition("/")[2] for name in names) == [
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
        "run_record",
    ]


def test_credentials_are_not_printed(outputs: str) -> None:
    assert PASSWORD not in outputs


def test_an_object_is_created_by_one_of_many(outputs: str, store: Store) -> None:
    script = (
        "import sys; from megatron.core.object_store import as_path\n"
        "try: as_path('s3://bucket/race').create(sys.argv[1].encode()); print('mine')\n"
        "except FileExistsError: print('not mine')"
    )
    environment = {**os.environ, **store.environment}
    tries = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(number)], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE
        )
        for number in range(4)
    ]
    said = [process.communicate(timeout=_RUN_S)[0].decode().strip() for process in tries]
    assert said.count("mine") == 1 if store.is_atomic else "mine" in said
    kept = store.run("import s3fs; print(s3fs.S3FileSystem().cat_file('bucket/race').decode())").strip()
    assert said[int(kept)] == "mine"
    assert _create(store, "late", "bucket/race") == "not mine"


def _create(store: Store, text: str, key: str) -> str:
    return store.run(
        "from megatron.core.object_store import as_path\n"
        f"try: as_path('s3://{key}').create(b'{text}'); print('mine')\n"
        "except FileExistsError: print('not mine')"
    ).strip()


def test_an_upload_of_several_parts_is_there_when_it_is_whole(store: Store) -> None:
    said = store.run(
        "import numpy; from megatron.core.object_store import as_path\n"
        "from megatron.core.object_store import UploadedFile\n"
        "path, part = as_path('s3://bucket/large'), numpy.arange(1 << 22, dtype='uint32').view('uint8')\n"
        "with UploadedFile(path, 3 * part.nbytes) as file:\n"
        "    for _ in range(3): file.append(part)\n"
        "    print(path.exists())\n"
        "print(path.store.size(str(path)) == 3 * part.nbytes, path.read_bytes() == 3 * part.tobytes())"
    )
    assert said.split() == ["False", "True", "True"]


def test_a_second_run_in_the_folder_is_refused(store: Store, outputs: str, tmp_path: Path) -> None:
    longer = ["--train-iters", "100000", "--save-interval", "100000"]
    words = [sys.executable, "pretrain_gpt.py", *stored_args(tmp_path, *longer)]
    first = subprocess.Popen(
        words, cwd=REPOSITORY, env={**os.environ, **store.environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if b"elapsed time per iteration" in line:
                break
        second = run_command(words, env=store.environment, timeout_s=_RUN_S)
        assert second.returncode == 2
        assert f"--save {URL} is in use by a training run" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(20.0)


WHOLE = """
from megatron.cli import inspect_checkpoint
from megatron.core.object_store import as_path
from megatron.checkpoint.checkpoint_folder import saved_iterations
found = saved_iterations(as_path("s3://bucket/killed"))
assert all(inspect_checkpoint.main([f"s3://bucket/killed/iter_{number:07d}", "--verify"]) == 0 for number in found)
print("whole:", *found)
"""


def test_a_run_that_is_killed_while_it_saves_goes_on_from_a_whole_checkpoint(store: Store, tmp_path: Path) -> None:
    flags = "--train-iters 24 --save-interval 1 --lr-decay-iters 24 --eval-iters 0 --keep-last 2 --async-save"
    args = [*toy_args(tmp_path, flags, save=False), "--save", "s3://bucket/killed", "--load", "s3://bucket/killed"]
    args += ["--metrics-jsonl", str(tmp_path / "stored.jsonl")]
    draw, newest = random.Random(5), 0
    for kill in range(6):
        with subprocess.Popen(
            [sys.executable, "-u", "pretrain_gpt.py", *args],
            cwd=REPOSITORY,
            env={**os.environ, **store.environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            assert run.stdout is not None
            said = ""
            for line in run.stdout:
                said += line
                if f"saving checkpoint at iteration {newest + 1 + kill % 3:7d} " in line:
                    time.sleep(draw.uniform(0.0, 0.4))
                    run.kill()
            assert run.wait() == -signal.SIGKILL, said
        loaded = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", said)
        assert int(loaded.group(1)) == newest if loaded else newest == 0, said
        assert "damaged" not in said
        whole = store.run(WHOLE).splitlines()[-1].split()[1:]
        assert max(map(int, whole), default=0) >= newest, whole
        newest = max(map(int, whole), default=0)
    assert newest > 0
    last = run_training(args, env=store.environment, timeout_s=_RUN_S).check()
    quiet = run_training(toy_args(tmp_path, flags), timeout_s=_RUN_S).check()
    assert exact_figures(last.metrics) == exact_figures(quiet.metrics)
    kept = saved_iterations(tmp_path / "checkpoints")
    assert store.run(WHOLE).splitlines()[-1].split() == ["whole:", *map(str, kept)]
    names = store.run("import s3fs; print(*s3fs.S3FileSystem().ls('bucket/killed'))").split()
    expected = [*(f"iter_{number:07d}" for number in kept), "latest_checkpointed_iteration.txt", "run_record"]
    assert sorted(name.rpartition("/")[2] for name in names) == expected


def test_of_two_runs_that_start_at_one_moment_one_has_the_folder(store: Store, tmp_path: Path) -> None:
    flags = "--train-iters 6 --save-interval 6 --lr-decay-iters 6 --eval-iters 0"
    for number in range(3):
        runs = [
            subprocess.Popen(
                [
                    *(sys.executable, "pretrain_gpt.py", *toy_args(tmp_path, flags, save=False)),
                    *(
                        "--save",
                        f"s3://bucket/two/{number}",
                        "--metrics-jsonl",
                        str(tmp_path / f"{number}-{run}.jsonl"),
                    ),
                ],
                cwd=REPOSITORY,
                env={**os.environ, **store.environment, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            for run in range(2)
        ]
        said = [run.communicate(timeout=_RUN_S)[1].decode() for run in runs]
        # One may end before the other begins, on a busy machine: then that one follows it.
        assert sorted(run.returncode for run in runs) in ([0, 2], [0, 0]), said
        for run, text in zip(runs, said, strict=True):
            assert run.returncode == 0 or re.search("(is in use|was taken over) by a training run", text), text
            assert "Traceback" not in text
        found = store.run(WHOLE.replace("bucket/killed", f"bucket/two/{number}")).splitlines()[-1]
        assert found == "whole: 6"


def test_a_store_that_cannot_be_reached_is_told_in_a_line(store: Store) -> None:
    words = [sys.executable, "tools/checkpoint/inspect.py", URL]
    result = run_command(words, env={**store.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, timeout_s=_RUN_S)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {URL}")
    assert "Traceback" not in result.stderr
    assert PASSWORD not in result.stdout + result.stderr
