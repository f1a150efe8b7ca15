"""OpenStack Swift on this machine, with its S3 interface: one replica, four servers, an account by tempauth."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.harness.free_port import free_port

USER, PASSWORD = "team:trainer", "do-not-tell-anybody"
_START_S = 120.0
_PIPELINE = "catch_errors gatekeeper healthcheck proxy-logging cache listing_formats s3api tempauth bulk slo dlo"
# Where the machine is busy, an update of a listing that is given up is made by nobody: no updater runs here.
_PATIENCE = "container_update_timeout = 60\nconn_timeout = 20\nnode_timeout = 60"
_SERVERS = {"account": "swift.account.server", "container": "swift.container.server", "object": "swift.obj.server"}


@contextmanager
def swift_store(packages: Path, folder: Path) -> Iterator[Mapping[str, str]]:
    """Run Swift, of which the packages are in a folder, below another; yield the environment in which s3:// is it.

    The folder has to be on a file system with extended attributes.
    """
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    ports = {name: free_port() for name in (*_SERVERS, "proxy")}
    (folder / "devices" / "d1").mkdir(parents=True)
    _write_settings(folder, ports)
    for name in _SERVERS:
        _make_ring(folder / name, ports[name], environment)
    modules = _SERVERS | {"proxy": "swift.proxy.server"}
    servers = []
    with open(folder / "servers.log", "wb") as log:
        try:
            for name, module in modules.items():
                words = [sys.executable, "-m", module, f"{folder}/{name}.conf", "-v"]
                servers.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, cwd=folder))
            address = f"http://127.0.0.1:{ports['proxy']}"
            _wait_for(f"{address}/healthcheck", folder / "servers.log")
            yield {
                "AWS_ACCESS_KEY_ID": USER,
                "AWS_SECRET_ACCESS_KEY": PASSWORD,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": address,
            }
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(30.0)


def _write_settings(folder: Path, ports: Mapping[str, int]) -> None:
    user = Path(f"/proc/{os.getpid()}").owner()
    common = f"[DEFAULT]\nbind_ip = 127.0.0.1\nswift_dir = {folder}\ndevices = {folder}/devices\nmount_check = false\n"
    common += f"user = {user}\nworkers = 0\nfallocate_reserve = 0\nlog_address = {folder}/no-log\n"
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = test\n")
    for name in _SERVERS:
        text = f"{common}bind_port = {ports[name]}\n[pipeline:main]\npipeline = {name}-server\n"
        (folder / f"{name}.conf").write_text(f"{text}[app:{name}-server]\nuse = egg:swift#{name}\n{_PATIENCE}\n")
    filters = "".join(f"[filter:{name}]\nuse = egg:swift#{_egg_name(name)}\n" for name in _PIPELINE.split())
    filters = filters.replace("#tempauth\n", f"#tempauth\nuser_{USER.replace(':', '_')} = {PASSWORD} .admin\n")
    (folder / "proxy.conf").write_text(
        f"{common}bind_port = {ports['proxy']}\n[pipeline:main]\npipeline = {_PIPELINE} proxy-server\n{filters}"
        f"[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n{_PATIENCE}\n"
    )


def _egg_name(filter_name: str) -> str:
    return {"proxy-logging": "proxy_logging", "cache": "memcache"}.get(filter_name, filter_name)


def _make_ring(path: Path, port: int, environment: Mapping[str, str]) -> None:
    for words in (["create", "4", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/d1", "1"], ["rebalance"]):
        builder = [sys.executable, "-m", "swift.cli.ringbuilder", f"{path}.builder", *words]
        done = subprocess.run(builder, env=environment, capture_output=True, timeout=120)
        assert done.returncode in (0, 1), done.stderr.decode()  # 1 is a warning
    assert Path(f"{path}.ring.gz").is_file()


def _wait_for(url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer: {log.read_text()[-4000:]}"
            time.sleep(0.2)
