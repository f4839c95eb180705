"""``tierckpt size`` and ``tierckpt simulate``: text, JSON, pictures and errors."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.command_line import CommandLine, python
from tierckpt.client import close_all

GPT3 = ("--params", "175e9", "--optimizer", "adam", "--tp", "8", "--pp", "16", "--dp", "8")
QUICK = (*GPT3, "--days", "3", "--failure-rate", "100", "--only", "local")
PNG = b"\x89PNG\r\n\x1a\n"


def refusal(cli: CommandLine, *arguments: object) -> dict[str, Any]:
    done = cli(*arguments)
    assert (done.code, done.out) == (2, "")
    return done.error


# --- size ---------------------------------------------------------------------------------------------------------


def test_size_json_uses_bytes_and_seconds(cli: CommandLine) -> None:
    found = cli.answer("size", *GPT3)
    assert found["model_bytes"] == 350e9
    assert found["checkpoint_bytes"] == pytest.approx(2.45e12)
    assert {part["name"]: part["bytes_per_parameter"] for part in found["components"] if part["saved"]} == {
        "weights": 2,
        "master": 4,
        "exp_avg": 4,
        "exp_avg_sq": 4,
    }
    assert found["mesh"]["nodes"] == 128
    assert found["per_rank"]["held_bytes"] == pytest.approx(19.1e9, rel=0.01)
    assert found["per_node"]["held_bytes"] == pytest.approx(153e9, rel=0.01)
    assert {row["stall_seconds"]: row["bytes_per_second"] for row in found["write_bandwidth"]}[10] == 245e9
    assert found["restore"]["naive"] == {"shared_bytes": pytest.approx(19.6e12), "seconds": pytest.approx(196)}
    assert found["restore"]["fanned_out"]["seconds"] == pytest.approx(24.5)
    assert found["load"]["cached"]["seconds"] == pytest.approx(8.75)
    assert [tier["name"] for tier in found["tiers"]][-1] == "local + peer + shared"
    assert found["tiers"][0]["ettr"] < found["tiers"][-1]["ettr"] < 1
    assert found["tiers"][-1]["levels"][0]["interval_steps"] >= 1
    assert found["assumptions"]["failures_per_node_day"] == 6.5e-3


def test_a_config_json_from_a_directory_and_from_a_uri(tmp_path: Path, cli: CommandLine) -> None:
    llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(llama | heads))
    for where in (tmp_path, tmp_path / "config.json", f"file://{tmp_path}", f"file://{tmp_path}/config.json"):
        assert cli.answer("size", "--config", where)["model_bytes"] == 2 * 8030261248
    assert "does not exist" in refusal(cli, "size", "--config", tmp_path / "nowhere")["message"]
    (tmp_path / "config.json").write_text("[1, 2]")
    assert "holds no JSON object" in refusal(cli, "size", "--config", tmp_path)["message"]


def test_a_checkpoint_is_measured_by_component(tmp_path: Path, cli: CommandLine) -> None:
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    with tierckpt.Checkpointer(tmp_path / "run", drain=False) as checkpointer:
        checkpointer.save(7, {"model": model, "optimizer": optimizer})
    close_all()
    for uri in (tmp_path / "run", tmp_path / "run" / "step-7"):
        found = cli.answer("size", "--checkpoint", uri)
        assert found["model"]["parameters"] == 64 * 32 + 32
        assert found["model_bytes"] == 4 * (64 * 32 + 32)
        parts = {part["name"]: part["total_bytes"] for part in found["components"] if part["saved"]}
        assert parts == {
            "weights": found["model_bytes"],
            "exp_avg": found["model_bytes"],
            "exp_avg_sq": found["model_bytes"],
            "other": 8,
        }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("size --params 70b --dp 16 --gpus 32", "valid is 16 GPUs"),
        ("size --params 70b --mtbf 1min", "MTBF is 60 s, and a restart takes"),
        ("size --params 70b --config x", "--params and --config given: exactly one is needed"),
        ("size", "none of --params, --config and --checkpoint given"),
        ("size --gpus 0", "--gpus is 0: it must be a whole number of at least 1"),
        ("size --gpus 12", "do not fill nodes of 8"),
        ("size --gpus 100 --tp 8", "valid is 96 GPUs"),
        ("size --params 70b --plot x.gif", "its name must end in .svg, .png, .pdf"),
        ("size --params 70b --dp two", "--dp"),
        ("simulate --params 70b --days 0", "--days is 0"),
        ("simulate --params 70b --jobs 0", "--jobs is 0"),
        ("simulate --params 70b --only tape", "configurations are 'shared, blocking'"),
        ("simulate --params 70b --domain-nodes 0", "--domain-nodes is 0"),
        ("simulate --params 70b --repair 0", "--repair is 0"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(line: str, says: str, cli: CommandLine) -> None:
    assert says in refusal(cli, *line.split())["message"]


def test_size_needs_neither_torch_nor_matplotlib_nor_simpy() -> None:
    done = python(
        "import sys\n"
        "for name in ('torch', 'matplotlib', 'simpy'): sys.modules[name] = None\n"
        "from tierckpt.cli.ui.app import run\n"
        "sys.exit(run(['size', '--params', '70b', '--json']))"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_bytes"] == 140e9


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("matplotlib", ["size", "--params", "70b", "--plot", "x.svg"], "tierckpt[plot]"),
        ("simpy", ["simulate", "--params", "70b"], "tierckpt[cli]"),
    ],
)
def test_missing_extra_error_names_the_extra(
    missing: str, arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    for name in [name for name in sys.modules if name.startswith("tierckpt.planning.")]:
        if name.endswith(("simulator", "pipe")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    refused = refusal(cli, *arguments)
    assert (refused["error"], missing in refused["message"]) == ("MissingExtraError", True)
    assert extra in refused["hint"]


@pytest.mark.parametrize(
    ("arguments", "mesh", "parameters"),
    [
        (["--gpus", "1"], {"dp": 1, "nodes": 1, "stage": 3}, 2.5e9),
        (["--gpus", "64"], {"dp": 64, "nodes": 8, "stage": 3}, 160e9),
        (["--gpus", "4096"], {"dp": 4096, "nodes": 512, "stage": 3}, 10e12),
        (["--gpus", "64", "--params", "70b"], {"dp": 64, "stage": 3}, 70e9),
        (["--gpus", "64", "--params", "70b", "--stage", "1"], {"dp": 64, "stage": 1}, 70e9),
        (["--gpus", "64", "--params", "70b", "--tp", "8"], {"tp": 8, "dp": 8, "stage": 0}, 70e9),
        (["--gpus", "64", "--tp", "8", "--pp", "2"], {"tp": 8, "pp": 2, "dp": 4, "stage": 0}, 40e9),
        (["--params", "70b"], {"dp": 1, "stage": 0}, 70e9),
    ],
)
def test_size_from_gpus_alone(arguments: list[str], mesh: dict[str, int], parameters: float, cli: CommandLine) -> None:
    """Parallel degrees follow from the GPUs; the model from half of their 80 GB at 16 bytes a parameter."""
    found = cli.answer("size", *arguments)
    assert {name: found["mesh"][name] for name in mesh} == mesh
    assert found["model"]["parameters"] == pytest.approx(parameters)
    assumed = [text for text in found["warnings"] if "no model was given" in text]
    assert len(assumed) == ("--params" not in arguments)
    if assumed:
        total_bytes = sum(part["rank_bytes"] for part in found["components"])
        assert total_bytes == pytest.approx(40e9, rel=0.05)


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pictures_are_deterministic(tmp_path: Path, cli: CommandLine) -> None:
    first, second = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (first, second):
        assert cli.answer("size", *GPT3, "--plot", path)["plot"] == str(path)
    assert tree.parse(first).getroot().tag.endswith("svg")
    assert first.read_bytes() == second.read_bytes(), "pictures of the same numbers differ"
    cli.answer("simulate", *QUICK, "--plot", tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_unwritable_picture_error_names_the_path(tmp_path: Path, cli: CommandLine) -> None:
    done = cli("size", *GPT3, "--plot", tmp_path / "no" / "such" / "place.svg")
    assert done.code != 0 and "place.svg" in done.err


# --- simulate -----------------------------------------------------------------------------------------------------


def test_simulation_reports_each_configuration_and_is_seeded(cli: CommandLine) -> None:
    found = cli.answer("simulate", *QUICK, "--seed", "5")
    assert [one["name"] for one in found["runs"]] == ["local + shared", "local + peer + shared"]
    for one in found["runs"]:
        assert one["ettr"] == pytest.approx(one["expected_ettr"], rel=0.05)
        assert sum(one["failures"].values()) > 20
    again = cli.answer("simulate", *QUICK, "--seed", "5")
    assert again["runs"] == found["runs"]
    assert cli.answer("simulate", *QUICK, "--seed", "6")["runs"] != found["runs"]


def test_simulation_options_for_jobs_spares_outages_and_limits(cli: CommandLine) -> None:
    more = "--jobs 2 --spares 4 --repair 12h --outage-every 6h --outage 20min --rpo 1h"
    found = cli.answer("simulate", *QUICK, *more.split())
    assert found["nodes"] == 256
    assert all(one["waiting_seconds"] > 0 for one in found["runs"])


@pytest.mark.parametrize("more", [[], ["--modes"]])
def test_horizon_without_failures_warns_and_suggests_a_longer_one(more: list[str], cli: CommandLine) -> None:
    chosen = ("simulate", "--gpus", "64", "--params", "400b", "--only", "peer", *more)
    found = cli.answer(*chosen, "--days", "2")
    [warning] = found["warnings"]
    assert sum(sum(one["failures"].values()) for one in found["runs"]) == 0
    assert warning.startswith("no failure in 2 simulated days (all configurations;")
    assert "one is due every 19.2 d" in warning
    days = warning.rpartition("give --days ")[2]
    again = cli.answer(*chosen, "--days", days)
    assert int(days) == 97
    assert all(sum(one["failures"].values()) for one in again["runs"])
    assert not again.get("warnings")
    shown = cli.text(*chosen, "--days", "2")
    assert "warning: no failure in 2 simulated days" in shown.err
    assert "simulated days" not in shown.out


# --- the four ways --------------------------------------------------------------------------------------------------

LINKED = ("--params", "70e9", "--dp", "128", "--stage", "3", "--step", "2s", "--pcie", "1GB/s", "--dwpd", "3")


def test_size_gives_the_interval_from_which_a_log_moves_fewer_bytes(cli: CommandLine) -> None:
    log = cli.answer("size", *LINKED)["gradient_log"]
    assert (log["step_bytes"], log["fewer_bytes_below_interval_steps"]) == (140e9, 7)
    shown = cli.text("size", *LINKED).out
    assert "140 GB a step, fewer than full checkpoints more often than every 7 steps" in shown


@pytest.mark.slow
def test_four_save_modes_are_simulated_by_interval_and_drawn(tmp_path: Path, cli: CommandLine) -> None:
    chosen = ("simulate", "--modes", *LINKED, "--days", "2", "--mtbf", "3h")
    found = cli.answer(*chosen, "--plot", tmp_path / "modes.svg")
    names = ["async", "lazy", "multi-step", "gradient log"]
    assert [mode["name"] for mode in found["modes"]] == names
    assert {one["name"] for one in found["runs"]} == {*names}
    assert tree.parse(tmp_path / "modes.svg").getroot().tag.endswith("svg")
    shown = cli.text(*chosen).out
    assert all(text in shown for text in (*names, "lost by a failure", "by formula"))
    assert max(map(len, shown.splitlines())) <= 130
