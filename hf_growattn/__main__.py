"""The command `growattn`, also as `python -m hf_growattn`."""

import sys

from .cli.commands import main as run


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
