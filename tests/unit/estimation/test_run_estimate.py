"""One estimate of everything: what it answers, what it says is missing, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.unit.estimation.requests import SMALL, request_of, run_config, two_nodes

from drillyard.config.cluster import ClusterConfig, cluster_model
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import require_valid
from drillyard.errors import UserError
from drillyard.estimation.cost import PriceOptions
from drillyard.estimation.model_source import ModelOptions, ModelSource, find_model
from drillyard.estimation.run_estimate import RunEstimate, estimate_run
from drillyard.estimation.run_time import FailureOptions
from drillyard.estimation.sweep import with_settings
from drillyard.estimation.target import accelerator_target, cluster_target
from drillyard.hardware import catalog, load_catalog
from drillyard.modelspec import spec_from_counts

FULL = {"activation_checkpointing": "full"}


def missing(estimate: RunEstimate) -> dict[str, str]:
    return {one.what: one.give for one in estimate.missing}


def test_the_published_run_of_16_b200s_is_estimated_without_itself() -> None:
    request = request_of(
        run_config(training=FULL),
        price=PriceOptions(usd_per_gpu_hour=8.05),
        without_source="torch-distributed-training-gke",
    )
    found = estimate_run(request)
    assert found.verdict == "fits"
    assert found.step_time is not None and found.cost is not None
    assert found.step_time.seconds.low.value < 14.5 < found.step_time.seconds.high.value
    assert found.step_time.seconds.high.value / found.step_time.seconds.low.value <= 1.4
    assert found.cost.of_step.low.value < 0.52 < found.cost.of_step.high.value
    used = {row.row.publisher for row in found.step_time.rows}
    assert used and "torch-distributed-training-gke" not in used


def test_the_run_of_a_cluster_config_tells_time_cost_failures_and_quotas() -> None:
    cluster = ClusterConfig.model_validate(
        {
            "name": "c",
            "platform": "gke",
            "location": {"project": "p", "region": "us-central1"},
            "nodes": 2,
            "machine": "a4-highgpu-8g",
            "consumption": "flex-start-queued",
            "image": "i",
            "storage": {"bucket": "b"},
        }
    )
    found = estimate_run(request_of(target=cluster_target(cluster, catalog())))
    assert found.run_time is not None and found.run_time.wall is not None and found.cost is not None
    assert found.run_time.tokens == 1000 * 16 * 8 * 4096
    assert found.cost.of_run is not None
    paid = found.run_time.wall.low.value / 3600 * 16 * 8.05
    assert found.cost.of_run.low.value == pytest.approx(paid)
    assert found.run_time.gpu_hours.high.value == pytest.approx(
        found.run_time.wall.high.value / 3600 * 16
    )
    assert len(found.run_time.failures) == 3
    assert any(quota.amount == 16 and "B200" in quota.metric for quota in found.quotas)
    assert found.missing == ()


def test_experts_that_are_cut_over_more_ranks_than_there_are_of_them_are_reported() -> None:
    shapes = {
        "architecture": "mixtral",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    wide, narrow = (
        estimate_run(request_of(run_config(shapes), two_nodes("a3-megagpu-8g", nodes)))
        for nodes in (8, 1)
    )
    assert any(says(text, "% ... padding") for text in wide.warnings)
    assert not any("padding" in text for text in narrow.warnings)


def test_what_does_not_fit_comes_with_settings_that_do() -> None:
    config = run_config(training={"micro_batch_size": 64, **FULL})
    found = estimate_run(request_of(config))
    assert found.verdict == "does not fit"
    changes = found.alternatives
    assert changes and found.available_gib is not None
    for change in changes:
        assert change.memory_gib <= found.available_gib.value
    smaller = next(change for change in changes if change.keeps_training)
    again = run_config(
        training={"micro_batch_size": smaller.settings["training.micro_batch_size"], **FULL}
    )
    assert estimate_run(request_of(again)).verdict == "fits"
    assert estimate_run(request_of()).alternatives == []


def test_between_the_ends_of_the_range_it_may_not_fit() -> None:
    found = estimate_run(request_of(run_config(training=FULL)))
    assert found.memory is not None
    between = (found.memory.total.low.value + found.memory.total.high.value) / 2
    target = two_nodes()
    for memory_gib, verdict in (
        (between, "may not fit"),
        (found.memory.total.low.value - 1, "does not fit"),
    ):
        smaller = replace(
            target, accelerator=target.accelerator.model_copy(update={"memory_gib": memory_gib})
        )
        assert estimate_run(request_of(run_config(training=FULL), smaller)).verdict == verdict


def test_gpus_without_a_machine_fit_and_have_a_speed_and_the_rest_is_missing_with_its_flags() -> (
    None
):
    target = accelerator_target("h200", 4, catalog())
    found = estimate_run(request_of(run_config(SMALL), target))
    assert found.verdict == "fits" and found.step_time is not None and found.run_time is not None
    assert found.run_time.wall is None and found.cost is None
    message = missing(found)
    assert message["failures, goodput and the wall time with them"] == "--storage-gb-per-s"
    assert "--price-per-gpu-hour" in message["cost"]
    whole = request_of(
        run_config(SMALL),
        target,
        price=PriceOptions(2.0),
        failures=FailureOptions(storage_gb_per_s=5),
    )
    assert estimate_run(whole).missing == ()


def test_no_known_price_leaves_time_and_gpu_hours() -> None:
    found = estimate_run(request_of(run_config(SMALL), two_nodes("p5e.48xlarge")))
    assert (
        found.cost is None and found.run_time is not None and found.run_time.longest.low.value > 0
    )
    assert list(missing(found)) == ["cost"]


def test_an_accelerator_without_a_peak_has_no_step_time_and_no_mfu(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("accelerators: [{name: mine, title: Mine, memory_gib: 100}]\n")
    facts = load_catalog(own)
    request = replace(
        request_of(run_config(SMALL), accelerator_target("mine", 8, facts)), facts=facts
    )
    found = estimate_run(request)
    assert (
        found.verdict == "fits"
        and found.step_time is None
        and found.run_time is None
        and found.cost is None
    )
    assert "--hardware FILE" in missing(found)["step time, and all that follows from it"]


def test_an_accelerator_of_unknown_memory_has_an_unknown_verdict() -> None:
    found = estimate_run(request_of(run_config(SMALL), accelerator_target("cpu", 2, catalog())))
    assert found.verdict == "unknown" and found.memory is not None
    assert "memory_gib" in missing(found)["whether it fits"]


def test_a_run_in_epochs_needs_the_size_of_the_data_for_its_length_only() -> None:
    config = run_config(SMALL, training={"steps": None, "epochs": 2.0})
    found = estimate_run(request_of(config))
    assert found.run_time is None and found.cost is not None and found.cost.of_run is None
    assert list(missing(found).values()) == ["--data-tokens"]
    known = estimate_run(request_of(config, data_tokens=1e9)).run_time
    assert known is not None and known.steps == 2 * -(-1_000_000_000 // found.setup.tokens_per_step)


def test_a_model_of_which_only_counts_are_known_has_a_speed_but_no_memory() -> None:
    config = run_config()
    request = replace(
        request_of(config), model=find_model(config, ModelOptions(None, 70_000_000_000))
    )
    found = estimate_run(request)
    assert found.memory is None and found.verdict == "unknown" and found.step_time is not None
    assert "config.json" in missing(found)["memory"]
    assert any(says(warning, "only parameter counts") for warning in found.warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {"replicate": 3}}, r"16.*replicate 3"),
        ({"parallelism": {"shard": 32}}, r"shard 32 .*16 ranks"),
        ({"parallelism": {"tensor": 3}}, "parallelism.tensor"),
        ({"training": {"global_batch_size": 100}}, "global_batch_size: 100"),
        ({"training": {"steps": None}}, "training.steps: missing"),
        ({"training": {"device": "cpu"}}, r"training.device:.*'cpu'.*b200"),
    ],
)
def test_what_cannot_be_divided_as_asked_is_refused(
    changes: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        estimate_run(request_of(run_config(**changes)))


def test_what_only_the_trainer_would_refuse_is_estimated_and_said() -> None:
    config = run_config({**SMALL, "max_position_embeddings": 2048})
    found = estimate_run(request_of(config))
    assert found.step_time is not None
    assert len(found.refusals) == 1 and found.refusals[0].startswith("data.sequence_length: ")


PUBLISHED = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def pretrained(tmp_path: Path, content: dict[str, Any], **model: Any) -> RunConfig:
    """A run that trains the weights of a directory with this config.json."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    return run_config(model={"init": "pretrained", "config": None, "id": str(tmp_path), **model})


