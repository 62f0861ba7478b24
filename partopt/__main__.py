"""`python -m partopt`."""

from partopt.cli import main

main()
