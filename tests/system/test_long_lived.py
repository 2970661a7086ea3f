"""Test that objects of a process that has started are not looked at again."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from fusec.system.long_lived import leave_alone
class Node: pass
old = Node()
old.me = old
leave_alone()
new = Node()
new.me = new
held = gc.get_objects()
assert not any(each is old for each in held)
assert any(each is new for each in held)
del new, held
assert gc.collect()
print("good")
"""


def test_only_newer_objects_are_collected() -> None:
    """In a process of its own, because it lasts."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "good\n", done.stderr
