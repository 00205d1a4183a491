"""The command `growattn`, also as `python -m hf_growattn`."""

import io
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log of long work grows as it goes
    try:
        from .cli.commands import main as run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules were still being imported
        print("Interrupted: nothing was written.", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
