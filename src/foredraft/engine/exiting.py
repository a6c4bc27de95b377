"""Threads that compute while the interpreter ends: they are waited for, and none begins anew.

A daemon thread that torch or a kernel has let run without the interpreter's lock is ended where it
asks for the lock again (until Python 3.14), inside C++, and that aborts the whole process. Knows
threads; knows no engine.
"""

from __future__ import annotations

import atexit
import threading
import time

EXIT_SECONDS = 10.0  # that the interpreter's end waits for steps to finish, all in all


class _Computing:
    """`with computing:` around what may run in any thread. At exit it ends threads other than the
    main one by SystemExit, which no thread's end reports.
    """

    def __init__(self) -> None:
        self._depths: dict[threading.Thread, int] = {}  # each thread changes its own alone
        self._exiting = False
        self._deadline: float | None = None

    def __enter__(self) -> None:
        thread = threading.current_thread()
        if thread is threading.main_thread():  # it is who ends the interpreter
            return
        # Counted first: `wait` either sees it or has let it see that there is no way in.
        self._depths[thread] = self._depths.get(thread, 0) + 1
        if self._exiting:
            self._leave(thread)
            raise SystemExit("the interpreter ends")

    def __exit__(self, *_: object) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            self._leave(thread)

    def _leave(self, thread: threading.Thread) -> None:
        self._depths[thread] -= 1
        if not self._depths[thread]:
            del self._depths[thread]

    def seconds_left(self) -> float:
        """Of EXIT_SECONDS, which begin with the first call."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + EXIT_SECONDS
        return max(0.0, self._deadline - now)

    def wait(self) -> None:
        """Let no thread but the main one in any more, and wait for those that are."""
        self._exiting = True
        while any(thread.is_alive() for thread in list(self._depths)) and self.seconds_left():
            time.sleep(0.001)


computing = _Computing()
# Before all that is registered later, so after it: threads that can be told to stop are told first.
atexit.register(computing.wait)