def test_weights_trained_for_fewer_positions_are_refused_by_train_and_estimate(
    tmp_path: Path,
) -> None:
    config = pretrained(tmp_path, {**PUBLISHED, "max_position_embeddings": 2048})
    with pytest.raises(UserError, match=r"data\.sequence_length"):
        require_valid(config)
    refusals = estimate_run(request_of(config)).refusals
    assert [refusal.partition(":")[0] for refusal in refusals] == ["data.sequence_length"]
    shorter = config.model_copy(
        update={"data": config.data.model_copy(update={"sequence_length": 2048})}
    )
    require_valid(shorter)
    assert estimate_run(request_of(shorter)).refusals == ()


def test_a_config_json_given_beside_the_run_is_judged_as_the_trainer_would(tmp_path: Path) -> None:
    config = run_config(model={"init": "pretrained", "config": None, "id": "meta-llama/Llama-0-1B"})
    given = tmp_path / "other.json"
    given.write_text(
        json.dumps({**PUBLISHED, "model_type": "qwen2_moe", "max_position_embeddings": 2048})
    )
    request = replace(
        request_of(run_config(SMALL)),
        config=config,
        model=ModelSource(spec_from_counts(10**9), json.loads(given.read_text()), str(given)),
    )
    keys = [refusal.partition(":")[0] for refusal in estimate_run(request).refusals]
    assert keys == ["model.id", "data.sequence_length"]


