"""`drillyard image build | push | logs` with builders that record how they are called."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.facts import says
from tests.unit.provision.images.checkout import EPOCH, git, make_checkout, make_programs

from drillyard.cli.main import main
from drillyard.provision.images.image_plan import cloud_config, label_instruction

ROOT = Path(__file__).parents[4]
ACCEPTED = Path(__file__).with_name("gcloud_commands.txt").read_text().splitlines()
"""Commands that gcloud's own parser accepts: tools/gcloud_commands.py."""
BASE = f"docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:{'1' * 64}"
DOCKERFILE = f"ARG BASE={BASE}\nFROM ${{BASE}}\nCOPY main.py /\n"
DIGEST = f"sha256:{'a' * 64}"
REGISTRY = "us-central1-docker.pkg.dev/my-project/images"
IMAGE = f"{REGISTRY}/nemo"
LABEL = "org.opencontainers.image"
CLUSTER = """\
# ours
name: lab
platform: gke          # by `drillyard cluster up`
location: {project: my-project, region: us-central1, zone: us-central1-b}
machine: a4-highgpu-8g
nodes: 2
consumption: spot
storage: {bucket: runs}
"""
# What stands in for each builder: it keeps what it was given to build, and answers as it does.
_KEEP = (
    'cp -r context "$KEPT" && { [ ! -e labels ] || cp labels "$KEPT/labels"; }'
    ' && find context -type f | sort >"$KEPT/list"'
)
SCRIPTS = {
    "docker": 'case "$1 $2" in "buildx version") exit 0;; "buildx build") ' + _KEEP + ";; "
    f'"image inspect") echo \'["other.example.com/a@{DIGEST}", "{IMAGE}@{DIGEST}"]\';; esac',
    "buildah": f"case $1 in build) {_KEEP};; push) echo {DIGEST} >digest;; esac",
    "podman": f"case $1 in build) {_KEEP};; push) echo {DIGEST} >digest;; esac",
    "gcloud": 'case $2 in submit) mkdir -p "$KEPT"; cp context.tar.gz cloudbuild.json "$KEPT";'
    ' echo \'{"id": "11111111-2222"}\';; log) echo "step 1";;'
    f' describe) echo \'{{"status": "SUCCESS", "results": {{"images": [{{"name":'
    f' "{IMAGE}:1", "digest": "{DIGEST}"}}]}}}}\';; esac',
}


