"""Evaluation and comparison without a model: images are functions of their seeds."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from g2rpo.data.prompts import Prompt
from g2rpo.evaluation.before_after import OWN, UNSEEN, Comparison
from g2rpo.evaluation.monitor import EvaluationPlan, Evaluator, ImageSet, first_evaluation_problem
from g2rpo.rewards.registry import CheckedReward
from g2rpo.run.metrics import MetricsWriter, read_metrics
from g2rpo.runtime.progress import RunProgress


class Painter(Evaluator):
    """Images of one colour, which depends on the seed and the number of steps."""

    def images(self, image_set):
        shades = torch.tensor(image_set.seeds).remainder(251) / 255 + self.num_steps / 10_000
        return (shades[:, None, None, None].expand(-1, 3, 8, 8) * 255).round() / 255


def brightness(images, prompts, metadata=None):
    return images.mean((1, 2, 3))


def painter(num_steps=4, **rewards):
    policy = SimpleNamespace(device=torch.device("cpu"))
    return Painter(policy, rewards or {"brightness": brightness}, None, num_steps, 3.0, batch=3)


def prompts(*texts):
    return [Prompt(text, {"place": i}, i) for i, text in enumerate(texts)]


OWN_FILE, OTHER = prompts("a", "b", "c", "d", "e"), prompts("x", "b", "y", "z")
MET = [OWN_FILE[i] for i in (3, 1, 3, 0, 4)]


def comparison(images=2, num_steps=4, met=MET, other=OTHER):
    return Comparison.of(images, num_steps, met, OWN_FILE, other)


def test_rewards_get_what_is_known_of_each_prompt():
    seen = []

    def spy(images, texts, metadata=None):
        seen.extend(zip(texts, metadata, strict=True))
        return brightness(images, texts)

    painter(spy=spy).scores(one := ImageSet.of("some", OWN_FILE, 10), torch.rand(10, 3, 8, 8))
    assert seen == [(prompt.text, prompt.metadata) for prompt in OWN_FILE for _ in range(2)]
    assert one.seeds[0] == 1_000_000 and len(set(one.seeds)) == 10


def test_the_comparison_takes_what_is_trained_and_what_is_not():
    made = comparison()
    assert [(one.title, one.prompts) for one in made.sets] == [(OWN, ("b", "d")), (UNSEEN, ("x", "y"))]
    assert "1 evaluation prompts are also training prompts" in made.note
    assert comparison(0).sets == () and comparison(0).note == ""
    assert [len(one.prompts) for one in comparison(8).sets] == [8, 9]  # 4 and 3 prompts, each as often
    assert [one.title for one in comparison(other=OWN_FILE).sets] == [OWN]


def test_a_comparison_goes_on_as_it_began(tmp_path):
    comparison(8).draw_before(painter(), tmp_path)
    longer = comparison(8, met=[*MET, OWN_FILE[2]])  # more iterations: c is met too
    assert longer.sets != comparison(8).sets
    again = longer.resumed(tmp_path)
    assert again.sets == comparison(8).sets
    evaluator = painter(brightness=brightness, new=brightness)  # another reward than before
    (own, unseen) = again.draw_after(evaluator, tmp_path, ["brightness"])
    assert (own.reward, own.difference, own.num, unseen.num) == ("brightness", 0, 8, 9)
    assert (tmp_path / "before_after.png").is_file() and (tmp_path / "comparison.md").is_file()


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (comparison(num_steps=8), "eval_num_steps: 4 stored, 8 given"),
        (comparison(images=1), "compare_images: 2 stored, 1 given"),
        (
            comparison(other=OTHER[2:]),
            "eval_prompts or num_eval_prompts: the stored images have other unseen",
        ),
        (comparison(other=[]), "eval_prompts or num_eval_prompts: the stored images have other unseen"),
    ],
)
def test_a_comparison_with_other_images_is_refused(tmp_path, now, said):
    with pytest.raises(ValueError, match=r"lists no images of the untrained model.* or use compare_images=0"):
        now.resumed(tmp_path)
    comparison().draw_before(painter(), tmp_path)
    with pytest.raises(ValueError, match=f"{said}(.|\n)*or use compare_images=0"):
        now.resumed(tmp_path)
    assert comparison(0).resumed(tmp_path).sets == ()


def test_gains_are_reported_between_equal_images_only(tmp_path):
    one = ImageSet.of("evaluation", OTHER)
    painter().evaluate(one, tmp_path, 0)
    assert painter().evaluate(one, tmp_path, 5)["eval_gain/brightness"] == 0
    assert "eval_gain/brightness" not in painter(num_steps=8).evaluate(one, tmp_path, 5)
    assert "eval_gain/brightness" not in painter().evaluate(ImageSet.of("other", OTHER[1:]), tmp_path, 5)
    kept = json.loads((tmp_path / "evaluations" / "step_000000.json").read_text())
    assert kept["num_steps"] == 4 and kept["prompts"] == ["x", "b", "y", "z"]


@pytest.mark.parametrize(("changed", "reported"), [({"urls": ["b"]}, True), ({"prompt": "other"}, False)])
def test_gains_are_reported_of_equal_rewards_only(tmp_path, changed, reported):
    """An address may change between step 0 and 5, but not what is asked for."""
    one = ImageSet.of("evaluation", OTHER)
    options = {"urls": ["a"], "prompt": "p", "sizes": (1, 2), "folder": tmp_path}
    painter(judge=CheckedReward("judge", brightness, options)).evaluate(one, tmp_path, 0)
    later = painter(judge=CheckedReward("judge", brightness, {**options, **changed}))
    assert ("eval_gain/judge" in later.evaluate(one, tmp_path, 5)) == reported


def test_records_of_before_options_were_kept_still_have_gains(tmp_path):
    one = ImageSet.of("evaluation", OTHER)
    painter().evaluate(one, tmp_path, 0)
    path = tmp_path / "evaluations" / "step_000000.json"
    kept = json.loads(path.read_text())
    del kept["options"], kept["crc32"]  # earlier records have neither
    path.write_text(json.dumps(kept))
    judge = CheckedReward("brightness", brightness, {"prompt": "p"})
    assert painter(brightness=judge).evaluate(one, tmp_path, 5)["eval_gain/brightness"] == 0


def test_a_damaged_record_of_the_start_is_named_and_gives_no_wrong_gain(tmp_path, caplog):
    one = ImageSet.of("evaluation", OTHER)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/brightness": 0.5}\n')
    assert "step_000000.json is missing" in first_evaluation_problem(tmp_path)
    painter().evaluate(one, tmp_path, 0)
    assert first_evaluation_problem(tmp_path) == ""
    path = tmp_path / "evaluations" / "step_000000.json"
    text = path.read_text()
    for damaged in (text.replace("0.", "1.", 1), text[:-9], ""):
        path.write_text(damaged)
        assert "step_000000.json is damaged" in first_evaluation_problem(tmp_path)
        assert "eval_gain/brightness" not in painter().evaluate(one, tmp_path, 5)
        assert "step_000000.json is damaged" in caplog.text


def test_what_an_interrupt_cut_off_is_made_up_for(tmp_path):
    plan = EvaluationPlan(ImageSet.of("e", OTHER), ImageSet.of("s", OWN_FILE), 2, 2)
    grid = tmp_path / "samples" / "step_000002" / "grid.png"

    def evaluate(step, plan=plan):
        with MetricsWriter(tmp_path, resumed_step=step) as writer, RunProgress(4) as progress:
            plan.evaluate_if_due(painter(), tmp_path, step, writer, progress, ends=False, missing=True)
        return [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]

    assert evaluate(1) == [] and not grid.exists()  # not due
    assert evaluate(2, replace(plan, shown=None)) == [2] and not grid.exists()
    assert evaluate(2) == [2] and grid.is_file()  # the grid alone was missing
    written = grid.stat().st_mtime_ns
    assert evaluate(2) == [2] and grid.stat().st_mtime_ns == written
