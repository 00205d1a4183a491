"""Model cards of grown models, the figures they show, and pushes to the Hub in one commit."""

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
)
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from ..growable.folders import INDEX, find_replaced_weights
from ..growable.growths import attentions, origin_of
from ..growable.training_state import is_sharded
from ..model.configuration import PREFIX
from ..report.pictures import draw_growth
from ..report.report import GrowthReport
from .costs import costs_of

CARD, FIGURES, PICTURE = "README.md", "figures.json", "growth.png"
TAGS = ["hf_growattn", "growattn"]
TASKS = {  # by the end of a model class's name: the Auto class that loads it, and the Hub's name of its task
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForMultipleChoice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "": ("AutoModel", "feature-extraction"),
}


def task_of(class_name: str) -> tuple[str, str]:
    """The Auto class that loads a model of a class, and the Hub's name of its task."""
    return next(task for end, task in TASKS.items() if class_name.endswith(end))


def save_figures(
    folder: str | Path,
    reports: Iterable[GrowthReport],
    *,
    model: str,
    dataset: str,
    log_history: Iterable[dict] = (),
) -> None:
    """Write what a model card shows: `figures.json` and, where matplotlib is installed, `growth.png`.

    Args:
        folder: of the checkpoint.
        reports: of its growths, as `Grower.grow` returned them.
        model: Hub id or folder of the model that grew. A folder with figures of its own leads to its base model.
        dataset: name of the data.
        log_history: `trainer.state.log_history` of the training.
    """
    reports, log_history = list(reports), list(log_history)
    if model and (Path(model) / FIGURES).is_file():
        with contextlib.suppress(ValueError):
            model = read_figures(Path(model))["base_model"]
    figures = _collect_figures(reports, model, dataset, log_history)
    (Path(folder) / FIGURES).write_text(json.dumps(figures, indent=1))
    if reports and find_spec("matplotlib"):
        draw_growth(reports, log_history).savefig(Path(folder) / PICTURE, dpi=110)


def _collect_figures(reports: list[GrowthReport], model: str, dataset: str, log_history: list[dict]) -> dict:
    """Gather what `figures.json` holds."""
    steps = {entry["growth_loss_before"]: entry["step"] for entry in log_history if "growth_loss_before" in entry}
    losses = [(entry["step"], entry["eval_loss"]) for entry in log_history if "eval_loss" in entry]
    growths = [
        {
            "step": steps.get(report.loss_before),
            "growth_batches": [report.loss_before, report.loss_after],
            "added_parameters": report.added_parameters,
        }
        for report in reports
    ]
    return {
        "base_model": _find_path(model),
        "dataset": _find_path(dataset),
        "held_out": [(step, loss) for step, loss in losses if math.isfinite(loss)],
        "growths": growths,
    }


