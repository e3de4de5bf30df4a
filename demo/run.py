"""The demo: from one YAML file to a trained, measured model, with a rank killed on the way. Run it
with `make demo`.

It runs the commands that a person would type, prints what each of them proves, and fails when a
claim does not hold. `--seeds 0 1 2` repeats it and prints a table; `--development` measures on the
development splits, on which settings are chosen; figures are given on the test splits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("questions", "combinations", "databases")
MEANING = {
    "questions": "questions whose SQL never occurs in training",
    "combinations": "combinations of template and column never trained",
    "databases": "databases never seen (shown as it is)",
}
REQUIRED = {"questions": 0.85, "combinations": 0.75}
LARGEST_BEFORE = 0.03
STEPS_AFTER_SAVE = 20


@dataclass
class Demo:
    """One run of the demo with one seed."""

    seed: int
    output: Path
    parts: dict[str, str]
    ranks: int = 2

    @property
    def directory(self) -> Path:
        return self.output / f"text-to-sql-demo-{self.seed}"

    def run(self) -> dict[str, Any]:
        """Train with a killed rank, then check every claim; returns the figures, or raises
        SystemExit."""
        shutil.rmtree(self.directory, ignore_errors=True)
        started = time.monotonic()
        say(
            f"1. Train a language model from random weights on {self.ranks} FSDP2 ranks (seed"
            f" {self.seed})"
        )
        killed = self.train_and_kill()
        summary = json.loads((self.directory / "summary.json").read_text())
        say("2. A rank was killed; nothing was lost")
        self.tell_of_the_kill(killed)
        say("3. What it learned: SQL execution accuracy on held-out questions, 200 each")
        figures = self.accuracies()
        say("4. final/ in plain transformers, in a process that cannot import drillyard")
        self.check_plain_transformers(summary["steps"])
        print((self.directory / "summary.txt").read_text())
        say("5. All of it as one page, which needs no network")
        self.write_report()
        figures["seconds"] = time.monotonic() - started
        print(f"All of it holds, in {figures['seconds']:.0f} s. The run is in {self.directory}")
        return figures

    def train_and_kill(self) -> dict[str, Any]:
        command = [
            *(sys.executable, "-m", "drillyard", "train", str(HERE / "run.yaml")),
            *("--nproc-per-node", str(self.ranks), "--console", "text"),
            *("--set", f"name={self.directory.name}", "--set", f"output={self.output}"),
            *("--set", f"training.seed={self.seed}"),
            *("--set", f"data.source.options.held_out=[{','.join(self.parts.values())}]"),
        ]
        print("   $ drillyard " + " ".join(command[3:]))
        training = subprocess.Popen(command)
        try:
            killed = self.kill_a_rank(training)
            code = training.wait()
        finally:
            if training.poll() is None:
                training.terminate()
                training.wait()
        if code:
            raise SystemExit(
                f"demo: training ended with exit code {code}; logs are in {self.directory / 'logs'}"
            )
        return killed

    def kill_a_rank(self, training: subprocess.Popen[bytes]) -> dict[str, Any]:
        """SIGKILL a rank at a random moment, after the third checkpoint and well after a save."""
        while self.saves() < 3:
            if training.poll() is not None:
                raise SystemExit(f"demo: training ended early, exit code {training.returncode}")
            time.sleep(0.05)
        time.sleep(1.0 + time.time_ns() % 4_000 / 1_000)
        while self.steps_since_save() < STEPS_AFTER_SAVE and training.poll() is None:
            time.sleep(0.01)
        rank = time.time_ns() // 1_000 % self.ranks
        pid = pid_of_rank(training.pid, rank)
        os.kill(pid, signal.SIGKILL)
        print(f"\n   *** kill -9 {pid}: rank {rank} is dead ***\n", flush=True)
        return {"rank": rank, "time": time.time()}

    def saves(self) -> int:
        return sum(event["event"] == "checkpoint" for event in self.events())

    def steps_since_save(self) -> int:
        """Logged steps that are in no checkpoint yet."""
        steps = {name: 0 for name in ("step", "checkpoint")}
        for event in self.events():
            if event["event"] in steps:
                steps[event["event"]] = event["step"]
        return steps["step"] - steps["checkpoint"]

    def events(self) -> list[dict[str, Any]]:
        path = self.directory / "events.jsonl"
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]

    def tell_of_the_kill(self, killed: dict[str, Any]) -> None:
        events = self.events()
        resumed = [event for event in events if event["event"] == "resume"]
        if len(resumed) != 1:
            raise SystemExit(f"demo: expected one resume after the kill, found {len(resumed)}")
        before = [e["step"] for e in events if e["event"] == "step" and e.get("round", 0) == 0]
        lost = max(before) - resumed[0]["step"]
        print(
            f"   rank {killed['rank']} was killed when step {max(before)} was done; resumed at"
            f" {resumed[0]['step']}:"
        )
        print(
            f"   {lost} steps were lost and done again, bit for bit: " + self.redone_steps_agree()
        )

    def redone_steps_agree(self) -> str:
        """Compare every logged step that was done twice."""
        lines = [
            json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()
        ]
        by_step: dict[int, list[tuple[float, float]]] = {}
        for line in lines:
            if "loss" in line:
                by_step.setdefault(line["step"], []).append((line["loss"], line["grad_norm"]))
        twice = {step: values for step, values in by_step.items() if len(values) > 1}
        different = [step for step, values in twice.items() if len(set(values)) > 1]
        if not twice:
            raise SystemExit("demo: no step was done twice, so the kill proves nothing")
        if different:
            raise SystemExit(
                f"demo: step {different[0]} gave another loss the second time:"
                f" {by_step[different[0]]}"
            )
        return (
            f"the {len(twice)} of them that were logged have the same loss and gradient norm both"
            " times"
        )

    def accuracies(self) -> dict[str, Any]:
        """Print the table of accuracies before and after, and check the demo's claims."""
        from drillyard.config.load import load_run_config
        from drillyard.data.held_out_parts import evaluation_rows

        evaluations = [event for event in self.events() if event["event"] == "evaluation"]
        before, after = evaluations[0]["results"], evaluations[-1]["results"]
        config = load_run_config(self.directory / "run.yaml")
        figures: dict[str, Any] = {"seed": self.seed}
        failed = []
        print(f"   {'':52} {'before':>7} {'constant':>9} {'after':>7}")
        for part, name in self.parts.items():
            name = f"text-to-sql/{name}"
            _, constant = best_constant_answer(
                evaluation_rows(config, name, config.evaluation.samples)
            )
            first, last = before[name]["sql_execution"], after[name]["sql_execution"]
            print(f"   {MEANING[part]:52} {first:7.1%} {constant:9.1%} {last:7.1%}")
            figures |= {f"{part} before": first, f"{part} constant": constant, part: last}
            if part in REQUIRED and (
                max(first, constant) >= LARGEST_BEFORE or last <= REQUIRED[part]
            ):
                failed.append(
                    f"{part}: required < 3 % before and constant, > {REQUIRED[part]:.0%} after"
                )
        if failed:
            raise SystemExit("demo: " + "; ".join(failed))
        return figures

    def check_plain_transformers(self, step: int) -> None:
        folder = self.directory / "evaluations" / f"step-{step:08d}"
        command = [
            sys.executable,
            str(HERE / "plain_transformers.py"),
            str(self.directory / "final"),
        ]
        result = subprocess.run(
            [*command, *map(str, sorted(folder.glob("*.jsonl")))], capture_output=True, text=True
        )
        print("   " + (result.stdout.strip() or result.stderr.strip()[-2000:]))
        if result.returncode:
            raise SystemExit("demo: plain transformers did not generate the same texts")

    def write_report(self) -> None:
        """`drillyard report`, which writes report.html into the run directory."""
        command = [sys.executable, "-m", "drillyard", "report", str(self.directory)]
        print("   $ drillyard " + " ".join(command[3:]))
        result = subprocess.run(command, capture_output=True, text=True)
        print("   " + (result.stdout.strip() or result.stderr.strip()[-2000:]))
        if result.returncode:
            raise SystemExit("demo: the report was not written")


