"""Model cards of grown models."""

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ..growable.attention import attentions
from ..growable.folders import replacing
from ..growable.growths import check_kind, is_grown, origin_of
from ..model.compat import model_class_names
from ..report.report import GrowthReport
from ..report.words import format_width, summary_of

TASKS = {  # the Hub's name of the task, by the Auto class, in the order in which a model class is looked for
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForSeq2SeqLM": "text2text-generation",
}


def task_of(class_name: str) -> tuple[str, str]:
    """The Auto class that loads a model class, and the Hub's name of its task."""
    for auto_class, task in TASKS.items():
        names = model_class_names(getattr(modeling_auto, auto_class)).values()
        if any(class_name in ((name,) if isinstance(name, str) else name) for name in names):
            return auto_class, task
    return "AutoModel", "feature-extraction"


def write_card(
    model: PreTrainedModel,
    folder: str | Path,
    reports: Iterable[GrowthReport] = (),
    base_model: str = "",
    dataset: str = "",
    repo_id: str = "you/your-model",
) -> None:
    """Write the model card of a grown model, `README.md`.

    `hf upload you/your-model FOLDER` pushes a folder with its card. `model.push_to_hub` pushes the model alone: the
    card in the repository stays.

    Args:
        model: the grown model.
        folder: where to write; other files that lie there stay.
        reports: of its growths, as `Grower.grow` returned them.
        base_model: Hub id of the model that grew; by default what the model came from.
        dataset: Hub id of the data.
        repo_id: Hub id of the model, by which the card says how to load it.

    Raises:
        ValueError: the model has not grown.
    """
    check_kind(model)
    if not is_grown(model):
        raise ValueError(
            f"This {type(model).__name__} has not grown, and the card would say that it has. Grow it first, or write a "
            "card with huggingface_hub.ModelCard."
        )
    base, dataset = (name if _is_hub_id(name) else "" for name in (base_model or origin_of(model), dataset))
    auto_class, task = task_of(type(model).__name__)
    data = ModelCardData(
        base_model=base or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_growattn", "growattn"],
        datasets=[dataset] if dataset else None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        repo_id=repo_id,
        auto_class=auto_class,
        base=base,
        dataset=dataset,
        family=model.config.model_type,
        widths=[
            [format_width((each.stock_width_of(role), each.width_of(role))) for role in ("key", "value")]
            for each in attentions(model)
        ],
        growths=[summary_of(report) for report in reports],
    )
    with replacing(Path(folder).resolve()) as partial:
        card.save(partial / "README.md")


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()
