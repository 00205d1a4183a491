"""Fine-tuning of a small pretrained model: growth against LoRA and its kin, at equal weights and equal tokens.

    OMP_NUM_THREADS=1 python scripts/bench/finetuning.py --model a/llama --text Shakespeare.txt WikiText-2.txt

Frozen base: only what a method adds is trained. All weights: with growth and without.
"""

from dataclasses import replace

import page
from harness import Cell
from methods import LORA, NOTHING, Method
from results import Declared, Results, make_parser, parse
from text_task import OnText, tiny_llama

ADDED, ALL = (0.01, 0.02, 0.04), (0.002, 0.004, 0.008)  # learning rates of what is added, and of all weights
GROWTH, MIX, FULL = "growth", "1/3 growth, 2/3 LoRA", "all weights"
QKVO = ("query", "key", "value", "output")
METHODS = {
    "no training": NOTHING,
    GROWTH: Method(growth={}, rates=ADDED),
    "random growth": Method(growth={}, random=True, rates=ADDED),
    "growth of queries and keys": Method(growth={"kinds": ("qk",)}, rates=ADDED),
    MIX: Method(growth={}, share=1 / 3, adapter="lora", rates=ADDED),
    LORA: Method(adapter="lora", rates=ADDED),
    "LoRA on q, k, v, o": Method(adapter="lora", targets=QKVO, rates=ADDED),
    "LoRA on q, k": Method(adapter="lora", targets=("query", "key"), rates=ADDED),
    "DoRA on all linear layers": Method(adapter="dora", rates=ADDED),
    "LoRA-GA on all linear layers": Method(adapter="lora_ga", rates=ADDED),
    "PiSSA on q, k, v, o": Method(adapter="pissa", targets=QKVO, rates=ADDED),
    "EVA on q, k, v, o": Method(adapter="eva", targets=QKVO, rates=ADDED),
    FULL: Method(base=True, rates=ALL),
    "all weights, grown at the start": Method(growth={}, base=True, rates=ALL),
    "all weights, grown in the middle": Method(growth={}, base=True, at=0.5, rates=ALL),
}


def reaches(results: Results) -> list[page.Reach]:
    """Whether growth is ever worse than the best row of peft's, or than no growth where all weights train."""
    compared = [(GROWTH, [name for name in METHODS if METHODS[name].adapter and METHODS[name].growth is None])]
    compared += [(name, [FULL]) for name in METHODS if name.startswith(f"{FULL}, grown")]
    found = []
    for method, others in compared:
        leads = {task: results.lead(task, method, results.best(task, others)) for task in results.tasks}
        measured = "; ".join(f"{task} {lead} over {results.best(task, others)}" for task, lead in leads.items())
        worse = [task for task, lead in leads.items() if lead.is_clear and lead.mean < 0]
        few = any(len(lead.values) < 3 for lead in leads.values())
        verdict = "undecided" if few else "missed" if worse else "reached"
        against = "the best of peft's" if len(others) > 1 else FULL
        found.append(page.Reach(f"Fine-tuning, {method}: never worse than {against}", measured, verdict))
    return found


PAGE = Declared(
    name="finetuning",
    title="Fine-tuning: growth, LoRA and its kin",
    text="""The budget is what a uniform growth by two dims of queries, keys and values a head adds. What is trained
with a frozen base leaves all of its weights as they were, but for growth together with LoRA, which moves them. "Random
growth" has the same number of new dims in the same places, with random directions. Growth in the middle keeps the
optimizer.""",
    growing=[GROWTH, MIX],
    more={"right after the change": "at_change"},
    reaches=reaches,
)


def main() -> None:
    """Run the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="+", help="paths or Hub ids of causal LMs")
    parser.add_argument("--text", nargs="+", default=[], help="text files, also of JSON rows, or Hub ids")
    arguments = parse(parser)
    task = OnText(steps=150, growth_batches=6, rank=0, dims=2, batch_size=8, block_size=64, held_out=128)
    if arguments.quick:
        arguments.model, arguments.text = [tiny_llama(arguments.output / "tiny", 300)], [""]
        task = replace(task, steps=4, growth_batches=2, batch_size=2, block_size=16, held_out=4)
    if not (arguments.model and arguments.text):
        parser.error("--model and --text are needed, or --quick")
    tasks = [replace(task, source=model, path=path) for model in arguments.model for path in arguments.text]
    PAGE.run([Cell(each, METHODS) for each in tasks], arguments)


if __name__ == "__main__":
    main()
