"""The files of deploy/ are valid for Kubernetes, systemd, hadolint, bash and the tierckpt command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from tierckpt.cli.ui.app import app
from tierckpt.config import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CUSTOM_KINDS = {"Kustomization", "ClusterStorageContainer"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def containers(node: Any) -> list[dict[str, Any]]:
    """Return all objects below ``node`` that have an image."""
    if isinstance(node, list):
        return [found for one in node for found in containers(one)]
    if not isinstance(node, dict):
        return []
    return ([node] if "image" in node else []) + [found for one in node.values() for found in containers(one)]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_manifests_are_valid(manifest: Path) -> None:
    for document in documents(manifest):
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, "1.33", strict=True)


def test_control_misspelt_field_is_detected() -> None:
    (document,) = documents(DEPLOY / "kubernetes/drain-job.yaml")
    document["spec"]["template"]["spec"]["containers"][0]["comand"] = ["tierckpt"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_kustomize_names_files_that_exist() -> None:
    (document,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    assert document["resources"]
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in document["resources"])


def test_every_setting_exists() -> None:
    known = {f"TIERCKPT_{name.upper()}" for name in Settings.model_fields} | {"TIERCKPT_LOG_LEVEL"}
    for path in sorted(one for one in DEPLOY.rglob("*") if one.is_file()):
        wrong = set(re.findall(r"\bTIERCKPT_[A-Z_]+", path.read_text())) - known
        assert not wrong, f"{path.relative_to(ROOT)} sets {wrong}"


def simple_commands(script: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell script as words, without operators."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                yield words
                words = []
            else:
                words.append(word)


def commands_of(path: Path) -> Iterator[list[str]]:
    """Yield every command that a manifest, unit or script runs."""
    text = path.read_text()
    if path.suffix in {".sh", ".sbatch"}:
        yield from simple_commands(text)
    elif path.suffix == ".service":
        yield from map(shlex.split, re.findall(r"^Exec\w+=(.+)$", text, re.MULTILINE))
    elif path.suffix == ".yaml":
        for container in containers(documents(path)):
            words = container.get("command", [])
            yield from simple_commands(words[2]) if words[:1] == ["sh"] else [words]


def tierckpt_commands(path: Path) -> list[list[str]]:
    """Return the ``tierckpt`` command lines in a file, without the program name."""
    return [
        words[at + 1 :]
        for words in commands_of(path)
        for at, word in enumerate(words)
        if re.fullmatch(r"(/\S+/)?tierckpt", word) and words[at - 1] not in {"--tag", "--load-format"}
    ]


def refusal(words: list[str]) -> str:
    """Return the usage error of the command for ``words``, or "". Only parses."""
    verb, *arguments = words
    command = typer.main.get_command(app).commands.get(verb)  # type: ignore[attr-defined]
    if command is None:
        return f"no verb {verb!r}"
    try:
        command.make_context(verb, arguments)
    except Exception as error:  # the class of typer's usage errors differs between releases
        return str(error) or repr(error)
    return ""


def test_every_command_line_parses() -> None:
    """Verbs, options and argument counts in manifests, units and scripts."""
    found = {path: tierckpt_commands(path) for path in sorted(DEPLOY.rglob("*")) if path.is_file()}
    for path, lines in found.items():
        for words in lines:
            assert not refusal(words), (path.relative_to(ROOT), words, refusal(words))
    run = {path for path in found if path.parent.name in {"kubernetes", "kserve", "slurm", "systemd", "vllm"}}
    assert {path.name for path in run if not found[path]} == {"kustomization.yaml"}


@pytest.mark.parametrize(
    ("line", "why"),
    [("prefetsh s3://bucket/model", "no verb"), ("drain --wate", "--wate"), ("restore --to /nvme", "uri"),
     ("agent --metrics-port none", "valid integer"), ("agent /nvme", "extra argument")],
)  # fmt: skip
def test_control_invalid_command_line_is_detected(line: str, why: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"srun --overlap \\\n  /opt/tierckpt/bin/tierckpt {line} --json || exit # of the node\n")
    (words,) = tierckpt_commands(script)
    assert " ".join(words) == f"{line} --json"
    assert why in refusal(words)


def test_kserve_container_moves_the_models(tmp_path: Path) -> None:
    """The KServe script puts each model into the directory that KServe names."""
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


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in documents(path):
            if "template" in document.get("spec", {}):
                yield path.name, document["spec"]["template"]["spec"]


def test_containers_run_as_a_user_and_write_only_to_mounts() -> None:
    """Except the container that gives a hostPath directory, owned by root, to the user."""
    for name, pod in pods():
        for container in containers([pod.get("initContainers", []), pod["containers"]]):
            if not container["image"].startswith("your-registry/tierckpt"):
                continue
            context = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
            if container["command"][0] == "install":
                assert context["runAsUser"] == 0
                continue
            assert context["runAsNonRoot"] and context["runAsUser"] and context["readOnlyRootFilesystem"], name
            (root,) = (Path(one["value"]) for one in container["env"] if one["name"] == "TIERCKPT_LOCAL_ROOT")
            mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
            assert any(mount in root.parents for mount in mounts), f"{name}: the local root must be below a mount point"
        created = {words[-1] for one in pod.get("initContainers", []) if (words := one["command"])[0] == "install"}
        assert created or not any("OrCreate" in str(volume.get("hostPath")) for volume in pod["volumes"]), name


def test_pod_grace_period_exceeds_the_agents() -> None:
    for name, pod in pods():
        has_agent = any("agent" in container.get("command", []) for container in pod["containers"])
        grace = pod.get("terminationGracePeriodSeconds", 30)
        assert not has_agent or grace > Settings.model_fields["grace_seconds"].default, name
    for unit in DEPLOY.rglob("*agent.service"):
        (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
        assert int(seconds) > Settings.model_fields["grace_seconds"].default


def run_script(script: Path, tmp_path: Path, commands: dict[str, str], **variables: str) -> tuple[int, str]:
    """Run a script with stand-ins for ``commands`` and only ``variables`` in its environment."""
    (tmp_path / "bin").mkdir()
    for name, body in commands.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/said\n{body}\n')
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    text = re.sub(r"(?m)^export PATH=\S+", f"export PATH={path}", script.read_text())
    text = text.replace("/opt/tierckpt/bin/tierckpt", "tierckpt").replace("/local/nvme", str(tmp_path / "nvme"))
    env = variables if "export PATH" in text else {"PATH": path, **variables}
    done = subprocess.run(["/bin/bash", "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    return done.returncode, (tmp_path / "said").read_text() if (tmp_path / "said").exists() else done.stderr


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_USER": "nobody", "SLURM_JOB_UID": "65534", "SLURM_JOB_NUM_NODES": "1",
       "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "1"}  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="a prolog runs as root")
@pytest.mark.parametrize("starts", ["exit 0", "exit 1"])
def test_prolog_succeeds_without_an_agent(tmp_path: Path, starts: str) -> None:
    commands = {"systemctl": "exit 3", "systemd-run": starts, "logger": "exit 1"}
    code, output = run_script(DEPLOY / "slurm/prolog.sh", tmp_path, commands, **JOB)
    assert code == 0 and f"--setenv=TIERCKPT_LOCAL_ROOT={tmp_path}/nvme/tierckpt/nobody" in output
    assert ("no agent was started for nobody" in output) == (starts == "exit 1")
    root = tmp_path / "nvme/tierckpt/nobody"
    assert root.owner() == "nobody" and root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("job", [JOB, {}], ids=["job", "no variables"])
def test_the_epilog_never_fails(tmp_path: Path, job: dict[str, str]) -> None:
    (tmp_path / "nvme/tierckpt/nobody").mkdir(parents=True)
    code, output = run_script(DEPLOY / "slurm/epilog.sh", tmp_path, {"runuser": "echo left", "logger": "exit 1"}, **job)
    assert code == 0 and ("job 7: left" in output) == bool(job)


@pytest.mark.parametrize("script", sorted(DEPLOY.rglob("*.sbatch")), ids=lambda path: path.name)
def test_a_job_runs_without_user_and_home(tmp_path: Path, script: Path) -> None:
    commands = {"srun": "exit 0", "scontrol": "echo n1"}
    code, output = run_script(script, tmp_path, commands, **JOB, TIERCKPT_PEER_SECRET_FILE="/secret")
    assert code == 0 and "srun" in output, output


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("unit", sorted(DEPLOY.rglob("*.service")), ids=lambda path: path.stem)
def test_systemd_units_are_valid(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    for command in re.findall(r"^Exec\w+=(\S+)", text, re.MULTILINE):
        text = text.replace(command, "/bin/true")  # not installed here
    (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    assert unit.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_hadolint_accepts_the_containerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, "--failure-threshold", "info", DEPLOY / "Containerfile"], check=True)
