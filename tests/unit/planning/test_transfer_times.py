"""Async, lazy, multi-step and gradient log: formulas compared with step-by-step sums and the simulator."""

from __future__ import annotations

import pytest

from tierckpt.planning import Bandwidths, Mesh, Site, Sizing, ettr, from_number, size, state_of
from tierckpt.planning.simulator import Cluster, FailureKind, SimulationResult, configuration_of, simulate
from tierckpt.planning.transfer_times import Mode, modes

LINK = 1e9
RATES = Bandwidths(shared_write=1e11, shared_read=1e11, local_write=1e10, local_read=4e10, nic=25e9, pcie=LINK)


def ways(copy_steps: float, share: float = 1 / 7, step: float = 0.1) -> dict[str, Mode]:
    """Takes ``copy_steps`` steps of ``step`` seconds to copy, with ``share`` bytes of gradient per byte."""
    state = copy_steps * step * LINK
    made = modes(state, share * state, state / 14, ranks=1, step_seconds=step, interval_min_seconds=0.0, rates=RATES)
    return {mode.name: mode for mode in made}


def test_stalls_of_a_copy_that_takes_four_steps() -> None:
    """Equal parts wait only 19 ms, too little to justify more bytes. Steps of 1 s get decreasing parts, no wait."""
    found = ways(4)
    assert found["async"].stall_seconds == pytest.approx(0.4)
    assert found["lazy"].stall_seconds == pytest.approx(0.3)
    assert found["multi-step"].stall_seconds == pytest.approx(0.019, abs=1e-3)
    assert found["multi-step"].link_bytes == pytest.approx(0.4 * LINK * (1 + 5 / 2 / 7))
    assert ways(4, step=1.0)["multi-step"].stall_seconds == pytest.approx(0.0, abs=1e-12)
    assert found["gradient log"].stalled_share(10) == 0.0
    assert ways(0.5)["lazy"].stall_seconds == 0.0


def window(sizes: list[float], share: float, carried: float) -> tuple[float, float]:
    """Bytes moved, and bytes beyond ``carried``: each step moves a part and the gradients of all earlier parts."""
    moved = [size + share * sum(sizes[:step]) for step, size in enumerate(sizes)]
    return sum(moved), sum(max(0.0, one - carried) for one in moved)


@pytest.mark.parametrize("step", [0.1, 1.0])
@pytest.mark.parametrize("copy_steps", [1.5, 4.0, 5.0, 20.0])
@pytest.mark.parametrize("share", [1 / 7, 1 / 6, 1 / 3])
def test_window_totals_equal_the_sums_over_its_steps(copy_steps: float, share: float, step: float) -> None:
    """Parts are equal, unless decreasing parts save enough waiting."""
    mode = ways(copy_steps, share, step)["multi-step"]
    state, carried, steps = step * copy_steps * LINK, step * LINK, mode.window_steps
    equal = window([state / steps] * steps, share, carried)
    first = state * share / (1 - (1 - share) ** steps)
    falling = window([first * (1 - share) ** n for n in range(steps)], share, carried)
    is_equal = equal[1] <= max(falling[1], 0.04 * LINK)
    moved, over = equal if is_equal else falling
    assert mode.link_bytes == pytest.approx(moved)
    assert mode.stall_seconds == pytest.approx(over / LINK, abs=1e-9)


def test_windows_of_decreasing_parts_move_the_specified_bytes() -> None:
    """1.24 of the state in 4 steps, 1.52 in 7. A window has the fewest steps that hide the copy."""
    for steps, fits, total in ((4, 1 / 0.31, 1.24), (7, 1 / 0.2165, 1.52)):
        mode = ways(fits * 0.995, step=1.0)["multi-step"]
        assert mode.window_steps == steps
        assert mode.link_bytes / (fits * 0.995 * LINK) == pytest.approx(total, abs=0.01)


def test_no_window_helps_if_gradients_exceed_the_link() -> None:
    slow = ways(14)  # one step's gradients take two steps on the link
    assert slow["multi-step"].stall_seconds > 0
    assert slow["gradient log"].stall_step_seconds == pytest.approx(0.1)
    assert slow["gradient log"].stalled_share(50) == pytest.approx(1.0)


def job() -> Sizing:
    site = Site(step_seconds=2.0, mtbf_seconds=10800.0, ssd_dwpd=3.0, rates=RATES)
    return size(from_number("70e9"), state_of(), Mesh(dp=128, stage=3), site)


def test_a_log_moves_fewer_bytes_for_windows_under_seven_steps() -> None:
    sizing = job()
    assert sizing.log_interval_steps == 7
    assert sizing.log_step_bytes == 140e9
    assert sizing.log_drive_writes_per_day == pytest.approx(140e9 / 16 * 43200 / 30e12)
    full = {mode.name: mode for mode in sizing.modes}
    assert full["async"].link_bytes / 7 == pytest.approx(full["gradient log"].link_step_bytes)
    assert size(from_number("1e9"), state_of(weights="fp32"), Mesh(), Site()).log_interval_steps == 3


def test_a_log_loses_half_a_step_and_replays_half_an_interval() -> None:
    log = ways(4)["gradient log"]
    assert log.lost_seconds(10.0) == pytest.approx(0.05 + log.latency_seconds + 50 * log.replay_step_seconds)
    assert ways(4)["async"].lost_seconds(10.0) == pytest.approx(5.0 + ways(4)["async"].latency_seconds)


def test_the_best_interval_is_in_whole_steps_and_bounded_by_the_disks() -> None:
    for mode in job().modes:
        interval = mode.best_interval_seconds(10800.0)
        assert interval % 2.0 == 0.0
        assert interval >= mode.interval_min_seconds
        if mode.stall_seconds:
            at = [ettr.exact(one, mode.stall_seconds, 10800.0, 300.0) for one in (interval / 2, interval, 2 * interval)]
            assert max(at) == at[1]


def simulated(mode: Mode, sizing: Sizing, interval: float, days: float, *, wipes: bool = False) -> SimulationResult:
    nodes = sizing.mesh.nodes
    cluster = Cluster(nodes, sizing.site.rates, (FailureKind("any", 86400 / 10800.0 / nodes, wipes=wipes),))
    return simulate(cluster, configuration_of(mode, sizing, interval), days=days, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, 300])
@pytest.mark.parametrize("name", ["async", "lazy", "multi-step", "gradient log"])
def test_the_simulator_agrees_with_the_formula(name: str, steps: int) -> None:
    sizing = job()
    mode = next(mode for mode in sizing.modes if mode.name == name)
    run = simulated(mode, sizing, 2.0 * steps, 50)
    assert run.failures["any"] > 300
    assert run.ettr == pytest.approx(run.expected_ettr, rel=0.01)
    assert run.lost_by_failure_seconds == pytest.approx(mode.lost_seconds(2.0 * steps), rel=0.1)
    trained = run.kept_seconds + run.lost_seconds
    assert run.stalled_seconds / trained == pytest.approx(mode.stalled_share(2.0 * steps), rel=0.04, abs=1e-9)


def test_a_log_does_not_survive_its_disks() -> None:
    """Shared storage has no data, so a failure that erases the disks costs the whole run."""
    sizing = job()
    log = next(mode for mode in sizing.modes if mode.is_log)
    run = simulated(log, sizing, 60.0, 2, wipes=True)
    assert run.restores == {"start": sum(run.restores.values())}
    assert run.replaying_seconds == 0.0
