"""The whole platform as one command: Ray, the Serve app, a wait until it takes programs, and an orderly end.

`continuum serve` and the demo are this with a different middle. Whatever happens in the middle (an error, Ctrl-C, SIGTERM,
a part that does not start), what was started is stopped, and no process is left.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from agent_program.errors import EngineUnavailable
from deployments.access import is_local
from deployments.process_tree import adopt_orphans, end_descendants
from deployments.progress import told
from deployments.rest_client import RestClient
from deployments.settings import PlatformSettings, ReplicaSettings

logger = logging.getLogger(__name__)

APP_NAME = "continuum"
#: Ray keeps large objects in shared memory. Turns and tool results are small, and a container's /dev/shm often is too.
OBJECT_STORE_BYTES = 256 * 1024 * 1024
READY_DEADLINE_S = 300.0
#: After the orderly shutdown, before processes that are still there are ended by force.
EXIT_GRACE_S = 20.0


class PlatformStartError(Exception):
    """The platform did not start; what had started is stopped again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenOn:
    """Where the REST API is to be."""

    host: str = "127.0.0.1"
    #: 0 takes any free port.
    port: int = 8000
    #: A running Ray cluster's address; None starts a private one that ends with the platform.
    ray_address: str | None = None


class Interrupts:
    """SIGINT and SIGTERM while the platform is there: each raises KeyboardInterrupt and is remembered.

    Remembered, because what starts a platform is much code of others: an exception that is raised in a callback of theirs, in
    a finalizer or below an `except` without a name, is lost there. `check` raises it again once they return.
    """

    def __init__(self) -> None:
        self._is_asked = False

    def install(self) -> None:
        """Take both signals, whoever has them: Ray takes SIGTERM while it starts, and a shell that starts this in the background
        has SIGINT ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def check(self) -> None:
        """Raise the interrupt that somebody lost.

        Raises:
            KeyboardInterrupt: a signal came at any time since `install`.
        """
        if self._is_asked:
            raise KeyboardInterrupt

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_asked = True
        raise KeyboardInterrupt


@dataclass(frozen=True, kw_only=True, slots=True)
class Starters:
    """What starts the parts that take long; tests put in doubles."""

    #: `ray.init`, with its arguments.
    ray: Callable[..., object]
    #: Ends what `ray` started.
    stop_ray: Callable[[], None]
    #: Makes the embedded model, told where to say so.
    model: Callable[[Callable[[str], None]], None]
    #: Starts the Serve app on a port, and puts onto the stack what ends it.
    app: Callable[[PlatformSettings, ListenOn, int, contextlib.ExitStack, Callable[[str], None]], None]


@contextlib.contextmanager
def local_platform(
    settings: PlatformSettings, listen: ListenOn, *, on_stage: Callable[[str], None], starters: Starters | None = None
) -> Iterator[str]:
    """Run the platform for the length of a `with`; gives its address. SIGTERM ends the `with` as Ctrl-C does.

    Args:
        on_stage: told in a few words what is being done, for people who wait.
        starters: what starts the parts; Ray and Serve by default.

    Raises:
        PlatformStartError: the port is taken, or a part did not come up.
        KeyboardInterrupt: SIGINT or SIGTERM came, at any moment of the start or after it.
    """
    _check_doors(settings, listen)
    port = _free_port(listen)
    if settings.store.is_embedded:
        _check_store_port(settings.store.embedded_port)
    stack, interrupts = contextlib.ExitStack(), Interrupts()
    try:
        _restore_signals_at_the_end(stack)
        interrupts.install()
        starters = starters or _starters()
        if settings.engine.is_embedded and listen.ray_address is None:
            starters.model(on_stage)
            interrupts.check()
        with told("starting Ray", on_stage):
            _start_ray(starters, listen.ray_address, stack, on_stage, interrupts, num_cpus=_ray_cpus(settings.replicas))
        with told("starting the engine, the store and the tools", on_stage, detail=_what_is_starting):
            starters.app(settings, listen, port, stack, on_stage)
            interrupts.check()
        url = f"http://{_reachable(listen.host)}:{port}"
        with told("waiting until it is ready", on_stage):
            _wait_until_ready(url)
        yield url
    finally:
        _protect_the_clean_up()
        # While Serve ends, a thread of Ray's prints to stdout that Serve's controller has ended: no error, it is in Ray's
        # logs, and a caller's stdout may be JSON.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            stack.close()


def _check_doors(settings: PlatformSettings, listen: ListenOn) -> None:
    """Nobody opens a platform without keys to a network by accident."""
    http = settings.http
    if listen.ray_address is None and not (_is_loopback(listen.host) or http.api_keys or http.open_without_keys):
        raise PlatformStartError(
            f"{listen.host} can be reached from other machines, and there are no API keys: make one with `continuum keys new` "
            "and put it into http.api_keys, or say http.open_without_keys: true"
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or is_local(host)


def _free_port(listen: ListenOn) -> int:
    """The port to listen on. Serve would report a port that is taken long after everything else has started."""
    with socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise PlatformStartError(f"cannot listen on {listen.host}:{listen.port}: {error.strerror}") from error
        port: int = probe.getsockname()[1]
        return port


def _check_store_port(port: int) -> None:
    """The embedded store would report it too, in a log that nobody looks into, and a minute later."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PlatformStartError(
                f"the embedded store cannot listen on 127.0.0.1:{port}: {error.strerror}. Another platform may be running: "
                "stop it, give this one store.embedded_port and store.data_dir of its own, or set store.redis_url"
            ) from error


