"""How long this process has run, by a clock that nobody sets."""

import time

import psutil

_LOOKED_AT = time.monotonic()
_AGE_SECONDS = max(0.0, time.time() - psutil.Process().create_time())
"when this module was imported: of an interpreter that was starting"


def seconds_since_start() -> float:
    """Of the process; what the system's date does meanwhile changes nothing."""
    return _AGE_SECONDS + time.monotonic() - _LOOKED_AT
