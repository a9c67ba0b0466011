"""Two hosts on this machine: network namespaces on a bridge."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, WARM, run

_NUMBER = os.getpid() % 250  # of this session's network
_BRIDGE = f"slm{_NUMBER}"


@dataclass(frozen=True)
class Hosts:
    """What `two_hosts` has made."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    bridge_address: str
    "of the machine that both are on"

    def write_names(self, path: Path) -> Path:
        """An /etc/hosts for them."""
        pairs = zip((self.bridge_address, *self.addresses), (socket.gethostname(), *self.names), strict=True)
        path.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in pairs))
        return path

    def inside(self, name: str, hosts_file: Path) -> tuple[str, ...]:
        """Words before a command that run it there: a host with a name, names of others and a network."""
        script = f"hostname {name} && mount --bind {hosts_file} /etc/hosts && "
        script += f'exec nsenter --net=/run/netns/{name} "$@"'
        return ("unshare", "--mount", "--uts", "sh", "-c", script, "sh")

    def start(self, name: str, *words: str, log: Path, env: dict[str, str]) -> subprocess.Popen:
        """A command there, with this machine's name, which stands for the loopback there: a usual trap."""
        with log.open("w") as file:
            return subprocess.Popen(
                ("ip", "netns", "exec", name, *words),
                cwd=ROOT,
                env={**WARM.env(), **env},
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Nothing comes from there, nor goes there."""
        link = ("ip", "link", "set", f"{_BRIDGE}{name[-2:]}")
        assert run(*link, "down").code == 0
        yield
        assert run(*link, "up").code == 0

    def kill(self, name: str) -> None:
        """All that runs there, at once."""
        for pid in run("ip", "netns", "pids", name).out.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where they can't be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("only root makes network namespaces, with iproute2's ip: apt-get install iproute2")
    names = (f"{_BRIDGE}-a", f"{_BRIDGE}-b")
    bridge_address, *addresses = (f"10.77.{_NUMBER}.{number}" for number in (254, 1, 2))
    ip = [
        f"link add {_BRIDGE} type bridge",
        f"addr add {bridge_address}/24 dev {_BRIDGE}",
        f"link set {_BRIDGE} up",
    ]
    for name, address in zip(names, addresses, strict=True):
        ip += [
            f"netns add {name}",
            f"link add {_BRIDGE}{name[-2:]} type veth peer name eth0 netns {name}",
            f"link set {_BRIDGE}{name[-2:]} master {_BRIDGE} up",
            *(f"-n {name} addr add {address}/24 dev eth0", f"-n {name} link set eth0 up"),
            f"-n {name} link set lo up",
        ]
    try:
        for words in ip:
            if (done := run("ip", *words.split())).code != 0:
                pytest.skip(f"no network namespaces here: ip {words}: {done.err}")
        yield Hosts(names, tuple(addresses), bridge_address)
    finally:
        for name in names:
            run("ip", "link", "del", f"{_BRIDGE}{name[-2:]}")  # now: a namespace is only cleared later
            run("ip", "netns", "del", name)
        run("ip", "link", "del", _BRIDGE)
