"""The prompts of a run: which it trains on, evaluates and shows, and all texts that it will encode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g2rpo.config.settings import Settings
from g2rpo.data.prompts import Prompt, ReadReport, is_absent, read_prompts
from g2rpo.data.stream import PromptStream
from g2rpo.evaluation.before_after import Comparison
from g2rpo.evaluation.monitor import EvaluationPlan
from g2rpo.models.policy import Policy
from g2rpo.models.registry import negative_prompt_of


@dataclass(frozen=True)
class RunPrompts:
    """The prompts of a run, from its settings alone.

    Attributes:
        source: all training prompts, in the order of their source.
        report: what was read from that source.
        notes: what the run should say about its prompts; empty lines, repeats and choices in reading.
        stream: the order in which the run trains on them.
        trained: the prompts of all iterations, in that order, with repeats.
        comparison: the images that are sampled before and after training.
        evaluation: the images of evaluations and sample grids.
        negative: the negative prompt of classifier-free guidance; None: there is none.
    """

    source: Sequence[Prompt]
    report: ReadReport
    notes: Sequence[str]
    stream: PromptStream
    trained: Sequence[Prompt]
    comparison: Comparison
    evaluation: EvaluationPlan
    negative: str | None

    @staticmethod
    def of(settings: Settings, policy: Policy | None = None) -> RunPrompts:
        """Reads the prompts of a run.

        Args:
            policy: the policy of the run, if it was not loaded by its name; it knows its negative prompt.

        Raises:
            ValueError: a source of prompts cannot be read, or there is no such model.
        """
        source, report = read_prompts(settings.prompts)
        notes = [str(report)] if report.has_remarks else []
        evaluated: Sequence[Prompt] = []
        if settings.eval_prompts:
            evaluated, evaluation_report = read_prompts(settings.eval_prompts)
            notes += [f"evaluation: {evaluation_report}"] if evaluation_report.has_remarks else []
            if settings.eval_every and len(evaluated) < settings.num_eval_prompts:
                notes.append(
                    f"num_eval_prompts={settings.num_eval_prompts}, but {settings.eval_prompts} has only "
                    f"{len(evaluated)} prompts; all of them are evaluated"
                )
        evaluated = evaluated[: settings.num_eval_prompts]
        stream = PromptStream(source, settings.seed)
        trained = stream.at(0, settings.iterations * settings.prompts_per_iteration)
        if policy is not None:
            negative = policy.negative_prompt
        else:
            negative = negative_prompt_of(settings.model, settings.policy_options(), family=settings.family)
        return RunPrompts(
            source,
            report,
            notes,
            stream,
            trained,
            Comparison.of(settings.compare_images, settings.eval_num_steps, trained, source, evaluated),
            EvaluationPlan.of(settings, source, evaluated),
            negative,
        )

    @property
    def lines(self) -> list[str]:
        """What the run says about its prompts at the start: the training prompts, and `notes`."""
        return list(dict.fromkeys([str(self.report), *self.notes]))

    @property
    def texts(self) -> list[str]:
        """All distinct texts that the run encodes, the negative prompt last."""
        sets = (self.evaluation.shown, self.evaluation.evaluated, *self.comparison.sets)
        texts = [prompt.text for prompt in self.trained]
        texts += [text for image_set in sets if image_set is not None for text in image_set.prompts]
        texts += [] if self.negative is None else [self.negative]
        return list(dict.fromkeys(texts))


def planned_texts(settings: Settings) -> tuple[int | None, list[str]]:
    """Counts the texts that a planned run will encode, whose prompt files may be absent.

    Returns:
        The number of distinct texts, None where a file is absent; and notes about the prompts.

    Raises:
        ValueError: an error of `RunPrompts.of`, except an absent file.
    """
    sources = {"prompts": settings.prompts, "eval_prompts": settings.eval_prompts}
    absent = {key: source for key, source in sources.items() if source and is_absent(source)}
    if not absent:
        prompts = RunPrompts.of(settings)
        return len(prompts.texts), list(prompts.notes)
    named = " and ".join(f"{key}={source}" for key, source in absent.items())
    used = settings.iterations * settings.prompts_per_iteration
    return None, [f"{named} does not exist: the estimate assumes that all {used:,} prompts of the run differ"]
