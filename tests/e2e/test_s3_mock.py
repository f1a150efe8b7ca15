"""Training with data, cache and checkpoints in s3://, against a mock of S3 (moto's server): requests as on the wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.toy_run import DATA, exact_figures, toy_args
from tests.harness.free_port import free_port
from tests.harness.training_run import REPOSITORY, run_command, run_training

pytestmark = pytest.mark.long

SHORT = "--train-iters 6 --save-interval 2 --lr-decay-iters 6 --eval-iters 0 --keep-last 2"
SECRET = "do-not-tell-anybody"
URL = "s3://bucket/team/run"
_START_S = 60.0


@dataclass(frozen=True)
class MockedStore:
    """Hold the environment in which ``s3://`` is the mock, and a way to run a script in it."""

    environment: Mapping[str, str]

    def run(self, script: str) -> str:
        """Return what a Python script prints there."""
        return run_command([sys.executable, "-c", script], env=self.environment).check().stdout


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockedStore]:
    """Install s3fs and moto into a folder, start moto's server, and put the data there."""
    packages = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", packages]
    run_command([*install, "-r", REPOSITORY / "requirements" / "object_storage.txt"], timeout_s=600.0).check()
    port = free_port()
    environment = {
        "PYTHONPATH": str(packages),
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "HOME": str(tmp_path_factory.mktemp("home")),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(f"{environment['AWS_ENDPOINT_URL']}/moto-api/")
        mocked = MockedStore(environment)
        mocked.run(
            "import s3fs; store = s3fs.S3FileSystem(); store.mkdir('bucket')\n"
            f"for end in ('bin', 'idx'): store.put_file(f'{DATA}.{{end}}', f'bucket/data/text.{{end}}')"
        )
        yield mocked
    finally:
        server.terminate()
        server.wait(20.0)


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
def outputs(store: MockedStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train in two parts on two ranks, the second with saves beside training; return what was printed."""
    folder = tmp_path_factory.mktemp("run")
    local = run_training(toy_args(folder, SHORT), nproc=2).check()
    first = run_training(stored_args(folder, "--exit-interval", "4"), nproc=2, env=store.environment).check()
    second = run_training(stored_args(folder, "--async-save"), nproc=2, env=store.environment).check()
    assert f"loading checkpoint from {URL} at iteration 4" in second.stdout
    assert exact_figures(second.iterations()) == exact_figures(local.iterations())
    return first.stdout + first.stderr + second.stdout + second.stderr


def test_a_run_goes_on_bitwise_and_its_checkpoints_are_whole(outputs: str, store: MockedStore) -> None:
    said = (
        run_command([sys.executable, "tools/checkpoint/inspect.py", URL, "--verify"], env=store.environment)
        .check()
        .stdout
    )
    assert "match their checksums" in said
    names = store.run("import s3fs; print(*s3fs.S3FileSystem().ls('bucket/team/run'))").split()
    assert sorted(name.rpartition("/")[2] for name in names) == [
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]


def test_credentials_are_not_printed(outputs: str) -> None:
    assert SECRET not in outputs


def test_an_object_is_created_by_one_of_many(outputs: str, store: MockedStore) -> None:
    script = (
        "import sys; from megatron.core.files.object_path import as_path\n"
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
    said = [process.communicate(timeout=120.0)[0].decode().strip() for process in tries]
    assert sorted(said) == ["mine", "not mine", "not mine", "not mine"]


def test_a_second_run_in_the_folder_is_refused(store: MockedStore, outputs: str, tmp_path: Path) -> None:
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
        second = run_command(words, env=store.environment)
        assert second.returncode == 2
        assert f"--save {URL} is in use by a training run" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(20.0)


def test_a_store_that_cannot_be_reached_is_told_in_a_line(store: MockedStore) -> None:
    words = [sys.executable, "tools/checkpoint/inspect.py", URL]
    result = run_command(words, env={**store.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, timeout_s=300.0)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {URL}")
    assert "Traceback" not in result.stderr
    assert SECRET not in result.stdout + result.stderr
