"""Serving the page: its address, the files that a browser may read, and the end of the session.

The page is for the person who starts it: it binds to 127.0.0.1 unless another host is given, has no password
and no encryption, and is never published through a tunnel. A browser may read files of the session's folder
and no others; what the page shows of runs is part of the page.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from g2rpo.web.context import WebContext

HOST, PORT = "127.0.0.1", 7860
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INSTALL = 'the web page needs gradio: pip install "g2rpo[demo]"'
CLIENTS_WAITING = 32
"""Jobs that may wait; further ones are refused with a message."""


def check_gradio() -> None:
    """Checks that gradio is installed.

    Raises:
        ValueError: it is not, with the command that installs it.
    """
    try:
        installed = version("gradio")  # importing it would read the environment before `prepare`
    except PackageNotFoundError as error:
        raise ValueError(INSTALL) from error
    if installed.split(".")[0] != "6":
        raise ValueError(f"{INSTALL} (version 6 is needed, {installed} is installed)")


def check_address(host: str, port: int) -> None:
    """Checks that the page can be served at an address.

    Raises:
        ValueError: the port is in use or reserved, or the host is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use, perhaps by another `g2rpo demo`; give another --port"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ValueError(f"no permission to use port {port}; give a --port of 1024 or more") from error
        raise ValueError(f"--host {host} is not an address of this machine ({error}); use {HOST}") from error


def prepare(context: WebContext) -> None:
    """Sets what gradio reads from the environment; call it before gradio is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(context.folder / "files")
    # gradio would start with these instead of what was asked for.
    for name in ("GRADIO_SHARE", "GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT", "GRADIO_ALLOWED_PATHS"):
        os.environ.pop(name, None)


def start(context: WebContext, host: str = HOST, port: int = PORT) -> tuple[Any, str]:
    """Starts the server in a thread.

    Args:
        context: what is shown.
        host, port: the address; port 0 takes a free one.

    Returns:
        The page (gradio's `Blocks`, whose `close` ends the server), and its URL.

    Raises:
        ValueError: gradio is missing, or the address cannot be used.
    """
    check_gradio()
    if port == 0:
        with socket.create_server((host, 0)) as probe:
            port = probe.getsockname()[1]
    check_address(host, port)
    prepare(context)
    from g2rpo.web.app import CSS, THEME, build

    page = build(context)
    page.queue(max_size=CLIENTS_WAITING, default_concurrency_limit=4, api_open=False)
    _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        inbrowser=False,
        show_error=False,
        theme=THEME,
        css=CSS,
        footer_links=["settings"],
        run_history=False,
        allowed_paths=[str(context.folder)],
        max_file_size=context.limits.upload_bytes,
        enable_monitoring=False,
        app_kwargs={"middleware": _host_checks(host)},
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
    )
    return page, url


def _host_checks(host: str) -> list[Any]:
    """Refuses requests under other names than this machine's, where only this machine is meant to ask.

    Otherwise a web site whose name resolves to 127.0.0.1 could use the page from within the user's browser.
    """
    if host not in LOOPBACK:
        return []
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return [Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"], www_redirect=False)]


def serve(
    context: WebContext, host: str = HOST, port: int = PORT, say: Callable[[str], None] = print
) -> None:
    """Serves the page until a stop signal, and removes the session's folder.

    Raises:
        ValueError: as `start`.
    """
    try:
        page, url = start(context, host, port)
        say(f"{url} shows {', '.join(context.models)}; press Ctrl-C to stop")
        if host not in LOOPBACK:
            say(f"warning: everyone who reaches {host} can use this page and this machine's processor")
        try:
            threading.Event().wait()
        finally:
            page.close(verbose=False)
    finally:
        context.close()
