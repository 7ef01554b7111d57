"""One request for bytes of one file, and what every possible answer means. Keeps nothing; transfer.py decides."""

import contextlib
import enum
import re
import ssl
import time
from collections.abc import Generator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpcore2
import httpx2

from slotpy.hub.listing import HubAddress
from slotpy.hub.manifest import FileEntry

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_RATE_LIMIT = re.compile(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_READ_BYTES = 256 << 10
_LONGEST_PAUSE_S = 600.0


class Blame(enum.Enum):
    """Say what a failed request tells about its source."""

    NETWORK = "the connection failed: try again, less and less often"
    PAUSE = "the server asks for patience"
    STALE = "the signed address has expired: ask for another"
    ANSWER = "the answer cannot be right: try again a few times"
    RANGES = "the server sends whole files only"
    REFUSED = "this source will not have the file"


class FetchError(Exception):
    """Report a failed request. `pause_s` is what the server asked for, None if it did not say."""

    def __init__(self, blame: Blame, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.blame, self.reason, self.pause_s = blame, reason, pause_s


class Connection:
    """Own one HTTP connection: a client each, since streams of one HTTP/2 connection share its window.

    `locations` maps a file's address at the hub to the signed one that it led to; all connections share it.
    """

    def __init__(self, locations: dict[str, str], etags: dict[str, str], stall_s: float) -> None:
        self._locations, self._etags = locations, etags
        # httpcore's 64 KiB a read cost 2.6 CPU seconds a GB (hash and all); this costs 2.0. Without a hash, curl: 1.1.
        httpcore2.HTTP11Connection.READ_NUM_BYTES = _READ_BYTES
        self._client = httpx2.Client(follow_redirects=True, timeout=stall_s)

    def close(self) -> None:
        self._client.close()

    def blocks(
        self, address: HubAddress, entry: FileEntry, start: int, end: int
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yield bytes `start` to `end` of a file as they come, each block with its offset.

        Raises: FetchError, also when the bytes end early.
        """
        url = address.url(entry.path)
        whole = (start, end) == (0, entry.size)
        headers = {"Accept-Encoding": "identity"} | ({} if whole else {"Range": f"bytes={start}-{end - 1}"})
        signed = self._locations.get(url)
        headers |= {} if signed else address.headers
        position = start
        try:
            with self._client.stream("GET", signed or url, headers=headers) as response:
                if signed and 400 <= response.status_code < 500 and response.status_code not in (408, 416, 429):
                    if self._locations.get(url) == signed:
                        self._locations.pop(url, None)
                    raise FetchError(Blame.STALE, f"answers {response.status_code} for a signed address")
                self._check(response, url, entry, start, whole)
                # Decoded only where that is well defined: a range of an encoded body is of no use.
                for block in response.iter_bytes() if whole else response.iter_raw():
                    yield position, block
                    position += len(block)
                    if position > end:  # not at the end itself: a body read to its end leaves a usable connection
                        break
        except httpx2.TooManyRedirects as error:
            raise FetchError(Blame.ANSWER, "redirects in a circle") from error
        except httpx2.DecodingError as error:
            raise FetchError(Blame.ANSWER, f"sends a broken encoding: {error}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise _network_error(error) from error
        if position < end:
            raise FetchError(Blame.NETWORK, f"ended at byte {position}, {end - position} bytes too early")
        if position > end:
            raise FetchError(Blame.ANSWER, "sent more bytes than asked for")

    def _check(self, response: httpx2.Response, url: str, entry: FileEntry, start: int, whole: bool) -> None:
        """Raise FetchError unless the body is what was asked for; learn the signed address."""
        final = str(response.url)
        # A redirect that stays on the hub (a renamed repository) still needs the token: that one is followed each time.
        elsewhere = urlsplit(final).netloc != urlsplit(url).netloc
        if response.status_code not in (200, 206):
            raise _status_error(response, elsewhere)
        for step in response.history:
            _check_linked_etag(step, entry)
        _check_extent(response, entry, start, whole)
        etag = response.headers.get("ETag", "")
        if etag and self._etags.setdefault(f"{url} {urlsplit(final).netloc}", etag) != etag:
            raise FetchError(Blame.ANSWER, "changed while it was being fetched (another ETag)")
        if elsewhere:
            self._locations[url] = final


def _check_linked_etag(step: httpx2.Response, entry: FileEntry) -> None:
    linked = step.headers.get("X-Linked-Etag", "").strip('"')
    if entry.sha256 and re.fullmatch(r"[0-9a-f]{64}", linked) and linked != entry.sha256:
        raise FetchError(Blame.REFUSED, f"has another file there (SHA-256 {linked[:12]}..)")


def _check_extent(response: httpx2.Response, entry: FileEntry, start: int, whole: bool) -> None:
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    if response.status_code == 200:
        if not whole:
            raise FetchError(Blame.RANGES, "ignores Range")
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and not encoded and int(length) != entry.size:
            raise FetchError(Blame.ANSWER, f"announces {length} bytes, not {entry.size}")
        return
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start:
        raise FetchError(Blame.ANSWER, f"sends other bytes than asked for: {response.headers.get('Content-Range')}")
    if found[3] != "*" and int(found[3]) != entry.size:
        raise FetchError(Blame.ANSWER, f"has {found[3]} bytes, not {entry.size}")
    if encoded:
        raise FetchError(Blame.ANSWER, "encodes what must come as it is")


def _status_error(response: httpx2.Response, was_signed: bool) -> FetchError:
    status = response.status_code
    reason = f"answers {status} {response.reason_phrase}".rstrip()
    pause_s = _asked_pause(response)
    if status == 429 or pause_s is not None:
        return FetchError(Blame.PAUSE, reason, pause_s)
    if status >= 500 or status == 408:
        return FetchError(Blame.NETWORK, reason)
    if not was_signed and status in (401, 403):
        reason += " (set HF_TOKEN to a token that may read it)"
    return FetchError(Blame.ANSWER, reason)


def _asked_pause(response: httpx2.Response) -> float | None:
    """Read Retry-After or RateLimit. A date counts from the server's own clock, since ours may be wrong or jump."""
    value = response.headers.get("Retry-After", "").strip()
    seconds = None
    if value.isdigit():
        seconds = float(value)
    elif value:
        with contextlib.suppress(ValueError, TypeError):
            now = parsedate_to_datetime(response.headers.get("Date", ""))
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
    elif limit := _RATE_LIMIT.search(response.headers.get("RateLimit", "")):
        seconds = float(limit[1])
    return None if seconds is None else min(max(seconds, 0.0), _LONGEST_PAUSE_S)


def _network_error(error: Exception) -> FetchError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = f"shows a certificate that is not trusted: {cause.verify_message}"
            return FetchError(Blame.REFUSED, f"{reason} (is the clock right? behind a proxy, set SSL_CERT_FILE)")
        cause = cause.__cause__ or cause.__context__
    kind = "stalled" if isinstance(error, httpx2.ReadTimeout) else str(error) or type(error).__name__
    return FetchError(Blame.NETWORK, kind)


class SlowWatch:
    """Notice a connection that drips: far slower than its peers have been, for a whole window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._start, self._bytes = time.monotonic(), 0

    def add(self, num_bytes: int, least_bytes_per_s: float) -> None:
        """Count bytes. Raises: FetchError when a window ends below the least rate."""
        self._bytes += num_bytes
        now = time.monotonic()
        if now - self._start < self._window_s:
            return
        rate = self._bytes / (now - self._start)
        self._start, self._bytes = now, 0
        if rate < least_bytes_per_s:
            raise FetchError(Blame.NETWORK, f"drips at {rate:.0f} B/s")
