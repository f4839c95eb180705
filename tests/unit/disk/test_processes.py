"""A pid says something in its own pid namespace, on its own host, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import container, needs_namespaces, other_host
from tierckpt.disk.processes import (
    boot_id,
    has_ended,
    host_id,
    is_abandoned,
    pid_namespace,
    start_ticks,
    temporary_of_this_process,
)

SAYS = "from tierckpt.disk.processes import *; import os; print(host_id(), pid_namespace(), os.getpid())"
ABANDONED = "import sys; from tierckpt.disk.processes import is_abandoned; print(is_abandoned(sys.argv[1]))"


def says(*command: str) -> list[int]:
    done = subprocess.run([*command, sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_a_process_of_this_namespace_lives_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        began = start_ticks(child.pid)
        assert has_ended(child.pid, began, pid_namespace()) is False
        assert has_ended(child.pid, began + 1, pid_namespace()) is True
        child.kill()
        child.wait()
        assert has_ended(child.pid, began, pid_namespace()) is True
    assert has_ended(child.pid, began, 0) is None and has_ended(child.pid, began, pid_namespace() ^ 1) is None


@needs_namespaces
def test_containers_of_one_host_have_pids_of_their_own() -> None:
    host, namespace, pid = says(*container())
    assert host == host_id() and namespace not in (0, pid_namespace()) and pid < 10


@needs_namespaces
def test_hosts_differ_though_their_first_namespaces_have_one_number(tmp_path: Path) -> None:
    host, namespace, _ = says(*other_host(tmp_path))
    assert host != host_id() and namespace not in (0, pid_namespace())


@needs_namespaces
def test_a_process_that_cannot_look_its_pid_up_judges_no_other() -> None:
    assert says("unshare", "--pid", "--fork", "--kill-child")[1] == 0, "/proc is still of the outer namespace"


@needs_namespaces
@pytest.mark.parametrize("kind", ["container", "host"])
def test_a_temporary_name_of_elsewhere_is_nobodys_to_remove(tmp_path: Path, kind: str) -> None:
    name = temporary_of_this_process("x")
    wrap = container() if kind == "container" else other_host(tmp_path)
    command = [*wrap, sys.executable, "-c", ABANDONED, name]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"
    assert not is_abandoned(name)


def test_the_ids_of_this_process_do_not_change() -> None:
    assert boot_id() == boot_id() and pid_namespace() == pid_namespace() != 0
    child = os.fork()
    if not child:
        os._exit(pid_namespace() == 0)
    assert os.waitpid(child, 0)[1] == 0