@dataclass(frozen=True)
class Ended:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Workplace:
    """A checkout with a Dockerfile and a cluster config, and the programs of this machine."""

    directory: Path
    commit: str
    run: Callable[..., Ended]

    def calls(self) -> list[list[str]]:
        path = self.directory.parent / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split() for line in lines if not line.endswith("version")]

    @property
    def kept(self) -> Path:
        return self.directory.parent / "kept"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout to copy."""
    directory = tmp_path_factory.mktemp("prepared") / "work"
    files = {"Dockerfile": DOCKERFILE, "main.py": "x = 1\n", "cluster.yaml": CLUSTER}
    make_checkout(directory, files)
    return directory


@pytest.fixture
def made(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Workplace]:
    """Make a workplace with some of the programs."""

    def make(*names: str, scripts: Mapping[str, str] | None = None) -> Workplace:
        directory = tmp_path / "work"
        shutil.copytree(prepared, directory)
        commit = (directory / ".git" / "refs/heads/main").read_text().strip()
        every = {name: (scripts or SCRIPTS)[name] for name in names}
        programs = make_programs(tmp_path, every)
        system = tmp_path / "system"
        system.mkdir()
        for name in ("git", "sh", "cp", "find", "sort", "mkdir", "cat"):
            (system / name).symlink_to(
                next(
                    Path(each, name)
                    for each in os.environ["PATH"].split(":")
                    if Path(each, name).exists()
                )
            )
        monkeypatch.setenv("PATH", f"{programs}:{system}")
        monkeypatch.setenv("KEPT", str(tmp_path / "kept"))
        monkeypatch.chdir(directory)

        def run(line: str) -> Ended:
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(["image", *shlex.split(line)])
            out, err = capfd.readouterr()
            return Ended(int(ended.value.code or 0), out, err)

        return Workplace(directory, commit, run)

    return make


def words(call: list[str], flag: str) -> list[str]:
    return [value for name, value in itertools.pairwise(call) if name == flag]


def labels(work: Workplace, call: list[str]) -> list[str]:
    """The labels that a call gives, by flags or as the last instruction."""
    if words(call, "--file")[1:] != ["labels"]:
        return words(call, "--label")
    text = (work.kept / "labels").read_text()
    assert text.startswith("LABEL ")
    return [word for word in shlex.split(text)[1:] if word != "\n"]


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_an_image_is_built_and_pushed(made: Callable[..., Workplace], builder: str) -> None:
    work = made(builder)
    name = f"{IMAGE}:sha-{work.commit[:12]}"
    built = work.run(f"build --tag {IMAGE} --build-arg EXTRAS=a=b -- --no-cache")
    assert (built.code, built.out) == (0, f"{name}\n"), built.err
    (call,) = work.calls()
    assert words(call, "--tag") == [name]
    assert words(call, "--file")[0] == "context/Dockerfile"
    assert words(call, "--platform") == ["linux/amd64"]
    assert call[-2:] == ["--no-cache", "context"]
    base, _, digest = BASE.partition("@")
    assert labels(work, call) == [
        f"{LABEL}.base.name={base}",
        f"{LABEL}.base.digest={digest}",
        f"{LABEL}.created=2026-02-03T04:05:06Z",
        f"{LABEL}.revision={work.commit}",
        f"{LABEL}.version={work.commit[:12]}",
    ]
    if builder == "docker":
        assert words(call, "--build-arg") == ["EXTRAS=a=b", f"SOURCE_DATE_EPOCH={EPOCH}"]
        assert words(call, "--output") == ["type=docker,rewrite-timestamp=true"]
        assert "--provenance=false" in call
    else:
        assert words(call, "--build-arg") == ["EXTRAS=a=b"]
        assert words(call, "--timestamp") == ["315532800"]
    assert (work.kept / "list").read_text().split() == [
        "context/Dockerfile",
        "context/cluster.yaml",
        "context/main.py",
    ]
    # The command that it prints pushes what it built.
    line = next(each for each in built.err.splitlines() if "drillyard image push" in each)
    pushed = work.run(line.partition("drillyard image ")[2] + " --write cluster.yaml")
    assert (pushed.code, pushed.out) == (0, f"image: {IMAGE}@{DIGEST}\n"), pushed.err
    assert name in work.calls()[1]
    text = (work.directory / "cluster.yaml").read_text()
    assert text == CLUSTER + f"image: {IMAGE}@{DIGEST}\n"
    # A later push changes the line, and nothing else.
    again = work.run(line.partition("drillyard image ")[2] + " --write cluster.yaml")
    assert again.code == 0
    assert (work.directory / "cluster.yaml").read_text() == text


def test_labels_are_quoted() -> None:
    assert label_instruction({"a": 'x "$Y" \\z', "b": "1"}) == (
        'LABEL a="x \\"\\$Y\\" \\\\z" \\\n    b="1"\n'
    )


def test_what_dry_run_shows_is_what_runs(made: Callable[..., Workplace]) -> None:
    work = made("buildah")
    shown = work.run(f"build --tag {IMAGE} --dry-run")
    assert shown.code == 0
    assert work.calls() == []
    assert work.run(f"build --tag {IMAGE}").code == 0
    (call,) = work.calls()
    assert shlex.split(shown.out.splitlines()[-1]) == call
    for fact in (BASE, work.commit, "3 files", "2026-02-03T04:05:06Z"):
        assert fact in shown.out
    pushed = work.run(f"push --tag {IMAGE}:1 --dry-run")
    assert pushed.out == f"buildah push --digestfile digest {IMAGE}:1\n"
    assert len(work.calls()) == 1


def test_cloud_build_builds_pushes_and_ends_with_the_digest(
    made: Callable[..., Workplace], tmp_path: Path
) -> None:
    work = made("gcloud")
    built = work.run(
        f"build --builder cloud-build --tag {IMAGE}:1 --build-arg 'PRICE=$5' --write cluster.yaml"
    )
    assert (built.code, built.out) == (0, f"image: {IMAGE}@{DIGEST}\n"), built.err
    assert "step 1" in built.err
    places = ["--project=my-project", "--region=us-central1"]
    assert work.calls() == [
        [
            *("gcloud", "builds", "submit", "context.tar.gz", "--config=cloudbuild.json"),
            *(*places, "--timeout=2h", "--async", "--format=json"),
        ],
        ["gcloud", "builds", "log", "11111111-2222", "--stream", *places],
        ["gcloud", "builds", "describe", "11111111-2222", *places, "--format=json"],
    ]
    assert all(" ".join(call) in ACCEPTED for call in work.calls())
    config = json.loads((work.kept / "cloudbuild.json").read_text())
    assert config["images"] == [f"{IMAGE}:1"]
    (step,) = config["steps"]
    # A single `$` would be a substitution that Cloud Build does not know.
    assert words(step["args"], "--build-arg") == ["PRICE=$$5", f"SOURCE_DATE_EPOCH={EPOCH}"]
    assert words(step["args"], "--file") == ["Dockerfile"]
    with tarfile.open(work.kept / "context.tar.gz") as tar:
        assert tar.getnames() == ["Dockerfile", "cluster.yaml", "main.py"]
    assert f"image: {IMAGE}@{DIGEST}\n" in (work.directory / "cluster.yaml").read_text()


def test_async_prints_the_id_and_logs_follows_it(made: Callable[..., Workplace]) -> None:
    work = made("gcloud")
    started = work.run(
        f"build --builder cloud-build --async --machine-type e2-highcpu-32 --tag {IMAGE}:1"
    )
    assert (started.code, started.out) == (0, "11111111-2222\n")
    (call,) = work.calls()
    assert " ".join(call) in ACCEPTED
    assert "--machine-type=e2-highcpu-32" in call
    line = next(each for each in started.err.splitlines() if "drillyard image logs" in each)
    ended = work.run(line.partition("drillyard image ")[2] + " --write cluster.yaml")
    assert (ended.code, ended.out) == (0, f"image: {IMAGE}@{DIGEST}\n")
    assert f"image: {IMAGE}@{DIGEST}\n" in (work.directory / "cluster.yaml").read_text()


@pytest.mark.parametrize(
    ("image", "project", "region"),
    [
        ("europe-west4-docker.pkg.dev/p/r/a:1", "p", "europe-west4"),
        ("us-docker.pkg.dev/p/r/a:1", "p", "global"),
        ("gcr.io/p/a:1", "p", "global"),
        ("eu.gcr.io/p/a:1", "p", "global"),
    ],
)
def test_cloud_build_builds_where_the_registry_is(
    made: Callable[..., Workplace], image: str, project: str, region: str
) -> None:
    work = made("gcloud")
    shown = work.run(f"build --builder cloud-build --tag {image} --dry-run").out
    assert f" --project={project} --region={region} " in shown
    own = "--project other --region us-east1"
    shown = work.run(f"build --builder cloud-build --tag {image} --dry-run {own}").out
    assert " --project=other --region=us-east1 " in shown


def test_a_build_that_fails_says_so(made: Callable[..., Workplace]) -> None:
    failed = '{"status": "FAILURE", "failureInfo": {"detail": "step 0 exited with 1"}}'
    scripts = {
        "gcloud": f"case $2 in submit) echo '{{\"id\": \"7\"}}';; describe) echo '{failed}';; esac",
        "buildah": "case $1 in build) echo no space; exit 3;; esac",
        "docker": 'case "$2" in version) exit 1;; build) exit 1;; esac',
    }
    work = made("gcloud", "buildah", "docker", scripts=scripts)
    ended = work.run(f"build --builder cloud-build --tag {IMAGE}:1")
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, "FAILURE ... step 0 exited with 1 ... gcloud builds log 7 --stream")
    # docker without buildx is passed over; what a builder prints is shown.
    ended = work.run(f"build --tag {IMAGE}:1")
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, "no space ... buildah ... 3 ... buildah build")
    ended = work.run(f"build --builder docker --tag {IMAGE}:1")
    assert says(ended.err, "docker ... docker buildx version ... --builder podman")


@pytest.mark.parametrize(
    ("image", "remedy"),
    [
        (IMAGE, "gcloud auth configure-docker us-central1-docker.pkg.dev"),
        ("gcr.io/p/a", "gcloud auth configure-docker gcr.io"),
        ("ghcr.io/me/a", "buildah login ghcr.io"),
    ],
)
def test_a_registry_that_refuses_wants_a_login(
    made: Callable[..., Workplace], image: str, remedy: str
) -> None:
    work = made("buildah", scripts={"buildah": "echo denied >&2; exit 125"})
    ended = work.run(f"push --tag {image}:1 --builder buildah")
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, f"denied ... 125 ... buildah push ... {remedy}")
    assert remedy in ACCEPTED or remedy.startswith("buildah")


def test_the_base_must_fit_the_machine_before_anything_is_built(
    made: Callable[..., Workplace],
) -> None:
    work = made("buildah")
    (work.directory / "mega.yaml").write_text(CLUSTER.replace("a4-highgpu-8g", "a3-megagpu-8g"))
    old = "--build-arg BASE=nvidia/cuda:12.4.1-base-ubuntu20.04"
    ended = work.run(f"build --tag {IMAGE} --cluster cluster.yaml {old}")
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, "Dockerfile:2: ... CUDA 12.4 ... B200 ... 12.8 ... --build-arg BASE=")
    ended = work.run(f"build --tag {IMAGE} --cluster mega.yaml {old}")
    assert says(ended.err, "Dockerfile:2: ... glibc 2.31 ... tcpxo ... glibc >= 2.35")
    # Both at once, and what is older than the driver runs.
    new = "--build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu20.04"
    ended = work.run(f"build --tag {IMAGE} --cluster mega.yaml --driver 570.124.06 {new}")
    assert says(ended.err, "glibc 2.31 ... CUDA 13.0 ... 580 ... 570.124.06")
    assert work.calls() == []
    fits = f"--build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu22.04@sha256:{'2' * 64}"
    for config in ("cluster.yaml", "mega.yaml"):
        ended = work.run(f"build --tag {IMAGE} --cluster {config} --driver 570.124.06 {fits}")
        assert ended.code == 0, ended.err
        assert "warning: Dockerfile" not in ended.err


def test_what_a_base_does_not_show_is_said(made: Callable[..., Workplace]) -> None:
    work = made("buildah")
    line = f"build --tag {IMAGE} --dry-run --cluster cluster.yaml --driver 570"
    ended = work.run(f"{line} --build-arg BASE=nvcr.io/nvidia/nemo:24.07")
    assert ended.code == 0
    said = [each for each in ended.err.splitlines() if "nemo:24.07" in each]
    assert says(said, "CUDA >= 12.8 ... torch.version.cuda")
    assert says(said, "driver")
    assert says(said, "docker buildx imagetools inspect nvcr.io/nvidia/nemo:24.07")


def test_the_platform_is_the_machine_s(made: Callable[..., Workplace]) -> None:
    work = made("buildah", "gcloud")
    (work.directory / "arm.yaml").write_text(CLUSTER.replace("a4-highgpu-8g", "a4x-highgpu-4g"))
    shown = work.run(f"build --tag {IMAGE} --dry-run --cluster arm.yaml")
    assert "--platform linux/arm64 " in shown.out
    refused = work.run(f"build --tag {IMAGE} --cluster arm.yaml --builder cloud-build")
    assert says(refused.err, "linux/arm64 ... cloud-build ... linux/amd64 ... --builder docker")


def test_changed_and_untracked_files_are_named(made: Callable[..., Workplace]) -> None:
    work = made("buildah")
    (work.directory / "main.py").write_text("x = 2\n")
    (work.directory / "new.py").write_text("x = 2\n")
    ended = work.run(f"build --tag {IMAGE}")
    assert ended.out == f"{IMAGE}:sha-{work.commit[:12]}-dirty\n"
    assert says(ended.err, "'main.py' ... 'new.py'")
    (call,) = work.calls()
    assert f"{LABEL}.revision={work.commit}-dirty" in labels(work, call)
    assert "new.py" not in (work.kept / "list").read_text()
    assert (work.kept / "main.py").read_text() == "x = 2\n"


def test_a_file_that_is_copied_and_not_in_git_is_found_before_the_build(
    made: Callable[..., Workplace],
) -> None:
    work = made("buildah")
    (work.directory / "docker").mkdir()
    text = "FROM a:1\nCOPY main.py new.py /\n"
    (work.directory / "docker/Dockerfile").write_text(text)
    git(work.directory, "add", "docker")
    (work.directory / "new.py").write_text("x = 1\n")
    ended = work.run(f"build --tag {IMAGE} --file docker/Dockerfile")
    assert ended.code == 2
    assert says(ended.err, "Dockerfile:2: main.py ... docker ... --context")
    ended = work.run(f"build --tag {IMAGE} --file docker/Dockerfile --context .")
    assert says(ended.err, "Dockerfile:2: new.py ... git add ... --context ... 'new.py'")
    assert "main.py" not in ended.err
    assert work.calls() == []
    git(work.directory, "add", "new.py")
    assert work.run(f"build --tag {IMAGE} --file docker/Dockerfile --context .").code == 0


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("build --tag 'a b'", "a b: is not the name of an image"),
        (f"build --tag {IMAGE}@{DIGEST}", "is not the name of an image"),
        (f"build --tag {IMAGE} --builder kaniko", "--builder kaniko ... docker, podman, buildah"),
        (f"build --tag {IMAGE} --builder podman", "podman: is not installed"),
        (f"build --tag {IMAGE} --file missing", "missing ... --file"),
        (f"build --tag {IMAGE} --file /etc/passwd --context .", "/etc/passwd ... --context"),
        (f"build --tag {IMAGE} --context /nowhere", "/nowhere ... --context"),
        (f"build --tag {IMAGE} --build-arg X", "--build-arg X ... NAME=VALUE"),
        (f"build --tag {IMAGE} --driver new", "--driver new ... 570.124.06"),
        (f"build --tag {IMAGE} --async --region r", "--async, --region ... cloud-build"),
        (f"build --tag {IMAGE} somewhere", "somewhere ... --context somewhere ... --file"),
        (f"build --tag {IMAGE} --write cluster.yaml", "drillyard image push --write"),
        (f"build --tag {IMAGE} --cluster missing.yaml", "missing.yaml"),
        ("build --builder cloud-build --tag ghcr.io/me/a", "REGION-docker.pkg.dev/PROJECT"),
        (f"push --tag {IMAGE}", f"{IMAGE}:TAG"),
        ("push --tag a:1", "a:1 ... REGISTRY/REPOSITORY/NAME"),
        (f"push --tag {IMAGE}:1 --builder cloud-build", "cloud-build ... docker, podman, buildah"),
        (f"push --tag {IMAGE}:1 --write missing.yaml", "missing.yaml: ... --write"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    made: Callable[..., Workplace], line: str, facts: str
) -> None:
    work = made("buildah", "gcloud")
    ended = work.run(line)
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, facts), ended.err
    assert work.calls() == []


def test_a_machine_without_a_builder_is_an_error_that_names_them(
    made: Callable[..., Workplace],
) -> None:
    ended = made().run(f"build --tag {IMAGE}")
    assert (ended.code, ended.out) == (2, "")
    assert says(ended.err, "docker ... podman ... buildah ... --builder cloud-build")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            CLUSTER + "image: other.example.com/a:1\n",
            "file.yaml:9: image: ... other.example.com/a:1",
        ),
        ("name: a\nmodel: {}\n", "is not a cluster config"),
        ("- a\n", "is not a cluster config"),
        (CLUSTER + "image: a:1\nimage: b:1\n", "is not a cluster config"),
    ],
)
def test_only_our_own_line_is_written(
    made: Callable[..., Workplace], text: str, facts: str
) -> None:
    work = made("buildah")
    (work.directory / "file.yaml").write_text(text)
    ended = work.run(f"push --tag {IMAGE}:1 --write file.yaml")
    assert ended.code == 2
    assert says(ended.err, facts), ended.err
    assert f"image: {IMAGE}@sha256:" in ended.err
    assert (work.directory / "file.yaml").read_text() == text
    assert work.calls() == []


def test_an_earlier_image_of_the_repository_is_replaced(made: Callable[..., Workplace]) -> None:
    work = made("buildah")
    path = work.directory / "file.yaml"
    path.write_text(f"image: {IMAGE}:old   # latest\n{CLUSTER}")
    path.chmod(0o600)
    assert work.run(f"push --tag {IMAGE}:1 --write file.yaml").code == 0
    assert path.read_text() == f"image: '{IMAGE}@{DIGEST}'   # latest\n{CLUSTER}"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_command_of_the_recipe_builds_its_image(
    tmp_path: Path, made: Callable[..., Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "recipes/llama3-70b-nemo-a3mega"
    work = made("gcloud")
    files = {path.name: path.read_text() for path in (ROOT / name).iterdir() if path.is_file()}
    directory = tmp_path / "other"
    make_checkout(directory, {f"{name}/{each}": text for each, text in files.items()})
    monkeypatch.chdir(directory)
    line = files["Dockerfile"].splitlines()[0].removeprefix("# drillyard image ")
    ended = work.run(line)
    assert (ended.code, ended.out) == (0, "11111111-2222\n"), ended.err
    assert says(ended.err, "nvcr.io/nvidia/nemo:24.07 ... --project=my-project --region=global")
    image = yaml.safe_load(files["cluster.yaml"])["image"]
    assert json.loads((work.kept / "cloudbuild.json").read_text())["images"] == [image]


def test_the_file_for_a_hand_is_what_the_command_writes() -> None:
    found = yaml.safe_load((ROOT / "cloudbuild.yaml").read_text())
    given = ["--tag", "${_IMAGE}", "--label", f"{LABEL}.revision=${{_REVISION}}"]
    assert found == cloud_config("${_IMAGE}", "docker/Dockerfile", given, "${_EPOCH}")
    substitutions = "--substitutions=_IMAGE=a,_REVISION=b,_EPOCH=3"
    command = (
        f"gcloud builds submit --config=cloudbuild.yaml --region=r --timeout=2h {substitutions}"
    )
    assert command in ACCEPTED
