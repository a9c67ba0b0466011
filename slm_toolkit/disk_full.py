"""How a write for which there is no room is known: by its number, or by what C++ and Rust say."""

import errno
import re

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"error numbers of a write for which there is no room: of the disk, of a quota, of a limit on a file's size"
SAYS_DISK_FULL = re.compile(
    r"\[Errno (28|122|27)\]|No space left on device|Disk quota exceeded|os error (28|122|27)\b"
)
"the same numbers on Linux, and how C++ and Rust say it"
