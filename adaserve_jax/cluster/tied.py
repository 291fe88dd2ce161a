"""Runs a command that ends when its parent does: `python tied.py PARENT_PID COMMAND ...`, on Linux.

The kernel is told to send SIGTERM at the parent's death, then the command takes this process's place, so that nothing
stands between the two. Started as a file, without the package: it must begin fast. Elsewhere than on Linux the command
runs untied.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was told
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
