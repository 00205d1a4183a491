"""What growth is worth where rank is what is missing: the nearest neighbour (Amsel, Yehudai, Bruna 2024).

    python scripts/bench/nearest_neighbour.py

Return the nearest of N points on a sphere to a query on it. One head as wide as the data does it; narrow heads would
have to be very many. Every row sees as many queries. The runs go into `nearest_neighbour.json`, from which the page
and the picture beside it are made.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from memory import forget_peak, peak
from tqdm.auto import tqdm
from transformers import SmolLM3Config, SmolLM3ForSequenceClassification

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.modeling import attentions

GUIDED, RANDOM, SCRATCH = "guided growth", "random growth", "full rank from scratch"
COLUMNS = ["row", "heads", "width of q and k", "parameters", "growth batches", "seeds"]
COLUMNS += ["before growth", "at growth", "at the end", "time, s", "growth, s", "peak, MB"]


@dataclass(frozen=True)
class Row:
    """What is trained.

    Attributes:
        heads, width: heads, and how wide their queries and keys are at the start; values are `d` wide.
        estimator: where the directions of a growth to width `d` come from; None for no growth.
        growth_batches: what the growth measures.
    """

    heads: int
    width: int
    estimator: str | None = None
    growth_batches: int = 0


@dataclass(frozen=True)
class Setting:
    """The task and its training.

    Attributes:
        d, points: dims of a point, and how many there are.
        r: width of a head before growth; there are `d / r` heads.
        steps: optimizer steps before the growth, and as many again after it, less the batches that the growth measured:
            every row sees the same number of queries.
        batch_size, learning_rate: of AdamW, with one cosine to zero over all steps.
        growth_batches: batches that a growth measures; random growth measures nothing and gets one.
        held_out: queries that no row trains on.
    """

    d: int = 64
    points: int = 16
    r: int = 8
    steps: int = 1200
    batch_size: int = 64
    learning_rate: float = 3e-3
    growth_batches: int = 128
    held_out: int = 4096

    @property
    def rows(self) -> dict[str, Row]:
        """All rows by name."""
        d, r, batches = self.d, self.r, self.growth_batches
        few = d // r
        return {
            "stay at r (H = d / r)": Row(few, r),
            GUIDED: Row(few, r, "whitened", batches),
            "gradient growth, not whitened": Row(few, r, "gradient", batches),
            RANDOM: Row(few, r, "random", 1),
            SCRATCH: Row(few, d),
            "more heads, same parameters": Row(few * 2 * d // (d + r), r),
            f"guided growth, {batches // 4} batches": Row(few, r, "whitened", batches // 4),
            "H = d^1.5 / r": Row(round(d**1.5) // r, r),
            "H = d^2 / r": Row(d * d // r, r),
        }


QUICK = Setting(d=16, points=4, r=4, steps=8, batch_size=16, growth_batches=4, held_out=32)


def build(setting: Setting, row: Row, seed: int) -> SmolLM3ForSequenceClassification:
    """One SmolLM3 layer (Llama's, here without rotation) whose output is its attention's: no MLP, no final norm."""
    torch.manual_seed(seed)
    config = SmolLM3Config(
        vocab_size=1,
        hidden_size=setting.d,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=row.heads,
        num_key_value_heads=row.heads,
        no_rope_layers=[0],
        head_dim=setting.r,
        num_labels=setting.d,
        problem_type="regression",
        use_cache=False,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = SmolLM3ForSequenceClassification(config).requires_grad_(False)
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    torch.nn.init.eye_(model.score.weight)
    model.model.norm = torch.nn.Identity()
    (attention,) = attentions(patch_model(model))
    attention.widen(qk_dims=row.width - setting.r, v_dims=setting.d - setting.r)
    model.sync_config()
    for role in ("query", "key", "value", "output"):
        torch.nn.init.normal_(attention.projection_of(role).weight, std=config.initializer_range)
    attention.requires_grad_(True)
    return model


def draw(setting: Setting, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Points and, as the last token, a query that is no key; the residual stream adds it to the nearest point."""
    x = torch.randn(rows, setting.points + 1, setting.d, generator=generator)
    x *= setting.d**0.5 / x.norm(dim=-1, keepdim=True)  # what the RMS norm leaves as it is
    points, query = x[:, :-1], x[:, -1]
    nearest = points[torch.arange(rows), (points @ query.unsqueeze(-1)).squeeze(-1).argmax(-1)]
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[:, -1] = 0
    return {"inputs_embeds": x, "attention_mask": mask, "labels": nearest + query}


class Run:
    """One row with one seed: training, growth, training."""

    def __init__(self, setting: Setting, row: Row, seed: int):
        self.setting, self.row = setting, row
        self.model = build(setting, row, seed)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=setting.learning_rate, weight_decay=0)
        steps = 2 * setting.steps - row.growth_batches
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.generator = torch.Generator().manual_seed(1000 + seed)
        fresh = draw(setting, setting.held_out, torch.Generator().manual_seed(2000 + seed))
        # In batches as large as those of training, or they would set the peak of memory.
        parts = zip(*(values.split(setting.batch_size) for values in fresh.values()))
        self.fresh = [dict(zip(fresh, part)) for part in parts]
        self.seen, self.curve = 0, [(0, self.error())]

    def batch(self) -> dict[str, torch.Tensor]:
        """Fresh points."""
        self.seen += self.setting.batch_size
        return draw(self.setting, self.setting.batch_size, self.generator)

    @torch.no_grad()
    def error(self) -> float:
        """Mean square error of a coordinate on held-out queries."""
        return statistics.fmean(self.model(**batch).loss.item() for batch in self.fresh)

    def train(self, steps: int) -> None:
        """AdamW; the growth is one more event in one schedule."""
        every = max(self.setting.steps // 12, 1)
        for step in range(1, steps + 1):
            self.model(**self.batch()).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if step % every == 0 or step == steps:
                self.curve.append((self.seen, self.error()))

    def grow(self, seed: int) -> dict:
        """Widen every head to `d` by the real Grower, with the optimizer that training goes on with."""
        config = GrowthConfig(qk_dims=self.setting.d - self.setting.r, estimator=self.row.estimator, seed=seed)
        measured = [self.batch() for _ in range(self.row.growth_batches)]
        start = time.perf_counter()
        report = Grower(self.model, config, self.optimizer).grow(measured)
        seconds = time.perf_counter() - start
        self.curve.append((self.seen, self.error()))
        (layer,) = report.layers
        return {
            "growth_seconds": seconds,
            "step": layer.step_size,
            "starvation": layer.starvation,
            "mean_strength": statistics.fmean(layer.strength),
        }


def measure(job: tuple[Setting, str, int]) -> dict:
    """Run a row in this process and return its figures."""
    setting, name, seed = job
    row = setting.rows[name]
    torch.set_num_threads(1)  # a model this small is slower on more
    transformers.logging.set_verbosity_error()
    forget_peak()
    before, start = peak(), time.perf_counter()
    run = Run(setting, row, seed)
    grown = {}
    if row.estimator:
        run.train(setting.steps)
        grown = {"before_growth": run.curve[-1][1], **run.grow(seed), "at_growth": run.curve[-1][1]}
        run.train(setting.steps - row.growth_batches)
    else:
        run.train(2 * setting.steps)
    (attention,) = attentions(run.model)
    return {
        "row": name,
        "seed": seed,
        "heads": row.heads,
        "widths": [row.width, attention.qk_head_dim],
        "parameters": sum(weight.numel() for weight in attention.parameters()),
        "growth_batches": row.growth_batches,
        "queries": run.seen,
        **grown,
        "error": run.curve[-1][1],
        "seconds": time.perf_counter() - start,
        "peak_bytes": peak() - before,
        "curve": run.curve,
    }


def spread(values: list[float], digits: int = 3) -> str:
    """Median and range."""
    if not values:
        return ""
    middle, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({ends[0]} to {ends[1]})"


def page(result: dict, command: str) -> str:
    """The results as Markdown."""
    setting, runs = Setting(**result["setting"]), result["runs"]
    lines = [
        "# Nearest neighbour",
        "",
        f"Written by `{command}`, torch {result['torch']}, transformers {result['transformers']}, {result['machine']}, "
        f"one thread. N = {setting.points} points and a query on the sphere of radius sqrt(d), d = {setting.d}. One "
        "stock SmolLM3 layer without rotation, its MLP zeroed and no final norm; queries and keys start r = "
        f"{setting.r} wide, values are d wide. Mean square error of a coordinate on {setting.held_out:,} held-out "
        f"queries, median (range) over seeds. AdamW, one cosine from {setting.learning_rate} in all rows, "
        f"{setting.batch_size} queries a step, {setting.steps:,} steps before a growth; with what a growth measures, "
        f"every row sees {2 * setting.steps * setting.batch_size:,} queries. Peak memory is over the imported "
        "libraries.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    medians = {}
    for name in setting.rows:
        of_row = [run for run in runs if run["row"] == name]
        if not of_row:
            continue

        def column(key: str, digits: int, of_row: list[dict] = of_row) -> str:
            return spread([run[key] for run in of_row if key in run], digits)

        first = of_row[0]
        medians[name] = statistics.median(run["error"] for run in of_row)
        cells = [
            name,
            str(first["heads"]),
            " to ".join(map(str, dict.fromkeys(first["widths"]))),
            f"{first['parameters']:,}",
            str(first["growth_batches"] or ""),
            ", ".join(str(run["seed"]) for run in of_row),
            column("before_growth", 3),
            column("at_growth", 3),
            f"**{column('error', 3)}**",
            column("seconds", 0),
            column("growth_seconds", 1),
            spread([run["peak_bytes"] / 1e6 for run in of_row if "peak_bytes" in run], 0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    missing = [name for name in setting.rows if name not in medians]
    if missing:
        lines += [f"Not run: {'; '.join(missing)}.", ""]
    for other, reach in ((SCRATCH, 0.75), (RANDOM, 0.5)):
        if GUIDED in medians and other in medians:
            ratio = medians[GUIDED] / medians[other]
            verdict = "reached" if ratio <= reach else "missed"
            lines.append(f"- Guided growth ends at {ratio:.2f} times the error of {other}; aim {reach}: {verdict}.")
    if GUIDED in medians:
        better = [name for name, error in medians.items() if error < medians[GUIDED]]
        lines.append(f"- Rows that beat guided growth: {'; '.join(better) or 'none'}.")
    return "\n".join([*lines, "", "![held-out error over training](nearest_neighbour.png)", ""])


def picture(result: dict, path: Path) -> None:
    """Held-out error over queries seen: the median of the seeds and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in Setting(**result["setting"]).rows:
        curves = [run["curve"] for run in result["runs"] if run["row"] == name]
        if curves:
            seen = [point[0] for point in curves[0]]
            errors = [sorted(point[1] for point in points) for points in zip(*curves)]
            (line,) = axes.plot(seen, [statistics.median(values) for values in errors], label=name)
            axes.fill_between(seen, [v[0] for v in errors], [v[-1] for v in errors], color=line.get_color(), alpha=0.2)
    axes.set(xlabel="queries seen", ylabel="held-out mean square error", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Run the rows, one process each, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny setting: whether everything runs, not how well")
    parser.add_argument("--rows", nargs="+", choices=Setting().rows, help="some of the rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--add", action="store_true", help="keep the runs of the same setting that the JSON has")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    setting, seeds = (QUICK, arguments.seeds[:1]) if arguments.quick else (Setting(), arguments.seeds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = arguments.out / "nearest_neighbour.json"
    result = {
        "setting": asdict(setting),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "runs": [],
    }
    if arguments.add and written.exists():
        known = json.loads(written.read_text())
        result["runs"] = known["runs"] if known["setting"] == result["setting"] else []
    order = list(setting.rows)
    done = {(run["row"], run["seed"]) for run in result["runs"]}
    jobs = [(setting, name, seed) for seed in seeds for name in arguments.rows or order if (name, seed) not in done]
    # A fresh process each, so that the peak of memory is the run's own.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for run in tqdm(pool.imap(measure, jobs), total=len(jobs), desc="runs", disable=None):
            result["runs"].append(run)
            result["runs"].sort(key=lambda run: (order.index(run["row"]), run["seed"]))
            written.write_text(json.dumps(result) + "\n")
            print(f"{run['row']}, seed {run['seed']}: {run['error']:.4f} in {run['seconds']:.0f} s", flush=True)
    written.with_suffix(".md").write_text(page(result, "python scripts/bench/nearest_neighbour.py"))
    picture(result, written.with_suffix(".png"))


if __name__ == "__main__":
    main()
