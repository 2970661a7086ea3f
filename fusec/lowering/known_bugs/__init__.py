"""Known bugs of cuDNN, as tables of rules: graphs and plans that cuDNN accepts and computes wrongly.

`misread` refuses a graph before cuDNN is asked (graph_rules.py). `wrong_plan` leaves one plan of a graph out
(plan_rules.py). `deadly` refuses graphs that are malformed, or that crash cuDNN (malformed.py). To add a bug, write a
small predicate, add one line to the table, and describe the bug in docs/hazards.md.
"""

from fusec.lowering.known_bugs.graph_rules import misread
from fusec.lowering.known_bugs.malformed import MAX_ELEMENTS, deadly
from fusec.lowering.known_bugs.plan_rules import wrong_plan
from fusec.lowering.known_bugs.storage import two_of_three

__all__ = ["MAX_ELEMENTS", "deadly", "misread", "two_of_three", "wrong_plan"]
