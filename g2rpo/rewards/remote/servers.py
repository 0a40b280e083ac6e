"""HTTP requests to servers, with bounded concurrency, timeouts and retries.

Proxies of the environment are used (HTTP_PROXY, ALL_PROXY, NO_PROXY), but never for servers on this machine.

A request is repeated, on another server if there is one, after a connection error, a timeout, 429 or 5xx.
The pause doubles from `backoff`, shortened at random by up to a half so that clients do not synchronise, or
is the server's Retry-After. Any other answer is final. After a request that no server answered, the servers
count as down: until one answers, each further request is tried once per server, so that a batch ends soon.
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

from g2rpo.rewards.remote.options import addresses, bearer, integer, is_loopback, number, plain_headers
from g2rpo.rewards.remote.tally import Failure

if TYPE_CHECKING:
    import ssl

    import httpx

LONGEST_PAUSE = 60.0
"""Seconds; a server that requests a longer pause is not retried."""

T = TypeVar("T")


class Servers:
    """Equivalent servers, which are used in turn.

    Args:
        reward: name of the reward, for messages.
        option: name of the option that holds `urls`, for messages.
        urls: addresses of the servers.
        timeout: maximum seconds per answer, > 0.
        concurrency: maximum number of concurrent requests, >= 1.
        retries: maximum number of repetitions of a request, >= 0.
        backoff: seconds of the first pause, > 0.
        api_key_env: environment variable that holds a bearer token.
        headers: HTTP headers of each request.

    Raises:
        ValueError: an option is invalid, or the environment variable is not set.
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
        self.concurrency = integer(reward, "concurrency", concurrency, least=1)
        self.retries = integer(reward, "retries", retries, least=0)
        self.backoff = number(reward, "backoff", backoff, above=0, unit=" seconds")
        self.headers = plain_headers(reward, headers) | bearer(reward, api_key_env)
        self._busy_until = dict.fromkeys(self.urls, 0.0)  # end of the pause that a server requested
        self._turn = itertools.count()
        self._last_answer, self._down = -math.inf, False

    def post(self, path: str, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Sends each body as JSON in a POST request to address + path.

        Args:
            path: appended to a server's address.
            bodies: functions that create the bodies; each is called shortly before its request.

        Returns:
            The JSON of each answer, or a Failure, in the order of the bodies.
        """
        return run_in_thread(self._post_all(path, bodies))

    def get(self, path: str, seconds: float = 10.0) -> dict[str, httpx.Response | Failure]:
        """Sends one GET request to address + path of every server; the timeout is at most `seconds`."""

        async def get_one(client: httpx.AsyncClient, url: str) -> httpx.Response | Failure:
            import httpx

            try:
                async with asyncio.timeout(min(seconds, self.timeout)):
                    return await client.get(url + path)
            except TimeoutError:
                return Failure(f"no answer within {min(seconds, self.timeout):g} s")
            except httpx.HTTPError as error:
                return Failure(_describe(error))

        async def get_all() -> dict[str, httpx.Response | Failure]:
            async with self._client() as client:
                answers = await asyncio.gather(*(get_one(client, url) for url in self.urls))
                return dict(zip(self.urls, answers, strict=True))

        return run_in_thread(get_all())

    def _client(self) -> httpx.AsyncClient:
        import httpx

        # Timeouts are set around each request, and a semaphore bounds the number of requests.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)
        # Servers on this machine are contacted without proxies: a proxy would receive images and key, and
        # its answer would become the score. If all servers are local, proxy variables are not even read.
        direct = {url: None for url in self.urls if is_loopback(url)}
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=None,
            limits=limits,
            verify=_certificates(),
            mounts=direct,
            trust_env=len(direct) < len(self.urls),
        )

    async def _post_all(self, path: str, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        free = asyncio.Semaphore(self.concurrency)
        async with self._client() as client:

            async def post_one(body: Callable[[], Any]) -> Any:
                async with free:
                    content = await asyncio.to_thread(lambda: json.dumps(body(), allow_nan=False).encode())
                    return await self._post(client, path, content)

            return await asyncio.gather(*(post_one(body) for body in bodies))

    async def _post(self, client: httpx.AsyncClient, path: str, content: bytes) -> Any:
        began = time.monotonic()
        failure, unanswered = Failure("no request was sent"), True
        pauses: dict[str, float] = {}
        tries: Counter[str] = Counter()
        first = next(self._turn)
        down = self._down
        for attempt in range(len(self.urls) if down else self.retries + 1):
            url, pause = self._choice(first + attempt, pauses, tries)
            if pause > LONGEST_PAUSE:
                return Failure(f"{url}: requests a pause of more than {LONGEST_PAUSE:g} s", failure.example)
            await asyncio.sleep(pause)
            tries[url] += 1
            answer = await self._once(client, url + path, content)
            if not isinstance(answer, _FailedTry):
                return answer
            failure = Failure(f"{url}: {answer.reason}", answer.example)
            if answer.final:
                return failure
            unanswered &= not answer.answered
            wait = min(self.backoff * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1)
            pauses[url] = time.monotonic() + (wait if answer.pause is None else answer.pause)
            if answer.overloaded and not down:
                self._busy_until[url] = max(self._busy_until[url], pauses[url])
        self._down = unanswered and self._last_answer < began
        return failure

    def _choice(self, turn: int, pauses: Mapping[str, float], tries: Counter[str]) -> tuple[str, float]:
        """Chooses the server that is available first, then the least tried one; returns it and the pause."""
        now = time.monotonic()
        shift = turn % len(self.urls)
        order = self.urls[shift:] + self.urls[:shift]
        ready = {url: max(now, self._busy_until[url], pauses.get(url, 0.0)) for url in order}
        url = min(order, key=lambda candidate: (ready[candidate], tries[candidate]))
        return url, ready[url] - now

    async def _once(self, client: httpx.AsyncClient, address: str, content: bytes) -> Any:
        import httpx

        try:
            async with asyncio.timeout(self.timeout):
                response = await client.post(
                    address, content=content, headers={"Content-Type": "application/json"}
                )
        except TimeoutError:
            return _FailedTry(f"no answer within {self.timeout:g} s", answered=False)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return _FailedTry(_describe(error), answered=False, overloaded=True)
        except httpx.HTTPError as error:
            return _FailedTry(_describe(error), final=True)
        self._last_answer, self._down = time.monotonic(), False
        status = response.status_code
        if response.is_success:
            with suppress(ValueError, RecursionError):  # also invalid UTF-8 and unlimited nesting
                return response.json()
            return _FailedTry("the answer is not JSON", response.text[:200], final=True)
        final = status != 429 and status < 500
        return _FailedTry(
            f"HTTP {status}",
            response.text[:200],
            final=final,
            overloaded=status in (429, 503),
            pause=retry_after(response.headers.get("Retry-After")),
        )


@dataclass(frozen=True)
class _FailedTry(Failure):
    """One unsuccessful try of a request.

    Attributes:
        final: whether a retry would be useless.
        answered: whether a server answered.
        overloaded: whether no request should be sent to this server for now.
        pause: seconds that the server requests, or None.
    """

    final: bool = False
    answered: bool = True
    overloaded: bool = False
    pause: float | None = None


@cache
def _certificates() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()  # takes 0.1 s, hence cached


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to completion in a new thread, so that it works inside the caller's event loop too.

    An exception in the waiting caller, such as KeyboardInterrupt, cancels the coroutine.
    """
    task: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def registered() -> T:
        task.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: asyncio.run(registered()))
        try:
            return future.result()
        except BaseException:
            while not task and not future.done():
                time.sleep(0.001)
            with suppress(RuntimeError):  # the loop is closed already
                for loop, running in task:
                    if running is not None:
                        loop.call_soon_threadsafe(running.cancel)
            raise


def retry_after(header: str | None) -> float | None:
    """Reads a Retry-After header, seconds or a date, as seconds to wait; None if it is neither."""
    if header is None:
        return None
    with suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
