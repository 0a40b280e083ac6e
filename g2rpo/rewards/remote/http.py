"""A reward of an HTTP server, which gets images and prompts as JSON and returns one score per image.

The protocol is in docs/rewards.md, a server of 30 lines in examples/http_reward_server.py:

    POST {"images": [base64 of a PNG, ...], "prompts": [...], "metadata": [{...}, ...]}
    200  {"scores": [number or null, ...]}        null: this image has no score
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata, RewardSpec
from g2rpo.rewards.remote.options import boolean, integer
from g2rpo.rewards.remote.servers import Servers
from g2rpo.rewards.remote.tally import Failure, Tally
from g2rpo.rewards.remote.wire import base64_image, eight_bits

LARGEST = torch.finfo(torch.float32).max


@dataclass
class Http:
    """Sends up to `batch` images per request to the servers.

    Attributes:
        servers: the servers that score.
        batch: maximum number of images per request.
        contacts_servers: it is checked by contacting the servers, not by a dry call.
        last_error: why samples of the last call have no score, or None.
        tally: counts failures by reason.
    """

    servers: Servers
    batch: int
    contacts_servers: ClassVar[bool] = True
    last_error: str | None = None
    tally: Tally = field(default_factory=lambda: Tally("http"))

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        pixels, entries = eight_bits(images), [{} for _ in prompts] if metadata is None else metadata
        parts = [slice(low, low + self.batch) for low in range(0, len(prompts), self.batch)]
        bodies = [partial(_request, pixels[part], prompts[part], entries[part]) for part in parts]
        outcomes: list[float | Failure] = []
        for part, answer in zip(parts, self.servers.post("", bodies), strict=True):
            outcomes += read_scores(answer, len(prompts[part]))
        self.last_error = self.tally.add(outcomes)
        scores = [torch.nan if isinstance(outcome, Failure) else outcome for outcome in outcomes]
        return torch.tensor(scores, dtype=torch.float32)

    def describe(self) -> str:
        """Names the servers in one line, for the log.

        Runs store this text with their evaluations and compare it: with other words, a resumed run would take
        the same servers for another reward.
        """
        return f"http: {', '.join(self.servers.urls)}, {self.batch} pictures a request"


def read_scores(answer: Any, n: int) -> list[float | Failure]:
    """Reads the scores of n images from a server's answer; an image without a score gets a Failure."""
    if isinstance(answer, Failure):
        return [answer] * n
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        return [Failure('the answer has no list "scores"', str(answer)[:200])] * n
    if len(scores) != n:
        return [Failure("the answer does not have one score per image", f"{len(scores)} for {n}")] * n
    return [_score(score) for score in scores]


def _score(score: Any) -> float | Failure:
    if score is None:
        return Failure("the server returned null")
    if isinstance(score, bool) or not isinstance(score, int | float):
        return Failure("a score is not a number", repr(score)[:200])
    if not -LARGEST <= score <= LARGEST:  # NaN, infinity, or beyond the range of float32
        return Failure("a score is not finite", repr(score)[:200])
    return float(score)


def _request(pixels: Tensor, prompts: list[str], metadata: Metadata) -> dict[str, Any]:
    return {"images": [base64_image(image) for image in pixels], "prompts": prompts, "metadata": metadata}


def load(
    device: torch.device,
    *,
    urls: Sequence[str] | str = (),
    batch: int = 8,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    concurrency: int = 4,
    retries: int = 4,
    backoff: float = 1.0,
    api_key_env: str | None = None,
    check: bool = True,
) -> Http:
    """Creates the reward; unless check=False, every server must answer a GET request, with any status.

    Args:
        device: ignored; the servers compute.
        urls: complete addresses of the servers.
        batch: maximum number of images per request.
        headers: HTTP headers of each request.
        timeout, concurrency, retries, backoff, api_key_env: see `Servers`.
        check: whether to contact the servers now.

    Raises:
        ValueError: an option is invalid, or a server does not answer.
    """
    servers = Servers(
        "http",
        "urls",
        urls,
        timeout=timeout,
        concurrency=concurrency,
        retries=retries,
        backoff=backoff,
        api_key_env=api_key_env,
        headers=headers,
    )
    integer("http", "batch", batch, least=1)
    boolean("http", "check", check)
    for url, answer in servers.get("").items() if check else ():
        if isinstance(answer, Failure):
            raise ValueError(
                f"reward http: no server at {url} ({answer.reason}). Start it (docs/rewards.md has an "
                "example), or set check = false to contact it only when images are scored"
            )
    return Http(servers, batch)


SPEC = RewardSpec(load, origin="computed by a server, which has the weights", num_params=0)
