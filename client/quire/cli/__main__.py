"""`python -m quire.cli` is `quire`."""

from quire.cli import main

if __name__ == "__main__":
    main()
