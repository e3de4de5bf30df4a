"""What a pod of the test cluster consists of: an empty image, and this machine's programs bound
into it, read-only."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

_DIRECTORIES = ("etc", "proc", "sys", "dev", "tmp", "root", "opt", "var", "run", "home", "usr")
_LINKS = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}


def base_spec(checkout: Path) -> dict[str, Any]:
    """containerd's default runtime specification with /usr, this Python, its environment and the
    checkout bound."""
    spec: dict[str, Any] = json.loads(subprocess.check_output(["ctr", "oci", "spec"]))
    bound = dict.fromkeys(
        str(Path(path).resolve()) for path in ("/usr", sys.base_prefix, sys.prefix, checkout)
    )
    inner = {
        path for path in bound for other in bound if other != path and path.startswith(f"{other}/")
    }
    for path in bound:
        if path not in inner:
            options = ["rbind", "ro", "nosuid", "nodev"]
            spec["mounts"].append(
                {"destination": path, "type": "bind", "source": path, "options": options}
            )
    return spec


def write_image(path: Path, tag: str, command: list[str]) -> None:
    """An image of empty directories as an archive that `ctr images import` reads; with a command,
    it has busybox.

    Nothing is bound into a pod's sandbox, which must run something until its pod ends.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        for name in _DIRECTORIES:
            _add(files, name, type=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name, target in _LINKS.items():
            _add(files, name, type=tarfile.SYMTYPE, linkname=target)
        if command:
            _add(files, "busybox", Path("/bin/busybox").read_bytes())
    content = layer.getvalue()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": command, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
        "history": [],
    }
    encoded = json.dumps(config).encode()
    name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    with tarfile.open(path, "w") as archive:
        _add(archive, name, encoded)
        _add(archive, "layer.tar", content)
        _add(
            archive,
            "manifest.json",
            json.dumps([{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode(),
        )


def _add(archive: tarfile.TarFile, name: str, data: bytes | None = None, **fields: Any) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.size = 0o755, len(data or b"")
    for field, value in fields.items():
        setattr(entry, field, value)
    archive.addfile(entry, io.BytesIO(data) if data is not None else None)
