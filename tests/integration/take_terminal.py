"""Run a Python script with the terminal on stdin as controlling terminal, so that Ctrl-C reaches it as a signal."""

import fcntl
import runpy
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
