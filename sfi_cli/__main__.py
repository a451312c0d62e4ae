"""Entry of the command line, which imports nothing before it can answer Ctrl-C."""

import sys

INTERRUPTED = 130


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
