"""Lets a test move the wall clock of every Python process of a run: VLA3_TEST_CLOCK names a file that says by how many
seconds. It stands for an operator, or a time server, that sets the machine's clock.
"""

import os
import time

if "VLA3_TEST_CLOCK" in os.environ:
    _real, _file = time.time, os.environ["VLA3_TEST_CLOCK"]
    _seen = [0.0, 0.0]  # when the file was looked at, and what it said

    def _moved() -> float:
        now = time.monotonic()
        if now - _seen[0] > 0.2:
            _seen[0] = now
            try:
                with open(_file) as file:
                    _seen[1] = float(file.read())
                with open(f"{_file}.{os.getpid()}", "w") as file:  # it was here
                    file.write(str(_seen[1]))
            except (OSError, ValueError):
                pass
        return _real() + _seen[1]

    time.time = _moved
