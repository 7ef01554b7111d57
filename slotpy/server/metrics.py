"""What Prometheus reads at `/metrics`. Counts whole requests and replies, never tokens one by one nor experts."""

import dataclasses
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotpy.engine.generation import Embedded, Event, Finished
from slotpy.engine.worker import WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS_PER_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Metrics:
    """Keep one server's numbers, in a registry of its own. Safe from any thread."""

    def __init__(self, status: Callable[[], WorkerStatus]) -> None:
        """`status` is asked at each reading, and must answer at once."""
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "slotpy_requests", "Answered requests.", ["method", "route", "status"], registry=registry
        )
        self._first_token = Histogram(
            "slotpy_first_token_seconds",
            "From a request's arrival in the queue to the first piece of its reply.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._speed = Histogram(
            "slotpy_decode_tokens_per_second",
            "Speed of whole replies after their first token.",
            buckets=_TOKENS_PER_S,
            registry=registry,
        )
        self._prefilled = Counter("slotpy_prefilled_tokens", "Prompt tokens computed.", registry=registry)
        self._generated = Counter("slotpy_generated_tokens", "Tokens generated.", registry=registry)
        self._embedded = Counter("slotpy_embedded_tokens", "Tokens of texts embedded.", registry=registry)
        self._lookups = Counter(
            "slotpy_slot_lookups",
            "Experts that replies looked up, by whether they had a slot.",
            ["result"],
            registry=registry,
        )
        self._read = Counter(
            "slotpy_read_bytes", "Bytes of experts and n-gram rows read for replies.", registry=registry
        )
        self._records = Counter("slotpy_read_records", "Experts and n-gram rows read for replies.", registry=registry)
        self._peak = Gauge("slotpy_peak_memory_bytes", "Most memory a reply has used so far.", registry=registry)
        self._peak_bytes = 0
        registry.register(_Status(status))

    def answered(self, method: str, route: str, status: int) -> None:
        """Count a request; `route` is the pattern it matched. What clients make up makes no series of its own."""
        self._requests.labels(method if method in _METHODS else "other", route, status).inc()

    def first_token(self, seconds: float) -> None:
        """Record how long the first piece of a reply took."""
        self._first_token.observe(seconds)

    def finished(self, event: Event) -> None:
        """Take what the end of a request tells."""
        if isinstance(event, Embedded):
            self._embedded.inc(event.prompt_tokens)
        if not isinstance(event, Finished):
            return
        stats = event.stats
        self._prefilled.inc(stats.prefill_tokens)
        self._generated.inc(event.completion_tokens)
        self._lookups.labels("hit").inc(stats.hits)
        self._lookups.labels("miss").inc(stats.misses)
        self._read.inc(stats.bytes_read)
        self._records.inc(stats.records_read)
        self._peak_bytes = max(self._peak_bytes, stats.peak_bytes)
        self._peak.set(self._peak_bytes)
        if stats.decode_tokens > 1:  # the first token comes of the prefill, so takes no time of its own
            self._speed.observe((stats.decode_tokens - 1) / stats.decode_s)

    def render(self) -> bytes:
        """Give everything in Prometheus' text format, of CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Status(Collector):
    """What is the case now, rather than counted: queue, slots and memory plan."""

    def __init__(self, status: Callable[[], WorkerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # asked for at registration only; there may be no worker yet

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield GaugeMetricFamily("slotpy_queued_requests", "Requests waiting for the engine.", status.num_queued)
        yield GaugeMetricFamily("slotpy_running_requests", "Requests the engine works on.", int(status.running))
        yield GaugeMetricFamily("slotpy_loaded_models", "Models in memory.", int(status.loaded is not None))
        if status.loaded is None:
            return
        plan = status.loaded.plan
        yield GaugeMetricFamily("slotpy_slots", "Experts that have room in memory.", plan.num_slots)
        yield GaugeMetricFamily("slotpy_records", "Experts of the model.", plan.num_records)
        yield GaugeMetricFamily("slotpy_context_tokens", "Tokens there is room for.", plan.context_tokens)
        yield GaugeMetricFamily("slotpy_planned_memory_bytes", "Planned, with margin.", plan.total_bytes)
        yield GaugeMetricFamily("slotpy_expected_peak_bytes", "Planned peak.", plan.expected_peak_bytes)
        ledger = GaugeMetricFamily("slotpy_plan_bytes", "What the plan is made of.", labels=["part"])
        for part, nbytes in dataclasses.asdict(plan.ledger).items():
            ledger.add_metric([part.removesuffix("_bytes")], nbytes)
        yield ledger
