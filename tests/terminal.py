"""A program on its own terminal."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios

import outsider as o


class Terminal:
    def __init__(self, *command, rows=24, columns=80, cwd=None, **variables):
        """variables: the environment variables of the program, which sees no others of this
        project."""
        self.mine, theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(theirs)
        # The program setsid, which then executes the command, replaces preexec_fn. The code that
        # Python runs between fork and exec may wait for a gRPC thread, which the child lacks.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *map(str, command)], stdin=theirs, stdout=theirs, stderr=theirs,
            cwd=cwd, env=o.environment(**{"TERM": "xterm", **variables}))
        self.theirs = theirs  # It is kept open, so that output can be read at the end.
        self.text = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.mine, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds=0.0):
        while select.select([self.mine], [], [], seconds)[0]:
            self.text += os.read(self.mine, 65536)
            seconds = 0

    def wait_for(self, text, seconds=60):
        """Reads until the text has appeared, and discards everything up to its end."""
        def there():
            self.read(0.05)
            return text in self.text

        if not o.eventually(there, seconds, pause=0):
            raise AssertionError(f"{text!r} does not come: {self.text[-2000:]!r}")
        seen, self.text = self.text.split(text, 1)
        return seen

    def key(self, text):
        os.write(self.mine, text)

    def wait(self, seconds=60):
        """Returns the exit code."""
        def over():
            self.read()
            return self.process.poll() is not None

        if not o.eventually(over, seconds):
            raise AssertionError("it does not end")
        self.read()
        return self.process.returncode

    def as_before(self):
        return termios.tcgetattr(self.theirs) == self.before

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.mine)
        os.close(self.theirs)
