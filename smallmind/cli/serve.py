"""Serve models to a page in the browser, and to programs that speak OpenAI's API."""

import argparse
import gc
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import time
import webbrowser
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.cli.flags import add_precision, add_template_args, find_run
from smallmind.cli.signals import ENDING_SIGNALS, handled
from smallmind.console.signals import handling, impatience

if TYPE_CHECKING:
    import uvicorn

PORT = 8000
PORTS_TRIED = 20  # ports from the default one on
TOKEN = "SMALLMIND_TOKEN"  # the environment variable
FORCED_SECONDS = 2  # in which what is left ends by itself, whatever it does
SWITCH_SECONDS = 0.0005  # seconds until a thread that computes Python lets another one do so
MISSING = "smallmind serve needs a server: python -m pip install starlette uvicorn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind serve`."""
    parser.epilog = (
        "Opens a page to talk to models, see their probabilities and watch runs. Programs find an "
        "OpenAI-compatible API at http://localhost:8000/v1. Ctrl-C stops the server once answers "
        "in progress are finished."
    )
    parser.add_argument(
        "models",
        nargs="*",
        type=Path,
        metavar="RUN|MODEL",
        help="runs, their names in runs/, model files, or models of other programs; default: all "
        "runs in runs/, including those started later",
    )
    parser.add_argument(
        "--port", type=int, help=f"port; default: the first free one from {PORT} up"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but this machine's own needs a token",
    )
    parser.add_argument(
        "--token",
        help="require this token in requests, as Authorization: Bearer TOKEN; the page asks for "
        "it. Other users of this machine can see it in the process list: use the variable "
        f"{TOKEN} or --token-file to hide it",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the token is the first line of this file"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests to this machine under another name, such as gpu.lan, with or without "
        "a port; may be repeated. An asterisk, as in *.lan, matches any part of a name, and needs "
        "a token",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let the pages of this site use the server, such as http://localhost:3000 or "
        "http://localhost:*; may be repeated. An asterisk in the name, or null (pages opened from "
        "files), needs a token",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    parser.add_argument(
        "--in-notebook",
        action="store_true",
        help="stop when standard input closes, and allow pages on this machine to embed the page "
        "in a frame; used by Run.serve()",
    )
    parser.add_argument(
        "--slots", type=int, default=8, metavar="N", help="texts written at once; default: 8"
    )
    parser.add_argument(
        "--waiting", type=int, default=32, metavar="N", help="requests that may wait; default: 32"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N", help="tokens per answer; default: 4096"
    )
    parser.add_argument(
        "--max-prompt",
        type=int,
        default=32768,
        metavar="N",
        help="tokens per prompt; default: 32768",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds per answer; default: 600",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a text to keep in memory; default: the context of the model",
    )
    parser.add_argument(
        "--ignore-tools",
        action="store_true",
        help="if the model's chat template does not support tools, ignore them in requests instead "
        "of refusing the request",
    )
    add_template_args(parser, "; requests can override them with chat_template_kwargs")
    add_precision(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    console = Console()
    token = _token(options)
    _check(options, token)
    hosts = [_host(name, token) for name in options.allow_host]
    origins = [_origin(name, token) for name in options.allow_origin]
    from smallmind.exchange.stored import find
    from smallmind.runs.files import METRICS, RUNS
    from smallmind.text.templates import template_args, with_template_args

    paths, variables = [*map(find_run, options.models)], template_args(options.template_args)
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist; give a run, a checkpoint or a model file")
        # A run may have no model yet.
        if variables or path.is_file() or not (path / METRICS).exists():
            with_template_args(find(path).tokenizer(), variables)
    try:
        from smallmind.serve.api import RequestLimits
        from smallmind.serve.app import application
        from smallmind.serve.connections import server_of
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "anyio"):
            raise
        raise InputError(MISSING) from None
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what is imported stays: looking through all of it stops every thread for a while
    app = application(
        paths,
        None if paths else Path(RUNS),
        precision=options.precision,
        slots=options.slots,
        waiting=options.waiting,
        context=options.context,
        limits=RequestLimits(options.max_tokens, options.max_prompt, options.max_seconds),
        hosts=[*_names(options.host), *hosts],
        token=token,
        in_frames=options.in_notebook,
        template_args=variables,
        origins=origins,
        ignores_tools=options.ignore_tools,
    )
    listening = _listening(options.host, options.port)
    server = server_of(app)
    address = f"http://{_shown(options.host)}:{listening.getsockname()[1]}"
    _serve(server, listening, console, address, options)
    return 0


def _token(options: argparse.Namespace) -> str | None:
    """Returns the token, from the one place that has it; None if there is none."""
    if options.token_file is None:
        return options.token or os.environ.get(TOKEN) or None
    if options.token:
        raise InputError("give --token or --token-file, not both")
    try:
        with options.token_file.open(encoding="utf-8") as file:
            token = file.readline(1000).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"cannot read --token-file {options.token_file}: {reason}") from None
    if not token:
        raise InputError(f"the first line of --token-file {options.token_file} is empty")
    return token


