"""The command line, called in this process."""

import contextlib
import io
from typing import NamedTuple

import pytest

from hf_growattn.cli.commands import app


class Done(NamedTuple):
    """How a command ended: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def call(*words) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        app([str(word) for word in words], prog_name="growattn")
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())
