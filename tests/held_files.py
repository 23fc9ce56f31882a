#!/usr/bin/env python3
"""Runs a program that can open files like those of --data-dir only when a test lets it: the kernel
reports each opening with FLAGS to the test, and it waits for the answer.

usage: held_files.py SOCKET program [argument ...]
"""

import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
SECCOMP, OPENAT = {"x86_64": (317, 257), "aarch64": (277, 56)}[platform.machine()]
CONTINUE = struct.pack("qiI", 0, 0, 1)  # What follows the number of a report in its answer.


def run():
    """Becomes the program, and sends the socket what receives the reports."""
    load, jump, end = 0x20, 0x15, 0x06
    # 0 is the place of the system call's number, and 32 that of its third argument.
    code = ((load, 0, 0, 0), (jump, 0, 3, OPENAT), (load, 0, 0, 32), (jump, 0, 1, FLAGS),
            (end, 0, 0, 0x7FC00000), (end, 0, 0, 0x7FFF0000))  # To report, and to allow.
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_NEW_LISTENER.
    reports = libc.syscall(SECCOMP, ctypes.c_long(1), ctypes.c_long(8), program)
    if reports < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(sys.argv[1])
        socket.send_fds(test, [b"x"], [reports])
    os.close(reports)
    os.execv(sys.argv[2], sys.argv[2:])


class HeldFiles:
    """Lets a program open the first `free` files, and the others after release()."""

    def __init__(self, folder, free):
        self.free, self.released = free, threading.Event()
        path = folder / "held_files"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.prefix = (sys.executable, __file__, path)
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        with self.listener, self.listener.accept()[0] as program:
            reports = socket.recv_fds(program, 1, 1)[1][0]
        poll = select.poll()
        poll.register(reports, select.POLLIN)
        while poll.poll()[0][1] & select.POLLIN:  # Until the program has ended.
            if self.free == 0:
                self.released.wait()
            self.free = max(0, self.free - 1)
            report = bytearray(80)
            try:
                fcntl.ioctl(reports, 0xC0502100, report)  # SECCOMP_IOCTL_NOTIF_RECV
                # SECCOMP_IOCTL_NOTIF_SEND
                fcntl.ioctl(reports, 0xC0182101, report[:8] + CONTINUE)
            except OSError:
                break
        os.close(reports)

    def release(self):
        self.released.set()


if __name__ == "__main__":
    run()
