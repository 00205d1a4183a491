"""The command line, called in this process."""

import contextlib
import io
from typing import NamedTuple

from hf_growattn.cli.commands import main


class Done(NamedTuple):
    """How a command ended: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def call(*words) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:  # of argparse
            code = int(ended.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
