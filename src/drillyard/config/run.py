"""What the user writes about a training run: `run.yaml` as typed, strict models.

Every field carries its meaning and unit in its description, so the JSON Schema, the commented
starter of `drillyard init` and the reference documentation all come from here. Relations between
fields (a batch that does not divide, LoRA on random weights, ...) are judged in `checks.py`, several at once;
this file only says what each field may hold on its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from drillyard.config.strict_model import StrictModel

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]


class LoraConfig(StrictModel):
    """Low-rank adapters on a frozen pretrained model."""

    rank: PositiveInt = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(
        default=32.0, description="Scale of the adapters; the update is multiplied by alpha/rank."
    )
    dropout: Fraction = Field(default=0.0, description="Dropout probability on the adapters' input.")
    target_modules: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj"], description="Names of the linear layers that get an adapter."
    )


class ModelConfig(StrictModel):
    """Which causal language model, and where its weights come from."""

    id: str | None = Field(default=None, description="Hugging Face id or local directory of a model.")
    config: dict[str, Any] | None = Field(
        default=None,
        description="Inline model config instead of `id`: `architecture` (a transformers model_type such as llama) "
        "and its own fields.",
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="`pretrained` reads the weights of `id`; `random` trains from scratch."
    )
    lora: LoraConfig | None = Field(default=None, description="Train low-rank adapters instead of all weights.")
    attention: Literal["auto", "sdpa", "eager", "varlen", "flex"] = Field(
        default="auto", description="Attention kernel; `auto` takes the fastest that the device can train with."
    )


class SourceConfig(StrictModel):
    """One source of documents, and its share of the training mixture."""

    path: str = Field(
        description="File, directory, Hugging Face data set id, or builtin:text-to-sql / builtin:python-stdlib.",
        examples=["documents.jsonl"],
    )
    weight: PositiveFloat = Field(
        default=1.0, description="Share of training sequences drawn from this source, relative to the others."
    )
    name: str | None = Field(default=None, description="Name in metrics; default: the last part of `path`.")
    split: str = Field(default="train", description="Split of a Hugging Face data set.")
    options: dict[str, Any] = Field(
        default={}, description="Settings of a built-in source, such as {examples: 20000, seed: 0}."
    )


class TrainTokenizer(StrictModel):
    """A tokenizer trained from the training documents."""

    train: Literal["bpe"] = Field(description="Algorithm: byte-level BPE.", examples=["bpe"])
    vocab_size: Annotated[int, Field(ge=260)] = Field(
        description="Entries of the vocabulary, special tokens included.", examples=[8192]
    )


class HeldOutConfig(StrictModel):
    """Documents kept from training, on which evaluation is done."""

    source: str | SourceConfig | list[str | SourceConfig] | None = Field(
        default=None,
        description="A source of its own for held-out documents; otherwise they are taken from `data.source`.",
    )
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="Share of each source's documents that is held out, chosen by a hash of the document."
    )
    split_by: str | None = Field(
        default=None,
        description="Column whose values are held out as a whole (such as db_id), so that no value is in both parts.",
    )


class DataConfig(StrictModel):
    """What is read, how it becomes tokens, and how tokens become sequences."""

    source: str | SourceConfig | list[str | SourceConfig] = Field(
        description="A source, or several with weights: [{path: a.jsonl, weight: 2}, {path: b.jsonl}].",
        examples=["documents.jsonl"],
    )
    format: Literal["text", "prompt-completion", "chat", "text-to-sql"] = Field(
        default="text",
        description="How a row becomes a document. Of a chat, a null in messages or tools counts as absent (in Parquet "
        "the two are the same); write a call's arguments as JSON text to train a null.",
    )
    columns: dict[str, str] = Field(
        default={},
        description="Column names where they differ from the format's own: {prompt: question, completion: answer}.",
    )
    sequence_length: Annotated[int, Field(ge=8)] = Field(description="Tokens per training sequence.", examples=[1024])
    packing: bool = Field(
        default=True, description="Pack several documents into one sequence; attention never crosses documents."
    )
    loss_on: Literal["completion", "last", "all"] | None = Field(
        default=None,
        description="Tokens that carry loss: `completion` (of a chat every assistant turn, each as it is "
        "rendered when nothing follows), `last` (of a chat the last assistant turn only) or `all`; default: `all` for "
        "text, `completion` for the others.",
    )
    too_long: Literal["truncate", "split", "drop", "error"] | None = Field(
        default=None,
        description="What is done with a document longer than a sequence; default: `split` for text, "
        "`drop` for the others.",
    )
    tokenizer: str | TrainTokenizer | None = Field(
        default=None, description="Tokenizer: null takes the model's, a path or id, or {train: bpe, vocab_size: N}."
    )
    held_out: HeldOutConfig = Field(default=HeldOutConfig(), description="Documents kept for evaluation.")
    cache_directory: str | None = Field(
        default=None, description="Where tokenised data is kept; default: $DRILLYARD_CACHE or ~/.cache/drillyard."
    )


class OptimizerConfig(StrictModel):
    """The optimizer and its constants."""

    name: Literal["adamw"] = Field(default="adamw", description="Optimizer.")
    learning_rate: PositiveFloat = Field(description="Peak learning rate.", examples=[2.0e-5])
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moment."
    )
    epsilon: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled weight decay; not on norms and biases."
    )


class ScheduleConfig(StrictModel):
    """Learning rate over steps: linear warmup, then one of four shapes."""

    name: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = Field(
        default="cosine", description="Shape after warmup."
    )
    warmup_steps: Count = Field(default=0, description="Steps of linear warmup from 0 to the peak.")
    final_fraction: Fraction = Field(default=0.0, description="Learning rate at the end, as a fraction of the peak.")
    decay_steps: PositiveInt | None = Field(
        default=None, description="Steps of the final decay of warmup-stable-decay; default: a fifth of all steps."
    )


class TrainingConfig(StrictModel):
    """How long, how large a batch, in which precision, and with which optimizer."""

    steps: PositiveInt | None = Field(default=None, description="Optimizer steps; give this or `epochs`.")
    epochs: PositiveFloat | None = Field(
        default=None,
        description="Passes over the data, each ending with a batch of what is left; give this or `steps`.",
    )
    micro_batch_size: PositiveInt = Field(default=1, description="Sequences per rank in one forward/backward.")
    gradient_accumulation: PositiveInt | None = Field(
        default=None, description="Micro-batches per step; default 1, or what `global_batch_size` asks for."
    )
    global_batch_size: PositiveInt | None = Field(
        default=None, description="Sequences per step over all ranks; fixes the batch whatever the number of ranks."
    )
    precision: Literal["bf16", "fp32", "fp64"] = Field(
        default="bf16", description="Compute precision; master weights and reductions are fp32 under bf16."
    )
    optimizer: OptimizerConfig = Field(description="Optimizer and its constants.", examples=[{"learning_rate": 2.0e-5}])
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Learning rate over steps.")
    gradient_clipping: PositiveFloat | None = Field(
        default=1.0, description="Largest global gradient norm; null: no clipping."
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        default="auto",
        description="What is recomputed in backward instead of stored; `auto`: the least that is predicted to fit.",
    )
    compile: Literal["auto"] | bool = Field(default="auto", description="torch.compile per block; `auto`: on GPUs.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where ranks compute; `auto`: GPUs if there are any."
    )
    seed: Count = Field(default=0, description="Seed of weights, data order and dropout.")
    deterministic: bool = Field(default=False, description="Only deterministic kernels, on GPUs at some cost in speed.")
    threads_per_rank: PositiveInt | None = Field(
        default=None,
        description="CPU threads per rank; default: the host's cores shared among its ranks. Fixed and recorded.",
    )
    loss_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens whose logits are in memory at once; default: at most a quarter of a micro-batch and 2048.",
    )
    max_nonfinite_steps: PositiveInt = Field(
        default=10,
        description="Consecutive steps with a non-finite loss or gradient after which the run ends with an error.",
    )


class ParallelismConfig(StrictModel):
    """How ranks share the model. shard x replicate x tensor x context = number of ranks."""

    shard: Literal["auto"] | PositiveInt = Field(
        default="auto",
        description="Ranks that share one copy of the weights (FSDP2); `auto`: all that `replicate` leaves.",
    )
    replicate: PositiveInt = Field(default=1, description="Copies of the sharded model (HSDP when over 1).")
    tensor: PositiveInt = Field(default=1, description="Tensor-parallel ranks.")
    context: PositiveInt = Field(default=1, description="Context-parallel ranks.")


class CheckpointConfig(StrictModel):
    """When state is saved, what is kept, and what a start resumes from."""

    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between checkpoints; null: only at the end."
    )
    keep: PositiveInt = Field(default=3, description="Newest checkpoints kept.")
    keep_best: bool = Field(default=True, description="Keep the checkpoint with the lowest held-out loss besides.")
    asynchronous: bool = Field(default=True, description="Write while training goes on.")
    resume: str = Field(
        default="auto",
        description="How a run begins. `auto`: from the newest complete checkpoint of its directory; `never`: anew, "
        "and a directory with checkpoints is refused; or from the checkpoint at a path. Restarts of a run that has "
        "begun, by its supervisor or its launcher, go on from its own checkpoints.",
    )


class EvaluationConfig(StrictModel):
    """What is measured on held-out data, and when."""

    every_steps: PositiveInt | None = Field(
        default=None, description="Steps between evaluations; null: only at the end, if there is held-out data."
    )
    at_start: bool = Field(default=False, description="Evaluate before the first step too.")
    metrics: list[Literal["loss", "sql-execution"]] = Field(default=["loss"], description="What is measured.")
    parts: list[str] | None = Field(
        default=None,
        description="Names of the held-out parts to evaluate, such as train/held_out for what is held out of "
        "train.jsonl; default: all (of a built-in source its test parts).",
    )
    max_sequences: PositiveInt | None = Field(
        default=None, description="At most this many held-out sequences per source for the loss."
    )
    samples: PositiveInt = Field(
        default=200, description="Questions per held-out split for metrics that generate text."
    )
    batch_size: PositiveInt | None = Field(
        default=None, description="Sequences or prompts per rank in one forward; default: training.micro_batch_size."
    )
    max_new_tokens: PositiveInt = Field(default=128, description="Longest generated answer.")
    required: bool = Field(
        default=False,
        description="A run whose last evaluation, that of the finished model, lacks a metric ends with exit code 1; "
        "the model is exported in any case.",
    )


class LoggingConfig(StrictModel):
    """What a run writes about itself."""

    every_steps: PositiveInt = Field(default=1, description="Steps between logged steps.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    wandb: dict[str, Any] | None = Field(
        default=None, description="Weights & Biases: arguments of wandb.init (extra `wandb`)."
    )
    mlflow: dict[str, Any] | None = Field(
        default=None, description="MLflow: {tracking_uri, experiment} (extra `mlflow`)."
    )


class TimeoutsConfig(StrictModel):
    """How long a run may make no progress: each limit is longer than the one before it, so the first net catches."""

    collective_seconds: PositiveFloat | None = Field(
        default=None,
        description="A collective that has not ended after this many seconds fails on all ranks that wait in it; "
        "default: 600, or half of `watchdog_seconds` where that is less.",
    )
    watchdog_seconds: Annotated[float, Field(ge=0)] = Field(
        default=1800.0,
        description="A round whose ranks get no further for this many seconds (no step, no work in a phase without "
        "steps) is ended, its stacks written to logs/, and started again; 0: never. Also the limit of a save.",
    )
    launcher_grace_seconds: PositiveFloat | None = Field(
        default=None,
        description="How long whatever started the run lets it make no progress before it ends the job itself, "
        "to be checked against the watchdog; null: it does not look.",
    )

    @property
    def collective(self) -> float:
        """Seconds after which a collective fails, the default resolved."""
        if self.collective_seconds is not None:
            return self.collective_seconds
        return min(600.0, self.watchdog_seconds / 2) if self.watchdog_seconds else 600.0


class RunConfig(StrictModel):
    """A training run: what to train. `cluster.yaml` says where."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")] = Field(
        description="Name of the run: at most 63 lower case letters, digits, '.', '_' and '-'.",
        examples=["my-run"],
    )
    output: str = Field(
        default="runs", description="Directory that holds run directories; this run's is <output>/<name>."
    )
    model: ModelConfig = Field(examples=[{"id": "Qwen/Qwen3-0.6B"}])
    data: DataConfig = Field(examples=[{"source": "documents.jsonl", "sequence_length": 1024}])
    training: TrainingConfig = Field(examples=[{"steps": 1000, "optimizer": {"learning_rate": 2.0e-5}}])
    parallelism: ParallelismConfig = ParallelismConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
