"""Entry of the command line, which imports nothing before it can answer Ctrl-C."""

import os
import sys

INTERRUPTED = 130
# OpenMP's threads sleep once a matrix product is done, and leave the cores to compiled loops; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Load the command line and run it; Ctrl-C is one line from here on."""
    try:
        from sfi_cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
