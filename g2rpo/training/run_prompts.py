"""The prompts that a run will encode."""

from __future__ import annotations

from g2rpo.config.settings import Settings
from g2rpo.data.prompts import read_prompts
from g2rpo.data.stream import PromptStream
from g2rpo.evaluation.before_after import Comparison
from g2rpo.models.registry import negative_prompt_of


def run_prompts(settings: Settings) -> list[str]:
    """All distinct texts that a run encodes: for training, evaluation, sample grids and the comparison.

    With classifier-free guidance the negative prompt is one of them.

    Raises:
        ValueError: a source of prompts cannot be read, or there is no such model.
    """
    prompts, _ = read_prompts(settings.prompts)
    eval_prompts = (
        read_prompts(settings.eval_prompts)[0][: settings.num_eval_prompts] if settings.eval_prompts else []
    )
    trained = PromptStream(prompts, settings.seed).at(0, settings.iterations * settings.prompts_per_iteration)
    comparison = Comparison.of(
        settings.compare_images, settings.eval_num_steps, trained, prompts, eval_prompts
    )
    texts = [prompt.text for prompt in (*trained, *prompts[: settings.num_sample_prompts])]
    texts += [prompt.text for prompt in eval_prompts] if settings.eval_every else []
    texts += [text for image_set in comparison.sets for text in image_set.prompts]
    negative = negative_prompt_of(settings.model, settings.policy_options(), family=settings.family)
    texts += [] if negative is None else [negative]
    return list(dict.fromkeys(texts))
