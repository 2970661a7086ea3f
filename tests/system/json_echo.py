"""Child process that returns each message, and ends when it is asked to."""

from __future__ import annotations

import json
import sys

from fusec.system.json_child import ParentPipe


def main() -> None:
    pipe = ParentPipe()
    for line in sys.stdin:
        message = json.loads(line)
        if "exit" in message:
            print("last words", file=sys.stderr)
            sys.exit(message["exit"])
        pipe.tell({"answer": message})
