"""Run a command that ends when its parent does: `python child_process.py PARENT_PID GRACE_S COMMAND ...`.

On Linux a small watcher process waits for the parent's death. It then sends SIGTERM to the command, once, and kills the
rest of the command's process group GRACE_S seconds later. The command replaces this process by exec, so no wrapper
process remains. On other systems the command runs without this protection. The file is run by path with `python -I -S`
and imports no package code, because it must start fast.

The kernel could send the signal (PR_SET_PDEATHSIG), but sends it again for each thread of the parent that ends, and
servers take a second SIGTERM for an order to end at once.
"""

import contextlib
import os
import select
import signal
import sys
import time

POLL_S = 0.1


def main() -> None:
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        if os.getppid() != parent:  # it died already
            sys.exit(1)
        _start_watcher(parent, os.getpid(), grace_s)
    os.execvp(command[0], command)


def _start_watcher(parent: int, child: int, grace_s: float) -> None:
    """Fork the watcher twice, so that it is not a child of the command, which would not expect one."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    with contextlib.suppress(OSError):
        if not os.fork():
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            os.closerange(3, 2**20)  # an inherited socket or pipe stays open as long as any process holds it
            _watch(parent, child, grace_s)
    os._exit(0)


def _watch(parent: int, child: int, grace_s: float) -> None:
    """Wait until parent or child ends; if it was the parent, end the child, and its group once the grace is over."""
    try:
        ends = select.poll()
        ends.register(os.pidfd_open(child), select.POLLIN)
        parent_fd = os.pidfd_open(parent)
        ends.register(parent_fd, select.POLLIN)
        if parent_fd not in [descriptor for descriptor, _ in ends.poll()]:
            return  # a living parent cleans up after its child
    except ProcessLookupError:
        pass  # one of them has ended already
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while time.monotonic() < end:
        os.killpg(child, 0)  # raises, and so ends the watcher, when the group is empty
        time.sleep(POLL_S)
    os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
