"""How the end of a rank is reported."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.supervise import cause

TRACEBACK = """\
Step: 3 | Time: 0.1000s | TFLOPs/s/GPU: 0.01 | Tokens/s/GPU: 20 | Loss: 2.0
[rank1]: Traceback (most recent call last):
[rank1]:   File "trainer.py", line 12, in train_step
[rank1]:     loss.backward()
[rank1]: RuntimeError: shapes do not match
[rank1]:[W1121 13:00:00.0 ProcessGroup.cpp:1] Warning: destroy_process_group was not called
"""


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (1, "exit code 1"),
        (-9, "killed by SIGKILL (exit code 137)"),
        (-11, "killed by SIGSEGV (exit code 139)"),
        (143, "exit code 143, the code of SIGTERM"),
        (-40, "killed by signal 40 (exit code 168)"),
    ],
)
def test_exit_codes_and_signals_are_reported_in_words(returncode: int, words: str) -> None:
    assert cause.describe_exit(returncode) == words


def test_a_kill_is_known_by_signal_and_by_shell_code() -> None:
    assert cause.was_killed(-signal.SIGKILL) and cause.was_killed(137)
    assert not cause.was_killed(-signal.SIGTERM) and not cause.was_killed(1)


def test_the_last_exception_with_its_line_of_code_is_the_last_word() -> None:
    words = cause.last_words(TRACEBACK)
    assert words[:3] == [
        '[rank1]:   File "trainer.py", line 12, in train_step',
        "[rank1]:     loss.backward()",
        "[rank1]: RuntimeError: shapes do not match",
    ]
    assert cause.error_line(words) == "RuntimeError: shapes do not match"
    assert not cause.speaks_of_lost_peer(words)


def test_the_mark_below_a_line_of_code_is_left_out() -> None:
    log = (
        'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    step(a, b)\n  '
        "  ^^^^~~^^^^\nValueError: no\n"
    )
    assert cause.last_words(log) == [
        '  File "train.py", line 7, in main',
        "    step(a, b)",
        "ValueError: no",
    ]


def test_a_message_to_the_user_wins_and_keeps_its_lines() -> None:
    text = "Step: 1 | x\nerror: a.jsonl: line 3 is not JSON\nmend it\n\nlater noise\n"
    assert cause.user_message(text) == "error: a.jsonl: line 3 is not JSON\nmend it"
    assert cause.user_message(TRACEBACK) is None


def test_an_error_of_some_tool_is_not_the_cause_where_an_exception_follows() -> None:
    text = "error: command 'gcc' failed\n\nStep: 9 | Time: 1s\n" + TRACEBACK
    assert cause.last_words(text) == cause.last_words(TRACEBACK)
    assert cause.user_message(text) == "error: command 'gcc' failed", (
        "of a rank whose exit code says that there is one"
    )


def test_without_an_exception_the_last_telling_lines_are_shown() -> None:
    text = (
        "=== round 1 | ...\nterminate called\nStep: 9 | Time: 1s\n"
        + '{"event": "step", "step": 9}\n'
    )
    assert cause.last_words(text) == ["terminate called"]


def messages(file: str) -> dict[str, str]:
    """The texts of a file in last_words/ by their `# title`: what real programs print when they
    fail."""
    text = (Path(__file__).parent / "last_words" / file).read_text(encoding="utf-8")
    titled = [block.partition("\n") for block in text.removeprefix("# ").split("\n\n# ")]
    return {title: f"Traceback (most recent call last):\n{body}\n" for title, _, body in titled}


LOST_PEER = messages("lost_peer.txt")
OWN_FAULT = messages("own_fault.txt")


@pytest.mark.parametrize("text", LOST_PEER.values(), ids=LOST_PEER.keys())
def test_errors_about_lost_peers_are_recognised_as_effects(text: str) -> None:
    words = cause.last_words(text)
    assert cause.speaks_of_lost_peer(words), words


@pytest.mark.parametrize("text", OWN_FAULT.values(), ids=OWN_FAULT.keys())
def test_lost_connections_of_other_services_and_faults_of_the_host_are_causes(text: str) -> None:
    words = cause.last_words(text)
    assert not cause.speaks_of_lost_peer(words) and not cause.speaks_of_timeout(words), words


def test_a_rank_that_nccls_heartbeat_monitor_aborts_says_so_whatever_stacks_follow() -> None:
    fatal = (
        "[rank0]:[F801 12:00:00.123 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank"
        " 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in"
        " monitoring collectives."
    )
    text = (
        f"Step: 3 | Time: 0.1s\n{fatal}\nFatal Python error: Aborted\n\nThread 0x7f:\n  File"
        ' "a.py", line 3 in wait\n'
    )
    words = cause.last_words(text)
    assert words == [fatal]
    assert cause.speaks_of_lost_peer(words) and cause.speaks_of_timeout(words)


@given(st.text())
def test_any_log_has_some_last_words_of_limited_length(text: str) -> None:
    assert len(cause.last_words(text)) <= 6


def test_only_this_attempt_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"ValueError: old\n" + b"new\n")
    assert cause.read_from(log, len(b"ValueError: old\n")) == "new\n"


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"x" * 1_000_000 + b"\nthe end\n")
    text = cause.read_from(log, 0)
    assert text.endswith("\nthe end\n") and len(text) <= 64 * 1024


def test_a_counted_kill_of_the_kernel_is_reported_as_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cause, "oom_kills", lambda: 3)
    assert "memory ran out" in cause.memory_verdict(oom_kills_before=2)
    assert cause.memory_verdict(oom_kills_before=3).startswith("possibly out of memory")


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        (
            {
                "/proc/self/cgroup": "0::/job\n",
                "/sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 3\n",
            },
            3,
        ),
        (
            {
                "/proc/self/cgroup": "0::/job\n",
                "/sys/fs/cgroup/memory.events": "oom 9\noom_kill 0\n",
            },
            0,
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu,memory:/job\n0::/\n",
                "/sys/fs/cgroup/memory/job/memory.oom_control": (
                    "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
                ),
            },
            4,
        ),
        ({"/proc/self/cgroup": "0::/\n"}, 7),
        ({"/proc/self/cgroup": "4:cpu:/job\n0::/\n"}, 7),
        ({}, 7),
        ({"/proc/vmstat": "nr_free_pages 1\n"}, 0),
    ],
)
def test_kills_are_counted_in_the_control_group_else_on_the_host(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], kills: int
) -> None:
    found = {"/proc/vmstat": "pgfault 5\noom_kill 7\nthp_fault 1\n", **files}
    monkeypatch.setattr(cause, "read_kernel_file", lambda path: found.get(path, ""))
    assert cause.oom_kills() == kills


@pytest.mark.parametrize(
    "line",
    [
        "MemoryError",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
        (
            "[rank3]: RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't"
            " allocate memory: you"
        ),
        "  what():  std::bad_alloc",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_want_of_memory_is_reported_with_what_to_do(line: str) -> None:
    assert "lower micro_batch_size" in (cause.memory_advice(["x = f()", line]) or "")
    assert cause.memory_advice(["ValueError: memory lane"]) is None


@pytest.mark.parametrize(
    "line",
    [
        (
            "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 5500ms for"
            " send operation"
        ),
        (
            "[E ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout:"
            " WorkNCCL(SeqNum=1, Timeout(ms)=6)"
        ),
    ],
)
def test_a_rank_that_gave_up_waiting_tells_of_another(line: str) -> None:
    assert cause.speaks_of_timeout([line]) and cause.speaks_of_lost_peer([line])
    assert not cause.speaks_of_timeout(["RuntimeError: Connection closed by peer"])


def test_nccls_watchdog_that_aborts_a_rank_tells_of_another_whatever_stacks_follow() -> None:
    text = (
        "Step: 3 | Time: 0.1s\n[rank0]:[E1121 13:00:00.0 ProcessGroupNCCL.cpp:1] Some NCCL"
        " operations have failed or timed out.\nterminate called after throwing an instance of"
        " 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group"
        " watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation"
        " timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=60) ran for 600020 milliseconds"
        " before timing out.\nException raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most"
        " recent call first):\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96"
        " (0x7f in libc10.so)\n\nFatal Python error: Aborted\n\nThread 0x00007f (most recent call"
        ' first):\n  File "a.py", line 3 in wait\n'
    )
    words = cause.last_words(text)
    assert cause.speaks_of_timeout(words) and cause.speaks_of_lost_peer(words)
    assert cause.error_line(words).startswith("DistBackendError: [PG ID 0 ")
    out_of_memory = (
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what(): "
        " std::bad_alloc\n"
    )
    assert "lower micro_batch_size" in (cause.memory_advice(cause.last_words(out_of_memory)) or "")
    assert cause.last_words("terminate called after throwing an instance of 'int'") == ["int: "]


def test_stop_signals_that_ended_a_rank_are_known_by_both_codes() -> None:
    assert [cause.stop_signal(code) for code in (-15, 143, -10, 138)] == [15, 15, 10, 10]
    assert not any(cause.stop_signal(code) for code in (0, 1, 85, -9, -6, 137))


def test_the_innermost_frame_is_that_of_the_last_stack(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        file.write("noise\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.write("more noise\n")
    frame = cause.innermost_frame((tmp_path / "log").read_text())
    assert (
        frame is not None and frame.startswith("test_cause.py:") and frame.endswith("in " + CALLER)
    )
    assert cause.innermost_frame("no stack here") is None


CALLER = "test_the_innermost_frame_is_that_of_the_last_stack"
