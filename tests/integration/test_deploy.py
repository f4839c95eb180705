"""What lies in deploy/ is well formed, say the schemas of Kubernetes, systemd, hadolint, bash, and our own command."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tierckpt.cli.ui.app import app
from tierckpt.config import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
NOT_IN_KUBERNETES = {"Kustomization", "ClusterStorageContainer"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def containers(node: Any) -> list[dict[str, Any]]:
    """Return everything below ``node`` that has an image."""
    if isinstance(node, list):
        return [found for one in node for found in containers(one)]
    if not isinstance(node, dict):
        return []
    return ([node] if "image" in node else []) + [found for one in node.values() for found in containers(one)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_takes_the_manifests(manifest: Path) -> None:
    for document in documents(manifest):
        if document["kind"] not in NOT_IN_KUBERNETES:
            kubernetes_validate.validate(document, "1.33", strict=True)


def test_a_misspelt_field_is_found() -> None:
    (document,) = documents(DEPLOY / "kubernetes/drain-job.yaml")
    document["spec"]["template"]["spec"]["containers"][0]["comand"] = ["tierckpt"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_kustomize_names_files_that_exist() -> None:
    (document,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    assert document["resources"]
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in document["resources"])


def test_every_setting_and_verb_exists() -> None:
    """In manifests, units and scripts alike: names of settings, and of verbs and their options."""
    known = {f"TIERCKPT_{name.upper()}" for name in Settings.model_fields} | {"TIERCKPT_LOG_LEVEL"}
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    named = 0
    for path in sorted(one for one in DEPLOY.rglob("*") if one.is_file()):
        text = path.read_text()
        wrong = set(re.findall(r"\bTIERCKPT_[A-Z_]+", text)) - known
        assert not wrong, f"{path.relative_to(ROOT)} sets {wrong}"
        for verb in re.findall(r'(?:^|[\s/"\[])tierckpt"?,? +"?([a-z]+)"?(?=[\s",])', text, re.MULTILINE):
            if path.suffix in {".yaml", ".service", ".sh", ".sbatch"} and verb in verbs:
                named += 1
    assert named >= 8


def test_the_storage_container_moves_what_was_fetched(tmp_path: Path) -> None:
    """The script of the KServe container, with this command: each model lies in the directory that KServe names."""
    (document,) = documents(DEPLOY / "kserve/storage-container.yaml")
    (container,) = containers(document)
    models = {name: tmp_path / name for name in ("one", "two")}
    targets = [tmp_path / "mnt" / name for name in models]
    for (name, model), target in zip(models.items(), targets, strict=True):
        model.mkdir()
        target.mkdir(parents=True)
        (model / "weights.bin").write_text(name)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/tierckpt"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tierckpt "$@"\n')
    command.chmod(0o755)
    words = [word for pair in zip(models.values(), targets, strict=True) for word in map(str, pair)]
    subprocess.run(
        [*container["command"], *words],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
             "TIERCKPT_LOCAL_ROOT": str(tmp_path / "local")},
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    for (name, _), target in zip(models.items(), targets, strict=True):
        assert [path.name for path in target.iterdir()] == ["weights.bin"]
        assert (target / "weights.bin").read_text() == name


@pytest.mark.parametrize("script", [*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")], ids=lambda path: path.name)
def test_bash_takes_the_scripts(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("unit", sorted(DEPLOY.rglob("*.service")), ids=lambda path: path.stem)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    for command in re.findall(r"^Exec\w+=(\S+)", text, re.MULTILINE):
        text = text.replace(command, "/bin/true")  # what is not installed here
    (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    assert unit.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_hadolint_takes_the_image() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, "--failure-threshold", "info", DEPLOY / "Containerfile"], check=True)
