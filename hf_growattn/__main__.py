"""The command `growattn`, also as `python -m hf_growattn`."""

import io
import sys


def main() -> None:
    """Run the command line; interrupted while it is still being loaded, it ends as it does later."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a log of long work grows as it goes
    try:
        from .cli.commands import app

        app()
    except KeyboardInterrupt:
        print("Interrupted: nothing was written.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
