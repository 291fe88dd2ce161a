"""Runs a command that ends when its parent does: `python tied.py PARENT_PID GRACE_S COMMAND ...`, on Linux.

The kernel is told to send SIGTERM at the parent's death, then the command takes this process's place, so that nothing
stands between the two. Beside it a small process waits for the parent's death, and kills what is left of the command's
process group GRACE_S seconds later: not everything heeds SIGTERM. Started as a file, without the package: it must begin
fast. Elsewhere than on Linux the command runs untied.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
LOOK_EVERY_S = 0.1


def main() -> None:
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was told
            sys.exit(1)
        _watch_beside(parent, os.getpid(), grace_s)
    os.execvp(command[0], command)


def _watch_beside(parent: int, member: int, grace_s: float) -> None:
    """In a process that is no child of the command's, which knows nothing of it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    with contextlib.suppress(OSError):
        if not os.fork():
            os.setsid()
            _let_go()
            _watch(parent, member, grace_s)
    os._exit(0)


def _let_go() -> None:
    """Of all that was inherited: a socket stays open, and a pipe has no end, as long as anybody has it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, 2**20)


def _watch(parent: int, member: int, grace_s: float) -> None:
    """Until either has ended; where the parent has, until the command's group has, or is killed."""
    try:
        ends = select.poll()
        ends.register(os.pidfd_open(member), select.POLLIN)
        of_parent = os.pidfd_open(parent)
        ends.register(of_parent, select.POLLIN)
        if of_parent not in [descriptor for descriptor, _ in ends.poll()]:
            return  # the parent kills what its child left
    except ProcessLookupError:
        pass  # one has ended already
    end = time.monotonic() + grace_s
    while time.monotonic() < end:
        os.killpg(member, 0)  # raises when none of them is left
        time.sleep(LOOK_EVERY_S)
    os.killpg(member, signal.SIGKILL)


if __name__ == "__main__":
    main()
