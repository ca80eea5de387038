"""`python -m chasm`: the command line, for launchers that start modules."""

from chasm.cli import main

main()
