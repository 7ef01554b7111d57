"""How a server was asked to behave: the options of `slotpy serve`, else its variables, else defaults."""

import dataclasses
import ipaddress
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slotpy import config
from slotpy.errors import UsageError
from slotpy.server.durations import parse_duration

DEFAULT_PORT = 11434
_UNUSED = {"OLLAMA_NUM_PARALLEL": ("0", "1"), "OLLAMA_MAX_LOADED_MODELS": ("0", "1"), "OLLAMA_LOAD_TIMEOUT": ()}
"""Variables without effect, with the values at which that changes nothing."""


@dataclass(frozen=True)
class Settings:
    """Hold what a server needs to know beside its models.

    `host` "" means every address. `origins` may call beside local ones. `keep_alive_s` inf is for ever.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    origins: tuple[str, ...] = ()
    api_key: str | None = None
    insecure: bool = False
    keep_alive_s: float = config.KEEP_ALIVE_S
    max_queue: int = config.MAX_QUEUE
    context_tokens: int | None = None
    debug: bool = False
    max_body_bytes: int = config.MAX_BODY_BYTES
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        variables: Mapping[str, str],
        *,
        host: str | None = None,
        port: int | None = None,
        origins: str | None = None,
        api_key: str | None = None,
        insecure: bool = False,
        keep_alive: str | None = None,
        context_tokens: int | None = None,
    ) -> "Settings":
        """Combine options, None where not given, with `config.server_variables()`. Raises UsageError."""
        bound_host, bound_port = parse_host(variables.get("OLLAMA_HOST", ""), "OLLAMA_HOST")
        if host is not None:
            bound_host, bound_port = parse_host(host, "--host")
        kept = variables.get("OLLAMA_KEEP_ALIVE", "") if keep_alive is None else keep_alive
        return cls(
            host=bound_host,
            port=bound_port if port is None else port,
            origins=_split(variables.get("OLLAMA_ORIGINS", "") if origins is None else origins),
            api_key=api_key or variables.get("SLOTPY_API_KEY"),
            insecure=insecure,
            keep_alive_s=_keep_alive(kept, "OLLAMA_KEEP_ALIVE" if keep_alive is None else "--keep-alive"),
            max_queue=_count(variables, "OLLAMA_MAX_QUEUE") or config.MAX_QUEUE,
            context_tokens=context_tokens or _count(variables, "OLLAMA_CONTEXT_LENGTH"),
            debug=variables.get("OLLAMA_DEBUG", "0").lower() not in ("0", "f", "false"),
            notes=tuple(_unused(variables)),
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """The address for people and clients."""
        host = self.host or "0.0.0.0"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def check_exposure(self) -> None:
        """Refuse to listen beyond this machine unprotected. Raises UsageError."""
        if self.api_key is None and not self.insecure and not self.is_loopback:
            raise UsageError(
                f"{self.url} can be reached from other machines, and anyone there could use and delete models.",
                hint="Give --api-key KEY (or SLOTPY_API_KEY), or --insecure to let anyone in.",
            )

    def at(self, port: int) -> "Settings":
        """Give the same with the port that was got, where any was asked for."""
        return dataclasses.replace(self, port=port)


def parse_host(text: str, where: str) -> tuple[str, int]:
    """Split an address as Ollama does: `host`, `host:port`, `:port`, `[::1]:port`, `http://host:port/path`.

    A URL without a port means its scheme's. An empty host with a port means every address. Raises UsageError.
    """
    scheme, found, rest = text.strip().partition("://")
    address = rest if found else scheme
    default = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT) if found else DEFAULT_PORT
    address = address.partition("/")[0]
    host, port = address, ""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        port = port.removeprefix(":")
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
    elif not address:
        host = "127.0.0.1"
    if not port:
        return host, default
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"{where} {text}: {port} is no port.", hint="Give one as in 127.0.0.1:11434.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether an address, or the name localhost, is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _keep_alive(text: str, where: str) -> float:
    if not text:
        return config.KEEP_ALIVE_S
    try:
        seconds = float(int(text))
    except ValueError:
        try:
            seconds = parse_duration(text)
        except ValueError as error:
            raise UsageError(f"{where} {text} is no time.", hint="Give one as in 5m, 1h30m or 300.") from error
    return math.inf if seconds < 0 else seconds


def _unused(variables: Mapping[str, str]) -> Iterator[str]:
    for name, harmless in _UNUSED.items():
        if name in variables and variables[name] not in harmless:
            why = config.SERVER_VARIABLES[name].removeprefix("known, not used: ")
            yield f"{name}={variables[name]} has no effect: {why}"


def _count(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name}={text} is no count.", hint=f"Set it to a whole number, or unset {name}.")
    return int(text)
