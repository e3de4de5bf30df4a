"""What the user writes about a run that is not Drillyard's own training: `workload:` in a run config.

NeMo, Megatron-LM, MaxText, torchtune, an NCCL test: anything that is started by a command on every node. The plan, the
network stack, the queue, restarts and measurement are the same as for a training run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from drillyard.config.run import RunConfig
from drillyard.config.strict_model import StrictModel

EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class WorkloadConfig(StrictModel):
    """A command that every node runs, and what it needs there."""

    command: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="Program and arguments, each as one item: [python, pretrain_gpt.py, --tp, '8']. In them "
        "{node_rank}, {nodes}, {processes_per_node}, {master_addr}, {master_port} and {run_directory} are replaced.",
    )
    launcher_file: str | None = Field(
        default=None, description="Instead of `command`: a shell script of this machine, carried along and run by bash."
    )
    per: Literal["node", "gpu"] = Field(
        default="node",
        description="`node`: the command is started once on every node; `gpu`: torchrun starts it once per GPU, with "
        "static rendezvous.",
    )
    arguments: list[str] = Field(default=[], description="Further arguments of `command` or `launcher_file`.")
    image: str | None = Field(default=None, description="Container image; default: the cluster's `image`.")
    files: dict[str, str] = Field(
        default={},
        description="Files of this machine that the nodes need: {configs/nemo.yaml: path/here.yaml}, below the run's "
        "launch directory on the cluster, which is {launch_directory}/files.",
    )
    environment: dict[EnvironmentName, str] = Field(default={}, description="Environment variables of the command.")
    working_directory: str | None = Field(
        default=None, description="Where the command is started; default: the project's directory on the nodes."
    )
    checkpoints: str | None = Field(
        default=None,
        description="Pattern of files that appear with each checkpoint, below the run directory: "
        "checkpoints/*/metadata.json. Tells whether a run that was stopped has got further.",
    )


class WorkloadRunConfig(StrictModel):
    """A run config with `workload:` instead of model, data and training."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")] = Field(
        description=RunConfig.model_fields["name"].description, examples=["my-run"]
    )
    output: str = Field(default="runs", description=RunConfig.model_fields["output"].description)
    processes_per_node: PositiveInt | None = Field(
        default=None, description="Processes per node that the workload runs; default: the accelerators of the machine."
    )
    workload: WorkloadConfig = Field(examples=[{"command": ["python", "train.py"]}])
