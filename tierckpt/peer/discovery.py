"""Discovery of the other nodes' agents (``settings.peers``), and the speed of this node's network.

    host[:port],...     names, IPv4, [IPv6], ranges as Slurm writes them: ``node[01-08,12]-ib``
    slurm[:port]        the node list of the job
    dns:NAME[:port]     all addresses of a name, resolved periodically: a headless service of Kubernetes
    torchrun            addresses in the job's store (training/rank_exchange.py)

These are seeds: gossip.py finds all members from any of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import PEER_PORT
from ..errors import ConfigError
from ..telemetry import logger
from .membership import MEMBERS_MAX, ip_of, is_forbidden, is_plain_address
from .peer_http import address_of, host_and_port

log = logger("peer")

LOOKUP_SECONDS = 5.0
VALID = (
    "Write host[:port],... (ranges like node[01-08] too), slurm[:port], dns:NAME[:port] or torchrun; an IPv6 address "
    "in brackets when a port follows"
)

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\.?")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class PeersSetting:
    kind: Literal["static", "slurm", "dns", "torchrun"]
    hosts: tuple[tuple[str, int], ...] = ()
    port: int = PEER_PORT


def parse(text: str) -> PeersSetting:
    """Raises ConfigError: invalid; the hint has the valid forms."""
    text = text.strip()
    if text == "torchrun":
        return PeersSetting("torchrun")
    if text == "slurm" or text.startswith("slurm:"):
        return PeersSetting("slurm", port=_port(text[6:], text) if ":" in text else PEER_PORT)
    if text.startswith("dns:"):
        return PeersSetting("dns", (_host_and_port(text[4:]),))
    hosts = tuple(_host_and_port(item) for item in expand(text))
    if not hosts:
        raise _bad(text, "names no host")
    return PeersSetting("static", hosts)


def expand(text: str) -> list[str]:
    """Expand a list of hosts as Slurm writes it: ``a[01-03,7]b[0-1],c`` is a01b0, a01b1, ..., c.

    A number keeps its width. An IPv6 address keeps its brackets.

    Raises ConfigError: unbalanced brackets, a descending range, or more than ``MEMBERS_MAX`` hosts.
    """
    hosts: list[str] = []
    for item in _split(text):
        for host in _expand_one(item, text):
            if len(hosts) >= MEMBERS_MAX:
                raise _bad(text, f"names more than {MEMBERS_MAX} hosts")
            hosts.append(host)
    return hosts


def _split(text: str) -> list[str]:
    if {"[", "]"} & set(re.sub(r"\[[^][]*]", "", text)):
        raise _bad(text, "has brackets that do not fit")
    items = re.findall(r"(?:\[[^]]*]|[^[,])+", text)  # commas in brackets separate numbers
    return [item.strip() for item in items if item.strip()]


def _expand_one(item: str, text: str) -> Iterator[str]:
    opening = item.find("[")
    if opening < 0 or ":" in item[opening : item.find("]")]:
        yield item
        return
    closing = item.index("]")
    for number in _numbers(item[opening + 1 : closing], text):
        for rest in _expand_one(item[closing + 1 :], text):
            yield item[:opening] + number + rest


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
        if match is None:
            raise _bad(text, f"has [{ranges}], which is not a list of numbers and ranges")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _bad(text, f"has the range {part}, which goes down")
        yield from (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))


def _host_and_port(item: str) -> tuple[str, int]:
    if item.startswith("["):
        host, closing, port = item[1:].partition("]")
        if not closing or (port and not port.startswith(":")):
            raise _bad(item, "is not an IPv6 address in brackets")
        return _checked(host, item), _port(port[1:], item) if port else PEER_PORT
    if item.count(":") > 1:
        return _checked(item, item), PEER_PORT
    host, colon, port = item.partition(":")
    return _checked(host, item), _port(port, item) if colon else PEER_PORT


def _checked(host: str, item: str) -> str:
    ip = ip_of(host)
    if ip is None and (not _HOST.fullmatch(host) or re.fullmatch(r"[0-9.]+", host)):
        raise _bad(item, "names no host")
    if ip is not None and is_forbidden(ip):
        raise _bad(item, "is not an address of a node (link-local, multicast, or a cloud's metadata service)")
    return host


def _port(text: str, item: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise _bad(item, f"has the port {text!r}, which is not between 1 and 65535")
    return int(text)


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"peers: {text[:200]!r} {why}", hint=VALID)


def resolve(text: str, port: int) -> str:
    """Return the resolved ``IP:port`` of ``host[:port]``. Blocking. Raises ConfigError: no address of a node."""
    host, given = _host_and_port(text)
    has_port = text.endswith(f":{given}") and not (text.count(":") > 1 and not text.startswith("["))
    try:
        found = socket.getaddrinfo(host, given, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot resolve {host}: {error}", hint="--advertise is host[:port] of this node") from None
    for item in found:
        address = address_of(str(item[4][0]), given if has_port else port)
        if is_plain_address(address):
            return address
    raise _bad(text, "is not an address of a node")


# --- looking up ------------------------------------------------------------------------------------------------


class Lookup:
    """A failed lookup is logged once and keeps the last addresses."""

    def __init__(self, text: str, environment: Mapping[str, str] = os.environ) -> None:
        """Raises ConfigError."""
        self._setting = parse(text)
        self._resolved: dict[str, list[str]] = {}
        self._job_addresses: list[str] = []
        self.problem = ""
        if self._setting.kind == "slurm":
            self._hosts = [(host, self._setting.port) for host in slurm_hosts(environment)]
        else:
            self._hosts = list(self._setting.hosts)
        self._literal = [address_of(host, port) for host, port in self._hosts if ip_of(host) is not None]
        self._names = [(host, port) for host, port in self._hosts if ip_of(host) is None]

    def set_job_addresses(self, addresses: Sequence[str]) -> None:
        self._job_addresses = [address for address in addresses if is_plain_address(address)][:MEMBERS_MAX]

    async def addresses(self) -> list[str]:
        """Return ``IP:port`` of each seed. Never raises; bounded in time."""
        problems = []
        # Each lookup holds a thread of the loop's pool.
        for start in range(0, len(self._names), 16):
            part = self._names[start : start + 16]
            results = await asyncio.gather(*(_look_up(*pair) for pair in part))
            for (host, port), found in zip(part, results, strict=True):
                if isinstance(found, str):
                    problems.append(found)
                else:
                    self._resolved[address_of(host, port)] = found
        text = f"cannot resolve {len(problems)} of the names in peers: {problems[0]}" if problems else ""
        if text and text != self.problem:
            log.warning("%s; the lookup is repeated", text)
        self.problem = text
        resolved = (address for found in self._resolved.values() for address in found)
        return list(dict.fromkeys([*self._literal, *resolved, *self._job_addresses]))[:MEMBERS_MAX]

    def places(self) -> dict[str, list[str]]:
        known: dict[str, list[str]] = {address: [address] for address in self._literal}
        known |= {address_of(host, port): [] for host, port in self._names} | self._resolved
        if self._setting.kind == "dns" and any(known.values()):
            known = {address: [address] for found in known.values() for address in found}
        return {**known, **{address: [address] for address in self._job_addresses}}


async def _look_up(host: str, port: int) -> list[str] | str:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return f"{host}: no answer in {LOOKUP_SECONDS:g} s"
    except (OSError, UnicodeError) as error:
        return f"{host}: {error}"
    addresses = [address_of(str(item[4][0]), port) for item in found]
    return sorted({address for address in addresses if is_plain_address(address)})[:MEMBERS_MAX]


def slurm_hosts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Raises ConfigError: no job, or an invalid list."""
    text = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not text:
        raise ConfigError(
            "peers is slurm, and SLURM_JOB_NODELIST is not set: this process belongs to no Slurm job",
            hint="Start the agent in the job (its prolog does not have the list), or list the hosts: peers=node[01-08]",
        )
    return [_checked(host, text) for host in expand(text)]


# --- this node's network ---------------------------------------------------------------------------------------


def source_address(toward: Sequence[str]) -> str | None:
    """Return this node's address on the route to the first of ``toward`` that has one. Sends nothing."""
    for address in toward:
        try:
            host, port = host_and_port(address)
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))
                return str(probe.getsockname()[0])
        except (OSError, ValueError):
            continue
    return None


def network_bytes_per_second(source: str, sys_net: Path = Path("/sys/class/net")) -> float:
    """Return the speed of the interface with the IPv4 address ``source``; 0 if unknown."""
    name = _interface_of(source) if ":" not in source else ""
    try:
        megabits = int((sys_net / name / "speed").read_text()) if name else 0
    except (OSError, ValueError):
        return 0.0
    return megabits * 1e6 / 8 if megabits > 0 else 0.0


def _interface_of(source: str) -> str:
    address = socket.inet_aton(source)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if answer[20:24] == address:
                return name
    return ""
