"""What a race compares: who wins, by how much, and how that is printed."""

from dataclasses import replace

import pytest

from hf_growattn.report.comparison import RaceResult, Run, compare_runs

OPTIONS = {"budget": 10, "modules_to_save": [], "growth_batches": 16}


def run_of(method: str, losses: list[float], seed: int = 0, rate: float = 1e-2, steps: int = 8) -> Run:
    return Run(method, rate, steps, seed, losses, 10, 20)


GIVEN = [2.0, 2.5, 3.0, 3.5]


@pytest.mark.parametrize(
    "by, winner, sentence, is_open",
    [
        ([0.10, 0.11, 0.10, 0.11], "growth", "The winner is growth: its held-out loss is 0.1", False),
        ([0.009, 0.008, 0.009, 0.008], "lora", "0.0085 ± 0.0003 lower, and must be lower by more than 0.01", False),
        ([0.9, -0.7, 0.8, -0.7], "lora", "two standard errors", True),
        ([0.020, -0.010, 0.015, -0.009], "lora", "two standard errors", True),  # below both
        ([0.7, -0.9, 0.7, -0.8], "lora", "lower than that of growth", True),
        ([-0.10, -0.11, -0.10, -0.11], "lora", "lower than that of growth", False),
    ],
)
def test_growth_wins_by_a_margin_and_two_errors(by, winner, sentence, is_open):
    result = RaceResult(8, run_of("start", [9.0] * 4), OPTIONS)
    result.runs = [run_of("lora", GIVEN), run_of("growth", [loss - less for loss, less in zip(GIVEN, by)])]
    assert result.winner == winner
    assert sentence in result.verdict and result.verdict in str(result)
    assert ("More held-out batches or seeds may show that growth leads." in result.verdict) == is_open


def test_what_diverged_is_said():
    result = RaceResult(8, run_of("start", GIVEN), OPTIONS)
    for own, lora, said in (
        ([], GIVEN, "LoRA wins: growth diverged."),
        (GIVEN, [], "The winner is growth: LoRA diverged."),
    ):
        result.runs = [run_of("lora", lora), run_of("growth", own)]
        assert result.verdict == said


def test_a_column_of_caches_is_for_models_that_have_one():
    runs = [run_of("lora", GIVEN), run_of("growth", GIVEN)]
    result = RaceResult(8, run_of("start", GIVEN), OPTIONS, runs)
    assert "KV cache" in result.table()
    result.start, *result.runs = (replace(run, cache=0) for run in (result.start, *runs))
    assert "KV cache" not in result.table()


def test_a_lead_is_paired_by_seed_and_batch():
    own = [run_of("growth", [0.0, 4.0], 0), run_of("growth", [1.0, 5.0], 1), run_of("growth", [0.0, 0.0], 2)]
    assert compare_runs(own, [run_of("lora", [1.0, 5.0], 0), run_of("lora", [2.0, 6.0], 1)]) == (1.0, 0.0)
    mean, error = compare_runs(own[:1], [run_of("lora", [1.0, 7.0], 0)])
    assert mean == 2.0 and error == pytest.approx(1.0)
    mean, error = compare_runs(own[:2], [run_of("lora", [1.0, 5.0], 0), run_of("lora", [4.0, 8.0], 1)])
    assert mean == 2.0 and error == pytest.approx(1.0)
