"""Asking servers over HTTP: bounded, patient with what may pass, and without a number for what did not.

The environment's proxies are used as usual (HTTP_PROXY, ALL_PROXY, NO_PROXY), but never for this machine.

Asked again, elsewhere if there is another server: no connection, no answer in time, 429 and 5xx, after pauses
that double from `backoff` (shortened at random by up to a half, so that clients spread) or after the server's
own Retry-After. Everything else is an answer, good or bad. A request that no server answered at all marks
them as down: until one answers, each further request is tried once a server, so that a batch ends soon.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from g2rpo.rewards.remote.options import addresses, bearer, is_loopback, number, plain_headers, whole
from g2rpo.rewards.remote.tally import Failed

if TYPE_CHECKING:
    import ssl

    import httpx

LONGEST_PAUSE = 60.0
"""Seconds; a server that asks for more is not waited for."""

T = TypeVar("T")


class Servers:
    """Servers that do the same, asked in turn.

    Args:
        reward: whose they are, for messages. option: what the user calls `urls`.
        urls: addresses.
        timeout: seconds an answer may take. concurrency: most requests in flight. retries: more tries.
        backoff: seconds of the first pause.
        api_key_env: environment variable that holds a bearer token.

    Raises:
        ValueError: an option that cannot be meant, or an empty environment variable.
    """

    def __init__(
        self,
        reward: str,
        option: str,
        urls: Any,
        *,
        timeout: float,
        concurrency: int,
        retries: int,
        backoff: float,
        api_key_env: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.reward, self.option = reward, option
        self.urls = addresses(reward, option, urls)
        self.timeout = number(reward, "timeout", timeout, above=0, unit=" seconds")
        self.concurrency = whole(reward, "concurrency", concurrency, least=1)
        self.retries = whole(reward, "retries", retries, least=0)
        self.backoff = number(reward, "backoff", backoff, above=0, unit=" seconds")
        self.headers = plain_headers(reward, headers) | bearer(reward, api_key_env)
        self._rests = dict.fromkeys(self.urls, 0.0)  # until when a server has asked to be left alone
        self._turn = itertools.count()
        self._answered, self._down = -math.inf, False

    def ask(self, path: str, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """POST each body as JSON to address + path; bodies are made shortly before they are sent.

        Returns:
            The answers' JSON or why there is none (Failed), in the order of the bodies.
        """
        return in_own_loop(self._ask_all(path, bodies))

    def reach(self, path: str, seconds: float = 10.0) -> dict[str, httpx.Response | Failed]:
        """GET address + path of every server, once."""

        async def get(client: httpx.AsyncClient, url: str) -> httpx.Response | Failed:
            import httpx

            try:
                async with asyncio.timeout(min(seconds, self.timeout)):
                    return await client.get(url + path)
            except TimeoutError:
                return Failed(f"no answer within {min(seconds, self.timeout):g} s")
            except httpx.HTTPError as error:
                return Failed(_words(error))

        async def every() -> dict[str, httpx.Response | Failed]:
            async with self._client() as client:
                return dict(
                    zip(self.urls, await asyncio.gather(*(get(client, u) for u in self.urls)), strict=True)
                )

        return in_own_loop(every())

    def _client(self) -> httpx.AsyncClient:
        import httpx

        # Time is limited around each request; the bound on requests is the semaphore's.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)
        # Proxy variables are not for servers on this machine: a proxy would get images and key, and its
        # answer would be the score. Where all servers are here, not even an unusable variable matters.
        direct = {url: None for url in self.urls if is_loopback(url)}
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=None,
            limits=limits,
            verify=_certificates(),
            mounts=direct,
            trust_env=len(direct) < len(self.urls),
        )

    async def _ask_all(self, path: str, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        free = asyncio.Semaphore(self.concurrency)
        async with self._client() as client:

            async def one(body: Callable[[], Any]) -> Any:
                async with free:
                    content = await asyncio.to_thread(lambda: json.dumps(body(), allow_nan=False).encode())
                    return await self._ask(client, path, content)

            return await asyncio.gather(*(one(body) for body in bodies))

    async def _ask(self, client: httpx.AsyncClient, path: str, content: bytes) -> Any:
        began = time.monotonic()
        failed, silent = Failed("never asked"), True
        pauses: dict[str, float] = {}
        tries: Counter[str] = Counter()
        first = next(self._turn)
        down = self._down
        for attempt in range(len(self.urls) if down else self.retries + 1):
            url, pause = self._choice(first + attempt, pauses, tries)
            if pause > LONGEST_PAUSE:
                return Failed(f"{url}: asks for a pause of more than {LONGEST_PAUSE:g} s", failed.example)
            await asyncio.sleep(pause)
            tries[url] += 1
            answer = await self._once(client, url + path, content)
            if not isinstance(answer, _Again):
                return answer
            failed = Failed(f"{url}: {answer.reason}", answer.example)
            if answer.final:
                return failed
            silent &= not answer.spoke
            wait = min(self.backoff * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1)
            pauses[url] = time.monotonic() + (wait if answer.pause is None else answer.pause)
            if answer.crowded and not down:
                self._rests[url] = max(self._rests[url], pauses[url])
        self._down = silent and self._answered < began
        return failed

    def _choice(self, turn: int, pauses: Mapping[str, float], tries: Counter[str]) -> tuple[str, float]:
        """The server that may be asked first, and in how many seconds; of equals the least tried."""
        now = time.monotonic()
        shift = turn % len(self.urls)
        order = self.urls[shift:] + self.urls[:shift]
        ready = {url: max(now, self._rests[url], pauses.get(url, 0.0)) for url in order}
        url = min(order, key=lambda one: (ready[one], tries[one]))
        return url, ready[url] - now

    async def _once(self, client: httpx.AsyncClient, address: str, content: bytes) -> Any:
        import httpx

        try:
            async with asyncio.timeout(self.timeout):
                response = await client.post(
                    address, content=content, headers={"Content-Type": "application/json"}
                )
        except TimeoutError:
            return _Again(f"no answer within {self.timeout:g} s", spoke=False)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return _Again(_words(error), spoke=False, crowded=True)
        except httpx.HTTPError as error:
            return _Again(_words(error), final=True)
        self._answered, self._down = time.monotonic(), False
        status = response.status_code
        if response.is_success:
            with suppress(ValueError, RecursionError):  # among them no UTF-8, and brackets without end
                return response.json()
            return _Again("the answer is no JSON", response.text[:200], final=True)
        final = status != 429 and status < 500
        return _Again(
            f"HTTP {status}",
            response.text[:200],
            final=final,
            crowded=status in (429, 503),
            pause=retry_after(response.headers.get("Retry-After")),
        )


@dataclass(frozen=True)
class _Again(Failed):
    """A failed try. final: asking again would not help. spoke: a server answered. crowded: nobody should ask
    it for now. pause: seconds that it wants."""

    final: bool = False
    spoke: bool = True
    crowded: bool = False
    pause: float | None = None


@cache
def _certificates() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()  # 0.1 s: once, not for every batch


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread of its own, where no loop of the caller is in the way.

    An exception that reaches the waiting caller, such as Ctrl-C, cancels it.
    """
    task: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def known() -> T:
        task.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: asyncio.run(known()))
        try:
            return future.result()
        except BaseException:
            while not task and not future.done():
                time.sleep(0.001)
            with suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
                for loop, running in task:
                    if running is not None:
                        loop.call_soon_threadsafe(running.cancel)
            raise


def retry_after(header: str | None) -> float | None:
    """Seconds to wait: from a number of them, or from a date; None where the header is neither."""
    if header is None:
        return None
    with suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
