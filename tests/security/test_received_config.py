"""A run directory from somebody else, with addresses, hub ids and variables in its config.

No command fetches or fills in any, and the commands of its owner still work.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tests.integration.forked_start import COMPUTING, forked
from tests.security.called_commands import Called, call_commands
from tests.unit.data.object_server import ObjectServer, serving

from drillyard.cli import main as cli

NAMES = (
    "ANTHROPIC_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "DATABASE_URL",
    "GITHUB_TOKEN",
    "HF_TOKEN",
    "KAGGLE_KEY",
    "NPM_TOKEN",
    "OPENAI_API_KEY",
    "SLURM_JWT",
    "WANDB_API_KEY",
)
VALUES = {name: f"recognisable{number:02}{name.lower()}" for number, name in enumerate(NAMES)}
CONFIG = """
name: received
output: runs
model:
  config: {{architecture: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2}}
  init: random
data:
  source: "{url}/docs.jsonl?{query}"
  sequence_length: 32
  tokenizer: {{train: bpe, vocab_size: 300}}
  held_out: {{fraction: 0.2}}
training: {{steps: 4, device: cpu, precision: fp32, micro_batch_size: 1,
           optimizer: {{learning_rate: 1.0e-3}}}}
checkpoint: {{every_steps: 2, keep: 10}}
logging: {{every_steps: 1, tensorboard: false}}
"""
QUERY = "&".join(f"{name}=${{env:{name}}}" for name in NAMES)
FROM_ADDRESS = {
    "data preview": "RUN/run.yaml",
    "data build": "RUN/run.yaml",
    "data show": "RUN --step 1",
    "train": "RUN/run.yaml --replay 3",
    "eval": "RUN/final",
    "bench": "RUN/run.yaml --steps 1",
    "chaos": "RUN/run.yaml --faults kill --count 1",
}
"""Commands that need the data of a received run, which are nowhere but at its address."""
WITHOUT_DATA = {
    "init": "RUN",
    "schema": "run",
    "hardware": "h100",
    "estimate": "RUN/run.yaml --accelerator h100 --num-gpus 1 --calibrate RUN",
    "cluster plan": "cluster.yaml",
    "cluster leaks": "cluster.yaml",
    "cluster status": "cluster.yaml",
    "cluster up": "cluster.yaml",
    "cluster down": "cluster.yaml",
    "accept": "cluster.yaml --dry-run",
    "image build": "--builder docker --tag r.io/x/y --file RUN/run.yaml --dry-run",
    "image push": "--builder docker --tag r.io/x/y:1 --write cluster.yaml --dry-run",
    "image logs": "received --write cluster.yaml",
    "launch": "RUN/run.yaml --cluster cluster.yaml --dry-run",
    "runs list": "--cluster cluster.yaml",
    "runs status": "received --cluster cluster.yaml",
    "runs logs": "received --cluster cluster.yaml",
    "runs watch": "received --cluster cluster.yaml",
    "runs wait": "received --cluster cluster.yaml",
    "runs cancel": "received --cluster cluster.yaml",
    "runs resume": "received --cluster cluster.yaml",
    "runs artifacts": "received --cluster cluster.yaml",
    "runs forget": "received --cluster cluster.yaml",
    "generate": "RUN --prompt a --max-new-tokens 2",
    "chat": "RUN/checkpoints/step-00000004 --prompt a --max-new-tokens 2",
    "export": "RUN/checkpoints/step-00000004 exported",
    "checkpoint list": "RUN",
    "checkpoint verify": "RUN",
    "checkpoint prune": "RUN --keep 9",
    "watch": "RUN",
    "report": "RUN",
    "metrics": "RUN",
    "diff": "RUN RUN",
}


@dataclass
class RecordingServer(ObjectServer):
    """An object server that records each request: its method, its target and its token."""

    requests: list[str] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        token = handler.headers.get("Authorization", "")
        self.requests.append(f"{handler.command} {handler.path} {token}")
        super().answer(handler)


@dataclass(frozen=True)
class Owner:
    """Where a run was trained from an address, by who wrote its config."""

    directory: Path
    server: RecordingServer
    environment: dict[str, str]

    def call(self, *commands: str, directory: Path | None = None) -> list[Called]:
        """The results of commands, in the owner's directory or in another."""
        self.server.requests.clear()
        words = [command.split() for command in commands]
        return call_commands(words, directory or self.directory, self.environment)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    directory = tmp_path_factory.mktemp("owner")
    rows = [{"text": f"document {n} says {n * n} and {n**3} words " * 3} for n in range(60)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with (
        serving({"/docs.jsonl": content}, RecordingServer) as server,
        pytest.MonkeyPatch.context() as patched,
        forked(COMPUTING),
    ):
        environment = {
            **VALUES,
            "DRILLYARD_CACHE": str(directory / "cache"),
            "HF_HOME": str(directory / "hub"),
            "HF_ENDPOINT": server.url,
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "XDG_STATE_HOME": str(directory / "state"),
        }
        for name, value in environment.items():
            patched.setenv(name, value)
        (directory / "docs.jsonl").write_bytes(content)
        (directory / "run.yaml").write_text(CONFIG.format(url=server.url, query=QUERY))
        (directory / "cluster.yaml").write_text(
            "name: here\nplatform: local\nprocesses_per_node: 1\n"
        )
        trained = Owner(directory, server, environment)
        (done,) = trained.call("train run.yaml")
        assert done.code == 0, done.output
        yield trained


@pytest.fixture
def reader(owner: Owner, tmp_path: Path) -> Owner:
    """Who received the run: another directory, and caches without the run's data."""
    shutil.copytree(owner.directory / "runs" / "received", tmp_path / "runs" / "received")
    shutil.copy(owner.directory / "cluster.yaml", tmp_path)
    shutil.copy(owner.directory / "docs.jsonl", tmp_path)
    environment = {**owner.environment, "DRILLYARD_CACHE": str(tmp_path / "cache")}
    return Owner(tmp_path, owner.server, environment)


def all_commands() -> set[str]:
    """Every command of `drillyard --help`, with the commands of its groups."""
    found = set()
    for name in cli.COMMANDS:
        inner = getattr(cli.load_command(name), "commands", None)
        found |= {name} if inner is None else {f"{name} {each}" for each in inner}
    return found


def contains_a_value(text: str) -> bool:
    return any(value in text for value in VALUES.values())


def files_with_a_value(directory: Path) -> list[Path]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return [path for path in files if contains_a_value(path.read_bytes().decode("latin-1"))]


def test_the_owner_works_on_his_run_without_a_flag(owner: Owner) -> None:
    """From the cache, without a request; only his own config is asked for its data."""
    commands = ("data show runs/received --step 1", "eval runs/received/final")
    results = owner.call(*commands, "export runs/received/checkpoints/step-00000004 exported")
    assert [result.code for result in results] == [0, 0, 0], results
    assert owner.server.requests == []
    replayed, built = owner.call("train run.yaml --replay 3", "data build run.yaml")
    assert (replayed.code, built.code) == (0, 0), replayed.output
    assert all(VALUES[name] in owner.server.requests[0] for name in NAMES)
    assert files_with_a_value(owner.directory) == []


def test_every_command_leaves_a_received_run_without_a_request_or_a_value(reader: Owner) -> None:
    lines = {**FROM_ADDRESS, **WITHOUT_DATA}
    assert set(lines) == all_commands()
    commands = [f"{name} {rest.replace('RUN', 'runs/received')}" for name, rest in lines.items()]
    results = dict(zip(lines, reader.call(*commands), strict=True))

    assert reader.server.requests == []
    for name, result in results.items():
        own = reader.server.url.removeprefix("http://")
        assert own not in result.contacted, name
        assert not contains_a_value(result.output + " ".join(result.started)), name
        assert result.code != 70, result.output
    for name in FROM_ADDRESS:
        words = results[name].output
        assert results[name].code == 2, words
        assert f"{reader.server.url}/docs.jsonl," in words and "docs.jsonl?" not in words
        assert all(variable in words for variable in NAMES), words
        assert "--trust-config" in words
    assert files_with_a_value(reader.directory) == []
    done = (
        "generate",
        "chat",
        "export",
        "launch",
        "runs list",
        "watch",
        "report",
        "metrics",
        "diff",
        "checkpoint list",
    )
    assert [(name, results[name].code) for name in done] == [(name, 0) for name in done]


def test_a_received_run_yaml_alone_sends_nothing(reader: Owner) -> None:
    """Without the other files of its run it is recognised by its spelled out defaults."""
    (reader.directory / "alone").mkdir()
    shutil.copy(reader.directory / "runs/received/run.yaml", reader.directory / "alone")
    lines = ("data preview", "data build", "chaos --faults kill --count 1", "train --replay 3")
    results = reader.call(*(f"{line} alone/run.yaml" for line in lines))
    for line, result in zip(lines, results, strict=True):
        assert result.code == 2, (line, result.output)
        assert all(name in result.output for name in NAMES), (line, result.output)
    assert reader.server.requests == []


def test_the_flags_that_a_refusal_names_work(reader: Owner) -> None:
    run = "runs/received"
    commands = [
        f"eval {run}/final --data docs.jsonl",
        f"data show {run} --step 1 --trust-config",
        f"data preview {run}/run.yaml --trust-config",
        f"data build {run}/run.yaml --trust-config",
        f"train {run}/run.yaml --replay 3 --trust-config",
        f"eval {run}/final --trust-config",
        f"export {run}/checkpoints/step-00000004 exported --trust-config",
    ]
    for_data, *trusting = reader.call(*commands)

    assert for_data.code == 0, for_data.output
    assert any(contains_a_value(request) for request in reader.server.requests)
    for result in trusting:
        assert result.code == 0, result.output
        assert f"{reader.server.url}/docs.jsonl," in result.output
        assert all(name in result.output for name in NAMES)
        assert not contains_a_value(result.output)
    assert files_with_a_value(reader.directory) == []


def test_a_trusted_config_prints_what_it_names_before_a_campaign_begins(reader: Owner) -> None:
    (result,) = reader.call(
        "chaos runs/received/run.yaml --trust-config --faults kill --count 1 --directory docs.jsonl"
    )
    assert reader.server.url in result.output and result.code != 0


Change = Callable[[dict[str, Any]], object]
SOURCES = {
    "https": "https://host.invalid/docs.jsonl",
    "s3": "s3://bucket/docs.jsonl",
    "gs": "gs://bucket/docs.jsonl",
    "hf": "hf://datasets/attacker/set/docs.jsonl",
    "hub": "attacker/set",
    "path": "${env:HF_TOKEN}/docs.jsonl",
}


def changed(reader: Owner, change: Change, directory: str) -> Path:
    """A copy of the received run with another run.yaml."""
    run = reader.directory / directory
    shutil.copytree(reader.directory / "runs" / "received", run)
    config = yaml.safe_load((run / "run.yaml").read_text())
    change(config)
    (run / "run.yaml").write_text(yaml.safe_dump(config))
    return run


def test_no_kind_of_address_in_a_received_config_is_asked(reader: Owner) -> None:
    commands, named = [], []
    for kind, path in SOURCES.items():
        changed(reader, lambda config, path=path: config["data"].update(source=path), kind)
        changed(
            reader,
            lambda config, path=path: config["data"].update(
                source="docs.jsonl", held_out={"source": path}
            ),
            f"{kind}-held-out",
        )
        commands += [f"data show {kind} --step 1", f"eval {kind}-held-out/final"]
        named += [path, path]
        (reader.directory / f"{kind}-held-out" / "data.json").unlink()
    changed(reader, lambda c: c["data"].update(cache_directory="${env:HF_TOKEN}/c"), "cache")
    changed(
        reader, lambda c: c["data"].update(tokenizer="attacker/words", source="docs.jsonl"), "t"
    )
    changed(reader, lambda config: config.update(output="${env:HF_TOKEN}"), "output")
    commands += [
        "data show cache --step 1",
        "data preview t/run.yaml",
        "train t/run.yaml --dry-run",
    ]
    commands += ["train output/run.yaml --replay 3"]
    named += ["HF_TOKEN", "attacker/words", "attacker/words", "HF_TOKEN"]

    for command, name, result in zip(commands, named, reader.call(*commands), strict=True):
        assert result.code == 2 and name in result.output, (command, result.output)
        assert result.contacted == [], command
        assert "--trust-config" in result.output
    assert reader.server.requests == []


def test_no_model_that_a_run_or_an_adapter_names_is_fetched(reader: Owner) -> None:
    """Hub ids would be fetched with the reader's token; a missing tokenizer/ is no hub id."""
    pretrained = {"id": "attacker/model", "config": None, "init": "pretrained"}
    changed(reader, lambda config: config["model"].update(pretrained), "hub")
    changed(reader, lambda c: c["model"].update(pretrained, id="${env:HF_TOKEN}/model"), "variable")
    adapters = changed(
        reader, lambda config: config["model"].update(pretrained, lora={"rank": 2}), "adapters"
    )
    (adapters / "base").mkdir()
    record = {"version": 1, "id": "attacker/model", "path": "attacker/base", "dtypes": {}}
    (adapters / "base" / "base.json").write_text(json.dumps(record))
    shutil.rmtree(changed(reader, lambda config: None, "words") / "tokenizer")
    write_adapter(changed(reader, lambda config: None, "adapter") / "final", "attacker/base")
    step = "checkpoints/step-00000004"
    named = {
        f"export hub/{step} exported": "attacker/model",
        f"eval hub/{step} --data docs.jsonl": "attacker/model",
        f"export variable/{step} exported": "HF_TOKEN",
        f"export adapters/{step} exported --merge": "attacker/base",
        f"eval adapters/{step} --data docs.jsonl": "attacker/base",
        "eval adapter/final --data docs.jsonl": "attacker/base",
        f"generate hub/{step} --prompt a": "attacker/model",
        f"generate adapters/{step} --prompt a": "attacker/base",
        "generate adapter/final --prompt a": "attacker/base",
        f"export words/{step} exported": "words/tokenizer: no such directory",
        f"export words/{step} exported --trust-config": "words/tokenizer: no such directory",
    }
    for (command, name), result in zip(named.items(), reader.call(*named), strict=True):
        assert result.code == 2 and name in result.output, (command, result.output)
        assert [each for each in result.contacted if "127.0.0.1" not in each] == [], command
    assert reader.server.requests == []
    assert not (reader.directory / "exported").exists()

    reader.call(f"export hub/{step} exported --trust-config")
    assert any(VALUES["HF_TOKEN"] in request for request in reader.server.requests)


def write_adapter(final: Path, base: str) -> None:
    """An adapter on `base` in the place of a model."""
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    shapes = {f"{layer}.lora_A.weight": (2, 16), f"{layer}.lora_B.weight": (32, 2)}
    weights = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
    save_file(weights, final / "adapter_model.safetensors", {"format": "pt"})
    described = {"peft_type": "LORA", "r": 2, "target_modules": ["up_proj"]}
    described["base_model_name_or_path"] = base
    (final / "adapter_config.json").write_text(json.dumps(described))
    (final / "config.json").unlink()
    (final / "model.safetensors").unlink()


def test_what_is_in_the_local_hub_cache_is_used_without_a_request(reader: Owner) -> None:
    cached = Path(reader.environment["HF_HOME"], "hub", "models--owner--model")
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(reader.directory / "runs/received/final", cached / "snapshots" / ("0" * 40))
    write_adapter(changed(reader, lambda config: None, "adapter") / "final", "owner/model")
    changed(
        reader, lambda c: c["data"].update(tokenizer="owner/model", source="docs.jsonl"), "words"
    )
    for result in reader.call(
        "eval adapter/final --data docs.jsonl", "data preview words/run.yaml"
    ):
        assert result.code == 0, result.output
    assert reader.server.requests == []
