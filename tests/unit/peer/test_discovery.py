"""Discovery of peers: every form of ``settings.peers``, and invalid ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tierckpt.config import Settings
from tierckpt.errors import ConfigError
from tierckpt.peer.discovery import Lookup, expand, network_bytes_per_second, parse, slurm_hosts, source_address


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a,b", ["a", "b"]),
        (" a , b ,", ["a", "b"]),
        ("node[01-03]", ["node01", "node02", "node03"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101,7]", ["node098", "node099", "node100", "node101", "node7"]),
        ("r[1-2]n[1-2]-ib,gpu5", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib", "gpu5"]),
        ("n[1-2]:9000,[fd00::1]:9000", ["n1:9000", "n2:9000", "[fd00::1]:9000"]),
    ],
)
def test_lists_of_hosts_are_expanded_as_slurm_does(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "kind", "hosts"),
    [
        ("10.0.0.1", "static", [("10.0.0.1", 7117)]),
        ("10.0.0.1:99,b.example:1", "static", [("10.0.0.1", 99), ("b.example", 1)]),
        ("[fd00::1],[fd00::2]:8,fd00::3", "static", [("fd00::1", 7117), ("fd00::2", 8), ("fd00::3", 7117)]),
        ("dns:peers.ns.svc", "dns", [("peers.ns.svc", 7117)]),
        ("dns:peers:81", "dns", [("peers", 81)]),
        ("torchrun", "torchrun", []),
        ("slurm:81", "slurm", []),
    ],
)
def test_every_form_is_understood(text: str, kind: str, hosts: list[tuple[str, int]]) -> None:
    found = parse(text)
    assert (found.kind, list(found.hosts)) == (kind, hosts)


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "a:b", "a:0", "a:65536", "a:", "node[1-", "node]1[", "node[[1]]", "node[3-1]", "node[a-b]", "node[]",
        "n[1-9999999]", "http://a", "a/b", "-a", "a b", "1.2.3", "999.1.1.1", "[::1", "[fd00::1]x", "dns:", "slurm:x",
        "169.254.169.254", "[fe80::1]", "169.254.169.254:80", "[::ffff:169.254.1.1]:1", "0.0.0.0", "224.0.0.1",
        "[fd00:ec2::254]", "slurm:0", "dns:169.254.169.254",
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_would(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert "peers:" in caught.value.message
    assert "dns:NAME" in caught.value.hint


def test_the_hosts_of_a_slurm_job_are_in_its_environment() -> None:
    assert slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        Lookup("slurm", {})


def test_names_are_looked_up_and_what_is_not_found_does_not_hide_the_rest() -> None:
    lookup = Lookup("localhost:81,nowhere.invalid,10.0.0.9,10.0.0.9")
    addresses = asyncio.run(lookup.addresses())
    assert {"127.0.0.1:81", "10.0.0.9:7117"} <= set(addresses)
    assert len(addresses) == len(set(addresses))
    assert "nowhere.invalid" in lookup.problem


def test_a_name_does_not_lead_to_the_metadata_of_a_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lie(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (host, 7117)) for host in ("169.254.169.254", "10.0.0.5")]

    async def found() -> list[str]:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lie)
        return await Lookup("dns:rebound").addresses()

    assert asyncio.run(found()) == ["10.0.0.5:7117"]


def test_what_a_store_of_the_job_says_is_checked() -> None:
    lookup = Lookup("torchrun")
    lookup.set_job_addresses(["10.0.0.1:7117", "169.254.169.254:80", "host:1", "[fd00::1]:9"])
    assert asyncio.run(lookup.addresses()) == ["10.0.0.1:7117", "[fd00::1]:9"]


def test_the_way_to_a_peer_tells_our_address_and_its_speed(tmp_path: Path) -> None:
    assert source_address(["nowhere:1", "127.0.0.1:9"]) == "127.0.0.1"
    assert source_address([]) is None
    assert network_bytes_per_second("127.0.0.1") == 0, "the loopback interface has no speed"
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text("25000\n")
    assert network_bytes_per_second("127.0.0.1", tmp_path) == 25e9 / 8
    (tmp_path / "lo" / "speed").write_text("-1\n")
    assert network_bytes_per_second("127.0.0.1", tmp_path) == 0


# --- the settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peer_listen": "7117"}, "is not an address"),
        ({"peer_listen": "host"}, "is not an address"),
        ({"peer_listen": "host:70000"}, "is not an address"),
        ({"peer_domain": "rack\n1"}, "peer_domain"),
        ({"replicas": 2}, "needs peers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Settings.load(**fields)