def _check(options: argparse.Namespace, token: str | None) -> None:
    for name in ("slots", "waiting", "max_tokens", "max_prompt", "max_seconds", "context"):
        value = getattr(options, name)
        if value is not None and not value >= 1:
            raise InputError(f"--{name.replace('_', '-')} {value:g} must be at least 1")
    if options.port is not None and not 0 <= options.port < 2**16:
        raise InputError(f"--port {options.port} must be from 0 to 65535")
    if "" in (options.token, token) or (token and not (token.isascii() and token.strip())):
        raise InputError("the token must be ASCII characters, not only spaces")
    if not _is_own(options.host) and not token:
        raise InputError(
            f"--host {options.host} lets everyone on the network use the models: add --token-file "
            "FILE, with a token that requests must then send"
        )


def _host(value: str, token: str | None) -> str:
    """Returns a name as clients send it in the field Host. InputError if it is not a name."""
    name = value.rpartition("://")[2].partition("/")[0].lower().rstrip(".")
    with suppress(ValueError):
        name = f"[{ipaddress.IPv6Address(name)}]"
    with suppress(UnicodeError):
        name = name.encode("idna").decode()
    if not re.fullmatch(r"([a-z0-9_.*-]+|\[[0-9a-f:.]+\])(:(\d+|\*))?", name):
        raise InputError(f"--allow-host {value} is not a name; give one such as gpu.lan")
    _check_asterisk(f"--allow-host {value}", name, token)
    return name


def _origin(value: str, token: str | None) -> str:
    """Returns a site as browsers send it in the field Origin. InputError if it is none."""
    if value not in ("*", "null") and not re.fullmatch(r"[\w+.-]+://[^/@\s]+(/.*)?", value):
        raise InputError(
            f"--allow-origin {value} is not an origin: give scheme, host and port, such as "
            "http://localhost:3000"
        )
    origin = "/".join(value.lower().split("/")[:3])  # without the rest of a page's address
    for scheme, port in (("http", 80), ("https", 443)):  # which browsers leave out
        if origin.startswith(f"{scheme}://"):
            origin = origin.removesuffix(f":{port}")
    _check_asterisk(f"--allow-origin {value}", origin.replace("null", "*"), token)
    return origin


def _check_asterisk(flag: str, name: str, token: str | None) -> None:
    """Raises InputError for a name that sites of others may have too, without a token."""
    if "*" in name.removesuffix(":*") and not token:
        raise InputError(
            f"{flag} lets sites that are not yours use the models: add --token-file FILE, with a "
            "token that requests must then send"
        )


def _is_own(host: str) -> bool:
    """Returns True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names(host: str) -> list[str]:
    """Returns the names by which others call this machine, if it listens for them."""
    if _is_own(host):
        return [host]
    names = {host, socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"}
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
        names |= {str(each[4][0]) for each in found}
    except OSError:
        pass
    if host in ("0.0.0.0", "::"):
        names |= _addresses()
    return [f"[{name}]" if ":" in name else name for name in names]


def _addresses() -> set[str]:
    """Returns the addresses of this machine's network interfaces."""
    import psutil

    families = socket.AF_INET, socket.AF_INET6
    each = (address for found in psutil.net_if_addrs().values() for address in found)
    return {address.address.partition("%")[0] for address in each if address.family in families}


def _listening(host: str, port: int | None) -> socket.socket:
    """Returns a socket at the port, or at the first free one. InputError if it is taken."""
    ports = range(PORT, PORT + PORTS_TRIED) if port is None else [port]
    for number in ports:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.socket(family)
            if sys.platform != "win32":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, number))
            return made
        except OSError as error:
            made.close()
            if number == ports[-1]:
                raise InputError(
                    f"cannot listen at {host}, port {number}: {error.strerror}; choose another "
                    "--port"
                ) from None
        except OverflowError:
            raise InputError(f"--port {port} must be from 0 to 65535") from None
    raise AssertionError


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::", "127.0.0.1"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _serve(
    server: "uvicorn.Server",
    listening: socket.socket,
    console: Console,
    address: str,
    options: argparse.Namespace,
) -> None:
    """Serves until a signal comes, and then until the answers have been written."""

    from smallmind.serve.connections import MAX_QUEUED, SHUTDOWN_SECONDS

    is_impatient = impatience()
    timers: list[threading.Timer] = []

    def end_within(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os._exit, [0]))
        timers[-1].daemon = True
        timers[-1].start()

    def stop(*_: Any) -> None:
        if is_impatient() and not server.force_exit:
            server.force_exit = True
            end_within(FORCED_SECONDS)
        elif not server.should_exit:
            console.line(f"Finishing answers in progress (at most {SHUTDOWN_SECONDS} s).")
            end_within(SHUTDOWN_SECONDS + FORCED_SECONDS)
        server.should_exit = True

    def announce() -> None:
        while not server.started:
            if server.should_exit:
                return
            time.sleep(0.02)
        with suppress(OSError):  # it has been closed already
            listening.listen(MAX_QUEUED)
        console.line(f"Talk at {address}/  (API: {address}/v1; Ctrl-C stops)")
        if not options.no_browser:
            webbrowser.open(address)  # without the token, which the list of processes would show

    def end_with_input() -> None:
        with suppress(AttributeError, OSError, ValueError):  # it may be closed
            while os.read(sys.stdin.fileno(), 1024):  # without a lock that an exit would wait for
                pass
        server.should_exit = True

    threading.Thread(target=announce, daemon=True).start()
    if options.in_notebook:
        threading.Thread(target=end_with_input, daemon=True).start()
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    with handling(stop, *handled("SIGINT", *ENDING_SIGNALS)):
        server.run(sockets=[listening])
    if timers:  # the process ends: one more Ctrl-C would only make that an error
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for timer in timers:
        timer.cancel()