@pytest.mark.parametrize("targets", [["foo"], ["q_proj", "foo"], ["c_attn"], []])
def test_adapters_on_layers_that_the_model_does_not_have_are_refused(
    tmp_path: Path, targets: list[str]
) -> None:
    config = pretrained(tmp_path, PUBLISHED, lora={"rank": 8, "target_modules": targets})
    with pytest.raises(UserError, match=r"model\.lora\.target_modules") as refused:
        estimate_run(request_of(config))
    assert "q_proj" in str(refused.value)


def test_layers_that_nf4_cannot_hold_are_refused_as_the_trainer_does(tmp_path: Path) -> None:
    lora = {"lora": {"rank": 8, "target_modules": "all-linear"}, "quantization": "nf4"}
    held = estimate_run(request_of(pretrained(tmp_path, PUBLISHED, **lora)))
    assert held.setup.quantized and held.refusals == ()
    odd = {**PUBLISHED, "intermediate_size": PUBLISHED["intermediate_size"] + 32}
    with pytest.raises(UserError, match=r"model\.quantization: .*down_proj.* multiple of 64"):
        estimate_run(request_of(pretrained(tmp_path, odd, **lora)))


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
        {
            **PUBLISHED,
            "hidden_size": 1032,
            "intermediate_size": 4104,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
        },
    ],
)
def test_fp8_without_a_layer_that_can_compute_in_it_is_refused_as_the_trainer_does(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    config = pretrained(tmp_path, content)
    fp8 = config.model_copy(
        update={"training": config.training.model_copy(update={"precision": "fp8"})}
    )
    with pytest.raises(UserError, match=r"training\.precision: .*multiples of 16"):
        estimate_run(request_of(fp8))
    assert estimate_run(request_of(config)).step_time is not None


@pytest.mark.parametrize(
    ("gpu", "scaling", "refusals"),
    [
        ("a100-80gb", "tensorwise", ["training.precision: ... 8.9; ... A100 ... 8.0; ... bf16"]),
        ("l4", "tensorwise", []),
        (
            "l4",
            "rowwise",
            ["training.precision: ... 9.0; ... L4 has 8.9; ... bf16, or ... tensorwise"],
        ),
        ("h100", "rowwise", []),
        ("b300", "rowwise", []),
        ("mi300x", "rowwise", []),
    ],
)
def test_fp8_is_refused_for_a_gpu_that_has_no_such_products(
    gpu: str, scaling: str, refusals: list[str]
) -> None:
    config = run_config(SMALL, training={"precision": "fp8", "fp8_scaling": scaling})
    found = estimate_run(request_of(config, accelerator_target(gpu, 8, catalog())))
    assert len(found.refusals) == len(refusals)
    for refusal, said in zip(found.refusals, refusals, strict=True):
        assert says(refusal, said)


@pytest.mark.parametrize(
    ("training", "machine", "nodes"),
    [
        ({"micro_batch_size": 1, "activation_checkpointing": "full"}, "a3-megagpu-8g", 1),
        ({"micro_batch_size": 16}, "a3-megagpu-8g", 2),
        ({"micro_batch_size": 8, "global_batch_size": 512}, "a3-megagpu-8g", 4),
        ({"micro_batch_size": 64}, "a4-highgpu-8g", 1),
    ],
)
def test_whatever_is_said_to_fit_is_accepted_by_train_and_fits(
    tmp_path: Path, training: dict[str, Any], machine: str, nodes: int
) -> None:
    content = {
        **PUBLISHED,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "vocab_size": 128256,
    }
    config = pretrained(tmp_path, content)
    config = config.model_copy(update={"training": config.training.model_copy(update=training)})
    target = two_nodes(machine, nodes)
    changes = estimate_run(request_of(config, target)).alternatives
    assert changes
    for change in changes:
        changed = with_settings(config, change.settings)
        gpus = change.num_gpus or target.num_gpus
        require_valid(changed, gpus, has_gpu=True)
        there = two_nodes(machine, gpus // target.gpus_per_node)
        assert estimate_run(request_of(changed, there)).verdict == "fits"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"every_steps": 50}}, "every 50 steps"),
        ({"data": {"packing": False}}, "padding counts"),
        ({"training": {"deterministic": True}}, "not counted"),
    ],
)
def test_settings_whose_time_is_in_no_figure_are_reported(
    changes: dict[str, dict[str, object]], message: str
) -> None:
    assert any(
        says(text, message)
        for text in estimate_run(request_of(run_config(SMALL, **changes))).warnings
    )
    assert not any(
        says(text, message) for text in estimate_run(request_of(run_config(SMALL))).warnings
    )


