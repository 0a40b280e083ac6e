"""Which prompts a run will encode."""

from __future__ import annotations

from g2rpo.config.settings import Settings
from g2rpo.data.prompts import read_prompts
from g2rpo.data.stream import PromptStream
from g2rpo.evaluation.before_after import Comparison


def run_prompts(settings: Settings) -> list[str]:
    """Every text that a run of these settings encodes, each once: training, evaluation, grids, comparison.

    Raises:
        ValueError: a source of prompts that cannot be read.
    """
    prompts, _ = read_prompts(settings.prompts)
    other = (
        read_prompts(settings.eval_prompts)[0][: settings.num_eval_prompts] if settings.eval_prompts else []
    )
    met = PromptStream(prompts, settings.seed).at(0, settings.iterations * settings.prompts_per_iteration)
    comparison = Comparison.of(settings.compare_images, settings.eval_num_steps, met, prompts, other)
    texts = [prompt.text for prompt in (*met, *prompts[: settings.num_sample_prompts])]
    texts += [prompt.text for prompt in other] if settings.eval_every else []
    texts += [text for one in comparison.sets for text in one.prompts]
    if settings.true_cfg != 1:
        texts.append("")  # what the guidance leads away from
    return list(dict.fromkeys(texts))
