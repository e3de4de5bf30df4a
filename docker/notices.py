"""Prints the licences of the packages in a virtual environment: `python3 notices.py
/opt/drillyard`.

For the image, which redistributes these packages: their licences require their texts to be
included. The base image has those of its own packages in /usr/share/doc. Standard library only.
"""

import importlib.metadata
import sys
from pathlib import Path

NAMES = ("licen", "notice", "copying", "copyright", "authors")


def main() -> None:
    """Print each package with its licence and the text of each file that it installs about it."""
    (packages,) = Path(sys.argv[1]).glob("lib/python3*/site-packages")
    found = importlib.metadata.distributions(path=[str(packages)])
    for each in sorted(found, key=lambda each: each.name.lower()):
        print(f"{'=' * 100}\n{each.name} {each.version}: {licence_of(each.metadata)}\n")
        for file in sorted(each.files or ()):
            if ".dist-info" in file.parts[0] and file.name.lower().startswith(NAMES):
                print(
                    f"--- {file}\n{file.locate().read_text(encoding='utf-8', errors='replace').strip()}\n"  # noqa: E501
                )


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """The licence in the package's metadata: an expression, a line of text, or classifiers."""
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in metadata.get_all("Classifier") or ()
        if "License ::" in each
    ]
    said = (
        metadata.get("License-Expression")
        or (metadata.get("License") or "").strip().partition("\n")[0]
    )
    return said or ", ".join(classifiers) or "not said"


if __name__ == "__main__":
    main()
