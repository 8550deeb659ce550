"""`make gpu-ten-minutes`: python tests/gpu/ten_minutes [FLAGS]... See command.py."""

import sys

from command import main

if __name__ == "__main__":
    sys.exit(main())
