"""The command `growattn` as `python -m hf_growattn`."""

from .cli.commands import main

if __name__ == "__main__":
    main()
