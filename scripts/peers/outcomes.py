"""A pytest plugin: every test starts from one seed, and how it ended goes to the file named in OUTCOMES.

The file holds {name: [outcome, message]}.
"""

import json
import os
from pathlib import Path

from transformers import set_seed

_RANK = {"skipped": 0, "passed": 1, "failed": 2}
_outcomes: dict[str, list[str]] = {}


def pytest_runtest_setup():
    """Draw the same for a stock class and for ours, and the same in every run."""
    set_seed(0)


def pytest_runtest_logreport(report):
    """Note the call of a test, or its set-up and tear-down where they say more; a part of it may fail it."""
    is_part = hasattr(report, "context")  # a subtest
    counts = report.failed or (not is_part and (report.when == "call" or report.skipped))
    name = report.nodeid.partition("::")[2]
    if counts and _RANK[report.outcome] >= _RANK[_outcomes.get(name, ["skipped"])[0]]:
        crash = getattr(report.longrepr, "reprcrash", None)
        _outcomes[name] = [report.outcome, crash.message.strip() if crash else ""]


def pytest_sessionfinish(session):
    """Write them once, where all reports come together."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["OUTCOMES"]).write_text(json.dumps(_outcomes, indent=1))
