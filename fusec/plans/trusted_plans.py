"""Record which serialized plans this machine trusts, by the hash of their bytes, because a plan holds machine code."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from pathlib import Path

from fusec.plans.cache_folder import folder_errors, lock_folder
from fusec.system import atomic_write

MAX_BYTES = 8 << 20  # of the list of trusted hashes, 65 bytes each; beyond it the older half is deleted


class TrustedPlans:
    """The list of trusted hashes, in the file `trusted` of a folder that many threads and processes share."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "trusted"
        self._known: set[str] = set()
        self._read_bytes = 0  # size of the list when `_known` was read
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return sum(len(line) == 64 for line in self._hashes())

    def __contains__(self, blob: bytes) -> bool:
        return hashlib.sha256(blob).hexdigest() in self._hashes()

    def add(self, *blobs: bytes) -> None:
        """Trust serialized plans from now on."""
        known = self._hashes()
        new = [digest for blob in blobs if (digest := hashlib.sha256(blob).hexdigest()) not in known]
        if not new:
            return
        with folder_errors(self.folder), lock_folder(self.folder, "trusted"):
            if self.path.exists() and self.path.stat().st_size > MAX_BYTES:
                lines = self.path.read_text(encoding="ascii", errors="replace").split("\n")
                with atomic_write.written(self.path, durable=False) as newer:
                    newer.write("\n".join(lines[len(lines) // 2 :]).encode(errors="replace"))
            with self.path.open("ab") as file:
                # newlines come first, so that a line that was cut off before does not join the next one
                file.write("".join(f"\n{d}" for d in new).encode())

    def _hashes(self) -> set[str]:
        """Return the trusted hashes; read the list again if its size changed."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        with self._mutex:
            if size != self._read_bytes:
                text = ""
                with contextlib.suppress(FileNotFoundError), folder_errors(self.folder):
                    text = self.path.read_text(encoding="ascii", errors="replace")
                self._known, self._read_bytes = set(text.split("\n")), len(text)
            return self._known
