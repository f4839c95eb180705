"""The simulator compared with closed forms: one tier, two tiers, replicas, sharing; and at its largest size.

Tolerances follow the sample: the ETTR of a run with n failures is accurate to about 1/sqrt(n) of their cost.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import simpy

from tierckpt.errors import ConfigError
from tierckpt.planning import Bandwidths, Level, Mesh, Site, ettr, from_number, size, state_of
from tierckpt.planning.drain_policy import Rules
from tierckpt.planning.simulator import (
    Cluster,
    Configuration,
    FailureKind,
    Flow,
    Pipe,
    configurations_of,
    failures_of,
    simulate,
)

GB, TB = 1e9, 1e12
RATES = Bandwidths(
    shared_write=100 * GB, shared_read=100 * GB, local_write=10 * GB, local_read=40 * GB, nic=25 * GB, pcie=25 * GB
)
NODES = 64
MTBF = 600.0
BLOCKING = Configuration(
    "blocking", 230, checkpoint_bytes=6 * TB, restart_seconds=30, blocking=True, restore_bytes=1 * TB
)
"""60 s to write, 10 s to read."""


def failing(mtbf: float, name: str = "node", nodes: int = NODES, **more: bool | int) -> FailureKind:
    return FailureKind(name, 86400 / mtbf / nodes, **more)  # type: ignore[arg-type]


CLUSTER = Cluster(NODES, RATES, (failing(MTBF),))


# --- one tier -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [100.0, 230.0, 600.0])
def test_blocking_saves_match_the_exact_formula(span: float) -> None:
    run = simulate(CLUSTER, replace(BLOCKING, interval_seconds=span), days=60, seed=3)
    assert run.ettr == pytest.approx(ettr.exact(span, 60, MTBF, 40), rel=0.02)


@pytest.mark.parametrize("span", [100.0, 230.0])
def test_background_saves_cost_their_latency(span: float) -> None:
    background = replace(BLOCKING, interval_seconds=span, blocking=False, stall_seconds=5)
    run = simulate(CLUSTER, background, days=30, seed=3)
    assert run.ettr == pytest.approx(ettr.exact(span, 5, MTBF, 40, 60), rel=0.02)


def test_a_formula_without_restarts_is_detected() -> None:
    """Seeded bug: the comparison fails without one of its terms."""
    run = simulate(CLUSTER, BLOCKING, days=60, seed=3)
    assert run.ettr != pytest.approx(ettr.exact(230, 60, MTBF, 0), rel=0.02)


# --- several tiers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 17, 40])
def test_two_tiers_match_the_nested_formula(every: int) -> None:
    cluster = Cluster(NODES, RATES, (failing(3600, "process", wipes=False), failing(36000)))
    tiered = Configuration(
        "two", 120, checkpoint_bytes=6 * TB, restart_seconds=50, stall_seconds=2, local=True, flush_seconds=5,
        local_load_seconds=10, restore_bytes=15 * TB, rules=Rules(every=every),
    )  # fmt: skip
    levels = [Level("local", 2, 60, 3600, latency_seconds=5), Level("shared", 0, 200, 36000, latency_seconds=65)]
    run = simulate(cluster, tiered, days=40, seed=2)
    assert run.restores["local"] > 700
    assert run.restores["shared"] > 70
    assert run.ettr == pytest.approx(ettr.nested(levels, 120, (1, every)), rel=0.02)


def with_peers(nodes: int, replicas: int = 2) -> Configuration:
    return Configuration(
        "peers", 120, checkpoint_bytes=6 * TB, restart_seconds=30, local=True, peer=True, flush_seconds=5,
        replicate_seconds=10, replicas=replicas, local_load_seconds=5, peer_load_seconds=10, restore_bytes=1 * TB,
        rules=Rules(every=10),
    )  # fmt: skip


def test_a_rack_failure_loses_no_shard() -> None:
    cluster = Cluster(64, RATES, (FailureKind("rack", 24 / 64 / 5, nodes=16),))
    run = simulate(cluster, replace(with_peers(64), interval_seconds=600.0), days=60, seed=1)
    assert run.failures["rack"] > 200
    assert run.restores.get("shared", 0) < 0.05 * run.failures["rack"]  # only if a second rack fails soon after


@pytest.mark.slow
def test_each_added_tier_helps_and_matches_the_sizer() -> None:
    sizing = size(
        from_number("175e9"), state_of(), Mesh(tp=8, pp=16, dp=8), Site(rates=RATES, failures_per_node_day=0.05)
    )
    cluster = Cluster(sizing.mesh.nodes, RATES, failures_of(sizing, 16))
    runs = [simulate(cluster, one, days=40, seed=4) for one in configurations_of(sizing)]
    ratios = [run.ettr for run in runs]
    assert ratios == sorted(ratios)
    for run in runs:
        assert run.ettr == pytest.approx(run.expected_ettr, rel=0.03)  # the accuracy stated in the guide


# --- time, seeds, sharing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spares", [None, 0, 3])
def test_every_second_is_accounted_for(spares: int | None) -> None:
    cluster = replace(CLUSTER, spares=spares, repair_seconds=1800.0, failures=(failing(3600),))
    run = simulate(cluster, with_peers(NODES), days=10, seed=1)
    spent = run.kept_seconds + run.lost_seconds + run.stalled_seconds
    spent += run.restarting_seconds + run.loading_seconds + run.waiting_seconds
    assert spent == pytest.approx(run.wall_seconds)
    assert (run.waiting_seconds > 0) == (spares is not None)


def test_a_job_without_spares_or_repair_stops_at_the_first_loss() -> None:
    cluster = replace(CLUSTER, spares=0, repair_seconds=1e9)
    run = simulate(cluster, BLOCKING, days=10, seed=1)
    assert run.waiting_seconds > 0.9 * run.wall_seconds


def test_runs_are_determined_by_their_seed() -> None:
    cluster = replace(CLUSTER, spares=8, outage_every_seconds=7200.0, outage_seconds=600.0)
    first, again = (simulate(cluster, with_peers(NODES), days=3, seed=11) for _ in range(2))
    assert first == again
    assert simulate(cluster, with_peers(NODES), days=3, seed=12) != first


def test_without_failures_only_the_stalls_are_lost() -> None:
    run = simulate(replace(CLUSTER, failures=()), replace(BLOCKING, interval_seconds=240), days=1, seed=0)
    assert run.ettr == pytest.approx(240 / 300, rel=0.01)
    assert (run.failures, run.restores, run.lost_seconds) == ({}, {}, 0)


def test_jobs_share_the_bandwidth() -> None:
    """Each of four jobs with colliding saves takes four times as long."""
    alone = simulate(Cluster(16, RATES, ()), BLOCKING, days=2)
    four = simulate(Cluster(64, RATES, (), jobs=4), BLOCKING, days=2)
    assert alone.stalled_seconds / alone.checkpoints == pytest.approx(60, rel=0.01)
    assert four.stalled_seconds / (four.checkpoints / 4) == pytest.approx(240, rel=0.01)


def test_a_local_tier_bounds_the_cost_of_a_shared_outage() -> None:
    away = replace(
        CLUSTER, failures=(failing(7200, "process", wipes=False),), outage_every_seconds=7200, outage_seconds=1800
    )
    tiered = replace(with_peers(NODES), peer=False)
    lost = simulate(away, tiered, days=10, seed=1)
    assert lost.ettr > 0.95
    assert lost.ettr > simulate(away, BLOCKING, days=10, seed=1).ettr + 0.15
    assert lost.exposure_seconds_max > 1800


def test_flows_share_a_pipe_fairly_within_their_caps() -> None:
    env = simpy.Environment()
    pipe = Pipe(env, 10.0)
    ends: dict[str, float] = {}

    def note(name: str, flow: Flow) -> None:
        flow.done.callbacks.append(lambda _: ends.setdefault(name, env.now))

    note("capped", pipe.send(20.0, 2.0))  # 2 a second throughout: 10 s
    note("first", pipe.send(40.0))  # 8 a second, then 4 next to the second flow
    env.run(until=2)
    note("second", pipe.send(24.0))
    given_up = pipe.send(1000.0)
    pipe.cancel(given_up)
    env.run(until=7)
    pipe.set_capacity(0.0)
    env.run(until=17)
    pipe.set_capacity(10.0)
    env.run()
    # After 2 s each has 24 left, at 4 a second: 6 s, plus ten seconds of outage.
    assert ends == pytest.approx({"first": 18.0, "second": 18.0, "capped": 20.0})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cluster(64, RATES, (), jobs=5), "jobs are 5: they must divide the 64 nodes evenly"),
        (lambda: Cluster(4, RATES, (FailureKind("rack", 1, nodes=16),)), "takes 16 of 4 nodes"),
        (lambda: Cluster(4, RATES, (), spares=-1), "spares is -1"),
        (lambda: simulate(CLUSTER, BLOCKING, days=0), "days is 0"),
        (lambda: replace(BLOCKING, interval_seconds=0.0), "interval seconds is 0"),
        (lambda: simulate(Cluster(2, RATES, ()), with_peers(2, 3), days=1), "replicas are 3: a job of 2 nodes"),
    ],
)
def test_invalid_input_is_explained(make, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.slow
def test_16384_nodes_for_30_days() -> None:
    """Takes seconds. If its cost grew faster than the number of nodes, the test would exceed its deadline."""
    sizing = size(
        from_number("1e12"), state_of(), Mesh(tp=8, pp=16, dp=1024),
        Site(rates=replace(RATES, shared_write=1 * TB, shared_read=1 * TB), step_seconds=60.0),
    )  # fmt: skip
    assert sizing.mesh.nodes == 16_384
    cluster = Cluster(sizing.mesh.nodes, sizing.site.rates, failures_of(sizing, 16))
    run = simulate(cluster, configurations_of(sizing)[-1], days=30, seed=1)
    assert sum(run.failures.values()) == pytest.approx(30 * 86400 / sizing.mtbf_seconds, rel=0.1)
    assert run.ettr == pytest.approx(run.expected_ettr, rel=0.03)
