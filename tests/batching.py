"""What the batcher's tests share: a clock that the test moves, and threads that a failing test does not wait for."""

import threading
import time
from concurrent.futures import Future

LONG = 10.0  # seconds; never reached unless something hangs
NEVER_MS = 1e9


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


def payloads(tickets):
    return [ticket.payload for ticket in tickets]


def wait_until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.001)


def start(function, *args):
    """The future of ``function(*args)`` in a thread of its own, which a failing test does not wait for."""
    future = Future()

    def body():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future
