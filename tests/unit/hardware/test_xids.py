from __future__ import annotations

from drillyard.hardware.catalog import packaged_rows
from drillyard.hardware.xids import Xid, XidAction, find_xid


def test_each_number_stands_once() -> None:
    numbers = [number for row in packaged_rows(Xid, "xids") for number in row.xids]
    assert len(numbers) == len(set(numbers)) > 100


def test_actions_of_some() -> None:
    actions = {13: "RESTART_APP", 31: "RESTART_APP", 43: "IGNORE", 48: "RESET_GPU", 63: "IGNORE"}
    actions |= {74: "RESET_GPU", 79: "RESTART_BM", 94: "RESTART_APP", 95: "RESET_GPU"}
    for number, action in actions.items():
        row = find_xid(number)
        assert row is not None and row.action == action and row.provenance.row.text
    assert find_xid(1) is None


def test_every_action_has_a_remedy_and_a_side() -> None:
    assert all(action.remedy for action in XidAction)
    assert [action for action in XidAction if not action.blames_node] == [
        "IGNORE", "RESTART_APP", "CHECK_UVM",
    ]  # fmt: skip


def test_texts_of_a_line_decide_where_a_row_says_so() -> None:
    row = find_xid(154)
    assert row is not None
    text = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    assert row.action_for(text) is XidAction.RESET_GPU
    assert row.action_for("in a form that is new") is XidAction.CONTACT_SUPPORT
