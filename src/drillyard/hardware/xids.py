"""Xids: errors that NVIDIA's driver writes into the kernel log, whose fault each one is, and what
to do. The facts are in xids.yaml."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from pydantic import Field, PositiveInt

from drillyard.hardware.catalog import packaged_rows
from drillyard.hardware.facts import CatalogRow


class XidAction(StrEnum):
    """NVIDIA's resolution of an Xid: whose fault it means, and what to do in words."""

    IGNORE = "IGNORE"
    RESTART_APP = "RESTART_APP"
    CHECK_UVM = "CHECK_UVM"
    RESET_GPU = "RESET_GPU"
    RESTART_VM = "RESTART_VM"
    RESTART_BM = "RESTART_BM"
    CHECK_MECHANICALS = "CHECK_MECHANICALS"
    UPDATE_SWFW = "UPDATE_SWFW"
    CONTACT_SUPPORT = "CONTACT_SUPPORT"

    @property
    def blames_node(self) -> bool:
        """Whether the node needs work before it is used; otherwise it is information, or the
        application's."""
        return self not in (XidAction.IGNORE, XidAction.RESTART_APP, XidAction.CHECK_UVM)

    @property
    def remedy(self) -> str:
        """What to do."""
        return _REMEDIES[self]


_REMEDIES = {
    XidAction.IGNORE: "nothing to do",
    XidAction.RESTART_APP: "restart the application; look for the fault in it",
    XidAction.CHECK_UVM: "restart the application; look for the fault in its unified memory",
    XidAction.RESET_GPU: "drain the node and reset the GPU (nvidia-smi -r); if it comes back, have"
    " it repaired",
    XidAction.RESTART_VM: "restart the virtual machine",
    XidAction.RESTART_BM: "drain and restart the node; if it comes back, have the GPU replaced",
    XidAction.CHECK_MECHANICALS: "drain the node; check power and seating of the GPU",
    XidAction.UPDATE_SWFW: "update the driver and the GPU's firmware",
    XidAction.CONTACT_SUPPORT: "drain the node; ask the vendor",
}


class Xid(CatalogRow):
    """What numbers mean. `by_text`: another action for a line that has the text; `by_accelerator`:
    another one on that GPU."""

    xids: tuple[PositiveInt, ...]
    title: str
    action: XidAction
    by_text: dict[str, XidAction] = Field(default={})
    by_accelerator: dict[str, XidAction] = Field(default={})

    def action_for(self, line: str, accelerator: str | None = None) -> XidAction:
        """What to do for a line of the kernel log on a GPU."""
        chosen = self.by_accelerator.get(accelerator or "", self.action)
        places = {line.rfind(text): action for text, action in self.by_text.items()}
        last = max(places, default=-1)
        return places[last] if last >= 0 else chosen


def find_xid(number: int) -> Xid | None:
    """The row of a number; None: it is not known."""
    return _by_number().get(number)


@cache
def _by_number() -> dict[int, Xid]:
    rows = packaged_rows(Xid, "xids")
    return {number: row for row in rows for number in row.xids}
