"""What synthetic sequences cannot show: packed against padded documents of the built-in data sets,
and how long training waits for an asynchronous save.

Documents are packed and padded by the trainer's own data preparation. A real token is one that
carries loss; the ratio of fill, real tokens of a packed sequence over those of a padded one, is
what packing could gain where attention and the loss cost nothing.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from setups import Setting, assembled, compile_quickly, run_config
from speed import model_of, timed
from training import ranks_of

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare_sample
from drillyard.training.build import batch_shape
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.model_setup import build_sharded_model, fill_weights
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.resume import checkpoint_state
from drillyard.training.trainer import StepWindow, Trainer

SEQUENCES = 512
SAVES = 3


def packed_over_padded(
    setting: Setting, source: str, format: str, shape: str, sequence_length: int, micro_batch: int
) -> dict[str, Any]:
    """Real tokens per second of packed and of padded sequences, beside their fill."""
    compile_quickly(setting)
    speeds, fills = {}, {}
    for packing in (True, False):
        config = _on_real_data(
            setting, source, format, shape, sequence_length, micro_batch, packing=packing
        )
        torch._dynamo.reset()
        speeds[packing], fills[packing] = _real_tokens(config, setting)
    gain, fill = speeds[True] / speeds[False], fills[True] / fills[False]
    return {
        "packed_real_tokens_per_second": speeds[True],
        "padded_real_tokens_per_second": speeds[False],
        "packed_fill": fills[True],
        "padded_fill": fills[False],
        "gain": gain,
        "gain_over_ratio_of_fill": gain / fill,
    }


def _on_real_data(
    setting: Setting,
    source: str,
    format: str,
    shape: str,
    sequence_length: int,
    micro_batch: int,
    *,
    packing: bool,
) -> RunConfig:
    model = {key: value for key, value in model_of(shape, setting).items() if key != "vocab_size"}
    length = 128 if setting.tiny else sequence_length
    config = run_config(
        setting, model, precision="bf16", compile="auto", micro_batch_size=micro_batch
    )
    data = {
        "source": source,
        "format": format,
        "sequence_length": length,
        "packing": packing,
        "too_long": "truncate",
        "tokenizer": {"train": "bpe", "vocab_size": 512 if setting.tiny else 32768},
    }
    settings = config.model_dump(exclude_unset=True, mode="json")
    return RunConfig.model_validate(settings | {"data": data})


def _real_tokens(config: RunConfig, setting: Setting) -> tuple[float, float]:
    """Tokens with loss per second, and their share of a sequence."""
    sequences = 32 if setting.tiny else SEQUENCES
    with prepare_sample(config, sequences) as data, ranks_of(config) as ranks:
        model = build_sharded_model(config, data.tokenizer, ranks)
        fill_weights(config, model)
        training = config.training
        optimizer = ShardedAdamW(model.root, training.optimizer, training.gradient_clipping, ranks)
        shape = batch_shape(config, ranks.num_data_ranks)
        assert training.steps is not None
        trainer = Trainer(config, ranks, model, optimizer, data.train, shape, training.steps)
        windows: list[StepWindow] = []

        def step(number: int) -> None:
            windows.append(StepWindow(0.0))
            trainer.train_step(number, windows[-1])

        seconds = timed(step, setting)
        measured = windows[-len(seconds) :]
        tokens = sum(window.valid_tokens for window in measured)
        places = sum(window.sequences for window in measured) * config.data.sequence_length
        return tokens / sum(seconds), tokens / places


def stall_of_a_save(
    setting: Setting, shape: str, sequence_length: int, micro_batch: int
) -> dict[str, Any]:
    """How much longer a step takes with an asynchronous save before it, by events on the stream
    that computes; on a CPU by the clock."""
    compile_quickly(setting)
    config = run_config(
        setting,
        model_of(shape, setting),
        sequence_length=sequence_length,
        precision="bf16",
        compile="auto",
        micro_batch_size=micro_batch,
        activation_checkpointing="auto",
    )
    with ranks_of(config) as ranks:
        trainer, _ = assembled(config, ranks)
        state = checkpoint_state(trainer.optimizer, ranks)
        checkpointer = Checkpointer(
            Path(setting.directory) / "checkpoints",
            keep=1,
            keep_best=False,
            asynchronous=True,
            identity={"name": "stall"},
            on_event=lambda *_, **__: None,
        )
        checkpointer.prepare(state)
        usual = timed(lambda step: trainer.train_step(step, StepWindow(0.0)), setting)
        median = statistics.median(usual)
        stalls = []
        for step in range(SAVES):
            checkpointer.wait()
            mark = _Interval(ranks.device)
            checkpointer.save(step + 1, state, metadata={})
            trainer.train_step(step, StepWindow(0.0))
            stalls.append(mark.seconds() - median)
        saved = checkpointer.wait()
        checkpointer.close()
    assert saved, "the last save has failed"
    shards = trainer.optimizer.shards
    nbytes = 3 * sum(each.local.nbytes for each in shards)
    return {
        "step_seconds": median,
        "stall_seconds": statistics.median(stalls),
        "longest_stall_seconds": max(stalls),
        "saved_gb": nbytes / 1e9,
    }


class _Interval:
    """The time from its making to the call of `seconds`, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.began = self._now()

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """Waits for the device."""
        ended = self._now()
        if not self.on_gpu:
            return float(ended - self.began)
        ended.synchronize()
        return float(self.began.elapsed_time(ended)) / 1e3
