"""A launched run's part on the nodes: one agent per node, which starts the command there and follows the leader's.

The agent travels as source files and runs on the nodes' own Python: standard library only, nothing newer than 3.9.
"""

from __future__ import annotations

import re

_SHARED = {
    "drillyard": ("redaction",),
    "drillyard.supervise": (
        "cause",
        "launch_contract",
        "process_identity",
        "reaper",
        "restart_policy",
        "sockets",
        "stop_requests",
    ),
}
"""Modules of other packages that travel along, as siblings of these files."""
_IMPORT = re.compile(r"^from drillyard(?:\.supervise)?(\.\w+)? import", re.MULTILINE)


def shipped_files() -> dict[str, str]:
    """The agent as it travels: the text of each of its files, by name, in order of names.

    Read as resources of the packages, so that a zipped wheel has them too.
    """
    from importlib.resources import files

    found = {each.name: each for each in files(__package__).iterdir() if each.name.endswith(".py")}
    for package, names in _SHARED.items():
        found.update({f"{name}.py": files(package).joinpath(f"{name}.py") for name in names})
    texts = {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}
    return {name: _IMPORT.sub(lambda match: f"from {match[1] or '.'} import", text) for name, text in texts.items()}
