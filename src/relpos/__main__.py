"""`python -m relpos` is the command `relpos`."""

from relpos.cli import main

main()
