# SPDX-License-Identifier: Apache-2.0
"""What a machine with other work adds to everything that is measured on it."""

from __future__ import annotations

import threading
import time

NAP_S = 0.005


class Lateness:
    """How long a thread of this process was kept waiting that wanted nothing but to sleep, in seconds so far.

    Who takes a time less what ``late_s`` grew by meanwhile has what the machine's other work did not add.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(NAP_S):
            now = time.monotonic()
            self.late_s += max(now - last - 2 * NAP_S, 0.0)
            last = now

    def close(self) -> None:
        self._over.set()
        self._thread.join()
