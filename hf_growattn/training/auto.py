"""`finetune --method auto`: a race, then a training by its winner, and by whoever is near it; the lower one is kept."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..interop.figures import FIGURES
from ..report.words import MARGIN, gap_text, lines_of
from . import finetuning
from .contest import Contest, Run, paired
from .methods import METHODS
from .race import RUNS, race_of
from .recipe import Recipe, last_checkpoint

_ENDED = "ended.jsonl"  # in DIR-race: what the trainings after it gave


def main(recipe: Recipe, say: Callable[[str], object]) -> dict:
    """Race in `DIR-race`, then train, and leave the model that ends lower in `DIR`, the other one in `DIR-METHOD`.

    A race that the recipe names goes on instead, which does nothing where it is over.

    One with a larger KV cache is kept only if it ends lower by more than 0.01 nats a token.

    Args:
        recipe: how to train; `DIR` is its `output_dir`.
        say: gets what a user should know on the way.

    Returns:
        What `figures.json` of the model that is kept holds.

    Raises:
        ValueError: as for `race_of` and `finetuning.main`; there is no race where the recipe names one, or there is a
            model where one would be left.
    """
    output = Path(recipe.training.output_dir)
    race = Path(recipe.growth.race or f"{output}-race")
    if recipe.growth.race and not (race / RUNS).exists():
        raise ValueError(f"{race} holds no race: leave out --race, or make one by growattn race ... -o {race}.")
    contest = race_of(recipe._replace(training=replace(recipe.training, output_dir=str(race))), say)
    print(contest)
    finalists, verdict = contest.finalists, " ".join(contest.sentences())
    folders = dict(zip(finalists, (output, Path(f"{output}-{finalists[-1]}"))))
    if len(folders) == 1:
        return finetuning.main(_recipe(recipe, contest, folders, finalists[0]), verdict)
    first, second = finalists
    resumes = recipe.training.resume_from_checkpoint
    for folder in (Path(f"{output}-{first}"), *([] if resumes else [folders[second]])):
        if folder.exists():
            raise ValueError(f"{folder} is there already, and a model of this training may go there: name another -o.")
    both = f"{METHODS[first].capital} and {METHODS[second].title}"
    verdict += f" {both} were near, so both train to the end, and the lower one is kept."
    say(f"{both} are near, and either may end lower. Both train, and the lower one is kept.")
    kept = Path(f"{output}-race") / _ENDED
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not resumes:
        kept.unlink(missing_ok=True)  # of an earlier training after the same race
    ended = [Run(**json.loads(line)) for line in kept.read_text().splitlines()] if kept.exists() else []
    for name in finalists[len(ended) :]:
        if ended:
            say(f"{METHODS[first].capital} is trained: {output} holds its model. Next: {METHODS[second].title}.")
        finetuning.main(_recipe(recipe, contest, folders, name), verdict, ended.append)
        ended[-1] = replace(ended[-1], method=name)
        kept.write_text("".join(f"{json.dumps(vars(run))}\n" for run in ended))
    told, lower = _told(*ended)
    other = folders[second]
    if lower:
        output.rename(other := Path(f"{output}-{first}"))
        folders[second].rename(output)
    told += f" The other model is in {other}."
    figures = json.loads((output / FIGURES).read_text())
    figures["race"] = f"{verdict} {told}"
    (output / FIGURES).write_text(json.dumps(figures, indent=1))
    print(lines_of(told))
    if recipe.training.push_to_hub:
        name = recipe.training.hub_model_id or "YOU/NAME"
        say(f"Nothing was pushed, as two trained. To push what was kept: growattn push {output} {name}")
    return figures


def _recipe(recipe: Recipe, contest: Contest, folders: dict[str, Path], name: str) -> Recipe:
    """How to train by one of those that go on, in its folder; beside LoRA there is no need to compare with it."""
    training, options = copy.copy(recipe.training), contest.options_of(name)
    training.learning_rate, training.output_dir = options.pop("learning_rate"), str(folders[name])
    resumes, training.push_to_hub = training.resume_from_checkpoint, training.push_to_hub and len(folders) == 1
    if len(folders) > 1 and resumes and Path(resumes).resolve().parent != folders[name].resolve():
        training.resume_from_checkpoint = last_checkpoint(folders[name])
    compare = recipe.growth.compare and METHODS[name].growth > 0 and "lora" not in folders
    return recipe._replace(training=training, growth=replace(recipe.growth, compare=compare, race=None, **options))


def _told(first: Run, second: Run) -> tuple[str, bool]:
    """Which of two is kept and why, and whether that is the second; the first has the smaller KV cache, or the same."""
    (lead, error), wider = paired([second], [first]), second.cache / first.cache - 1
    gap, cost = gap_text(lead, error), f" for a KV cache {wider:.0%} larger" if wider else ""
    names = METHODS[first.method], METHODS[second.method]
    if lead > MARGIN:
        return f"Kept: {names[1].title}. It ends {gap} below {names[0].title}{cost}.", True
    side = f"below it, which is too little{cost}" if lead > 0 else "above it"
    return f"Kept: {names[0].title}. {names[1].capital} ends {gap} {side}.", False
