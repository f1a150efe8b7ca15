"""Names and ports by which the processes of a run find each other."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping

from megatron.doctor.finding import Finding, judge

_DEFAULT_PORT = "29500"


def interface_names() -> list[str]:
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def examine_network(
    environment: Mapping[str, str], interfaces: Collection[str], is_launched: bool
) -> Iterator[Finding]:
    """Yield whether names resolve, chosen interfaces exist and the port is free, if torchrun has not taken it."""
    yield _examine_name("host name", socket.gethostname(), "add it to /etc/hosts")
    address = environment.get("MASTER_ADDR")
    if address is not None:
        yield _examine_name("MASTER_ADDR", address, "give the name or address of the first machine")
    for variable, find in (("NCCL_SOCKET_IFNAME", nccl_interfaces), ("GLOO_SOCKET_IFNAME", gloo_interfaces)):
        if variable in environment:
            chosen = find(environment[variable], interfaces)
            text = f"{environment[variable]} " + (f"is {', '.join(chosen)}" if chosen else "fits no interface")
            yield judge(variable, not chosen, text, f"this machine has {', '.join(sorted(interfaces))}", "wrong")
    if is_launched:
        yield Finding("skipped", "port", "the launcher holds it")
        return
    yield _examine_port(environment.get("MASTER_PORT", _DEFAULT_PORT))


def nccl_interfaces(value: str, interfaces: Collection[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME chooses: by prefixes, ``=`` by names, ``^`` all others."""
    is_excluding, text = value.startswith("^"), value.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    names = [name for name in text.split(",") if name]
    fits = [any(each == name if is_exact else each.startswith(name) for name in names) for each in interfaces]
    return [each for each, is_named in zip(interfaces, fits) if is_named != is_excluding]


def gloo_interfaces(value: str, interfaces: Collection[str]) -> list[str]:
    """Return the interfaces of a value of GLOO_SOCKET_IFNAME, none where one of its names is of no interface."""
    names = value.split(",")
    return names if all(name in interfaces for name in names) else []


def _examine_name(subject: str, name: str, remedy: str) -> Finding:
    try:
        found = socket.getaddrinfo(name, None)
    except OSError as error:
        return Finding("wrong", subject, f"{name} does not resolve ({error})", remedy)
    addresses = sorted({str(entry[4][0]) for entry in found})
    return Finding("ok", subject, f"{name} is {', '.join(addresses)}")


def _examine_port(text: str) -> Finding:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        return Finding("wrong", "port", f"MASTER_PORT is {text!r}", "give a number from 1 to 65535")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(text)))
        except OSError as error:
            remedy = "end what uses it, or give torchrun another --master-port"
            return Finding("wrong", "port", f"{text} cannot be taken ({error.strerror})", remedy)
    return Finding("ok", "port", f"{text} is free")
