"""A network of namespaces on this machine: nodes and an origin, each with a link of its own rate, joined by a switch.

    node-1 [eth0] ==== [p1]  switch (a bridge in a namespace of its own)  [p0] ==== [eth0] origin

Each link is a veth pair. A token bucket (tbf) at the node shapes its uplink, another at the switch its downlink.
Segments stay large through the bridge, so shaping costs little. Jumbo frames keep the payload rate within one percent
of the link's rate.

The switch has a static table of addresses and never floods. To partition two nodes, an address is moved to an unused
port: packets are lost silently.

Names begin with ``tcf-PID-``. ``remove_left`` removes the namespaces of ended processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "tcf"
MTU = 9000
BURST_BYTES = 128 * 1024
"""At least one large segment, or each would be cut up for the bucket."""
QUEUE_SECONDS = 0.1
CONGESTION = "reno"
"""What every kernel has and lets a namespace choose."""
SUBNET = "10.117.0"
ORIGIN = 250
NOWHERE = "02:00:00:00:00:00"
"""No port of the switch has this address."""

_SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as sock:
    sock.sendall(bytes(int(sys.argv[3])))
"""
_SINK = f"""
import socket, time
listener = socket.create_server(("0.0.0.0", 0))
print(listener.getsockname()[1], flush=True)
sock, count, begun = listener.accept()[0], 0, 0.0
while data := sock.recv(1 << 20):
    count += len(data)
    if not begun and count > {BURST_BYTES}:  # the bucket was full
        begun, first = time.monotonic(), count
print((count - first) / (time.monotonic() - begun))
"""


@dataclass
class Network:
    """Hosts are numbered from 1; ``ORIGIN`` is the origin's number."""

    name: str
    rates: dict[int, float] = field(default_factory=dict)
    """Bytes per second of each host's link, both ways."""

    @classmethod
    @contextmanager
    def running(cls, nodes: int, node_rate: float, origin_rate: float) -> Iterator[Network]:
        """Raises RuntimeError when this is not Linux, or not root."""
        remove_left()
        network = cls(f"{PREFIX}-{os.getpid()}")
        try:
            network._make_switch()
            for number in range(1, nodes + 1):
                network._attach(number, node_rate)
            network._attach(ORIGIN, origin_rate)
            network._introduce()
            yield network
        finally:
            remove(f"{network.name}-")

    def namespace(self, number: int) -> str:
        return f"{self.name}-{number}"

    def address(self, number: int) -> str:
        return f"{SUBNET}.{number}"

    def within(self, number: int) -> list[str]:
        """Return the prefix of a command that runs in a host's namespace."""
        return ["ip", "netns", "exec", self.namespace(number)]

    def shape(self, number: int, sends: float, receives: float | None = None) -> None:
        """Set the rates of a host's link, in bytes per second. The downlink gets the uplink's rate by default."""
        self.rates[number] = sends
        ends = ((self.namespace(number), "eth0", sends), (self._switch, f"p{number}", receives or sends))
        for namespace, device, rate in ends:
            _run(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"),
                *("rate", f"{int(rate * 8)}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_SECONDS * 1000:g}ms"),
            )

    def dropped(self) -> int:
        """Return the packets dropped by the shapers since the rates were set, because their queues were full."""
        ends = [(self.namespace(number), "eth0") for number in self.rates]
        ends += [(self._switch, f"p{number}") for number in self.rates]
        told = (json.loads(_run("tc", "-s", "-j", "-n", place, "qdisc", "show", "dev", port)) for place, port in ends)
        return sum(int(one["drops"]) for shown in told for one in shown)

    def part(self, one: Iterable[int], other: Iterable[int]) -> None:
        """Lose all packets between the hosts of ``one`` and those of ``other``, silently."""
        self._between(one, other, lambda number: NOWHERE)

    def heal(self, one: Iterable[int], other: Iterable[int]) -> None:
        self._between(one, other, _hardware)

    def cut(self, number: int) -> None:
        """Disconnect a host from the switch, silently."""
        _run("ip", "-n", self._switch, "link", "set", f"p{number}", "nomaster")

    def measured(self, sender: int, receiver: int, seconds: float = 1.0) -> float:
        """Return the bytes per second of one bare connection: the limit of the set rates."""
        size = int(seconds * min(self.rates[sender], self.rates[receiver])) + 2 * BURST_BYTES
        sink = subprocess.Popen(
            [*self.within(receiver), sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True
        )
        assert sink.stdout is not None
        port = sink.stdout.readline().strip()
        source = [*self.within(sender), sys.executable, "-c", _SOURCE, self.address(receiver), port, str(size)]
        subprocess.run(source, check=True, timeout=20 * seconds + 20)
        return float(sink.communicate(timeout=10)[0])

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _batch(
            self._switch,
            ["link set lo up", "link add name switch type bridge ageing_time 0", f"link set dev switch mtu {MTU} up"],
        )

    def _attach(self, number: int, rate: float) -> None:
        inside, port = self.namespace(number), f"p{number}"
        _run("ip", "netns", "add", inside)
        _batch(
            self._switch,
            [
                f"link add name {port} mtu {MTU} type veth"
                f" peer name eth0 mtu {MTU} address {_hardware(number)} netns {inside}",
                f"link set dev {port} master switch",
                f"link set dev {port} up",
            ],
        )
        _run("bridge", "-n", self._switch, "link", "set", "dev", port, "flood", "off", "learning", "off")
        _run("bridge", "-n", self._switch, "fdb", "replace", _hardware(number), "dev", port, "master", "static")
        _batch(inside, ["link set lo up", f"addr add {self.address(number)}/24 dev eth0", "link set eth0 up"])
        _run(*self.within(number), "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={CONGESTION}")
        self.shape(number, rate)

    def _introduce(self) -> None:
        """Give each host the hardware addresses of all others, so that no ARP request is lost in a partition."""
        for number in self.rates:
            _batch(self.namespace(number), [_neighbour(self, other, _hardware(other)) for other in self.rates])

    def _between(self, one: Iterable[int], other: Iterable[int], hardware: Callable[[int], str]) -> None:
        first, second = list(one), list(other)
        for here, there in ((first, second), (second, first)):
            for number in here:
                _batch(self.namespace(number), [_neighbour(self, far, hardware(far)) for far in there])


def _neighbour(network: Network, number: int, hardware: str) -> str:
    return f"neigh replace {network.address(number)} lladdr {hardware} dev eth0 nud permanent"


def _hardware(number: int) -> str:
    return f"02:74:63:66:00:{number:02x}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _batch(namespace: str, lines: Sequence[str]) -> None:
    """Several `ip` commands in one process."""
    done = subprocess.run(
        ["ip", "-n", namespace, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"ip -n {namespace}: {done.stderr.strip()}")


def remove_left() -> list[str]:
    """Remove the namespaces of ended runs. Returns their names."""
    gone = []
    for name in _ours(f"{PREFIX}-"):
        pid = re.match(rf"{PREFIX}-(\d+)-", name)
        if pid is None or not is_running(int(pid[1])):
            gone += remove(name)
    return gone


def is_running(pid: int) -> bool:
    """Return False for an ended process, even if its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def remove(prefix: str) -> list[str]:
    """End the processes in the namespaces with this prefix and remove the namespaces with their links."""
    names = _ours(prefix)
    for name in names:
        for pid in _run("ip", "netns", "pids", name).split():
            try:
                os.kill(int(pid), 9)
            except ProcessLookupError:
                pass  # ended meanwhile
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return names


def _ours(prefix: str) -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith(prefix)]
