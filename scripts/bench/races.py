"""Whether a race tells what training five times as long would.

    python scripts/bench/races.py --model path/to/llama --text a.txt b.jsonl --pretrain b.jsonl

A pair is a model and something to train it on: the given models and small ones that the script trains first, on texts;
and phone books (recall.py) and nearest neighbours (neighbour_task.py), whose models have heads of several widths. For
each, a race says what to train; then every method of it trains five times as long, with three seeds, whoever is behind.
Nothing else is chosen by hand: learning rates, too, are the race's own, in both.
"""

import argparse
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import page
import runs
from races_run import (
    BOOKS,
    HELD_OUT,
    LARGE,
    LONG,
    LONG_SEEDS,
    MODELS,
    MODELS_NEVER_SEEN,
    NEIGHBOURS,
    NEVER_SEEN,
    NEWEST,
    QUICK,
    RACE,
    RANK,
    TASKS,
    Setting,
    measure,
    trained_here,
)
from transformers import AutoTokenizer

from hf_growattn.training.contest import LONGER, MARGIN, SURE
from hf_growattn.training.methods import METHODS

EARLIER, ALL, PRESENT = "earlier rules", "all rules", "the present rules"  # what a pair is held out of


def told_of(race: dict, long: dict) -> dict:
    """What the page needs of what `summary` told of a race and of its long trainings, and their times.

    A lead is a mean and an error; the KV cache and the forward pass are those of the growth that the race compares.
    """
    grown = race["challenger"]
    told = {name: race[name] for name in ("winner", "challenger", "finalists", "lead", "overtime", "processor")}
    longer = {name: long[name] for name in ("lead", "losses", "processor")}
    longer["losses"] = {name: loss for name, loss in long["losses"].items() if name in METHODS}
    longer |= {name: long[name][grown] for name in ("cache", "forward") if grown in long[name]}
    for part in (told, longer):
        part["lead"] = list(part["lead"].values()) if part["lead"] else None
    return {RACE: shortened(told), LONG: shortened(longer)}


def shortened(value):
    """The same with all numbers at five digits, which is more than a page shows, and nothing said of what is not."""
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items() if one is not False}
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def lead_of(told: dict) -> float:
    """How far growth ends below LoRA; where it was out, it is behind by enough."""
    return told["lead"][0] if "lead" in told else -1.0


def long_lead(pair: dict) -> float:
    """How far what the race took for the better growth ends below LoRA after the long training."""
    losses, name = pair["long"]["losses"], pair["race"].get("challenger")
    return losses["lora"] - losses[name] if name in losses else lead_of(pair["long"])


def says_growth(pair: dict) -> bool:
    """What the race says; else it is LoRA."""
    return pair[RACE]["winner"] != "lora"


def right(pair: dict) -> bool:
    """Whether the race chose what the long trainings show to be lower; LoRA where there is next to nothing in it."""
    return holds(pair[RACE]["winner"], long_lead(pair))


def holds(winner: str, lead: float) -> bool:
    """Whether what a race says is right if growth leads by so much in the end."""
    return lead < MARGIN if winner == "lora" else lead > 0


def level(pair: dict) -> bool:
    """Whether a race would call a tie what growth leads by after the long trainings, with all their seeds."""
    lead, error = pair[LONG].get("lead", (0.0, 0.0))
    return lead <= SURE * error or lead - error <= MARGIN


def regret(pair: dict, name: str | None = None) -> float:
    """How far a method, or else the race's choice, ends above the best one after the long trainings."""
    losses = pair["long"]["losses"]
    return losses.get(name or pair["race"]["winner"], max(losses.values())) - min(losses.values())


def when_new(pair: dict) -> dict:
    """The same with what a race said by the rules of before anybody saw the pair, where later ones choose otherwise."""
    return pair | {RACE: pair.get("then", pair[RACE])}


