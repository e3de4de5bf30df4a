"""What failures do to a job: frequency, cost of a save and of a restart, goodput, each with its
formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as forall
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.estimation.checkpoint_interval import expected_wall_seconds
from drillyard.estimation.failure_estimate import (
    GOODPUT_NAME,
    checkpoint_cost,
    failure_estimate,
    restart_time,
)
from drillyard.estimation.failure_rates import custom_failure_rate, failure_rate, failure_rates
from drillyard.hardware import catalog

LLAMA3 = failure_rate("llama3")
shared = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)


def test_llama3_is_interrupted_7_8_times_a_day_and_its_time_between_failures_is_3_1_hours(make_job):
    outlook = failure_estimate(make_job(), LLAMA3)
    assert outlook.named("interruptions per day").value == pytest.approx(7.8, abs=0.05)
    assert outlook.mtbf_seconds == pytest.approx(3.09 * 3600, rel=0.005)


def test_without_a_choice_the_answer_is_the_range_over_the_three(make_job):
    outlooks = [failure_estimate(make_job(), rate) for rate in failure_rates().values()]
    assert [outlook.rate.name for outlook in outlooks] == ["llama3", "rsc1", "rsc2"]
    assert outlooks[1].goodput < outlooks[0].goodput < outlooks[2].goodput


def test_a_rate_is_per_eight_gpus_whatever_a_machine_has(make_job):
    eight = failure_estimate(make_job(machine="a3-megagpu-8g", num_nodes=16), LLAMA3)
    four = failure_estimate(
        make_job(machine="a4x-highgpu-4g", num_nodes=32, cost={"storage_gb_per_s": 50}), LLAMA3
    )
    assert four.mtbf_seconds == pytest.approx(eight.mtbf_seconds)


def test_a_synchronous_save_blocks_for_all_bytes_over_the_storage(make_job):
    cost = make_job(
        num_nodes=4, cost={"bytes_per_gpu": 1e10, "asynchronous": False, "storage_gb_per_s": 20}
    ).checkpoint
    assert (cost.blocking.value, cost.drain.value, cost.load.value) == pytest.approx((16, 0, 16))


def test_an_asynchronous_save_blocks_for_the_copy_to_the_host_and_then_drains(make_job):
    own = {
        "bytes_per_gpu": 1e10,
        "asynchronous": True,
        "storage_gb_per_s": 20,
        "host_device_gb_per_s": 50,
    }
    cost = make_job(num_nodes=4, cost=own).checkpoint
    assert (cost.blocking.value, cost.drain.value, cost.load.value) == pytest.approx((0.2, 16, 16))


def test_each_copy_of_the_model_is_copied_to_its_host_and_loaded_but_one_is_written(make_job):
    own = {"bytes_per_gpu": 1e10, "copies": 2, "storage_gb_per_s": 20, "host_device_gb_per_s": 50}
    twice = make_job(num_nodes=4, cost=own).checkpoint
    assert (twice.blocking.value, twice.drain.value, twice.load.value) == pytest.approx(
        (0.4, 16, 32)
    )
    assert "x 2 copies" in twice.blocking.formula and "x 2 copies" in twice.load.formula


def test_published_bandwidths_come_with_their_doubts(make_job):
    cost = make_job().checkpoint
    assert cost.drain.unverified
    assert "Cloud Storage" in cost.drain.source


def test_a_restart_is_the_sum_of_parts_that_can_be_overridden(make_job):
    cost = make_job(num_nodes=4, cost={"bytes_per_gpu": 1e10, "storage_gb_per_s": 20}).checkpoint
    assert restart_time(cost).total.value == pytest.approx(150 + 300 + 16)
    assert restart_time(cost).total.unverified
    own = restart_time(cost, detect_seconds=10, start_seconds=60, load_seconds=5)
    assert (own.total.value, own.total.unverified) == (75, False)


def test_a_drain_longer_than_daly_s_interval_sets_the_interval(make_job):
    outlook = failure_estimate(make_job(), LLAMA3)
    drain = outlook.named("drain").value
    assert outlook.named("Daly's interval").value < drain
    assert outlook.schedule.interval_steps == math.ceil(drain / 10)
    lost = outlook.named("lost work per interruption").value
    assert lost == pytest.approx(outlook.schedule.interval_seconds / 2 + drain)


def test_a_short_run_saves_once_at_the_end(make_job):
    slow = {"bytes_per_gpu": 1e10, "asynchronous": False, "storage_gb_per_s": 20}
    outlook = failure_estimate(make_job(num_nodes=2, steps=100, cost=slow), LLAMA3)
    assert (outlook.schedule.interval_steps, outlook.named("saves").value) == (100, 1)


def test_an_own_interval_is_kept(make_job):
    outlook = failure_estimate(make_job(interval_steps=360), LLAMA3)
    assert outlook.schedule.interval_steps == 360
    assert outlook.goodput < failure_estimate(make_job(), LLAMA3).goodput


def test_spot_without_preemptions_says_what_is_left_out(make_job):
    assert "preemptions" in failure_estimate(make_job(spot=True), LLAMA3).left_out[0]
    with_them = failure_estimate(make_job(spot=True, preemptions_per_node_day=0.01), LLAMA3)
    assert not any("preemptions" in words for words in with_them.left_out)
    assert with_them.named("interruptions per day").value == pytest.approx(2048 * (3.8e-3 + 0.01))


def test_the_goodput_is_named_for_what_it_is(make_job):
    outlook = failure_estimate(make_job(), LLAMA3)
    assert "ETTR without queue wait" in GOODPUT_NAME
    assert outlook.named(GOODPUT_NAME).value == outlook.goodput
    assert any("queue wait" in words for words in outlook.left_out)


def test_nothing_fails_at_a_rate_of_zero(make_job):
    outlook = failure_estimate(make_job(), custom_failure_rate(0))
    assert outlook.schedule.saves == 1
    assert outlook.wall_seconds == outlook.schedule.failure_free_seconds
    assert outlook.named("expected interruptions").value == 0


def test_every_term_explains_itself(make_job):
    outlook = failure_estimate(make_job(preemptions_per_node_day=0.01), LLAMA3)
    assert all(one.formula for one in outlook.quantities)
    assert all(one.source for one in outlook.quantities)
    assert len({one.name for one in outlook.quantities}) == len(outlook.quantities)
    assert "Daly" in outlook.named("Daly's interval").source
    assert "Young" in outlook.named("Young's interval").source
    assert outlook.named("expected goodput (ETTR without queue wait)").value == outlook.goodput


@shared
@forall(rate=st.floats(0.0, 50.0), more=st.floats(1.01, 10.0), nodes=st.integers(1, 2000))
def test_goodput_lies_between_0_and_1_and_falls_with_the_rate(make_job, rate, more, nodes):
    job = make_job(num_nodes=nodes)
    low = failure_estimate(job, custom_failure_rate(rate))
    high = failure_estimate(job, custom_failure_rate(rate * more))
    assert (
        0 < high.goodput <= low.goodput * (1 + 1e-3)
    )  # to within the rounding of intervals to steps
    assert low.goodput < 1
    fixed = expected_wall_seconds(low.schedule, 300, high.mtbf_seconds)
    assert fixed >= low.wall_seconds * (1 - 1e-12)


@shared
@forall(st.integers(1, 4000), st.floats(1e6, 1e10), st.booleans())
def test_to_first_order_the_estimate_is_meta_s_formula(make_job, nodes, size, asynchronous):
    """Where a restart and an interval are short against the time between failures."""
    job = make_job(num_nodes=nodes, cost={"bytes_per_gpu": size, "asynchronous": asynchronous})
    outlook = failure_estimate(job, custom_failure_rate(0.01))
    tau, M = outlook.schedule.interval_seconds, outlook.mtbf_seconds
    small = (tau + job.checkpoint.blocking.value + job.checkpoint.drain.value + 300) / M
    first = outlook.named("goodput to first order").value
    # The formula is of a run without end: this one also waits for its last save.
    end = (
        job.checkpoint.drain.value + job.checkpoint.blocking.value
    ) / outlook.schedule.work_seconds
    assert outlook.goodput == pytest.approx(
        first, abs=small**2 + 2 * job.checkpoint.blocking.value / M + end + 1e-3
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"preemptions_per_node_day": -0.1}, "preemptions per node-day is -0.1"),
        ({"cost": {"storage_gb_per_s": 0}}, r"storage bandwidth.* 0"),
        ({"cost": {"host_device_gb_per_s": -1}}, "host-device bandwidth in GB/s is -1"),
    ],
)
def test_bad_input_is_refused_in_one_or_two_lines(make_job, change, words):
    with pytest.raises(UserError, match=words) as refused:
        make_job(**change)
    assert len(str(refused.value).splitlines()) <= 2


def test_an_unknown_bandwidth_is_asked_for(make_job):
    job = make_job()
    silent = job.machine.model_copy(
        update={"storage": None, "host_nics": job.machine.host_nics.model_copy(update={"count": 0})}
    )
    with pytest.raises(UserError, match=r"storage bandwidth.*a3-megagpu-8g"):
        checkpoint_cost(
            silent,
            catalog().accelerator("h100"),
            num_nodes=1,
            bytes_per_gpu=1e9,
            asynchronous=False,
        )
    unlinked = (
        catalog()
        .accelerator("h100")
        .model_copy(update={"host_device_gb_per_s": None, "host_link_gb_per_s": None})
    )
    with pytest.raises(UserError, match=r"host-device bandwidth.*h100"):
        checkpoint_cost(job.machine, unlinked, num_nodes=1, bytes_per_gpu=1e9, asynchronous=True)


def test_a_run_that_never_ends_is_an_error(make_job):
    job = make_job(interval_steps=259_200)
    with pytest.raises(UserError, match="never ends") as refused:
        failure_estimate(job, custom_failure_rate(500))
    assert len(str(refused.value).splitlines()) == 2
