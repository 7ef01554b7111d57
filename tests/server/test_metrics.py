import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slotpy.budget import Ledger
from slotpy.engine.generation import Failed, TextDelta
from slotpy.engine.session import GenerationStats
from slotpy.engine.worker import WorkerStatus
from slotpy.errors import SlotpyError
from slotpy.server.metrics import Metrics
from slotpy.server.service import Service
from tests.server.fakes import LOADED, TINY, FakeLibrary, FakeWorker, embedded, finished

STATS = GenerationStats(
    prefill_tokens=5, prefill_s=1.0, decode_tokens=41, decode_s=2.0, hits=30, misses=10, records_read=12,
    bytes_read=1000, read_s=0.5, peak_bytes=7000,
)  # fmt: skip


def values(metrics: Metrics) -> dict[str, float]:
    """Give all samples, as `name{label=value}`; without the times at which they began."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name: value for name, value in found.items() if "_created" not in name}


def run(*events) -> dict[str, float]:
    worker = FakeWorker([events])
    service = Service(FakeLibrary([TINY]), worker)

    async def consume():
        with service.submit(TINY, None) as found:
            async for _ in found:
                pass

    asyncio.run(consume())
    return values(service.metrics)


def test_a_reply_is_counted_when_it_is_finished():
    found = run(TextDelta("a"), TextDelta("b"), finished(stats=STATS, completion_tokens=41))
    assert found["slotpy_prefilled_tokens_total"] == 5 and found["slotpy_generated_tokens_total"] == 41
    assert found["slotpy_slot_lookups_total{result=hit}"] == 30
    assert found["slotpy_slot_lookups_total{result=miss}"] == 10
    assert found["slotpy_read_bytes_total"] == 1000 and found["slotpy_read_records_total"] == 12
    assert found["slotpy_peak_memory_bytes"] == 7000
    assert found["slotpy_decode_tokens_per_second_sum"] == 20.0
    assert found["slotpy_first_token_seconds_count"] == 1, "a reply has one first piece"
    assert 0 < found["slotpy_first_token_seconds_sum"] < 5


def test_a_reply_of_one_token_has_no_speed():
    found = run(finished(stats=dataclasses.replace(STATS, decode_tokens=1, decode_s=1e-4)))
    assert found["slotpy_decode_tokens_per_second_count"] == 0


def test_counts_add_up_and_the_peak_is_the_highest():
    metrics = Metrics(lambda: WorkerStatus(None, 0, False))
    for peak_bytes in (5, 9, 3):
        metrics.finished(finished(stats=dataclasses.replace(STATS, peak_bytes=peak_bytes)))
    found = values(metrics)
    assert found["slotpy_peak_memory_bytes"] == 9 and found["slotpy_read_bytes_total"] == 3000


def test_what_is_no_reply_counts_no_reply():
    found = run(embedded([1.0], prompt_tokens=3))
    assert found["slotpy_embedded_tokens_total"] == 3 and found["slotpy_first_token_seconds_count"] == 0
    assert run(LOADED)["slotpy_decode_tokens_per_second_count"] == 0
    with pytest.raises(SlotpyError):
        run(TextDelta("a"), Failed(SlotpyError("no")))


def test_requests_are_counted_by_route_and_status():
    metrics = Metrics(lambda: WorkerStatus(None, 0, False))
    metrics.answered("POST", "/api/chat", 200)
    metrics.answered("POST", "/api/chat", 200)
    metrics.answered("GET", "/v1/models/{id}", 404)
    for number in range(3):
        metrics.answered(f"METHOD{number}", "unmatched", 405)
    found = values(metrics)
    assert found["slotpy_requests_total{method=POST,route=/api/chat,status=200}"] == 2
    assert found["slotpy_requests_total{method=GET,route=/v1/models/{id},status=404}"] == 1
    assert found["slotpy_requests_total{method=other,route=unmatched,status=405}"] == 3


def test_queue_slots_and_plan_are_those_of_the_moment():
    status = WorkerStatus(None, 0, False)
    metrics = Metrics(lambda: status)
    assert values(metrics)["slotpy_loaded_models"] == 0 and "slotpy_slots" not in values(metrics)
    ledger = Ledger(**{field.name: index for index, field in enumerate(dataclasses.fields(Ledger))})
    plan = SimpleNamespace(
        num_slots=64, num_records=256, context_tokens=4096, total_bytes=900, expected_peak_bytes=800, ledger=ledger
    )
    status = WorkerStatus(SimpleNamespace(plan=plan), 7, True)
    found = values(metrics)
    assert (found["slotpy_queued_requests"], found["slotpy_running_requests"], found["slotpy_loaded_models"]) == (
        7,
        1,
        1,
    )
    assert (found["slotpy_slots"], found["slotpy_records"], found["slotpy_context_tokens"]) == (64, 256, 4096)
    assert (found["slotpy_planned_memory_bytes"], found["slotpy_expected_peak_bytes"]) == (900, 800)
    assert found["slotpy_plan_bytes{part=resident}"] == 0 and found["slotpy_plan_bytes{part=slots}"] == 1


def test_each_server_has_numbers_of_its_own():
    one, other = (Metrics(lambda: WorkerStatus(None, 0, False)) for _ in range(2))
    one.answered("GET", "/", 200)
    assert any(name.startswith("slotpy_requests_total") for name in values(one))
    assert not any(name.startswith("slotpy_requests_total") for name in values(other))