def test_a_shared_directory_of_unknown_bandwidth_is_reported() -> None:
    content = {
        "name": "c",
        "platform": "slurm",
        "machine": "a3-megagpu-8g",
        "storage": {"directory": "/lustre"},
    }
    target = cluster_target(cluster_model().model_validate(content), catalog())
    message = "the bandwidth of storage.directory /lustre is not known"
    found = estimate_run(request_of(run_config(SMALL), target))
    assert any(message in text for text in found.warnings)
    assert found.quotas == ()
    given = request_of(run_config(SMALL), target, failures=FailureOptions(storage_gb_per_s=10))
    assert not any("storage.directory" in text for text in estimate_run(given).warnings)


def test_a_run_that_is_longer_than_its_slurm_job_is_reported() -> None:
    def is_warned(limit: str) -> bool:
        content = {
            "name": "c",
            "platform": "slurm",
            "machine": "a3-megagpu-8g",
            "slurm": {"time_limit": limit},
        }
        target = cluster_target(cluster_model().model_validate(content), catalog())
        return any(
            "slurm.time_limit" in text
            for text in estimate_run(request_of(run_config(SMALL), target)).warnings
        )

    assert is_warned("1") and not is_warned("30-0")


def test_storage_that_each_node_has_of_its_own_is_warned_of() -> None:
    (message,) = [
        text
        for text in estimate_run(request_of(run_config(SMALL), two_nodes("p5.48xlarge"))).warnings
        if "FSx" in text
    ]
    assert "2 x 10 GB/s" in message and "--storage-gb-per-s" in message
    given = request_of(
        run_config(SMALL), two_nodes("p5.48xlarge"), failures=FailureOptions(storage_gb_per_s=10)
    )
    for request in (
        given,
        request_of(run_config(SMALL), two_nodes("p5.48xlarge", 1)),
        request_of(run_config(SMALL)),
    ):
        assert not any("FSx" in text for text in estimate_run(request).warnings)
