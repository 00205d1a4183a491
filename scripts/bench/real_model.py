"""A real pretrained model: growth against what people would pick instead, on texts and on phone books in words.

OMP_NUM_THREADS=1 python scripts/bench/real_model.py --model path/to/smollm2 --text a.txt b.json
"""

from harness import Cell
from methods import LORA, Method
from results import Declared, make_parser, parse
from text_task import OnText, WordBook, tiny_llama
from transformers import AutoConfig

from hf_growattn.report.comparison import TITLES
from hf_growattn.training.race import RATES

GROWTH, MIX = TITLES["growth"], TITLES["mix"]
BOOKS = (20, 50, 100)  # entries of phone books


def methods(width: int) -> dict[str, Method]:
    """What is compared: the methods of a race at their rates for a `hidden_size`, and two more adapters."""
    rates = tuple(rate / width for rate in RATES)
    named = {TITLES[name]: Method(library=name, rates=rates) for name in ("lora", "growth", "mix")}
    full = tuple(rate / width for rate in (0.1, 0.3))
    return {
        LORA: named[TITLES["lora"]],
        **named,
        "all weights": Method(base=True, rates=full),
        "LoRA on q, k, v, o": Method(adapter="lora", targets=("query", "key", "value", "output"), rates=rates),
        "LoRA-GA on all linear layers": Method(adapter="lora_ga", rates=rates),
    }


PAGE = Declared(
    name="real_model",
    title="A real model",
    text="""Methods train about the number of weights that LoRA of rank 3 on all linear layers has, but for
"all weights". LoRA on
all linear layers, growth and their mix are trained as a race of hf_growattn trains them; the mix has two learning
rates. Phone books have names of two words out of 64 each; "right" is the share of labelled tokens that
are right.""",
    growing=[GROWTH, MIX],
    more={"right": "right", "right after the change": "at_change"},
)


def main() -> None:
    """Run the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="path or Hub id of a causal LM with separate projections")
    parser.add_argument("--text", nargs="*", default=[], help="text files, also of JSON rows, or Hub ids")
    parser.add_argument("--books", type=int, nargs="*", default=BOOKS, help="entries of phone books")
    arguments = parse(parser)
    sizes: dict = {}
    if arguments.quick:
        arguments.model, arguments.text, arguments.books = tiny_llama(arguments.output / "tiny"), [""], [9]
        sizes = {"steps": 3, "growth_batches": 2, "held_out": 2}
    if not arguments.model:
        parser.error("--model is needed, or --quick")
    compared = methods(AutoConfig.from_pretrained(arguments.model).hidden_size)
    if arguments.quick:
        compared = {name: compared[name] for name in (LORA, GROWTH, MIX)}
    tasks = [OnText(source=arguments.model, path=path, **sizes) for path in arguments.text]
    tasks += [WordBook(source=arguments.model, entries=entries, **sizes) for entries in arguments.books]
    PAGE.run([Cell(task, compared) for task in tasks], arguments)


if __name__ == "__main__":
    main()
