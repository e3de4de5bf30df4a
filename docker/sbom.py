"""Prints the bill of materials of the image, CycloneDX JSON: `python sbom.py /opt/drillyard`.

The packages of the virtual environment are listed by cyclonedx-py, those of Debian by dpkg. Neither
a time nor a serial number is in it: the same packages give the same bytes. Runs in an environment
that has cyclonedx-bom.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from packageurl import PackageURL


def main() -> None:
    """Print the document."""
    tool = Path(sys.executable).with_name("cyclonedx-py")
    python = Path(sys.argv[1], "bin/python")
    words = [str(tool), "environment", "--output-reproducible", "--of", "JSON", str(python)]
    document = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    document["components"] = sorted(
        [*document.get("components", []), *debian_packages()], key=lambda each: each["bom-ref"]
    )
    print(json.dumps(document, indent=1, sort_keys=True))


def debian_packages() -> list[dict[str, Any]]:
    """Debian's packages as components (https://github.com/package-url/purl-spec, type deb)."""
    form = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"
    listed = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={form}"], check=True, capture_output=True, text=True
    ).stdout
    found = []
    for status, name, version, architecture in (line.split("\t") for line in listed.splitlines()):
        if status == "installed":
            purl = PackageURL("deb", _vendor(), name, version, {"arch": architecture}).to_string()
            found.append(
                {
                    "type": "library",
                    "bom-ref": purl,
                    "name": name,
                    "version": version,
                    "purl": purl,
                }
            )
    return found


def _vendor() -> str:
    """`debian` or `ubuntu`."""
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    return values.get("ID", "debian").strip('"')


if __name__ == "__main__":
    main()
