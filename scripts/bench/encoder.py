"""A real encoder for retrieval: growth against what people would pick instead, to find the answer to a question.

OMP_NUM_THREADS=1 python scripts/bench/encoder.py --model path/to/minilm --pairs instructions.jsonl a.txt
"""

from encoder_task import SCALE, Retrieval, tiny_bert
from harness import Cell
from methods import LORA, NOTHING, Method
from results import Declared, make_parser, parse
from transformers import AutoConfig

from hf_growattn.training.methods import TITLES

GROWTH, MIX = TITLES["growth"], TITLES["mix"]
RATES = (0.15, 0.5, 1.5)  # over hidden_size: those of a race, and a smaller one

PAGE = Declared(
    name="encoder",
    title="A real encoder",
    text=f"""A task is a file of pairs, of which the second answers the first, to be found among the answers of a batch,
and of all held-out pairs. All methods train about the number of weights that LoRA of rank 3 on all linear layers has,
as a race of hf_growattn trains them. The loss is that of {SCALE:g} times the cosines; recall@1 does not depend on that
number. An encoder keeps no KV cache, so what growth costs is time.""",
    growing=[GROWTH, MIX],
    more={"recall@1": "recall", "right after the change": "at_change"},
)


def main() -> None:
    """Run the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="path or Hub id of an encoder like BERT")
    parser.add_argument("--pairs", nargs="*", default=[], help="files of pairs, each a task")
    arguments = parse(parser)
    sizes: dict = {}
    if arguments.quick:
        arguments.model, arguments.pairs = tiny_bert(arguments.output / "tiny"), [""]
        sizes = {"steps": 3, "growth_batches": 2, "pairs": 4, "held_out": 16}
    if not (arguments.model and arguments.pairs):
        parser.error("--model and --pairs are needed, or --quick")
    rates = tuple(rate / AutoConfig.from_pretrained(arguments.model).hidden_size for rate in RATES)
    named = {TITLES[name]: Method(library=name, rates=rates) for name in ("lora", "growth", "mix")}
    compared = {"no training": NOTHING, LORA: named[TITLES["lora"]], **named}
    tasks = [Retrieval(source=arguments.model, path=path, **sizes) for path in arguments.pairs]
    PAGE.run([Cell(task, compared) for task in tasks], arguments)


if __name__ == "__main__":
    main()
