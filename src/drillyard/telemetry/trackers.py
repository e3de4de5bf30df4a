"""Experiment trackers: TensorBoard, Weights & Biases, MLflow. Each receives the same numbers under
the same names.

A tracker is imported only if the run config enables it. A missing package is a UserError before
training starts. A tracker that cannot start (no login, no service) is an error at the first start
of a run, a warning at a restart; one that fails later (disk full, service down) warns once and is
dropped, and training continues.

TensorBoard's own event writer has a queue and a thread: a step costs about 100 microseconds. W&B
and MLflow send from threads of their own. A resumed run continues the same W&B or MLflow run: their
ids are in `trackers.json` in the run directory. In TensorBoard a resume hides the points of
repeated steps.
"""

from __future__ import annotations

import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from drillyard.errors import ConfigError, MissingExtraError, UserError
from drillyard.guarded_files import is_there, read_json

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig

IDS_FILE: Final = "trackers.json"


class Tracker(ABC):
    """A sink of scalars by step."""

    @abstractmethod
    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Record `values` (name -> number) at `step`."""

    def resumed(self, step: int) -> None:  # noqa: B027 (W&B and MLflow cannot)
        """Training resumes after `step`: discard later points, where the tracker can."""

    @abstractmethod
    def close(self) -> None:
        """Send what is still queued."""


def _installed(package: str, setting: str, remedy: str) -> Any:
    """A tracker's package. Raises MissingExtraError where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"{setting} but {package} is not installed.\n{remedy}") from error


class TensorBoard(Tracker):
    """Event files under `tensorboard/`, one per attempt, written without torch or TensorFlow."""

    def __init__(self, run_directory: Path, config: RunConfig) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError(
                "logging.tensorboard is true but TensorBoard is not installed.\n"
                "Install it (pip install tensorboard) or set `logging: {tensorboard: false}`."
            ) from error
        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(
            str(run_directory / "tensorboard"), max_queue_size=1000, flush_secs=10
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        summary = self._summary.Summary(
            value=[
                self._summary.Summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
            ]
        )
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def resumed(self, step: int) -> None:
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(
            self._event.Event(wall_time=time.time(), step=step + 1, session_log=start)
        )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A Weights & Biases run; `logging.wandb` holds arguments of wandb.init."""

    def __init__(self, run_directory: Path, config: RunConfig) -> None:
        wandb = _installed(
            "wandb", "logging.wandb is set", "Install it: pip install 'drillyard[wandb]'."
        )
        arguments = {
            "name": config.name,
            "dir": str(run_directory),
            "config": config.model_dump(mode="json"),
            "resume": "allow",
            "id": _tracker_ids(run_directory).get("wandb"),
            **(config.logging.wandb or {}),
        }
        self._run: Any = wandb.init(**arguments)
        # Our own step axis: W&B's counter must not decrease, and a resume repeats steps.
        self._run.define_metric("*", step_metric="step")
        _keep_tracker_id(run_directory, "wandb", self._run.id)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """An MLflow run; `logging.mlflow` holds `tracking_uri` and `experiment`."""

    def __init__(self, run_directory: Path, config: RunConfig) -> None:
        mlflow = _installed(
            "mlflow", "logging.mlflow is set", "Install it: pip install 'drillyard[mlflow]'."
        )
        settings = config.logging.mlflow or {}
        unknown = settings.keys() - {"tracking_uri", "experiment"}
        if unknown:
            raise ConfigError(
                f"logging.mlflow: unknown keys {sorted(unknown)}; allowed: experiment,"
                " tracking_uri."
            )
        self._mlflow = mlflow
        if "tracking_uri" in settings:
            mlflow.set_tracking_uri(settings["tracking_uri"])
        mlflow.set_experiment(settings.get("experiment", "drillyard"))
        known_id = _tracker_ids(run_directory).get("mlflow")
        run = mlflow.start_run(run_id=known_id, run_name=config.name)
        if known_id is None:
            mlflow.log_dict(config.model_dump(mode="json"), "run.json")
        _keep_tracker_id(run_directory, "mlflow", run.info.run_id)
        self._known: set[str] = set()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        # Send a metric's first value synchronously: MLflow's threads collide when they create its
        # file at once.
        is_known = self._known.issuperset(values)
        self._known.update(values)
        self._mlflow.log_metrics(values, step=step, synchronous=not is_known)

    def close(self) -> None:
        self._mlflow.end_run()


def _tracker_ids(run_directory: Path) -> dict[str, str]:
    """The trackers' ids of this run from earlier attempts."""
    path = run_directory / IDS_FILE
    return dict(read_json(path)) if is_there(path) else {}


def _keep_tracker_id(run_directory: Path, tracker: str, identifier: str) -> None:
    ids = {**_tracker_ids(run_directory), tracker: identifier}
    (run_directory / IDS_FILE).write_text(json.dumps(ids) + "\n")


class Trackers:
    """All trackers that the config enables; none of them ends a training that has begun."""

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        warn: Callable[[str], None],
        *,
        first_start: bool,
    ) -> None:
        self._warn = warn
        logging = config.logging
        enabled: dict[type[TensorBoard | WeightsAndBiases | MLflow], bool] = {
            TensorBoard: logging.tensorboard,
            WeightsAndBiases: logging.wandb is not None,
            MLflow: logging.mlflow is not None,
        }
        self._active: list[Tracker] = []
        for tracker in (one for one, wanted in enabled.items() if wanted):
            try:
                self._active.append(tracker(run_directory, config))
            except Exception as error:  # trackers raise anything
                if not first_start:
                    warn(f"{tracker.__name__} cannot start and is not used: {error}")
                    continue
                self.close()
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{tracker.__name__} cannot start: {error}") from error

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Record numbers at `step` everywhere."""
        self._each(lambda tracker: tracker.scalars(step, values))

    def resumed(self, step: int) -> None:
        """Discard points after `step` everywhere."""
        self._each(lambda tracker: tracker.resumed(step))

    def close(self) -> None:
        """Flush and close everywhere."""
        self._each(lambda tracker: tracker.close())
        self._active = []

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                call(tracker)
            except Exception as error:
                self._active.remove(tracker)
                self._warn(f"{type(tracker).__name__} failed and is no longer used: {error}")
