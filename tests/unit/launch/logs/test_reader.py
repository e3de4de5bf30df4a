"""A run's logs from its files: which lines, in which order, from where, and until when."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.launch.logs.merge import key_of
from drillyard.launch.logs.reader import as_json_lines, plain, run_logs
from drillyard.launch.remote_files import Files, LocalFiles, RemoteFiles, copy_files, read_file
from drillyard.launch.request import LogSelection
from drillyard.programs import Host, Programs

NOON = 1_763_985_600


def stamped(second: float, text: str) -> bytes:
    return key_of(round((NOON + second) * 1e6)) + text.encode() + b"\n"


class Place:
    """A run directory whose nodes write logs."""

    def __init__(self, run_directory: Path, nodes: int = 2, per_node: int = 2) -> None:
        self.run_directory = run_directory
        self.launch_directory = run_directory / "launch"
        self.launch_directory.mkdir(parents=True)
        (run_directory / "logs").mkdir()
        job = {"nodes": nodes, "processes_per_node": per_node, "run_directory": str(run_directory)}
        (self.launch_directory / "job.json").write_text(json.dumps(job))

    def node(self, node: int, *lines: bytes) -> None:
        with (self.launch_directory / f"node-{node}.log").open("ab") as file:
            file.write(b"".join(lines))

    def rank(self, rank: int, text: bytes) -> None:
        with (self.run_directory / "logs" / f"rank-{rank}.log").open("ab") as file:
            file.write(text)

    def logs(
        self, *, files: Files | None = None, over: Callable[[], bool] = lambda: True, **wanted: Any
    ) -> bytes:
        return b"".join(self.pieces(files=files, over=over, **wanted))

    def pieces(
        self, *, files: Files | None = None, over: Callable[[], bool] = lambda: True, **wanted: Any
    ) -> Iterator[bytes]:
        return run_logs(
            str(self.launch_directory), files or LocalFiles(), LogSelection(**wanted), over=over
        )


@pytest.fixture(autouse=True)
def asking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drillyard.launch.logs.reader.ASK_SECONDS", 0.05)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "a run [1]")


class ThisMachine(Programs):
    """Runs what would run on another host here: the words after ssh, by a shell as sshd does."""

    def __init__(self) -> None:
        self.started = 0
        self.last: Any = None

    def stream(self, argv: Any) -> Any:
        self.started += 1
        self.last = super().stream(shlex.split(argv[-1])[5:])
        return self.last


@pytest.fixture
def programs() -> ThisMachine:
    return ThisMachine()


@pytest.fixture
def remote(programs: ThisMachine) -> Iterator[RemoteFiles]:
    files = RemoteFiles(Host("login"), programs, python=sys.executable)
    yield files
    files.close()


def texts(logs: bytes) -> list[str]:
    return [line.decode() for line in plain(logs, stamps=False, prefixes=True).splitlines()]


def test_nodes_are_one_stream_in_order_of_time_with_their_numbers(place: Place) -> None:
    place.node(0, stamped(1, "a"), stamped(3, "c"))
    place.node(1, stamped(2, "b"))

    assert place.logs() == b"0: " + stamped(1, "a") + b"1: " + stamped(2, "b") + b"0: " + stamped(
        3, "c"
    )


def test_numbers_of_many_nodes_are_as_wide_as_the_last(tmp_path: Path) -> None:
    place = Place(tmp_path / "run", nodes=11)
    place.node(0, stamped(1, "a"))
    place.node(10, stamped(2, "b"))

    assert texts(place.logs()) == [" 0: a", "10: b"]


def test_one_node_alone(place: Place) -> None:
    place.node(0, stamped(1, "a"))
    place.node(1, stamped(2, "b"))

    assert texts(place.logs(node=1)) == ["1: b"]


def test_a_rank_has_its_own_log(place: Place) -> None:
    place.node(1, stamped(1, "[rank3]: from the node's log"))
    place.rank(3, b"first\nlast without end")

    assert place.logs(rank=3) == b"[rank3]: first\n[rank3]: last without end\n"


def test_a_rank_without_a_log_is_found_in_its_nodes_by_the_prefixes_of_launchers(
    place: Place,
) -> None:
    place.node(0, stamped(1, "[default1]:of rank 1"), stamped(1, "[rank3]: says node 0"))
    place.node(
        1,
        stamped(2, "[default0]:of rank 2"),
        stamped(3, "[default1]:of rank 3"),
        stamped(4, "[rank3]: global"),
        stamped(5, "[default1]:[rank3]: both"),
        stamped(6, "of nobody"),
        stamped(7, "[1,3]<stdout>:of Open MPI"),
        stamped(8, "[default7]:no such local rank"),
    )

    assert texts(place.logs(rank=3)) == [
        "[rank3]: [default1]:of rank 3",
        "[rank3]: [rank3]: global",
        "[rank3]: [default1]:[rank3]: both",
        "[rank3]: [1,3]<stdout>:of Open MPI",
    ]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"rank": 4}, "ranks 0 to 3"),
        ({"node": 2}, "nodes 0 to 1"),
        ({"rank": 3, "node": 0}, "is on node 1"),
    ],
)
def test_what_the_run_does_not_have_is_an_error(
    place: Place, wanted: dict[str, int], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        place.logs(**wanted)


def test_a_run_without_output_has_no_lines(place: Place) -> None:
    assert place.logs() == b""
    assert place.logs(follow=True) == b""


def test_the_last_lines_of_all_logs(place: Place) -> None:
    place.node(0, *(stamped(second, f"a{second}") for second in range(0, 5000, 2)))
    place.node(1, *(stamped(second, f"b{second}") for second in range(1, 5000, 2)))

    assert texts(place.logs(tail=3)) == ["1: b4997", "0: a4998", "1: b4999"]
    assert place.logs(tail=0) == b""
    assert len(texts(place.logs(tail=10_000))) == 5000


def test_the_last_lines_are_read_from_the_end(place: Place) -> None:
    place.node(0, *(stamped(second, "x" * 1000) for second in range(3000)))
    files = CountingFiles()

    assert len(texts(place.logs(files=files, tail=5))) == 5
    assert files.bytes < 500_000


def test_lines_since_a_time_are_found_without_reading_what_was_before(place: Place) -> None:
    place.node(0, *(stamped(second, "x" * 1000 + f" {second}") for second in range(5000)))
    files = CountingFiles()

    logs = place.logs(files=files, since=NOON + 4990)

    assert [line.split()[-1] for line in texts(logs)] == [
        str(second) for second in range(4990, 5000)
    ]
    assert files.bytes < 1_500_000


def test_of_a_submission_only_its_lines_are_shown_where_lines_carry_times(place: Place) -> None:
    place.node(0, stamped(1, "before"), stamped(9, "at once"), stamped(12, "after"))
    place.node(1, b"no time\n", stamped(2, "before"), stamped(11, "after"))
    place.rank(
        0, b"=== round 0 | 2025-11-24T12:00:01Z\nold\n=== round 0 | 2025-11-24T12:00:11Z\nnew\n"
    )
    place.rank(1, b"no line of it\nhas a time\n")

    shown, first, second = (place.logs(rank=rank, submitted_at=NOON + 10) for rank in (None, 0, 1))
    assert (
        plain(shown, stamps=False, prefixes=True) == b"1: no time\n0: at once\n1: after\n0: after\n"
    )
    assert b"new" in first and b"old" not in first and second.count(b"\n") == 2
    assert place.logs(since=NOON + 1, submitted_at=NOON + 10).count(b"before") == 2


def test_since_needs_lines_that_carry_times(place: Place) -> None:
    place.rank(0, b"no time\n" * 10)

    with pytest.raises(UserError, match=r"rank-0\.log: .*--since.*--tail"):
        place.logs(rank=0, since=NOON)


class CountingFiles(LocalFiles):
    def __init__(self) -> None:
        self.bytes = 0

    def read(self, requests: Any) -> Any:
        pieces = super().read(requests)
        self.bytes += sum(len(piece.data) for piece in pieces if piece is not None)
        return pieces


def test_large_logs_are_never_in_memory_whole(place: Place) -> None:
    for node in range(2):
        place.node(node, *(stamped(second / 1000, "x" * 2000) for second in range(15_000)))

    largest = max(map(len, place.pieces()))

    assert largest < 4 << 20


class Followed:
    """Collects what following yields, in a thread."""

    def __init__(self, place: Place, **wanted: Any) -> None:
        self.over = threading.Event()
        self.text = b""
        self._pieces = place.pieces(over=self.over.is_set, follow=True, **wanted)
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for piece in self._pieces:
            self.text += piece

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def finish(self) -> list[str]:
        self.over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return texts(self.text)


def test_following_shows_new_lines_new_files_and_ends_with_the_run(place: Place) -> None:
    place.node(0, stamped(1, "there already"))
    followed = Followed(place)
    followed.wait_for(b"there already")
    place.node(0, stamped(2, "added"), stamped(3, "torn")[:-3])
    followed.wait_for(b"added")
    place.node(1, stamped(4, "a new file"))
    followed.wait_for(b"a new file")
    assert b"to" not in followed.text.replace(b"there already", b"")

    place.node(0, b"rn\n", stamped(5, "the last")[:-1])

    assert followed.finish() == [
        "0: there already",
        "0: added",
        "1: a new file",
        "0: torn",
        "0: the last",
    ]


def test_following_keeps_the_order_of_lines_that_arrive_within_half_a_second(place: Place) -> None:
    now = time.time() - NOON
    followed = Followed(place)
    place.node(0, stamped(now + 0.2, "second"))
    time.sleep(0.1)
    place.node(1, stamped(now + 0.1, "first"))
    followed.wait_for(b"second")

    assert followed.finish() == ["1: first", "0: second"]


def test_following_from_the_last_lines(place: Place) -> None:
    place.node(0, *(stamped(second, f"old {second}") for second in range(10)))
    followed = Followed(place, tail=2)
    followed.wait_for(b"old 9")
    place.node(0, stamped(11, "new"))
    followed.wait_for(b"new")

    assert followed.finish() == ["0: old 8", "0: old 9", "0: new"]


def test_a_log_that_is_replaced_or_truncated_is_read_from_its_beginning(place: Place) -> None:
    place.node(0, stamped(1, "one"), stamped(2, "two"))
    followed = Followed(place)
    followed.wait_for(b"two")
    (place.launch_directory / "node-0.log").write_bytes(stamped(3, "new"))
    followed.wait_for(b"new")

    assert followed.finish() == ["0: one", "0: two", "0: new"]


def test_lines_that_can_be_seen_only_after_the_end_are_shown_too(place: Place) -> None:
    over = threading.Event()

    class Late(LocalFiles):
        reads_after_the_end = 0

        def read(self, requests: Any) -> Any:
            if over.is_set():
                self.reads_after_the_end += 1
                if self.reads_after_the_end == 2:
                    place.node(0, stamped(2, "late"))
            return super().read(requests)

    answers = iter([False, True])

    def is_over() -> bool:
        if next(answers):
            over.set()
        return over.is_set()

    place.node(0, stamped(1, "a"))

    assert texts(place.logs(files=Late(), over=is_over, follow=True)) == ["0: a", "0: late"]


def test_a_scheduler_that_does_not_answer_ends_no_following(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([UserError("squeue: no answer"), False, True])

    def over() -> bool:
        answer = next(answers)
        if isinstance(answer, UserError):
            raise answer
        return answer

    place.node(0, stamped(1, "a"))

    assert texts(place.logs(over=over, follow=True)) == ["0: a"]
    assert "squeue: no answer" in capsys.readouterr().err


def test_another_host_is_read_over_one_connection(
    place: Place, remote: RemoteFiles, programs: ThisMachine
) -> None:
    for node in range(2):
        place.node(
            node, *(stamped(second + node / 2, f"{node} {second}") for second in range(20_000))
        )

    assert place.logs(files=remote) == place.logs()
    assert programs.started == 1


def test_a_connection_that_is_lost_is_made_again_where_it_was(
    place: Place, remote: RemoteFiles, programs: ThisMachine
) -> None:
    place.node(0, *(stamped(second, "x" * 100) for second in range(50_000)))
    text = b""
    for number, piece in enumerate(place.pieces(files=remote)):
        text += piece
        if number in (3, 6):
            programs.last.kill()

    assert text == place.logs()
    assert programs.started == 3


def test_a_host_that_cannot_be_reached_is_named_with_its_own_words(place: Place) -> None:
    class Refusing(Programs):
        def stream(self, argv: Any) -> Any:
            return super().stream(
                ["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"]
            )

    with pytest.raises(
        UserError,
        match=r"login: its files cannot be read: Permission denied \(publickey\)\.\ncommand:",
    ):
        place.logs(files=RemoteFiles(Host("login"), Refusing()))


def test_files_are_copied_and_read_from_an_offset(
    place: Place, remote: RemoteFiles, tmp_path: Path
) -> None:
    (place.run_directory / "final").mkdir()
    content = bytes(range(256)) * 40_000
    (place.run_directory / "final" / "model.safetensors").write_bytes(content)
    run = str(place.run_directory)

    copy_files(remote, run, ["final/model.safetensors"], str(tmp_path / "here"))

    assert (tmp_path / "here" / "final" / "model.safetensors").read_bytes() == content
    assert ("final/model.safetensors", len(content)) in remote.tree(run)
    assert read_file(remote, f"{run}/final/model.safetensors", len(content) - 5) == content[-5:]
    assert read_file(remote, f"{run}/final/model.safetensors", -7) == content[-7:]
    assert read_file(remote, f"{run}/nothing", 0) == b""
    with pytest.raises(UserError, match=r"nothing: .* login"):
        copy_files(remote, run, ["nothing"], str(tmp_path / "here"))
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["final"]


def test_lines_are_shown_with_or_without_time_and_prefix() -> None:
    piece = b"0: " + stamped(1, "a") + b"[rank3]: no time\n"

    assert plain(piece, stamps=True, prefixes=True) == piece
    assert plain(piece, stamps=False, prefixes=False) == b"a\nno time\n"
    assert plain(piece, stamps=True, prefixes=False) == stamped(1, "a") + b"no time\n"
    assert [json.loads(line) for line in as_json_lines(piece).splitlines()] == [
        {"node": 0, "rank": None, "time": "2025-11-24T12:00:01.000000Z", "text": "a"},
        {"node": None, "rank": 3, "time": None, "text": "no time"},
    ]


def test_a_last_line_that_was_cut_off_has_its_place_in_time(tmp_path: Path) -> None:
    place = Place(tmp_path / "run")
    place.node(0, stamped(0, "first"), stamped(2, "cut off")[:-1])
    place.node(1, *(stamped(10 + i * 0.001, f"line {i}") for i in range(60_000)))
    lines = place.logs().splitlines()
    assert len(lines) == 60_002 and b"cut off" in lines[1]


@pytest.mark.parametrize("job", ["[]", "{", '{"nodes": "2", "processes_per_node": 2}'])
def test_a_damaged_job_is_named(tmp_path: Path, job: str) -> None:
    place = Place(tmp_path / "run")
    (place.launch_directory / "job.json").write_text(job)
    with pytest.raises(UserError, match=r"job\.json: is damaged"):
        place.logs()


def test_a_copy_of_a_log_is_not_read(tmp_path: Path) -> None:
    place = Place(tmp_path / "run")
    place.node(1, stamped(0, "one"))
    copy = place.launch_directory / "node-1.old.log"
    copy.write_bytes((place.launch_directory / "node-1.log").read_bytes())
    assert place.logs().count(b"one") == 1
