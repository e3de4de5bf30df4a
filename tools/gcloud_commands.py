"""Ask gcloud's own parser about commands, one a line on standard input; print what it accepts.

    python tools/gcloud_commands.py < COMMANDS > tests/unit/provision/google/gcloud_commands.txt

The commands are not run. gcloud must be installed (its Python libraries are beside its program).
Exit code 1 where one is refused: gcloud says why on standard error.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PARSER = """
import shlex, sys
from googlecloudsdk import gcloud_main
parser = gcloud_main.CreateCLI([])._CLI__parser
refused = 0
for line in sys.stdin.read().splitlines():
    try:
        parser.parse_args(shlex.split(line)[1:])
        print(line)
    except SystemExit:
        refused = 1
sys.exit(refused)
"""


def main() -> int:
    """Parse the commands with the Python that gcloud brings, or this one."""
    program = shutil.which("gcloud")
    if program is None:
        print("gcloud is not on PATH: https://cloud.google.com/sdk/docs/install", file=sys.stderr)
        return 2
    root = Path(program).resolve().parent.parent
    bundled = root / "platform/bundledpythonunix/bin/python3"
    python = str(bundled) if bundled.exists() else sys.executable
    libraries = f"{root}/lib:{root}/lib/third_party"
    lines = sorted({" ".join(shlex.split(line)) for line in sys.stdin if line.strip()})
    ended = subprocess.run(
        [python, "-c", PARSER],
        input="\n".join(lines),
        text=True,
        env={"PYTHONPATH": libraries, "CLOUDSDK_CONFIG": "/nonexistent", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
