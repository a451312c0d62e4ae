"""`python -m sfi_cli`: the command line without an install."""

from sfi_cli.app import main

main()