def _find_path(name: str) -> str:
    """Return the whole path of a file or folder here, which nobody takes for a Hub id; other names as they are."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def read_figures(folder: Path) -> dict[str, Any]:
    """Return the figures of a checkpoint.

    Raises:
        ValueError: the file does not hold such figures; the message names the fix.
    """
    try:
        figures = json.loads((folder / FIGURES).read_bytes())
        return {name: figures[name] for name in ("base_model", "dataset", "held_out", "growths")}
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / FIGURES} does not hold the figures of a growth. Put back what was written there, or delete it: "
            f"a model card can do without. ({type(error).__name__}: {error})"
        ) from error


def model_card(
    model: PreTrainedModel,
    repo_id: str,
    form: str = "native",
    reports: Iterable[GrowthReport] = (),
    figures: dict | None = None,
    base_model: str | None = None,
    picture: bool = False,
) -> ModelCard:
    """Return the card of a grown model: its origin, its widths and costs, its losses, how to load it.

    Args:
        model: the grown model.
        repo_id: where it will be on the Hub.
        form: "native" or "stock", as it is pushed.
        reports: of its growths, as `Grower.grow` returned them.
        figures: instead of reports, what `read_figures` returned.
        base_model: Hub id or folder of the model that grew; by default as the figures or the model know it.
        picture: whether the repository has `growth.png`.

    Returns:
        The card; `card.save(path)` writes it, `card.push_to_hub(repo_id)` pushes it alone.

    Raises:
        ValueError: the model is not growable.
    """
    config = model.config
    if not config.model_type.startswith(PREFIX):
        raise ValueError(f"{type(model).__name__} is not growable: the card is for models that patch_model has seen.")
    figures = figures or _collect_figures(list(reports), origin_of(model), "", [])
    base, dataset = base_model or figures["base_model"], figures["dataset"]
    auto_class, task = task_of(type(model).__name__)
    data = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        library_name="transformers",
        pipeline_tag=task,
        tags=TAGS,
        datasets=[dataset] if _is_hub_id(dataset) else None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        repo_id=repo_id,
        form=form,
        auto_class=auto_class,
        base=_format_name(base, "https://huggingface.co/"),
        dataset=_format_name(dataset, "https://huggingface.co/datasets/"),
        family=config.model_type.removeprefix(PREFIX),
        heads=attentions(model)[0].shape.num_heads,
        stock_width=attentions(model)[0].shape.qk_head_dim,
        widths=[(attention.width_of("key"), attention.width_of("value")) for attention in attentions(model)],
        costs=costs_of(model),
        growths=figures["growths"],
        losses=figures["held_out"][:1] + figures["held_out"][1:][-1:],
        picture=PICTURE if picture else None,
    )


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _format_name(name: str, place: str) -> str:
    """Return a name as the card shows it: a link to the Hub, or the last part of a path here."""
    if _is_hub_id(name):
        return f"[{name}]({place}{name})"
    path = Path(_find_path(name))
    text = _clean_text(path.name if path.is_absolute() else name)
    return f"`{text}`" if text else ""


def _clean_text(text: str) -> str:
    """Return a text from elsewhere as one line that is neither Markdown nor HTML."""
    return re.sub(r"[^\w .,:;/+=%@()'\"-]+", " ", text).strip()


def push_folder(
    folder: Path,
    repo_id: str,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
) -> CommitInfo:
    """Push the files of a folder as one commit; it removes only the former weights that they replace.

    `HfApi.upload_folder` may make several commits, between which the repository holds half a model. The arguments are
    as for `push_model`; the repository must exist.
    """
    api = HfApi(token=token)
    if revision is not None and not create_pr and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    there = set(api.list_repo_files(repo_id, revision=revision))
    index = Path(api.hf_hub_download(repo_id, INDEX, revision=revision)).read_bytes() if INDEX in there else None
    replaced = find_replaced_weights(set(files), index) & there
    return api.create_commit(
        repo_id,
        [*(CommitOperationAdd(*file) for file in files.items()), *map(CommitOperationDelete, replaced)],
        commit_message=commit_message,
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    reports: Iterable[GrowthReport] = (),
    private: bool | None = None,
    token: bool | str | None = None,
    max_shard_size: int | str = "50GB",
    tags: Iterable[str] | None = None,
    **commit,
) -> CommitInfo:
    """Push a grown model in its native form with a card, in one commit; this is `model.push_to_hub`.

    Args:
        model: the grown model.
        repo_id: where to; made if it does not exist.
        reports: of the growths. With them the card is written again; without them a card in the repository stays.
        private: make a new repository private.
        token: of a user who may write; None takes the one of `hf auth login` or HF_TOKEN.
        max_shard_size: size of a file of weights at most, in bytes or as in "5GB".
        tags: for the card, besides those of this library.
        **commit: `commit_message`, `commit_description`, `revision` (a branch, made if it does not exist) and
            `create_pr`, as for `HfApi.create_commit`.

    Raises:
        ValueError: the model is not growable, or is spread over processes.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; nothing was changed there but for an empty repository.
    """
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"The model is spread over processes, which would all push. Call save_pretrained(folder) on all of them, "
            f"and push that folder from one: hf upload {repo_id} folder."
        )
    repo_id = HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    reports, card = list(reports), None
    if not reports:
        with contextlib.suppress(EntryNotFoundError):
            card = ModelCard.load(repo_id, token=cast(str, token))  # it takes True, too
    card = card or model_card(model, repo_id, reports=reports)
    card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), *(tags or [])]))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        card.save(Path(folder, CARD))
        return push_folder(Path(folder), repo_id, token, **commit)
