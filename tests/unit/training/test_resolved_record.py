"""What a run's open settings became is recorded for each layout, kept there, and resolved again
elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.facts import says

from drillyard.config.run import RunConfig
from drillyard.config.run_model import LoraConfig
from drillyard.errors import UserError
from drillyard.estimation.resolved_setup import ResolvedSetup, resolve_setup
from drillyard.modelspec import model_spec
from drillyard.parallel.ranks import Ranks
from drillyard.training import resolved_record
from drillyard.training.resolved_record import (
    RESOLVED_RECORD,
    load_auto_settings,
    read_layouts,
    replace_settings,
    report_auto_settings,
    report_estimate,
    save_auto_settings,
)
from drillyard.training.saved_model import without_training_layout

LLAMA = {
    "architecture": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Log:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.messages: list[str] = []
        self.warnings: list[str] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def message(self, text: str) -> None:
        self.messages.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@dataclasses.dataclass
class Mesh:
    shard: int

    def size(self, axis: int) -> int:
        return (1, self.shard)[axis]


def ranks(count: int = 2) -> Ranks:
    mesh: Any = Mesh(count)
    return Ranks(0, count, 0, count, torch.device("cpu"), mesh, 1)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"config": LLAMA, "init": "random"},
            "data": {"source": "x.jsonl", "sequence_length": 64},
            "training": {"steps": 10, "global_batch_size": 4, "optimizer": {"learning_rate": 1e-3}},
        }
    )


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run directory that holds training."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path


def resolve(config: RunConfig, count: int = 2, mode: str | None = None) -> ResolvedSetup:
    found = resolve_setup(
        config,
        model_spec(LLAMA),
        num_gpus=count,
        gpus_per_node=count,
        memory_gib=None,
        device_type="cpu",
    )
    changes = {} if mode is None else {"activation_checkpointing": mode}
    return dataclasses.replace(found, setup=dataclasses.replace(found.setup, **changes))


def record(config: RunConfig, directory: Path, count: int = 2, mode: str = "selective") -> None:
    log: Any = Log()
    save_auto_settings(
        load_auto_settings(config, ranks(count), directory),
        resolve(config, count, mode),
        directory,
        log,
    )


def test_nothing_is_kept_of_a_run_that_has_recorded_nothing(
    config: RunConfig, trained: Path
) -> None:
    kept = load_auto_settings(config, ranks(), trained)
    assert kept.config == config
    assert (kept.settings, kept.before) == ({}, {})
    assert kept.memory_gib > 0


def test_a_start_on_the_same_layout_has_what_the_first_one_had(
    config: RunConfig, trained: Path
) -> None:
    record(config, trained)
    kept = load_auto_settings(config, ranks(), trained)
    assert kept.config.training.activation_checkpointing == "selective"
    assert kept.config.model.attention == "sdpa"
    assert kept.config.training.compile is False
    assert kept.config.training.loss_chunk_tokens == 16
    assert kept.before == {}
    assert config.training.activation_checkpointing == "auto", (
        "the config of the caller is left as it is"
    )


def test_the_first_record_of_a_layout_stays(config: RunConfig, trained: Path) -> None:
    record(config, trained, mode="selective")
    before = (trained / RESOLVED_RECORD).read_bytes()
    record(config, trained, mode="none")
    assert (trained / RESOLVED_RECORD).read_bytes() == before


def test_another_layout_is_resolved_again_and_the_first_one_is_found_again(
    config: RunConfig, trained: Path
) -> None:
    record(config, trained, 2, "selective")
    elsewhere = load_auto_settings(config, ranks(4), trained)
    assert elsewhere.settings == {}
    assert elsewhere.config == config
    assert elsewhere.before["training.activation_checkpointing"] == "selective"
    record(config, trained, 4, "none")
    assert len(read_layouts(trained)) == 2
    assert (
        load_auto_settings(config, ranks(2), trained).config.training.activation_checkpointing
        == "selective"
    )
    assert (
        load_auto_settings(config, ranks(4), trained).config.training.activation_checkpointing
        == "none"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"activation_checkpointing": "full"},
        {"compile": True},
        {"loss_chunk_tokens": 3},
        {"micro_batch_size": 2},
    ],
)
def test_what_the_user_sets_is_never_overruled_and_is_another_layout(
    config: RunConfig, trained: Path, change: dict[str, Any]
) -> None:
    record(config, trained)
    changed = config.model_copy(update={"training": config.training.model_copy(update=change)})
    kept = load_auto_settings(changed, ranks(), trained)
    assert kept.config == changed
    assert kept.settings == {}


def test_the_record_says_where_weights_are_in_fp8(config: RunConfig, trained: Path) -> None:
    log: Any = Log()
    kept = load_auto_settings(config, ranks(), trained)
    for stores, gathers in ((True, False), (False, True)):
        left = ["layers.*.mlp.gate"]
        save_auto_settings(kept, resolve(config), trained, log, left, stores, gathers)
        (entry,) = read_layouts(trained)
        assert entry["left_in_bf16"] == left
        assert (entry["stores_fp8"], entry["gathers_fp8"]) == (stores, gathers)


@pytest.mark.parametrize("whole", [True, False])
def test_the_record_says_whether_every_rank_holds_frozen_weights_whole(
    config: RunConfig, trained: Path, whole: bool
) -> None:
    lora = config.model_copy(
        update={"model": config.model.model_copy(update={"lora": LoraConfig(rank=4)})}
    )
    found = resolve(lora)
    setup = dataclasses.replace(found.setup, keeps_frozen_whole=whole, keeps_unsharded=False)
    log: Any = Log()
    kept = load_auto_settings(lora, ranks(), trained)
    save_auto_settings(kept, dataclasses.replace(found, setup=setup), trained, log)
    (entry,) = read_layouts(trained)
    assert entry["frozen_whole"] == whole
    # A later start may have other memory: the settings are kept, and what is true now is said.
    setup = dataclasses.replace(setup, keeps_frozen_whole=not whole, micro_batch_size=64)
    kept = load_auto_settings(lora, ranks(), trained)
    save_auto_settings(kept, dataclasses.replace(found, setup=setup), trained, log)
    assert read_layouts(trained) == [entry | {"frozen_whole": not whole}]


def test_what_a_failed_start_left_is_not_kept(config: RunConfig, tmp_path: Path) -> None:
    record(config, tmp_path, mode="selective")
    assert load_auto_settings(config, ranks(), tmp_path).settings == {}
    record(config, tmp_path, mode="none")
    (entry,) = read_layouts(tmp_path)
    assert entry["settings"]["training.activation_checkpointing"] == "none"


def test_settings_that_ran_out_of_memory_are_replaced_for_the_next_start(
    config: RunConfig, tmp_path: Path
) -> None:
    record(config, tmp_path, mode="none")
    kept = load_auto_settings(config, ranks(), tmp_path)
    resolved = resolve(config, mode="none")
    changes = replace_settings(kept, resolved, tmp_path, "loss", first_step=0)
    assert changes is not None and "training.activation_checkpointing: " in changes
    again = load_auto_settings(config, ranks(), tmp_path)
    mode = again.settings["training.activation_checkpointing"]
    assert mode != "none" and again.config.training.activation_checkpointing == mode
    # What that frees is not all filled with weights that are kept whole.
    assert kept.trusted_gib == kept.memory_gib
    assert again.trusted_gib == pytest.approx(0.9 * again.memory_gib)
    (entry,) = read_layouts(tmp_path)
    reason = entry["reasons"]["training.activation_checkpointing"]
    assert says(reason, "none ran out of memory") and "`loss`" in reason

    # Once more: then what needs least; after that nothing is left.
    replace_settings(again, resolve(again.config, mode=mode), tmp_path, "loss", first_step=0)
    last = load_auto_settings(config, ranks(), tmp_path)
    assert last.config.training.activation_checkpointing == "full"
    full = resolve(last.config, mode="full")
    assert replace_settings(last, full, tmp_path, "loss", first_step=0) is None


def test_replaced_settings_of_another_config_are_not_taken(
    config: RunConfig, tmp_path: Path
) -> None:
    record(config, tmp_path, mode="none")
    kept = load_auto_settings(config, ranks(), tmp_path)
    replace_settings(kept, resolve(config, mode="none"), tmp_path, "loss", first_step=0)
    shorter = config.data.model_copy(update={"sequence_length": 32})
    other = config.model_copy(update={"data": shorter})
    assert load_auto_settings(other, ranks(), tmp_path).settings == {}


@pytest.mark.parametrize("changes", [{"activation_checkpointing": "none"}, {}])
def test_settings_of_the_user_or_of_a_checkpoint_are_not_replaced(
    config: RunConfig, trained: Path, changes: dict[str, str]
) -> None:
    given = config.training.model_copy(update=changes)
    config = config.model_copy(update={"training": given})
    record(config, trained, mode="none")
    kept = load_auto_settings(config, ranks(), trained)
    before = (trained / RESOLVED_RECORD).read_bytes()
    first_step = 0 if changes else 4
    resolved = resolve(config, mode="none")
    assert replace_settings(kept, resolved, trained, "loss", first_step=first_step) is None
    assert (trained / RESOLVED_RECORD).read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layouts": [{"layout": 3}]}', '{"version": 1}'])
def test_a_damaged_record_is_as_none(config: RunConfig, trained: Path, text: str) -> None:
    (trained / RESOLVED_RECORD).write_text(text)
    assert read_layouts(trained) == []
    assert load_auto_settings(config, ranks(), trained).settings == {}


def test_a_disk_that_takes_no_more_ends_no_run(
    config: RunConfig, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    log: Any = Log()
    monkeypatch.setattr(os, "fsync", full)
    save_auto_settings(load_auto_settings(config, ranks(), trained), resolve(config), trained, log)
    (warning,) = log.warnings
    assert str(trained / RESOLVED_RECORD) in warning and "No space left" in warning


def test_the_event_has_every_setting_with_its_reason_or_that_it_was_kept(
    config: RunConfig, trained: Path
) -> None:
    first, again, elsewhere = (Log() for _ in range(3))
    report_auto_settings(load_auto_settings(config, ranks(), trained), resolve(config), first)  # type: ignore[arg-type]
    ((name, fields),) = first.events
    assert name == "resolved"
    assert fields["settings"]["training.activation_checkpointing"] == "full"
    assert fields["reasons"].keys() == fields["settings"].keys()
    assert (fields["kept"], fields["changed"], first.messages) == (None, None, [])

    record(config, trained, mode="selective")
    kept = load_auto_settings(config, ranks(), trained)
    report_auto_settings(kept, resolve(kept.config), again)  # type: ignore[arg-type]
    ((_, fields),) = again.events
    assert fields["kept"] == sorted(resolved_record.AUTO_KEYS)
    assert list(fields["reasons"]) == ["parallelism.shard"]

    kept = load_auto_settings(config, ranks(4), trained)
    report_auto_settings(kept, resolve(kept.config, 4), elsewhere)  # type: ignore[arg-type]
    ((_, fields),) = elsewhere.events
    assert fields["changed"] == {
        "training.activation_checkpointing": ["selective", "full"],
        "parallelism.shard": [2, 4],
    }
    (message,) = elsewhere.messages
    assert message.endswith(
        "training.activation_checkpointing: selective -> full; parallelism.shard: 2 -> 4"
    )
    json.dumps(fields)


def test_where_it_may_not_fit_the_user_is_warned_and_reported_what_would(
    config: RunConfig, trained: Path
) -> None:
    kept = load_auto_settings(config, ranks(), trained)
    calm, warned = Log(), Log()
    report_estimate(kept, resolve(kept.config), calm)  # type: ignore[arg-type]
    ((name, fields),) = calm.events
    assert (name, fields["verdict"]) == ("estimate", "fits")
    (line,) = calm.messages
    assert says(line, "Estimate: ... fits ... step time ... not known ... cpu")
    tight = dataclasses.replace(kept, memory_gib=1e-6)
    report_estimate(tight, resolve(kept.config), warned)  # type: ignore[arg-type]
    assert warned.events[0][1]["verdict"] == "does not fit"
    (warning,) = warned.warnings
    assert says(warning, "lack of memory\n ... no change")


def test_a_model_is_brought_up_on_ranks_that_its_batch_does_not_divide_by(
    config: RunConfig,
) -> None:
    with pytest.raises(UserError, match="not a multiple"):
        resolve(config, 3)
    assert resolve(without_training_layout(config), 3).setup.activation_checkpointing == "none"
