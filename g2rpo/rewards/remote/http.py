"""Any scorer behind HTTP: pictures and prompts as JSON go out, one number a picture comes back.

The protocol is in docs/rewards.md, a server of 30 lines in examples/http_reward_server.py:

    POST {"images": [base64 of a PNG, ...], "prompts": [...], "metadata": [{...}, ...]}
    200  {"scores": [number or null, ...]}        null: this picture cannot be judged
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata
from g2rpo.rewards.remote.options import whole
from g2rpo.rewards.remote.servers import Servers
from g2rpo.rewards.remote.tally import Failed, Tally
from g2rpo.rewards.remote.wire import eight_bits, encoded

LARGEST = torch.finfo(torch.float32).max


@dataclass
class Http:
    """Asks the servers about up to `batch` pictures at once.

    Attributes:
        last_error: why samples of the last call have no score, or None.
    """

    servers: Servers
    batch: int
    last_error: str | None = None
    tally: Tally = field(default_factory=lambda: Tally("http"))

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        pixels, known = eight_bits(images), [{} for _ in prompts] if metadata is None else metadata
        parts = [slice(low, low + self.batch) for low in range(0, len(prompts), self.batch)]
        bodies = [partial(_question, pixels[part], prompts[part], known[part]) for part in parts]
        outcomes: list[float | Failed] = []
        for part, answer in zip(parts, self.servers.ask("", bodies), strict=True):
            outcomes += read_scores(answer, len(prompts[part]))
        self.last_error = self.tally.take([one if isinstance(one, Failed) else None for one in outcomes])
        scores = [torch.nan if isinstance(one, Failed) else one for one in outcomes]
        return torch.tensor(scores, dtype=torch.float32)

    def describe(self) -> str:
        """Who is asked: a line for the log."""
        return f"http: {', '.join(self.servers.urls)}, {self.batch} pictures a request"


def read_scores(answer: Any, n: int) -> list[float | Failed]:
    """One score, or why there is none, for each of n pictures."""
    if isinstance(answer, Failed):
        return [answer] * n
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        return [Failed('the answer has no list "scores"', str(answer)[:200])] * n
    if len(scores) != n:
        return [
            Failed(
                "the answer has another number of scores than there were pictures", f"{len(scores)} for {n}"
            )
        ] * n
    return [_score(score) for score in scores]


def _score(score: Any) -> float | Failed:
    if score is None:
        return Failed("the server gave null")
    if isinstance(score, bool) or not isinstance(score, int | float):
        return Failed("a score is no number", repr(score)[:200])
    if not -LARGEST <= score <= LARGEST:  # NaN is not, nor is what float32 cannot hold
        return Failed("a score is not finite", repr(score)[:200])
    return float(score)


def _question(pixels: Tensor, prompts: list[str], metadata: Metadata) -> dict[str, Any]:
    return {"images": [encoded(one) for one in pixels], "prompts": prompts, "metadata": metadata}


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
    """Checks the options and, unless check=False, that every server answers a GET, with whatever status.

    Args:
        urls: whole addresses. batch: most pictures of a request. headers: sent with each.
        timeout, concurrency, retries, backoff, api_key_env: see `Servers`.

    Raises:
        ValueError: options that cannot be meant, or a server that is not there.
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
    whole("http", "batch", batch, least=1)
    for url, answer in servers.reach("").items() if check else ():
        if isinstance(answer, Failed):
            raise ValueError(
                f"reward http: no server at {url} ({answer.reason}). Start it (docs/rewards.md has an "
                "example), or give check = false to ask it only when pictures are judged"
            )
    return Http(servers, batch)
