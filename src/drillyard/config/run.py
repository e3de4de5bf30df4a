"""`run.yaml` as strict models: a training run, or a `workload`, the command of any other program.

Each field's description gives its meaning and unit; the JSON Schema, the starter of `drillyard
init` and error messages use it. The sections `model` and `data` have files of their own
(`run_model.py`, `run_data.py`). `run_checks.py` checks relations between fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from drillyard.allowed_values import Allowed
from drillyard.config.run_data import DataConfig
from drillyard.config.run_model import ModelConfig
from drillyard.config.strict_model import Count, FileMark, Fraction, StrictModel, VariableName

RunName = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"),
    Allowed("at most 63 lower case letters, digits, '.', '_' and '-'", is_name=True),
]


class OptimizerConfig(StrictModel):
    """The optimizer and its constants."""

    name: Literal["adamw", "adamw-8bit"] = Field(
        default="adamw",
        description=(
            "Optimizer; `adamw-8bit`: moments of 2 instead of 8 bytes a parameter, by torchao, in"
            " slower steps."
        ),
    )
    learning_rate: PositiveFloat = Field(description="Peak learning rate.", examples=[2.0e-5])
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moment."
    )
    epsilon: PositiveFloat = Field(
        default=1e-8, description="Added to the root of the second moment."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled weight decay; not on norms and biases."
    )


class ScheduleConfig(StrictModel):
    """Learning rate over steps: linear warmup, then one of four shapes."""

    name: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = Field(
        default="cosine", description="Shape after warmup."
    )
    warmup_steps: Count = Field(default=0, description="Steps of linear warmup from 0 to the peak.")
    final_fraction: Fraction = Field(
        default=0.0, description="Learning rate at the end, as a fraction of the peak."
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description=(
            "Steps of the final decay of warmup-stable-decay; default: a fifth of all steps."
        ),
    )


class TrainingConfig(StrictModel):
    """Length, batch size, precision and optimizer of training."""

    steps: PositiveInt | None = Field(
        default=None, description="Optimizer steps; give this or `epochs`."
    )
    epochs: PositiveFloat | None = Field(
        default=None,
        description=(
            "Passes over the data, each ending with a batch of what is left; give this or `steps`."
        ),
    )
    micro_batch_size: Literal["auto"] | PositiveInt = Field(
        default=1,
        description=(
            "Sequences per rank in one forward/backward; `auto`, with `global_batch_size`: what is"
            " estimated to fit with the least recomputation, up to 16,384 tokens."
        ),
    )
    gradient_accumulation: PositiveInt | None = Field(
        default=None,
        description="Micro-batches per step; default 1, or what `global_batch_size` asks for.",
    )
    global_batch_size: PositiveInt | None = Field(
        default=None,
        description=(
            "Sequences per step over all ranks; fixes the batch whatever the number of ranks."
        ),
    )
    precision: Literal["bf16", "fp8", "fp32", "fp64"] = Field(
        default="bf16",
        description=(
            "Compute precision; master weights and reductions are fp32 under bf16. `fp8`: bf16 with"
            " the products of linear layers in 8 bits, by torchao."
        ),
    )
    fp8_scaling: Literal["tensorwise", "rowwise"] | None = Field(
        default=None,
        description=(
            "Scales of operands under `precision: fp8`: one each, or one for each row; default:"
            " `tensorwise`, which is faster."
        ),
    )
    optimizer: OptimizerConfig = Field(
        description="Optimizer and its constants.", examples=[{"learning_rate": 2.0e-5}]
    )
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(), description="Learning rate over steps."
    )
    gradient_clipping: PositiveFloat | None = Field(
        default=1.0, description="Largest global gradient norm; null: no clipping."
    )
    activation_checkpointing: Literal["auto", "none", "memory-budget", "selective", "full"] = Field(
        default="auto",
        description=(
            "What is recomputed in backward instead of stored; `memory-budget`: what compiled"
            " blocks can compute again without their products; `auto`: the least that is estimated"
            " to fit."
        ),
    )
    compile: Literal["auto"] | bool = Field(
        default="auto", description="torch.compile per block; `auto`: on GPUs."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where ranks compute; `auto`: GPUs if there are any."
    )
    seed: Count = Field(default=0, description="Seed of weights, data order and dropout.")
    deterministic: bool = Field(
        default=False, description="Only deterministic kernels, on GPUs at some cost in speed."
    )
    threads_per_rank: PositiveInt | None = Field(
        default=None,
        description=(
            "CPU threads per rank; default: the host's cores shared among its ranks. Fixed and"
            " recorded."
        ),
    )
    loss_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description=(
            "Tokens whose logits are in memory at once; default: at most a quarter of a micro-batch"
            " and 2048."
        ),
    )
    max_nonfinite_steps: PositiveInt = Field(
        default=10,
        description=(
            "Consecutive steps with a non-finite loss or gradient after which the run fails."
        ),
    )


class ParallelismConfig(StrictModel):
    """Distribution of the model over ranks. shard x replicate = number of ranks."""

    shard: Literal["auto"] | PositiveInt = Field(
        default="auto",
        description=(
            "Ranks that share one copy of the weights (FSDP2); `auto`: the number of ranks over"
            " `replicate`."
        ),
    )
    replicate: PositiveInt = Field(
        default=1, description="Copies of the sharded model (HSDP when over 1)."
    )
    tensor: PositiveInt = Field(
        default=1, description="Tensor-parallel ranks; training accepts 1 alone."
    )
    context: PositiveInt = Field(
        default=1, description="Context-parallel ranks; training accepts 1 alone."
    )


class CheckpointConfig(StrictModel):
    """Times of saves, checkpoints to keep, and the checkpoint that a start resumes from."""

    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between checkpoints; null: only at the end."
    )
    keep: PositiveInt = Field(default=3, description="Newest checkpoints kept.")
    keep_best: bool = Field(
        default=True, description="Keep the checkpoint with the lowest held-out loss besides."
    )
    asynchronous: bool = Field(default=True, description="Write while training goes on.")
    resume: Annotated[str, FileMark(may_be_name=True, words=("auto", "never"))] = Field(
        default="auto",
        description=(
            "Where a run starts. `auto`: at the newest complete checkpoint of its directory;"
            " `never`: at step 0, and a directory with checkpoints is refused; or the path of a"
            " checkpoint. A restart by the supervisor or launcher continues from the run's own"
            " checkpoints."
        ),
    )


class EvaluationConfig(StrictModel):
    """Metrics on held-out data, and when to compute them."""

    every_steps: PositiveInt | None = Field(
        default=None,
        description="Steps between evaluations; null: only at the end, if there is held-out data.",
    )
    at_start: bool = Field(default=False, description="Evaluate before the first step too.")
    metrics: list[Literal["loss", "sql-execution", "function-call"]] = Field(
        default=["loss"], description="What is measured."
    )
    parts: list[str] | None = Field(
        default=None,
        description=(
            "Names of the held-out parts to evaluate, such as train/held_out for what is held out"
            " of train.jsonl; default: all (of a built-in source its test parts)."
        ),
    )
    max_sequences: PositiveInt | None = Field(
        default=None, description="At most this many held-out sequences per source for the loss."
    )
    samples: PositiveInt = Field(
        default=200, description="Questions per held-out split for metrics that generate text."
    )
    batch_size: PositiveInt | None = Field(
        default=None,
        description=(
            "Sequences or prompts per rank in one forward; default: training.micro_batch_size."
        ),
    )
    max_new_tokens: PositiveInt = Field(default=128, description="Longest generated answer.")
    required: bool = Field(
        default=False,
        description=(
            "Exit with code 1 where the evaluation of the finished model lacks a metric; the model"
            " is exported in any case."
        ),
    )


class LoggingConfig(StrictModel):
    """Metrics of training: steps between logged ones, and the trackers that receive them."""

    every_steps: PositiveInt = Field(default=1, description="Steps between logged steps.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    wandb: dict[str, Any] | None = Field(
        default=None, description="Weights & Biases: arguments of wandb.init (extra `wandb`)."
    )
    mlflow: dict[str, Any] | None = Field(
        default=None, description="MLflow: {tracking_uri, experiment} (extra `mlflow`)."
    )


class TimeoutsConfig(StrictModel):
    """Longest times without progress: each limit must be longer than the one before it."""

    collective_seconds: PositiveFloat | None = Field(
        default=None,
        description=(
            "A collective that has not ended after this many seconds fails on all ranks that wait"
            " in it; default: 600, or half of `watchdog_seconds` where that is less."
        ),
    )
    watchdog_seconds: Annotated[float, Field(ge=0)] = Field(
        default=1800.0,
        description=(
            "An attempt whose ranks make no progress for this many seconds (no step, no work in a"
            " phase without steps) is stopped, its stacks are written to logs/, and it restarts; 0:"
            " never. Also limits a save. Ranks that another program starts, such as torchrun, have"
            " no watchdog."
        ),
    )
    launcher_grace_seconds: PositiveFloat | None = Field(
        default=None,
        description=(
            "Seconds without progress after which the scheduler or program that started the run"
            " kills it, to check the watchdog against; null: it does not watch."
        ),
    )

    @property
    def collective(self) -> float:
        """Seconds after which a collective fails, the default resolved."""
        if self.collective_seconds is not None:
            return self.collective_seconds
        return min(600.0, self.watchdog_seconds / 2) if self.watchdog_seconds else 600.0


class RunConfig(StrictModel):
    """A training run: what to train. `cluster.yaml` says where."""

    name: RunName = Field(
        description="Name of the run: at most 63 lower case letters, digits, '.', '_' and '-'.",
        examples=["my-run"],
    )
    output: str = Field(
        default="runs",
        description=(
            "Directory that holds run directories; this run's is <output>/<name>. A relative one is"
            " below the working directory; of a launched run, below the cluster's storage.directory"
            " or project directory."
        ),
    )
    model: ModelConfig = Field(examples=[{"id": "Qwen/Qwen3-0.6B"}])
    data: DataConfig = Field(examples=[{"source": "documents.jsonl", "sequence_length": 1024}])
    training: TrainingConfig = Field(
        examples=[{"steps": 1000, "optimizer": {"learning_rate": 2.0e-5}}]
    )
    parallelism: ParallelismConfig = ParallelismConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()


class WorkloadConfig(StrictModel):
    """A command that every node runs, and what it needs there."""

    command: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description=(
            "Program and arguments, each as one item: [python, pretrain_gpt.py, --tp, '8']. In them"
            " {node_rank}, {nodes}, {processes_per_node}, {master_addr}, {master_port} and"
            " {run_directory} are replaced."
        ),
    )
    launcher_file: Annotated[str, FileMark()] | None = Field(
        default=None,
        description=(
            "Instead of `command`: a shell script of this machine, carried along and run by bash."
        ),
    )
    per: Literal["node", "gpu"] = Field(
        default="node",
        description=(
            "`node`: the command is started once on every node; `gpu`: torchrun starts it once per"
            " GPU, with static rendezvous."
        ),
    )
    arguments: list[str] = Field(
        default=[], description="Further arguments of `command` or `launcher_file`."
    )
    image: str | None = Field(
        default=None, description="Container image; default: the cluster's `image`."
    )
    files: Annotated[dict[str, str], FileMark()] = Field(
        default={},
        description=(
            "Files of this machine that the nodes need: {configs/nemo.yaml: nemo.yaml}, below"
            " the run's launch directory on the cluster, which is {launch_directory}/files."
        ),
    )
    environment: dict[VariableName, str] = Field(
        default={}, description="Environment variables of the command."
    )
    working_directory: str | None = Field(
        default=None,
        description="Where the command is started; default: the project's directory on the nodes.",
    )
    checkpoints: str | None = Field(
        default=None,
        description=(
            "Pattern of files that appear with each checkpoint, below the run directory: "
            "checkpoints/*/metadata.json. New ones show that a stopped run has made progress."
        ),
    )


class WorkloadRunConfig(StrictModel):
    """A run config with `workload:` instead of model, data and training."""

    name: RunName = Field(
        description=RunConfig.model_fields["name"].description, examples=["my-run"]
    )
    output: str = Field(default="runs", description=RunConfig.model_fields["output"].description)
    processes_per_node: PositiveInt | None = Field(
        default=None,
        description=(
            "Processes per node that the workload runs; default: the accelerators of the machine."
        ),
    )
    workload: WorkloadConfig = Field(examples=[{"command": ["python", "train.py"]}])