def _ray_cpus(replicas: ReplicaSettings) -> int:
    """CPUs that a private cluster is told it has: the machine's, or as many as the settings ask for where that is more.

    Ray's CPUs are a way to share many machines. On one machine, more replicas than fit run slower instead of not at all.
    """
    services = replicas.ingress + replicas.runner + replicas.tools + 1
    asked = services * replicas.service_cpus + replicas.engine * replicas.engine_cpus
    return max(os.cpu_count() or 1, math.ceil(asked))


def _prepare_model(on_stage: Callable[[str], None]) -> None:
    """Convert the embedded model before a replica has to, where people see it. In a process of its own: what converts it
    (torch, transformers) would stay in this one's memory for good."""
    from engine_replicas.embedded_model import is_prepared

    try:
        if is_prepared():
            return
    except EngineUnavailable as error:
        raise PlatformStartError(error.message) from error
    with told("preparing the embedded model, once on this machine", on_stage):
        command = [sys.executable, "-m", "engine_replicas.embedded_model"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlatformStartError(f"the embedded model could not be prepared:\n{done.stderr.strip()[-2000:]}")


def _starters() -> Starters:
    """Ray and Serve. The import takes seconds: an interrupt may come in it, so it happens where one is handled."""
    import ray

    return Starters(ray=ray.init, stop_ray=ray.shutdown, model=_prepare_model, app=_start_app)


def _start_ray(
    starters: Starters,
    address: str | None,
    stack: contextlib.ExitStack,
    on_stage: Callable[[str], None],
    interrupts: Interrupts,
    *,
    num_cpus: int,
) -> None:
    is_started = False

    def stop_ray() -> None:
        with told("stopping Ray" if address is None else "leaving the cluster", on_stage):
            starters.stop_ray()

    def end_stragglers() -> None:
        # Processes of a Ray that did not get to its feet have nobody who tells them to end: waiting for it is in vain.
        _end_stragglers(on_stage, grace_s=EXIT_GRACE_S if is_started else 0.0)

    if address is None:
        stack.callback(end_stragglers)
    stack.callback(stop_ray)
    private = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": num_cpus}
    try:
        starters.ray(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.WARNING,
            **(private if address is None else {}),
        )
        is_started = True
    except SystemExit as error:
        # Ray's own handler of SIGTERM, which it sets as it starts.
        raise KeyboardInterrupt from error
    except Exception as error:
        interrupts.check()
        raise PlatformStartError(f"Ray did not start: {error}") from error
    finally:
        # Ray's handler would end this process in the middle of a clean-up.
        interrupts.install()
    interrupts.check()


def _start_app(
    settings: PlatformSettings,
    listen: ListenOn,
    port: int,
    stack: contextlib.ExitStack,
    on_stage: Callable[[str], None],
) -> None:
    from ray import serve
    from ray.exceptions import RayError

    from deployments.app import build_app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def stop_app() -> None:
        with told("stopping the application: programs are handed back, engines and sandboxes end", on_stage):
            if listen.ray_address is None:
                serve.shutdown()
            else:
                # A cluster that was there before may serve other applications: leave those alone.
                serve.delete(APP_NAME)

    stack.callback(stop_app)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": listen.host, "port": port})
        serve.run(build_app(settings), name=APP_NAME, route_prefix="/")
    except (RayError, RuntimeError) as error:
        raise PlatformStartError(f"the application did not start: {error}{_where_logs_are()}") from error


def _what_is_starting() -> str:
    """The deployments that are not up yet, as Serve sees them."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    deployments = application.deployments if application is not None else {}
    waiting = sorted(name for name, state in deployments.items() if state.status != "HEALTHY")
    return "waiting for " + ", ".join(waiting) if waiting else ""


def _where_logs_are() -> str:
    from ray._private.worker import global_worker

    node = global_worker.node  # None where the cluster is somebody else's
    return f"\nRay's logs are in {node.get_logs_dir_path()}" if node is not None else ""


def _wait_until_ready(url: str) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    with RestClient(url, timeout_s=10.0) as client:
        while not client.is_ready():
            if time.monotonic() > deadline_s:
                raise PlatformStartError(f"{url}/readyz did not say ready within {READY_DEADLINE_S:.0f} s")
            time.sleep(0.5)


def _reachable(host: str) -> str:
    """The address by which this machine reaches what listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _restore_signals_at_the_end(stack: contextlib.ExitStack) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        stack.callback(signal.signal, number, signal.getsignal(number))


def _protect_the_clean_up() -> None:
    """A second Ctrl-C must not cut it short, and an orphan must not escape it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()


def _end_stragglers(on_stage: Callable[[str], None], *, grace_s: float) -> None:
    with told("waiting for the last processes to end", on_stage):
        ended = end_descendants(grace_s=grace_s)
    if grace_s == 0:
        return  # nobody expected them to end by themselves
    for line in ended:
        logger.warning("had to end a process that outlived its parent: %s", line)
