"""Run the tests of transformers and peft on their classes and on ours, and print how they end, side by side.

A test that passes on the stock classes and not on ours is either listed in `inherent.py`, with its reason, or fails
this script. Peers' tests are taken for the installed versions; see `sources.py`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from inherent import INHERENT
from models import VARIANTS, make_models
from sources import CACHE, peft_tests, transformers_tests

HERE = Path(__file__).parent
Outcomes = dict[str, tuple[str, str]]  # name of a test: how it ended and, if it failed, the message
LORA, GROWATTN = "LoraConfig-config_kwargs0", "GrowAttnConfig-config_kwargs1"


@dataclass
class Comparison:
    """The same tests on stock classes and on ours."""

    title: str
    stock: Outcomes
    ours: Outcomes
    may_skip: bool = False  # tests of LoRA alone skip every other method

    def fallen(self) -> dict[str, str]:
        """What passes on the stock classes and not on ours: "title: test" and what happened."""
        fine = {"passed", "skipped"} if self.may_skip else {"passed"}
        names = [name for name, (outcome, _) in self.stock.items() if outcome == "passed"]
        ends = {name: self.ours.get(name, ("missing", "")) for name in names}
        return {f"{self.title} {n}": f"{end} {said}".strip() for n, (end, said) in ends.items() if end not in fine}


def main() -> int:
    """Run everything, print the table, and return 1 if a test ended otherwise than `inherent.py` allows."""
    CACHE.mkdir(parents=True, exist_ok=True)
    comparisons, notes = of_transformers()
    comparisons += of_peft()
    print(f"\n{'':32}{'stock':22}ours\n{'':32}{'passed failed skipped ' * 2}inherent unlisted")
    unlisted, listed, ran = {}, Counter(), set()
    for comparison in comparisons:
        fallen = comparison.fallen()
        reasons = {line: reason_of(line) for line in fallen}
        unlisted |= {line: said for line, said in fallen.items() if not reasons[line]}
        listed.update(filter(None, reasons.values()))
        ran.update(reason_of(f"{comparison.title} {name}") for name in comparison.ours)
        counts = "".join(tally(outcomes) for outcomes in (comparison.stock, comparison.ours))
        known = sum(map(bool, reasons.values()))
        print(f"{comparison.title:32}{counts}{known:8}{len(fallen) - known:9}")
    for reason, count in listed.items():
        print(f"Inherent, {count}: {reason}")
    for note in notes:
        print(note)
    for line, said in unlisted.items():
        print(f"Not listed: {line}: {said.splitlines()[0] if said else ''}")
    stale = [reason for reason in INHERENT if reason in ran and not listed[reason]]
    for reason in stale:
        print(f"Listed, but no such test fails any more: {reason}")
    return int(bool(unlisted or stale))


def of_transformers() -> tuple[list[Comparison], list[str]]:
    """Compare the tests of models and of generation, family by family; also what is to be said of their source."""
    root, whole = transformers_tests()
    outcomes = run_pytest("transformers_suite.py", root, root, "transformers")
    by_class: dict[str, Outcomes] = {}
    for name, end in outcomes.items():
        by_class.setdefault(name.partition("::")[0], {})[name.partition("::")[2]] = end
    families = dict.fromkeys(name.rpartition("-")[0] for name in by_class)
    pairs = [(family, variant) for family in families for variant in VARIANTS[1:]]
    missing = "Left out: transformers' tests of generation. Its source distribution has none, and no clone was had."
    return [
        Comparison(f"transformers {family} {variant}", by_class[f"{family}-stock"], by_class[f"{family}-{variant}"])
        for family, variant in pairs
    ], ([] if whole else [missing])


def of_peft() -> list[Comparison]:
    """Compare its methods on stock models and on ours, and `GrowAttnConfig` with plain LoRA on stock models."""
    root, models = peft_tests(), CACHE / "models"
    shutil.rmtree(models, ignore_errors=True)
    make_models(models)
    ends = {v: run_pytest("peft_suite.py", root, models / v, f"peft-{v}") for v in VARIANTS}
    theirs = {v: {name.partition("::")[2]: end for name, end in ends[v].items() if GROWATTN not in name} for v in ends}
    ours = {v: {name.partition("::")[2]: end for name, end in ends[v].items() if GROWATTN in name} for v in ends}
    lora = {name.replace(LORA, GROWATTN): end for name, end in theirs["stock"].items() if LORA in name}
    return [
        *(Comparison(f"peft methods {v}", theirs["stock"], theirs[v]) for v in VARIANTS[1:]),
        *(Comparison(f"peft GrowAttnConfig {v}", lora, ours[v], may_skip=True) for v in VARIANTS),
    ]


def run_pytest(suite: str, root: Path, folder: Path, name: str) -> Outcomes:
    """Run one of the suites beside this file in a folder, with the peer's `tests` in `root`, and return what it says.

    Raises:
        SystemExit: the tests did not run; the log, which is kept beside the sources, says why.
    """
    log, ends = CACHE / f"{name}.log", CACHE / f"{name}.json"
    ends.unlink(missing_ok=True)
    print(f"Running {name}, log in {log} ...", flush=True)
    paths = [str(root), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OUTCOMES": str(ends), "HF_HUB_OFFLINE": "1"}
    quiet = ["-p", "no:cacheprovider", "-p", "no:logging", "-W", "ignore", "--tb", "short", "--show-capture", "no"]
    plain = ["-c", os.devnull, "--rootdir", root, "-p", "outcomes", "-n", os.environ.get("WORKERS", "2")]
    with log.open("w") as out:
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *quiet, *plain, HERE / suite],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
        ).returncode
    if code not in (0, 1) or not ends.exists():
        raise SystemExit(f"The tests of {name} did not run:\n{log.read_text()[-3000:]}")
    return {test: tuple(end) for test, end in json.loads(ends.read_text()).items()}


def reason_of(line: str) -> str | None:
    """Why ours cannot pass a test, if that is listed."""
    return next((reason for reason, those in INHERENT.items() if any(re.search(one, line) for one in those)), None)


def tally(outcomes: Outcomes) -> str:
    """Counts, in the columns of the table."""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    return f"{counts['passed']:6} {counts['failed']:6} {counts['skipped']:7} "


if __name__ == "__main__":
    sys.exit(main())
