from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drillyard import host_tools
from drillyard.acceptance.job import node_files
from drillyard.acceptance.node import probe_kernel_log
from drillyard.host_tools import num_gpus, run_tool, run_tools


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def program(programs: Path, name: str, script: str) -> None:
    path = programs / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_answers_of_tools(programs: Path) -> None:
    program(programs, "good", "echo fine; echo aside >&2")
    program(programs, "bad", "echo table; echo why not >&2; exit 3")
    found = run_tools({"good": ["good"], "bad": ["bad", "-x"], "no": ["no-such-tool"]}, 5.0)
    assert (found["good"]["text"], found["good"]["error"]) == ("fine\n", None)
    assert (found["bad"]["code"], found["bad"]["text"]) == (3, "table\n")
    assert "why not" in found["bad"]["error"]
    assert (found["no"]["installed"], found["no"]["code"]) == (False, None)
    assert found["bad"]["argv"] == ["bad", "-x"]


def test_a_tool_that_hangs_ends_with_what_it_started(programs: Path, tmp_path: Path) -> None:
    program(programs, "hangs", f"sleep 300 & echo $! > {tmp_path}/child; echo begun; wait")
    began = time.monotonic()
    found = run_tools({"hangs": ["hangs"], "other": ["echo", "here"]}, 0.5)
    assert time.monotonic() - began < 20
    assert found["hangs"]["code"] is None and "did not end" in found["hangs"]["error"]
    assert found["other"]["text"] == "here\n"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("its child still runs")


def test_output_without_end_is_cut_and_said(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tools, "MOST_TEXT_BYTES", 1000)
    program(programs, "long", "head -c 5000 /dev/zero | tr '\\0' a")
    found = run_tool(["long"], 5.0)
    assert len(found["text"]) == 1000 and "more than" in found["error"]


def test_what_cannot_be_started_is_an_answer(programs: Path) -> None:
    broken = programs / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert "cannot be started" in run_tool(["broken"], 5.0)["error"]


def test_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia", "xnvidia1"):
        (tmp_path / name).touch()
    assert num_gpus(str(tmp_path)) == 2
    assert num_gpus(str(tmp_path / "absent")) == 0


def test_probes_run_where_only_their_files_are(tmp_path: Path) -> None:
    for file in node_files():
        path = tmp_path / file.path
        path.parent.mkdir(exist_ok=True)
        path.write_text(file.content)
    ran = subprocess.run(
        [sys.executable, "-I", "-S", tmp_path / "acceptance", "probe", "host"],
        input="{}", capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(ran.stdout)["cores"] > 0


def test_the_kernel_log_says_why_it_cannot_be_read(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "dmesg", "echo 'dmesg: read kernel buffer failed' >&2; exit 1")
    program(programs, "journalctl", "exit 0")

    def refuse() -> list[str]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(probe_kernel_log, "_kernel_messages", refuse)
    found = probe_kernel_log.probe({})
    assert found["source"] is None
    assert set(found["tried"]) == {"dmesg", "/dev/kmsg", "journalctl"}
    assert "read kernel buffer" in found["tried"]["dmesg"]


def test_the_kernel_log_keeps_errors_of_gpus_where_it_is_long(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_kernel_log, "MOST_LINES", 50)
    first = "[    1.000000] NVRM: Xid (PCI:0000:05:00): 79, x"
    text = "\n".join([first, *(f"[ {at}.000000] some error {at}" for at in range(2, 400))])
    (programs / "log").write_text(text + "\n[  500.000000] quiet words\n")
    program(programs, "dmesg", f"cat {programs}/log")
    found = probe_kernel_log.probe({})
    assert found["lines"][0] == first and len(found["lines"]) == 50
    assert found["left_out"] == 349 and found["total_lines"] == 400
    assert found["first_second"] == 1.0


def test_records_of_the_kernel_are_given_as_dmesg_does(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "dmesg", "exit 1")
    records = [b"3,339,5140900,-;NVRM: Xid (PCI:0000:05:00): 79, x\n SUBSYSTEM=pci\n", b"junk\n"]

    def read(descriptor: int, size: int) -> bytes:
        if not records:
            raise BlockingIOError
        return records.pop(0)

    kernel = SimpleNamespace(
        open=lambda *_: 0, read=read, close=lambda _: None, O_RDONLY=0, O_NONBLOCK=0
    )
    monkeypatch.setattr(probe_kernel_log, "os", kernel)
    found = probe_kernel_log.probe({})
    assert found["source"] == "/dev/kmsg"
    assert found["lines"] == ["[    5.140900] NVRM: Xid (PCI:0000:05:00): 79, x"]


def test_a_full_disk_hides_no_answer(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert run_tool(["echo", "here"], 5.0)["text"] == "here\n"
