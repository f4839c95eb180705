"""The guest's kernel and initial file system: busybox, kernel modules, Python, tierckpt and the guest's program.

Every file has the same path as on the host, so that Python and the loader find it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
BUSYBOX = Path("/usr/bin/busybox"), Path("/bin/busybox")
MODULES = ("virtio_pci", "virtio_blk", "xfs")
GUEST = "tests.fault.powercut.guest"
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_LIBRARY = re.compile(r"(/\S+) \(0x")
_UNUSED = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "lib2to3", "tkinter", "turtledemo"),
    *("config-*", "pydoc_data", "distutils", "*.opt-*.pyc", "*.a"),
)

INIT = """#!/bin/sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t sysfs none /sys
/bin/busybox mount -t devtmpfs none /dev
for module in {modules}; do /bin/busybox insmod /modules/$module.ko || echo "cannot load $module"; done
export HOME=/tmp PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1 TIERCKPT_MOVER=inline
exec {python} -m {guest} "$(/bin/busybox sed 's/.*file_system=\\([a-z0-9]*\\).*/\\1/' /proc/cmdline)" {mount}
"""


class MissingDependencyError(Exception):
    """A dependency is not installed; the message names the command that installs it."""


def unpack_kernel(folder: Path) -> tuple[Path, Path]:
    """Download Debian's cloud kernel and unpack it into ``folder``. Returns the kernel and its modules' directory."""
    target = folder / "kernel"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        listed = _output("apt-cache", "depends", "linux-image-cloud-amd64")
        name = re.search(r"Depends: (linux-image-\S+)", listed)
        if name is None:
            raise MissingDependencyError("apt knows no linux-image-cloud-amd64: run apt-get update")
        subprocess.run(["apt-get", "download", "-q", name[1]], cwd=folder, check=True, capture_output=True)
        package = next(folder.glob("linux-image-*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, folder / "unpacking"], check=True)
        (folder / "unpacking").rename(target)
    return next(target.glob("boot/vmlinuz-*")), next(target.glob("lib/modules/*"))


def build(folder: Path, modules: Path, mount: Path) -> Path:
    """Build the initrd in ``folder`` from the modules that the guest's program imports on the host."""
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "proc", "sys", "dev", "tmp", "modules"):
        (root / name).mkdir(parents=True)
    busybox = next((path for path in BUSYBOX if path.exists()), None)
    if busybox is None:
        raise MissingDependencyError("apt-get install busybox-static")
    shutil.copy2(busybox, root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    ordered = _copy_modules(modules, root / "modules")
    _copy_python(root)
    init = INIT.format(
        modules=" ".join(ordered), path=f"{_site_packages()}:{REPOSITORY}", python=_python(), guest=GUEST, mount=mount
    )
    (root / "init").write_text(init)
    (root / "init").chmod(0o755)
    initrd = folder / "initrd"
    with initrd.open("wb") as out:
        names = _output("find", ".", cwd=root)
        subprocess.run([busybox, "cpio", "-o", "-H", "newc"], input=names.encode(), cwd=root, stdout=out, check=True)
    shutil.rmtree(root)
    return initrd


def _copy_modules(source: Path, target: Path) -> list[str]:
    """Copy MODULES and their dependencies; return the names in load order."""
    files = {path.stem.replace("-", "_"): path for path in source.rglob("*.ko")}
    ordered: list[str] = []

    def take(name: str) -> None:
        if name in ordered or name not in files:
            return
        data = files[name].read_bytes()
        depends = _DEPENDS.search(data)
        for needed in (depends[1].decode() if depends else "").split(","):
            take(needed.replace("-", "_"))
        (target / f"{name}.ko").write_bytes(data)
        ordered.append(name)

    for name in MODULES:
        if name not in files:
            raise MissingDependencyError(f"the kernel has no module {name}")
        take(name)
    return ordered


def _copy_python(root: Path) -> None:
    ignore = shutil.ignore_patterns(*_UNUSED)
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, _in_guest(root, library), ignore=ignore)
    for name in _imported():
        source = _site_packages() / name
        if source.is_dir():
            shutil.copytree(source, _in_guest(root, source), ignore=shutil.ignore_patterns("tests"))
        else:
            _copy(root, source)
    for package in ("tierckpt", "tests/fault/sweep", "tests/fault/powercut"):
        shutil.copytree(REPOSITORY / package, _in_guest(root, REPOSITORY / package))
    _copy(root, REPOSITORY / "tests/__init__.py")
    _copy(root, _python())
    _copy_libraries(root, [_python(), *root.rglob("*.so")])


def _imported() -> list[str]:
    """Return the top-level names in site-packages that the guest's program imports."""
    # The product imports tenacity with its first drain.
    code = f"import {GUEST}, tenacity, sys; [print(vars(module).get('__file__')) for module in [*sys.modules.values()]]"
    files = _output(sys.executable, "-c", code, cwd=REPOSITORY).splitlines()
    inside = [Path(file).relative_to(_site_packages()) for file in files if Path(file).is_relative_to(_site_packages())]
    names = {path.parts[0] for path in inside}
    if "torch" in names:
        raise MissingDependencyError("the guest's program must not import torch")
    return sorted(names)


def _copy_libraries(root: Path, programs: Iterable[Path]) -> None:
    for program in programs:
        found = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        for name in _LIBRARY.findall(found.stdout):
            _copy(root, Path(name))


def _site_packages() -> Path:
    return Path(sysconfig.get_path("platlib"))


def _python() -> Path:
    return Path(sys.executable).resolve()


def _in_guest(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _copy(root: Path, source: Path) -> None:
    target = _in_guest(root, source)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _output(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
