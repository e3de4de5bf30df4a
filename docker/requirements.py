"""Prints what Drillyard needs, one requirement a line: `python3 requirements.py pyproject.toml
train,gcp`.

For the image's layer of dependencies, which is built before the code is copied. Standard library
only.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print the dependencies and those of the named extras; an extra that is not known ends the
    build."""
    _, path, extras = sys.argv
    project = tomllib.loads(Path(path).read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = [extra for extra in extras.split(",") if extra]
    for extra in wanted:
        if extra not in optional:
            sys.exit(f"error: EXTRAS: there is no '{extra}'; known are {', '.join(optional)}")
    print(
        "\n".join(
            [*project["dependencies"], *(each for extra in wanted for each in optional[extra])]
        )
    )


if __name__ == "__main__":
    main()
