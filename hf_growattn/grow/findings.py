"""What a growth finds out, as its report shows it."""

from ..growable.models import GrowableModelMixin, cache_bytes
from ..report.report import GrowthReport, LayerGrowth
from ..report.words import AT_LIMIT, NO_GAIN, NO_STEP, NOTHING_HELD, SPENT
from .plan import GrowthConfig, strength_of, weights_of
from .trial import Change, Trial, parameters_of_a_dim


def growth_report(
    config: GrowthConfig,
    model: GrowableModelMixin,
    changes: list[Change],
    trial: Trial,
    steps: list[float],
    **figures,
) -> GrowthReport:
    """The report of a trial, made before anything is written into the model.

    `changes` are all that were planned, those of 0 dims too, and the trial holds those that do something, each with one
    of the `steps`. `figures` are the report's losses, line search and seconds.
    """
    taken, weights = dict(zip(map(id, trial.changes), steps)), model.num_parameters()
    added, applied = trial.added_parameters(), sum(steps) > 0
    left = weights_of(config.budget, weights) - added
    return GrowthReport(
        layers=[_layer_growth(config, each, taken.get(id(each), 0.0), left) for each in changes],
        added_parameters=added if applied else 0,
        cache_bytes=(cache_bytes(model), cache_bytes(model, trial.parts if applied else None)),
        parameters=weights,
        **figures,
    )


def _layer_growth(config: GrowthConfig, change: Change, step: float, left: int) -> LayerGrowth:
    """The report of one change at the step that was taken.

    Args:
        config: of the growth.
        change: what was planned; it may have 0 dims.
        step: 0 where nothing was taken.
        left: weights of the budget that nothing was bought for.
    """
    gradient, block = change.gradient, change.gradient.block
    width = block.attention.width_of(block.kind.shared)
    weights = parameters_of_a_dim(block.attention, block.kind)
    if step > 0 and change.dims:
        why = ""
    elif not config.most_dims(block.attention, block.kind):
        why = AT_LIMIT
    elif not strength_of(gradient).any():
        why = NOTHING_HELD
    elif change.dims:
        why = NO_STEP
    else:
        why = SPENT if left < weights * config.multiple_of else NO_GAIN
    return LayerGrowth(
        layer=block.attention.layer,
        kind=block.kind.name,
        width=(width, width + (change.dims if step > 0 else 0)),
        step_size=step,
        in_sample=tuple(gradient.in_sample.tolist()),
        validated=tuple(gradient.validated.tolist()),
        strength=(*change.strength.tolist(), *[0.0] * (len(gradient.validated) - change.dims)),
        starvation=gradient.starvation,
        existing_slope=change.old_step.slope if change.old_step else 0.0,
        existing_validated=change.old_step.validated if change.old_step else 0.0,
        quadratic_ratio=step * change.quadratic_ratio,
        left=why,
    )