def best_constant_answer(rows: list[dict[str, Any]]) -> tuple[str, float]:
    """The reference query that scores best as the answer to every question, and its accuracy: the
    floor of a model."""
    from drillyard.evaluation.sql_scoring import QueryJudge

    judges = [each for each in map(QueryJudge, rows) if not each.unjudged]
    scores = {
        sql: sum(each.judge(sql).outcome == "correct" for each in judges)
        for sql in dict.fromkeys(each.reference for each in judges)
    }
    for each in judges:
        each.close()
    best = max(scores, key=lambda sql: scores[sql])
    return best, scores[best] / len(judges)


def pid_of_rank(supervisor: int, rank: int) -> int:
    """The process of a rank: a descendant of the supervisor whose environment has its RANK."""
    wanted = f"RANK={rank}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environment.parent.name)
        try:
            if wanted in environment.read_bytes().split(b"\0") and supervisor in ancestors(pid):
                return pid
        except OSError:
            continue
    raise SystemExit(f"demo: rank {rank} of supervisor {supervisor} was not found")


def ancestors(pid: int) -> list[int]:
    """Process ids from the parent of `pid` up to 1."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def say(text: str) -> None:
    """A heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Figures of several seeds as a Markdown table."""
    columns = [
        "seed",
        *(f"{part}{suffix}" for part in PARTS for suffix in (" before", " constant", "")),
        "seconds",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [
            f"{row[c]:.1%}" if isinstance(row[c], float) and c != "seconds" else f"{row[c]:.0f}"
            for c in columns
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="seeds to run, one after the other"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), help="where the run directories go"
    )
    parser.add_argument(
        "--development", action="store_true", help="measure on the development splits"
    )
    arguments = parser.parse_args()
    suffix = "-development" if arguments.development else ""
    parts = {part: part + suffix for part in PARTS}
    rows = [Demo(seed, arguments.output, parts).run() for seed in arguments.seeds]
    if len(rows) > 1:
        print("\n" + table(rows))


if __name__ == "__main__":
    main()
