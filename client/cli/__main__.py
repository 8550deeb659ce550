"""`python -m quire.client.cli` is `quire`."""

from quire.client.cli import main

if __name__ == "__main__":
    main()
