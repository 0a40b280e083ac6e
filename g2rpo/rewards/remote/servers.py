"""HTTP requests to servers, with bounded concurrency, timeouts and retries.

Proxies of the environment are used (HTTP_PROXY, ALL_PROXY, NO_PROXY), but never for servers on this machine.

A request is repeated, on another server if there is one, after a connection error, a timeout, 429 or 5xx.
The pause doubles from `backoff`, shortened at random by up to a half so that clients do not synchronise, or
is the server's Retry-After. Any other answer is final. After a request that no server answered, the servers
count as down: until one answers, each further request is tried once per server, so that a batch ends soon.

Redirects are refused: images and keys go to the given addresses only. An answer is read up to LARGEST_ANSWER
bytes, and a larger one gives no score. Its content type does not matter, only that it is JSON.
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
from g2rpo.runtime.secrets import masked, shown_address

if TYPE_CHECKING:
    import ssl

    import httpx

LONGEST_PAUSE = 60.0
"""Seconds; a server that requests a longer pause is not retried."""

LARGEST_ANSWER = 16 * 2**20
"""Bytes; of a larger answer no more is read, and it gives no score."""

SHOWN = 200
"""Maximum number of characters of an unusable answer in a message."""

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
        """Sends one GET request to address + path of every server; the timeout is at most `seconds`.

        Raises:
            ValueError: a server answers with a redirect, or its answer is larger than LARGEST_ANSWER.
        """

        async def get_one(client: httpx.AsyncClient, url: str) -> httpx.Response | Failure:
            import httpx

            try:
                async with asyncio.timeout(min(seconds, self.timeout)):
                    status, headers, content = await _answer(client, "GET", url + path)
            except TimeoutError:
                return Failure(f"no answer within {min(seconds, self.timeout):g} s")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return Failure(_describe(error))
            problem = _refusal(status, headers, content)
            if problem is not None:
                raise ValueError(f"reward {self.reward}: {url + path} answers with {problem} ({self.option})")
            return httpx.Response(status, content=content, request=httpx.Request("GET", url + path))

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
                status, headers, body = await _answer(client, "POST", address, content)
        except TimeoutError:
            return _FailedTry(f"no answer within {self.timeout:g} s", answered=False)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return _FailedTry(_describe(error), answered=False, overloaded=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _FailedTry(_describe(error), final=True)
        self._last_answer, self._down = time.monotonic(), False
        if (problem := _refusal(status, headers, body)) is not None:
            return _FailedTry(problem, final=True)
        text = masked((body or b"")[: 4 * SHOWN].decode(errors="replace"))[:SHOWN]
        if 200 <= status < 300 and body is not None:
            with suppress(ValueError, RecursionError):  # also invalid UTF-8 and unlimited nesting
                return json.loads(body)
            return _FailedTry("the answer is not JSON", text, final=True)
        final = status != 429 and status < 500
        return _FailedTry(
            f"HTTP {status}",
            text,
            final=final,
            overloaded=status in (429, 503),
            pause=retry_after(headers.get("Retry-After")),
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


async def _answer(
    client: httpx.AsyncClient, method: str, address: str, content: bytes | None = None
) -> tuple[int, httpx.Headers, bytes | None]:
    """Returns status, headers and body of an answer; None in place of a body above LARGEST_ANSWER."""
    sent = {} if content is None else {"Content-Type": "application/json"}
    async with client.stream(
        method, address, content=content, headers=sent, follow_redirects=False
    ) as response:
        declared = response.headers.get("Content-Length", "")
        if declared.isdigit() and int(declared) > LARGEST_ANSWER:
            return response.status_code, response.headers, None
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > LARGEST_ANSWER:
                return response.status_code, response.headers, None
        return response.status_code, response.headers, bytes(body)


def _refusal(status: int, headers: httpx.Headers, body: bytes | None) -> str | None:
    """Describes a redirect, or an answer that is too large; None for any other answer."""
    if 300 <= status < 400:
        target = shown_address(headers.get("Location", "")).partition("?")[0][:SHOWN]
        return (
            f"HTTP {status}, a redirect{f' to {target}' if target else ''}, which is not followed: images "
            "and keys go to the given address only; give the final one"
        )
    if body is None:
        return f"more than {LARGEST_ANSWER >> 20} MiB, which is not read (HTTP {status})"
    return None


def _describe(error: Exception) -> str:
    return masked(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"))
