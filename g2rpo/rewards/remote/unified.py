"""UnifiedReward: a vision-language model behind an OpenAI-compatible server (vLLM, SGLang) rates images.

The model answers with lines such as `Alignment Score (1-5): 4.5`; the score is one of these axes or their
mean, in 1..5. The scale depends on model, prompt and axes, so `describe()` names all three. An answer that
lacks one of the requested axes gives no score.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata, RewardSpec
from g2rpo.rewards.remote.options import boolean, integer
from g2rpo.rewards.remote.servers import Servers
from g2rpo.rewards.remote.tally import Failure, Tally
from g2rpo.rewards.remote.wire import base64_image, eight_bits
from g2rpo.runtime.text import did_you_mean

MEAN = "mean"
SCORE = re.compile(
    r"[^\w+\-]*([+\-]?\d+(?:[.,]\d+)?)(?:\s*(?:/|out of)\s*5)?"
    r"(?![.,]?\w|\s*(?:/|out of|to\b|[-–])\s*\d)"  # not part of a longer number or word
)
QUESTIONS = {
    "Alignment": "does the image show what the caption says: the objects, their number, looks and relations?",
    "Coherence": "does the image hold together: no distorted objects, glitches or impossible parts?",
    "Style": "how pleasing is the image to look at, whatever the caption says?",
    "Final": "how good is the image as a picture of this caption, all in all?",
}


def default_prompt(axes: Sequence[str]) -> str:
    """Returns g2rpo's prompt for these axes, with {prompt} in place of the caption.

    It requests the format in which the model family answers.
    """
    questions = "\n".join(f"- {axis} Score: {QUESTIONS[axis]}" for axis in axes)
    lines = "\n".join(f"{axis} Score{'' if axis == 'Final' else ' (1-5)'}: X" for axis in axes)
    return (
        "You see an image that was generated for a text caption. Judge it on each of these axes, with a "
        f"score from 1 (very poor) to 5 (excellent):\n{questions}\n\n"
        f"Answer in exactly this form, with numbers for X and nothing else:\n{lines}\n\n"
        "Text Caption: [{prompt}]"
    )


def parse(text: str, axis: str) -> float | None:
    """Reads the score of an axis from an answer, clamped to 1..5; None if there is none.

    The last line that names the axis counts. `4`, `4.5`, `4,5`, `4.5/5` and `4 out of 5` are scores; a share
    of another total (`8/10`), a range (`3-4`) and words are not.
    """
    lines = re.findall(rf"(?im)^[^a-z\n]*{re.escape(axis)}[ \t]+score\b[^:：\n]*[:：](.*)$", text)
    match = SCORE.match(lines[-1]) if lines else None
    return min(5.0, max(1.0, float(match[1].replace(",", ".")))) if match else None


@dataclass
class Unified:
    """Sends one request per image to the servers.

    Attributes:
        servers: the servers that score.
        model: name of the model on the servers.
        axes: the axes that each answer must contain.
        combine: the axis that is the score, or "mean" of all axes.
        template: the prompt, with {prompt} in place of the caption.
        source: origin of the template, for `describe`.
        image_format: "png" or "jpeg".
        max_tokens: maximum number of tokens per answer.
        contacts_servers: it is checked by contacting the servers, not by a dry call.
        last_error: why samples of the last call have no score, or None.
        tally: counts failures by reason.
    """

    servers: Servers
    model: str
    axes: tuple[str, ...]
    combine: str
    template: str
    source: str
    image_format: str
    max_tokens: int
    contacts_servers: ClassVar[bool] = True
    last_error: str | None = None
    tally: Tally = field(default_factory=lambda: Tally("unified"))

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        bodies = [partial(self._request, *pair) for pair in zip(eight_bits(images), prompts, strict=True)]
        outcomes = [self._score(answer) for answer in self.servers.post("/chat/completions", bodies)]
        self.last_error = self.tally.add(outcomes)
        scores = [torch.nan if isinstance(outcome, Failure) else outcome for outcome in outcomes]
        return torch.tensor(scores, dtype=torch.float32)

    def describe(self) -> str:
        """Names model, servers and prompt in one line, for the log.

        Evaluations store this text and compare it. Scores of two runs are comparable if their texts differ in
        the servers only.
        """
        score = f"mean of {', '.join(self.axes)}" if self.combine == MEAN else f"{self.combine}"
        digest = hashlib.sha256(self.template.encode()).hexdigest()[:12]
        return (
            f"unified: {self.model} at {', '.join(self.servers.urls)}; score: {score} (asked for "
            f"{', '.join(self.axes)}); {self.source}, sha256 {digest}; {self.image_format}, temperature 0, "
            f"{self.max_tokens} tokens"
        )

    def _request(self, pixels: Tensor, prompt: str) -> dict[str, Any]:
        url = f"data:image/{self.image_format};base64,{base64_image(pixels, self.image_format)}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": self.template.replace("{prompt}", prompt)},
        ]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def _score(self, answer: Any) -> float | Failure:
        if isinstance(answer, Failure):
            return answer
        try:
            choice = answer["choices"][0]
            text, truncated = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            text, truncated = None, False
        if not isinstance(text, str):
            return Failure("the answer is not a chat completion with text", str(answer)[:200])
        if truncated:  # the last line, possibly a number, is incomplete
            text = text.rpartition("\n")[0]
        scores = {axis: parse(text, axis) for axis in self.axes}
        complete = {axis: score for axis, score in scores.items() if score is not None}
        if len(complete) < len(scores):
            missing = ", ".join(axis for axis in scores if axis not in complete)
            ending = f" within max_tokens={self.max_tokens}" if truncated else ""
            return Failure(f"no {missing} score in the answer{ending}", text)
        return sum(complete.values()) / len(complete) if self.combine == MEAN else complete[self.combine]


def load(
    device: torch.device,
    *,
    servers: Sequence[str] | str = (),
    model: str = "",
    axes: Sequence[str] = ("Alignment", "Coherence", "Style"),
    combine: str | None = None,
    prompt_file: str | None = None,
    image_format: str = "png",
    max_tokens: int = 512,
    timeout: float = 120.0,
    concurrency: int = 16,
    retries: int = 4,
    backoff: float = 1.0,
    api_key_env: str | None = None,
    check: bool = True,
) -> Unified:
    """Creates the reward; unless check=False, every server must answer and serve the model.

    Args:
        device: ignored; the servers compute.
        servers: addresses of the servers, including /v1.
        model: name under which the servers serve the model.
        axes: the requested axes; each answer must contain all of them.
        combine: "mean" or one of the axes; None = the first axis.
        prompt_file: text file with the prompt, which must contain {prompt}; None = `default_prompt`.
        image_format: "png", or "jpeg" (quality 95).
        max_tokens: maximum number of tokens per answer.
        timeout, concurrency, retries, backoff, api_key_env: see `Servers`.
        check: whether to contact the servers now.

    Raises:
        ValueError: an option is invalid, a server does not answer, or it does not serve the model.
    """
    pool = Servers(
        "unified",
        "servers",
        servers,
        timeout=timeout,
        concurrency=concurrency,
        retries=retries,
        backoff=backoff,
        api_key_env=api_key_env,
    )
    if not model or not isinstance(model, str):
        raise ValueError(
            f"reward unified: model={model!r} must name the model as the servers do, such as "
            'model = "owner/model"'
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or not all(isinstance(axis, str) and axis for axis in names) or len({*names}) < len(names):
        raise ValueError(
            f"reward unified: axes={axes!r} must be a list of different names, such as {[*QUESTIONS]}"
        )
    chosen = names[0] if combine is None else combine
    if chosen not in (MEAN, *names):
        raise ValueError(
            f"reward unified: combine={combine!r} is neither 'mean' nor one of the axes {', '.join(names)}"
            f"{did_you_mean(str(combine), [MEAN, *names])}"
        )
    if image_format not in ("png", "jpeg"):
        raise ValueError(f"reward unified: image_format={image_format!r} must be 'png' or 'jpeg'")
    template, source = _template(prompt_file, names)
    integer("unified", "max_tokens", max_tokens, least=1)
    if boolean("unified", "check", check):
        _check(pool, model)
    return Unified(pool, model, names, chosen, template, source, image_format, max_tokens)


def _template(prompt_file: str | None, axes: Sequence[str]) -> tuple[str, str]:
    if prompt_file is None:
        if unknown := [axis for axis in axes if axis not in QUESTIONS]:
            raise ValueError(
                f"reward unified: the built-in prompt has no axis {unknown[0]!r}"
                f"{did_you_mean(unknown[0], QUESTIONS)}; it has {', '.join(QUESTIONS)}. For other axes, set "
                "prompt_file to a prompt that requests them"
            )
        return default_prompt(axes), "our own prompt"  # stored by evaluations, hence never reworded
    try:
        template = Path(prompt_file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"reward unified: prompt_file={prompt_file!r} cannot be read: {error}") from error
    if "{prompt}" not in template:
        raise ValueError(
            f"reward unified: prompt_file={prompt_file!r} must contain {{prompt}} in place of the caption"
        )
    return template, f"prompt of {prompt_file}"


def _check(servers: Servers, model: str) -> None:
    for url, answer in servers.get("/models").items():
        start = (
            f"Start it with `vllm serve {model} --port {url.rpartition(':')[2].partition('/')[0]}` or as "
            "docs/rewards.md says, or set check = false to contact it only when images are scored"
        )
        if isinstance(answer, Failure):
            raise ValueError(f"reward unified: no server at {url} ({answer.reason}). {start}")
        if answer.status_code in (401, 403):
            raise ValueError(
                f"reward unified: {url} requires a key (HTTP {answer.status_code}); put it into an "
                "environment variable and name it in api_key_env"
            )
        try:
            served = [str(entry["id"]) for entry in answer.raise_for_status().json()["data"]]
        except _answer_errors() as error:
            raise ValueError(
                f"reward unified: {url}/models returned HTTP {answer.status_code} and no list of models; the "
                f"address of an OpenAI-compatible server ends in /v1. {start}"
            ) from error
        if model not in served:
            raise ValueError(
                f"reward unified: {url} serves {', '.join(served) or 'nothing'}, not model={model!r}"
                f"{did_you_mean(model, served)}"
            )


def _answer_errors() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.HTTPStatusError, ValueError, KeyError, TypeError)


SPEC = RewardSpec(
    load, origin="computed by a server, which has the weights", num_params=0, title="UnifiedReward"
)
