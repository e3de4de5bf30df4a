"""A program with gcluster's commands, for tests at the edge of its protocol: it makes no cloud, and
writes into the bucket what the real one's Terraform would keep there.

Terraform is a child of the name `terraform`, which dies at once with gcluster, holds the lock of
its group's state, and saves the state when it is interrupted. FAKE_GCLUSTER is a directory: `log`
gets a line for each command; `faults.json` has, by `deploy cluster` and the like, the text of an
error and how often it comes, or `hang`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

VERSION = "v1.95.0"
ROOM = Path(os.environ["FAKE_GCLUSTER"])
_SET_NAME, _DIE_WITH_PARENT = 15, 1


def main(words: list[str]) -> int:
    if words == ["--version"]:
        print(f"gcluster version {VERSION}")
        return 0
    verb, *rest = words
    with open(ROOM / "log", "a", encoding="utf-8") as log:
        log.write(" ".join(each.rpartition("/")[2] for each in words) + "\n")
    if verb == "create":
        return create(rest)
    place = Path(rest[0])
    if verb == "export-outputs":
        return export(place.parent, place.name)
    assert "--auto-approve" in rest
    skipped = rest[rest.index("--skip") + 1].split(",") if "--skip" in rest else []
    groups = [each["group"] for each in expanded(place)["blueprint"]["deployment_groups"]]
    chosen = [each for each in groups if each not in skipped]
    failed = 0
    for group in chosen if verb == "deploy" else reversed(chosen):
        code = change(place, verb, group)
        # The real one goes on to destroy, and stops deploying.
        if code and verb == "deploy":
            return code
        failed = failed or code
    return failed


def create(rest: list[str]) -> int:
    options = dict(zip(rest[:-1:2], rest[1:-1:2], strict=True))
    assert options["-l"] == "ERROR"
    blueprint = yaml.safe_load(Path(rest[-1]).read_text())
    deployment = yaml.safe_load(Path(options["-d"]).read_text())
    place = Path(options["-o"]) / deployment["vars"]["deployment_name"]
    artifacts = place / ".ghpc" / "artifacts"
    artifacts.mkdir(parents=True)
    content = {"blueprint": blueprint, "deployment": deployment}
    (artifacts / "expanded_blueprint.yaml").write_text(yaml.safe_dump(content))
    return 0


def expanded(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (place / ".ghpc" / "artifacts" / "expanded_blueprint.yaml").read_text()
    )
    return found


def export(place: Path, group: str) -> int:
    (place / ".ghpc" / "artifacts" / f"{group}_outputs.tfvars").write_text("network = 1\n")
    return 0


def change(place: Path, verb: str, group: str) -> int:
    if group == "image":
        print("building image using packer", flush=True)
        return fault(verb, group)
    if group == "cluster" and verb == "destroy":
        outputs = place / ".ghpc" / "artifacts" / "base_outputs.tfvars"
        if not outputs.exists():
            print('Error: No value for required variable\n\nThe root module input "network"')
            return 1
    child = os.fork()
    if child == 0:
        os._exit(terraform(place, verb, group))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0 and verb == "deploy":
        export(place, group)
    return code


def terraform(place: Path, verb: str, group: str) -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_SET_NAME, b"terraform", 0, 0, 0)
    os.setpgid(0, 0)
    interrupted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
    found = expanded(place)
    blueprint, variables = found["blueprint"], found["deployment"]["vars"]
    bucket = bucket_of(found["deployment"])
    prefix = f"{blueprint['blueprint_name']}/{variables['deployment_name']}/{group}"
    lock = f"{prefix}/default.tflock"
    if call("GET", bucket, lock):
        print("Error: Error acquiring the state lock\n\nLock Info:", flush=True)
        return 1
    who = {"Who": os.environ["FAKE_WHO"], "Created": time.strftime("%Y-%m-%dT%H:%M:%S.1Z")}
    put(bucket, lock, {"ID": "1", "Operation": verb, **who})
    print(f"{group}: {verb}ing", flush=True)
    modules = [each["modules"] for each in blueprint["deployment_groups"] if each["group"] == group]
    made = [each["id"] for each in modules[0]] if verb == "deploy" else []
    code = fault(verb, group, interrupted)
    if code and verb == "deploy":
        made = made[:1]
    if not (code and verb == "destroy"):
        state(bucket, prefix, made)
    call("DELETE", bucket, lock)
    return code


def state(bucket: str, prefix: str, made: list[str]) -> None:
    rows = [
        {
            "mode": "managed",
            "type": "google_compute_instance_from_template",
            "name": each,
            "instances": [{"attributes": {"name": f"c-{each}", "zone": "us-central1-b"}}],
        }
        for each in made
    ]
    content = {"version": 4, "serial": 1, "lineage": "1", "resources": rows}
    put(bucket, f"{prefix}/default.tfstate", content)


def bucket_of(deployment: dict[str, Any]) -> str:
    backend = deployment["terraform_backend_defaults"]
    assert backend["type"] == "gcs"
    name: str = backend["configuration"]["bucket"]
    return name


def call(method: str, bucket: str, name: str) -> bool:
    """Whether an object is there."""
    path = f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"
    request = urllib.request.Request(os.environ["STORAGE_EMULATOR_HOST"] + path, method=method)
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError:
        return False
    return True


def put(bucket: str, name: str, content: dict[str, Any]) -> None:
    parts = ({"name": name}, content)
    body = "".join(
        f"--x\r\nContent-Type: application/json\r\n\r\n{json.dumps(each)}\r\n" for each in parts
    )
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
    request = urllib.request.Request(
        os.environ["STORAGE_EMULATOR_HOST"] + path,
        f"{body}--x--\r\n".encode(),
        {"Content-Type": "multipart/related; boundary=x"},
    )
    urllib.request.urlopen(request).close()


def fault(verb: str, group: str, interrupted: list[int] | None = None) -> int:
    path = ROOM / "faults.json"
    faults = json.loads(path.read_text()) if path.exists() else {}
    text, times = faults.get(f"{verb} {group}", ("", 0))
    if not times:
        return 0
    faults[f"{verb} {group}"] = text, times - 1
    path.write_text(json.dumps(faults))
    if text == "hang":
        (ROOM / "hangs").touch()
        while not interrupted:
            time.sleep(0.02)
        return 1
    print(f"╷\n│ \x1b[31mError: {text}\n╵", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
