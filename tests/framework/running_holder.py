"""A holder on a thread of the test's process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

from deadlines import DEADLINE_S

from quire.worker.holder.holder import Holder, listen_at


class RunningHolder:
    """A holder on a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = listen_at(path)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=Holder(self._listener).serve, args=(self._stop_read,))
        self._thread.start()

    def stop(self) -> None:
        os.write(self._stop_write, b".")
        self._thread.join(DEADLINE_S)
        self._listener.close()
        for end in (self._stop_read, self._stop_write):
            os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
