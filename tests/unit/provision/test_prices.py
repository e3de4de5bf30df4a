"""What a cluster costs: the sum of its parts, by the figures of an estimate, and never a guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.facts import says

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.errors import UserError
from drillyard.estimation.cost import PriceOptions, hourly_price
from drillyard.estimation.target import cluster_target
from drillyard.hardware import catalog, load_catalog
from drillyard.provision.cluster_plan import ClusterPlan, Pool, PriceLine
from drillyard.provision.prices import (
    cluster_prices,
    price_totals,
    prices_given,
    require_prices,
    with_own_prices,
)

A_MONTH = 730


def pool(
    machine: str = "a3-highgpu-8g",
    consumption: str = "on-demand",
    nodes: int = 2,
    name: str = "gpus",
    zone: str = "us-central1-a",
) -> Pool:
    return Pool(name, catalog().machine(machine), consumption, nodes, zone)  # type: ignore[arg-type]


def lines_of(*pools: Pool, given: dict[str, float] | None = None, **creation: object):
    lines = cluster_prices(pools, CreationConfig.model_validate(creation), catalog())
    return with_own_prices(lines, given or {})


def price(lines: tuple[PriceLine, ...], beginning: str) -> float:
    (found,) = [line for line in lines if line.what.startswith(beginning)]
    assert found.usd_per_hour is not None
    return found.usd_per_hour.value


def plan_with(lines: tuple[PriceLine, ...]) -> ClusterPlan:
    return ClusterPlan(
        "c", "gke", "p", "us-central1", "us-central1-a", (), {}, "s", (), prices=lines
    )


def test_each_part_of_a_cluster_by_hand() -> None:
    lines = lines_of(pool(nodes=2))
    assert price(lines, "control plane") == 0.10
    assert price(lines, "cpu: 3 x e2-standard-16") == pytest.approx(3 * 0.53609)
    assert price(lines, "cpu: boot disks") == pytest.approx(3 * 200 * 0.10 / A_MONTH)
    assert price(lines, "gpus: 2 x a3-highgpu-8g") == pytest.approx(2 * 88.49)
    assert price(lines, "gpus: boot disks") == pytest.approx(2 * 200 * 0.08 / A_MONTH)
    assert price(lines, "NAT gateway") == pytest.approx(5 * 0.0014)
    assert price(lines, "addresses of the NAT gateway") == 0.005
    assert len(lines) == 7
    totals = price_totals(lines)
    assert (
        totals.full.value
        == totals.idle.value
        == pytest.approx(
            0.10
            + 3 * 0.53609
            + 600 * 0.10 / A_MONTH
            + 2 * 88.49
            + 400 * 0.08 / A_MONTH
            + 0.007
            + 0.005
        )
    )
    assert totals.unknown == ()
    assert totals.full.date == "2026-11-21"
    assert totals.full.unverified


def test_what_only_runs_need_costs_nothing_while_the_cluster_is_idle() -> None:
    lines = lines_of(
        pool("a2-highgpu-8g", "flex-start-queued", 40), pool("g2-standard-4", "spot", 1, "l4")
    )
    idle = price_totals([line for line in lines if line.running])
    assert price_totals(lines).idle.value == pytest.approx(idle.full.value)
    assert price(lines, "NAT gateway, 4 nodes") == pytest.approx(4 * 0.0014)
    # Above 32 machines the gateway has one price.
    assert price(lines, "NAT gateway, 40 nodes more") == pytest.approx(0.044 - 4 * 0.0014)
    assert {line.what.split(":")[0]: line.running for line in lines if line.pool} == {
        "gpus": False,
        "l4": True,
    }
    full = price_totals(lines)
    assert full.full.value - full.idle.value == pytest.approx(
        40 * 16.16304 + 40 * 200 * 0.10 / A_MONTH + 0.044 - 4 * 0.0014
    )


@pytest.mark.parametrize(("nodes", "usd"), [(29, 32 * 0.0014), (30, 0.044), (1000, 0.044)])
def test_the_gateway_of_many_nodes(nodes: int, usd: float) -> None:
    assert price(lines_of(pool(nodes=nodes)), "NAT gateway") == pytest.approx(usd)


def test_public_nodes_have_addresses_and_no_gateway() -> None:
    lines = lines_of(pool(nodes=2), private_nodes=False)
    assert price(lines, "addresses of nodes") == pytest.approx(5 * 0.005)
    assert not any("NAT" in line.what for line in lines)


def test_the_sizes_of_the_config_count() -> None:
    lines = lines_of(pool(nodes=1), disk_gib=100, cpu_pool={"machine": "e2-standard-4", "nodes": 2})
    assert price(lines, "cpu: 6 x e2-standard-4") == pytest.approx(6 * 0.53609 / 4)
    assert price(lines, "cpu: boot disks") == pytest.approx(6 * 100 * 0.10 / A_MONTH)


def test_a_given_price_is_that_of_a_node_and_comes_before_the_known_one() -> None:
    lines = lines_of(pool(nodes=3), given={"gpus": 50.0, "cpu": 1.0})
    assert price(lines, "gpus: 3 x") == 150.0
    assert price(lines, "cpu: 3 x") == 3.0
    (line,) = [each for each in lines if each.pool]
    assert line.usd_per_hour is not None and "--price" in line.usd_per_hour.source


def test_a_pool_without_a_price_is_refused_with_its_name_and_both_ways_to_give_one(
    tmp_path: Path,
) -> None:
    unpriced = pool("a4x-highgpu-4g", "reservation", 4, "gb200")
    lines = lines_of(unpriced)
    totals = price_totals(lines)
    assert any("gb200: 4 x a4x-highgpu-4g" in what for what in totals.unknown)
    with pytest.raises(UserError) as caught:
        require_prices(plan_with(lines))
    message = str(caught.value)
    assert says(message, "gb200 ... a4x-highgpu-4g ... reservation ... us-central1")
    # Both ways, typed as they are printed.
    option = next(word for word in message.split() if word.startswith("gb200=")).rstrip(",")
    typed = prices_given([option.replace("USD", "20.5")], [unpriced])
    require_prices(plan_with(lines_of(unpriced, given=typed)))
    row = next(line for line in message.splitlines() if line.strip().startswith("prices:"))
    file = tmp_path / "own.yaml"
    file.write_text(row.strip().replace("USD", "20.5") + "\n")
    own = cluster_prices([unpriced], CreationConfig(), load_catalog(file))
    require_prices(plan_with(own))
    assert price(own, "gb200: 4 x") == 82.0


def test_the_row_that_a_part_asks_for_gives_its_price(tmp_path: Path) -> None:
    far = pool("g2-standard-4", "spot", 1, zone="asia-southeast2-a")
    lines = lines_of(far, given={"gpus": 1.0})
    missing = [
        line for line in lines if line.usd_per_hour is None and line.what.startswith("cpu: ")
    ]
    assert len(missing) == 2
    file = tmp_path / "own.yaml"
    rows = [line.missing.splitlines()[1].strip().removeprefix("part_prices: ") for line in missing]
    file.write_text(
        "part_prices:\n" + "".join(f"  - {row[1:-1]}\n" for row in rows).replace("USD", "1")
    )
    own = with_own_prices(
        cluster_prices([far], CreationConfig(), load_catalog(file)), {"gpus": 1.0}
    )
    assert price_totals(own).unknown == ()
    assert price(own, "cpu: 3 x") == 3.0
    # Other parts than nodes never stop `up`.
    require_prices(plan_with(lines))


@pytest.mark.parametrize(
    ("texts", "facts"),
    [
        (["0"], "0 ... above 0"),
        (["-3"], "-3 ... above 0"),
        (["gpus=0"], "gpus=0 ... above 0"),
        (["nan"], "nan ... above 0"),
        (["inf"], "inf ... above 0"),
        (["much"], "much ... above 0"),
        (["gpus="], "gpus= ... above 0"),
        (["other=3"], "other ... gpus, cpu"),
        (["3", "gpus=3"], "gpus ... twice"),
    ],
)
def test_a_price_that_is_none_is_refused(texts: list[str], facts: str) -> None:
    with pytest.raises(UserError) as caught:
        prices_given(texts, [pool()])
    assert says(str(caught.value), facts)


def test_the_price_of_one_of_several_pools_names_it() -> None:
    pools = [pool(name="one"), pool(name="two")]
    with pytest.raises(UserError) as caught:
        prices_given(["3"], pools)
    assert says(str(caught.value), "--price one=3 ... --price two=3")
    assert prices_given(["one=3", "two=4.5"], pools) == {"one": 3.0, "two": 4.5}
    assert prices_given(["3"], pools[:1]) == {"one": 3.0}


def test_a_cpu_machine_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"cluster\.cpu_pool\.machine: .*e2-standard-16"):
        lines_of(pool(), cpu_pool={"machine": "e2-standard-15"})


@pytest.mark.parametrize(
    ("machine", "consumption"),
    [
        (machine.name, consumption)
        for machine in catalog().machines.values()
        if machine.cloud == "gcp"
        for consumption in machine.consumption
    ],
)
def test_an_estimate_has_the_same_price_for_every_machine_and_mode(
    machine: str, consumption: str
) -> None:
    cluster = ClusterConfig(
        name="c",
        platform="gke",
        machine=machine,
        consumption=consumption,  # type: ignore[arg-type]
        nodes=3,
        location={"project": "p", "region": "us-central1"},  # type: ignore[arg-type]
    )
    target = cluster_target(cluster, catalog())
    for own in (None, 7.25):
        estimated = hourly_price(target, catalog(), PriceOptions(usd_per_node_hour=own))
        given = None if own is None else {"gpus": own}
        lines = lines_of(pool(machine, consumption, 3), given=given)
        (nodes,) = [line for line in lines if line.pool]
        if estimated is None:
            assert nodes.usd_per_hour is None
            assert nodes.missing
        else:
            assert nodes.usd_per_hour is not None
            assert nodes.usd_per_hour.value == pytest.approx(estimated.of_all.value)
            assert nodes.usd_per_hour.date == estimated.of_all.date


def test_prices_of_a_thousand_nodes_are_sums() -> None:
    one, many = lines_of(pool(nodes=1)), lines_of(pool(nodes=1000))
    assert price(many, "gpus: 1000 x") == pytest.approx(1000 * price(one, "gpus: 1 x"))
    assert price(many, "addresses of the NAT gateway") == 0.005
    assert many[0] == one[0]