def kept(pair: dict) -> str:
    """What `finetune --method auto` keeps: of two, the one with the larger KV cache if it ends lower by a margin."""
    first, *others = pair["race"]["finalists"]
    return next((name for name in others if regret(pair, first) - regret(pair, name) > MARGIN), first)


def likely(hits: int, count: int) -> tuple[float, float]:
    """Between which shares of hits the true one is, with 95 % confidence (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, 1.96**2 / count
    middle, off = share + square / 2, (square * (share * (1 - share) + square / 4)) ** 0.5
    return (middle - off) / (1 + square), (middle + off) / (1 + square)


class Told:
    """How races of some pairs did."""

    def __init__(self, pairs: list[dict]):
        self.pairs = len(pairs)
        self.hits = sum(map(right, pairs))
        self.grown = [max(-long_lead(pair), 0.0) for pair in pairs if says_growth(pair)]
        self.lost = max(map(regret, pairs), default=0.0)
        self.near = sum(regret(pair) <= MARGIN for pair in pairs)
        self.two = sum(len(pair["race"]["finalists"]) > 1 for pair in pairs)
        self.by_auto = [regret(pair, kept(pair)) for pair in pairs]

    def cells(self) -> list[str]:
        """Its row of the table."""
        wrong = f"at most {max(self.grown):.3f}" if self.grown else ""
        above = [f"at most {most:.3f}" for most in (self.lost, max(self.by_auto))]
        return [str(self.pairs), str(len(self.grown)), str(self.hits), wrong, above[0], str(self.two), above[1]]

    def right(self, aim: str) -> page.Reach:
        """Whether nine in ten were right."""
        low, high = likely(self.hits, self.pairs)
        measured = f"{self.hits} of {self.pairs} (of others like these {low:.0%} to {high:.0%})"
        return page.Reach(aim, measured, _reached(self.hits >= 0.9 * self.pairs))

    def sound(self, aim: str) -> page.Reach:
        """Whether growth was only advised where it is no worse."""
        wrong = max(self.grown, default=0.0)
        return page.Reach(aim, f"wrong by at most {wrong:.3f} in {len(self.grown)} verdicts", _reached(wrong <= MARGIN))

    def close(self, aim: str) -> page.Reach:
        """Whether a training by the race ends next to the best method everywhere."""
        most, near = max(self.by_auto, default=0.0), sum(above <= MARGIN for above in self.by_auto)
        return page.Reach(
            aim, f"at most {most:.3f}, within it in {near} of {self.pairs} pairs", _reached(most <= MARGIN)
        )


def on_text(pair: dict) -> bool:
    """Whether the data of a pair is a text."""
    return pair["pair"] not in TASKS


def _reached(holds: bool) -> str:
    return "reached" if holds else "missed"


def page_of(figures: dict) -> page.Page:
    """What the figures say."""
    pairs = page.out_of_table(figures["pairs"])
    new, seen = [when_new(p) for p in pairs if "new" in p], [p for p in pairs if "new" not in p]
    unseen = [p for p in new if p["new"] != EARLIER]
    groups = {
        "the text it was pretrained on": [p for p in seen if "known" in p],
        "other texts": [p for p in seen if on_text(p) and "known" not in p],
        "phone books": [p for p in seen if p["pair"] in BOOKS],
        "nearest neighbours": [p for p in seen if p["pair"] in NEIGHBOURS],
    }
    for held in (EARLIER, ALL, PRESENT):
        of = [p for p in new if p["new"] == held]
        groups[f"held out of {held}: texts"] = [p for p in of if on_text(p)]
        groups[f"held out of {held}: phone books and neighbours"] = [p for p in of if not on_text(p)]
    whole = [p for p in pairs if all("processor" in p[part] for part in (RACE, LONG))]
    timed = [(p[RACE]["processor"], p[LONG]["processor"]) for p in whole]
    share, total = [race / long for race, long in timed], sum(r for r, _ in timed) / sum(l for _, l in timed)
    longer = sum(p[RACE].get("overtime", False) for p in pairs)
    rows = [[name, *Told(group).cells()] for name, group in groups.items() if group]
    told, held_out, never_seen = Told(pairs), Told(new), Told(unseen)
    latest = Told([p for p in new if p["new"] == PRESENT])
    missed = [pair for pair in unseen if not right(pair)]
    left, again = len(TASKS.keys() - {pair["pair"] for pair in pairs}), [pair for pair in pairs if "again" in pair]
    wrong_again = sum(not holds(p["again"]["winner"], p["again"]["lead"]) for p in again)
    lines = [
        [
            pair["pair"],
            " at first, ".join(dict.fromkeys("growth" if says_growth(p) else "LoRA" for p in (when_new(pair), pair))),
            _lead(pair["race"].get("lead")),
            _lead(pair["long"].get("lead")),
            ", ".join(f"{METHODS[n].title} {loss:.3f}" for n, loss in pair["long"]["losses"].items()),
            f"{pair[LONG].get('cache', 0):+.0%}",
            f"{pair[LONG]['forward']:.2f}" if "forward" in pair[LONG] else "",
            f"{regret(pair):.3f}",
            "right" if right(pair) else "wrong",
            " and ".join(METHODS[name].title for name in pair["race"]["finalists"]),
            f"{regret(pair, kept(pair)):.3f}",
        ]
        for pair in sorted(pairs, key=long_lead, reverse=True)
    ]
    large = sorted({pair["pair"].split(" on ")[0] for pair in pairs if "large" in pair})
    larger = f"; for {', '.join(large)} `{asdict(LARGE)}`" if large else ""
    columns = ["model and data", "the race says", "lead of growth in the race", "after the long training"]
    columns += ["losses after the long training", "KV cache of growth", "forward pass", "choice above the best method"]
    columns += ["", "auto trains", "auto above the best method"]
    heads = ["data", "pairs", "it says growth", "it is right", "growth wrong by", "choice above the best method"]
    heads += ["auto trains two", "auto above the best method"]
    return page.Page(
        title="What a race tells",
        claim=(
            f"Over {len(pairs)} pairs of a model and data, a race is right {told.hits} times; it says growth "
            f"{len(told.grown)} times. Trained {LONGER} times as long, what it chose ends within {MARGIN} nats of the "
            f"best method in {told.near} pairs, and {told.lost:.3f} above it in the worst; `finetune --method auto`, "
            f"which trains two where they are near, at most {max(told.by_auto):.3f} above it."
            + f" Of {len(unseen)} pairs held out of all of its rules, it was right in {never_seen.hits}; of the "
            f"{latest.pairs} of these that raced by the present rules alone, in {latest.hits}." * bool(latest.pairs)
        ),
        summary=page.table(heads, rows),
        text="\n\n".join(
            (
                "## How it was measured",
                f"Setting: `{figures['setting']}`{larger}. All methods train as many weights as LoRA of rank "
                f"{RANK} on all linear layers. The long trainings have {LONG_SEEDS} seeds and the race's own "
                "choice of learning rates; where two are near, both train to the end. In a mix, what grew takes "
                "smaller steps than LoRA where a model is wider than 64 (mix_rates.md). In a race, two whose "
                f"order is open after one seed, and matters, train for half as many steps again ({longer} pairs); "
                "a growth that wins after one seed, and not by far, has a second one. The long trainings have "
                "none of this.",
                "A race is right if the difference after the long training has its sign, or if both are under "
                f"{MARGIN}. A lead is in nats a token, that of the better of growth and growth with LoRA; its "
                "standard error is over rows and seeds, over rows alone where a race has one seed. `finetune "
                "--method auto` (auto) trains the winner, and the next one too if it is behind by at most a tenth "
                f"of what the winner gained; it keeps growth if that ends more than {MARGIN} lower, here by the "
                "means over the seeds. The forward pass is that of a grown model against the un-grown one, the "
                "median over the seeds: of models this small it takes milliseconds, and is off by a few "
                "hundredths.",
                "The first rules were made while looking at the pairs here that are not called held out; in the "
                f"{len(new)} others a race was right {held_out.hits} times. Of these, {len(unseen)} are held out "
                "of all rules: they were named in eight steps, each before a result of it was read, and none that "
                "ran was left out. What counts of a text is what the race said by the rules of that time, though "
                f"a later race of it chose otherwise in {sum('then' in p for p in pairs)}. Phone "
                "books and neighbours ran anew by the present rules: before, a mix trained four times as many "
                "weights as LoRA in their models, and the rules were made in sight of that."
                + f" {left} of them are not in the table, as they have yet to run."
                * bool(left)
                + f" Of the {len(missed)} that were wrong, {sum(not says_growth(p) for p in missed)} say LoRA where "
                "growth or the mix ends lower. The long trainings, too, with their three seeds, would call "
                f"{sum(map(level, missed))} of these a tie by the race's own rule (a lead of two standard errors, and "
                "of a margin and one).",
                "What is not in the table was not run. Two ran at a time, now and then with other work beside "
                "them, and not all on one version of the code: in older pairs, who trains second is by an earlier "
                f"rule. Time is the processor's, in the {len(share)} pairs whose trainings were not resumed in "
                f"between; all their races together took {total:.2f} of what their long trainings took. Other work "
                "on the machine makes a step take up to half as long again, for a race or for its long trainings. So "
                f"{len(again)} of those that had taken over a fifth ran again with nothing beside them; "
                f"{sum('same' in p['again'] for p in again)} took the same course, and so that time counts. Verdicts "
                f"are those of the first time: {sum(not right(p) for p in again)} of the {len(again)} were wrong "
                f"then, and {wrong_again} the second time, as small models trained "
                "anew are not quite the same. A race spares more now: a second seed where LoRA gained less than half "
                "of what growth did, and a second learning rate where one lost less than the margin.",
                "## Every pair",
                page.table(columns, lines),
            )
        ),
        draw=partial(draw, pairs, groups),
        reaches=[
            told.right("A race is right in at least 90 % of the pairs"),
            told.sound(f"A race's verdict for growth is never wrong by more than {MARGIN}"),
            told.close(f"`finetune --method auto` ends at most {MARGIN} above the best method"),
            never_seen.right("Held out: a race is right in at least 90 % of the pairs"),
            latest.right("Held out of the present rules: a race is right in at least 90 % of the pairs"),
            latest.sound(f"Held out of the present rules: a verdict for growth is never wrong by more than {MARGIN}"),
            latest.close(f"Held out of the present rules: `auto` ends at most {MARGIN} above the best method"),
            never_seen.sound(f"Held out: a race's verdict for growth is never wrong by more than {MARGIN}"),
            never_seen.close(f"Held out: `finetune --method auto` ends at most {MARGIN} above the best method"),
            page.Reach(
                "A race takes at most a fifth of the time of the long trainings",
                f"{runs.spread(share, 2)} of it in {len(share)} pairs",
                _reached(max(share, default=1) <= 0.2),
            ),
        ],
    )


def _lead(lead: list[float] | None) -> str:
    return f"{lead[0]:+.3f} ± {lead[1]:.3f}" if lead else "out"


def group_of(run: dict, arguments: argparse.Namespace, large: dict[str, str]) -> dict:
    """What sets a pair apart: a text that the model knows, a large model, or what it is held out of.

    Nobody looked at what is "new" while rules of a race were made: the earlier ones, all there were when it raced, or
    those there are.
    """
    known = run["text"] != "" and run["text"] == arguments.pretrain
    apart = {"known": known, "large": run["model"] in large.values()}
    if run["pair"] in NEWEST or run["text"] in arguments.new:
        apart["new"] = PRESENT
    elif run["pair"] in NEVER_SEEN or run["text"] in arguments.unseen:
        apart["new"] = ALL
    elif run["pair"] in HELD_OUT or run["text"] in arguments.held_out:
        apart["new"] = EARLIER
    return {name: value for name, value in apart.items() if value}


def draw(pairs: list[dict], groups: dict[str, list[dict]], plt):
    """The lead in the race against that after the long training."""
    figure, panel = plt.subplots(figsize=(6.4, 5.4), layout="constrained")
    for name, group in groups.items():
        shown = [pair for pair in group if "lead" in pair["race"] and "lead" in pair["long"]]
        errors = [pair["race"]["lead"][1] for pair in shown]
        points = [lead_of(pair["race"]) for pair in shown], [long_lead(pair) for pair in shown]
        panel.errorbar(*points, xerr=errors, fmt="o", markersize=4, label=name)
    panel.axhline(0, color="0.6", linewidth=1)
    panel.axvline(0, color="0.6", linewidth=1)
    panel.set(xlabel="lead of growth over LoRA in the race, nats", ylabel=f"trained {LONGER} times as long, nats")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)  # within it would cover points
    return figure


def main() -> None:
    """Race every pair, train every pair, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[], help="paths or Hub ids of causal LMs")
    parser.add_argument("--large", nargs="*", default=[], help="the same, models that race for half as many steps")
    parser.add_argument("--text", nargs="*", default=[], help="texts, as for finetuning.py")
    parser.add_argument("--held-out", nargs="*", default=[], help="more texts, which the first rules were not made on")
    parser.add_argument(
        "--unseen", nargs="*", default=[], help="more, which no rule had seen when they raced; new models race here"
    )
    parser.add_argument("--new", nargs="*", default=[], help="more, of which nobody saw a race by other rules")
    parser.add_argument("--pretrain", help="the text that the given models know; small models are trained on it")
    parser.add_argument("--folder", type=Path, default=Path("scripts/output"), help="keeps models and runs")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one phone book, a few steps: shows that it runs")
    arguments = parser.parse_args()
    setting = QUICK if arguments.quick else Setting()
    if arguments.quick:
        arguments.folder = arguments.output  # beside another setting's runs it would be refused
    arguments.output.mkdir(parents=True, exist_ok=True)
    given, large = ({Path(path).name: path for path in paths} for paths in (arguments.model, arguments.large))
    never_seen = {}
    if arguments.pretrain and given:
        tokenizer = AutoTokenizer.from_pretrained(next(iter(given.values())))
        given |= trained_here(MODELS, tokenizer, arguments.pretrain, arguments.folder)
        never_seen = trained_here(MODELS_NEVER_SEEN, tokenizer, arguments.pretrain, arguments.folder)
    later = arguments.unseen + arguments.new
    texts = arguments.text + arguments.held_out + later
    on_texts = [*product((given | large).items(), texts), *product(never_seen.items(), later)]
    jobs = [{"pair": f"{name} on {Path(text).stem}", "model": path, "text": text} for (name, path), text in on_texts]
    tasks = [next(iter(BOOKS)), next(iter(NEIGHBOURS))] if arguments.quick else TASKS
    jobs += [{"pair": name, "model": "", "text": ""} for name in tasks]
    kept = arguments.output / "races.jsonl"
    for job in jobs:
        job["setting"] = asdict(LARGE if job["model"] in large.values() else setting)
    jobs = [job | {"part": part} for job in jobs for part in (RACE, LONG)]
    done = runs.collect(partial(measure, folder=arguments.folder), jobs, kept, arguments.processes)
    pairs = [
        {"pair": run["pair"]} | told_of(run, long) | group_of(run, arguments, large)
        for run, long in zip(done[::2], done[1::2])
    ]
    figures = {"setting": asdict(setting), "pairs": page.in_table(pairs)}
    page.publish("races", figures, list(range(LONG_SEEDS)), arguments.output, sum(run["seconds"] for run in done))


if __name__ == "__main__":
    main()
