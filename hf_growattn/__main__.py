"""The command `growattn` as `python -m hf_growattn`."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
