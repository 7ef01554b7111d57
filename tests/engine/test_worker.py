"""The worker's promises: order, one model at a time, when it goes, and that nothing a request does outlives it."""

import dataclasses
import logging
import math
import queue
import random
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from slotpy import config
from slotpy.engine import worker as worker_module
from slotpy.engine.engine import Engine
from slotpy.engine.generation import (
    FINAL,
    Embedded,
    EmbedRequest,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Loaded,
    LoadRequest,
    Request,
    TextDelta,
    Unloaded,
    UnloadRequest,
)
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.worker import IDLE_CHECK_S, Job, Worker
from slotpy.errors import BusyError, CapacityError, SlotpyError
from slotpy.lock import ModelLock
from tests.engine.fake_model import DEMO, FakeModel, Gate, fail

HELLO = GenerationRequest(messages=({"role": "user", "content": "Hi"},))
ONE, TWO = Path("/models/one"), Path("/models/two")


class Asked:
    """One request that was submitted, with the events that came."""

    def __init__(self, job: Job, events: "queue.Queue[Event]") -> None:
        self.job, self._events = job, events

    def all(self) -> list[Event]:
        """Wait for the final event; give all up to it."""
        got: list[Event] = []
        while not got or not isinstance(got[-1], FINAL):
            got.append(self._events.get(timeout=10))
        return got

    def final(self) -> Event:
        return self.all()[-1]

    def error(self) -> Exception:
        final = self.final()
        assert isinstance(final, Failed)
        return final.error

    def so_far(self) -> list[Event]:
        return list(self._events.queue)


class Client:
    """A worker on a fake model, and how to ask it."""

    def __init__(self, model: FakeModel, **options: object) -> None:
        self.model = model
        self.worker = Worker(model.open, EngineOptions(context_tokens=1000), **options)  # type: ignore[arg-type]
        self.worker.start()

    def ask(
        self,
        request: Request = HELLO,
        *,
        directory: Path = ONE,
        name: str = "",
        keep_alive_s: float | None = None,
        deliver: Callable[[Event], None] = lambda event: None,
    ) -> Asked:
        events: queue.Queue[Event] = queue.Queue()

        def receive(event: Event) -> None:
            events.put(event)
            deliver(event)

        name = name or f"{directory.name}:latest"
        return Asked(self.worker.submit(name, directory, request, receive, keep_alive_s), events)


@pytest.fixture
def start() -> Iterator[Callable[..., Client]]:
    """Start clients that are closed at the end."""
    clients: list[Client] = []

    def make(*replies: list[object], **options: object) -> Client:
        clients.append(Client(FakeModel(*replies), **options))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.worker.close(0)


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# The queue ----------------------------------------------------------------------------------------------------------


def test_a_reply_comes_in_pieces_and_ends_once(start):
    *deltas, final = start(["Hello there!"]).ask().all()
    assert "".join(delta.text for delta in deltas) == "Hello there!"
    assert isinstance(final, Finished)
    assert final.reason == "stop"


def test_requests_are_served_in_the_order_of_submission(start):
    gate = Gate()
    client = start([gate, "first"])
    ended: list[int] = []
    asked = [client.ask(deliver=lambda e, n=n: ended.append(n) if isinstance(e, FINAL) else None) for n in range(8)]
    gate.wait_reached()
    assert client.worker.status().num_queued == 7
    gate.open()
    for each in asked:
        each.final()
    assert ended == list(range(8))


def test_a_full_queue_refuses_and_the_running_request_does_not_count(start):
    gate = Gate()
    client = start([gate], max_queue=2)
    first = client.ask()
    gate.wait_reached()
    waiting = [client.ask(), client.ask()]
    with pytest.raises(BusyError) as refused:
        client.ask()
    assert str(refused.value) == "server busy, please try again.  maximum pending requests exceeded"
    gate.open()
    for each in [first, *waiting]:
        assert isinstance(each.final(), Finished)


def test_with_nothing_running_the_first_in_the_queue_does_not_count_as_waiting():
    worker = Worker(FakeModel().open, EngineOptions(), max_queue=1)
    for _ in range(2):
        worker.submit("one", ONE, HELLO, lambda event: None)
    with pytest.raises(BusyError):
        worker.submit("one", ONE, HELLO, lambda event: None)


def test_a_request_cancelled_in_the_queue_makes_room_and_never_runs(start):
    gate = Gate()
    client = start([gate], max_queue=1)
    client.ask()
    gate.wait_reached()
    waiting = client.ask()
    waiting.job.cancel()
    waiting.job.cancel()
    next_one = client.ask()
    gate.open()
    assert isinstance(next_one.final(), Finished)
    assert len(client.model.calls) == 2
    assert waiting.so_far() == []


# Cancelling ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_reply_ends_within_a_token_and_says_nothing_more(start):
    gate = Gate()
    passed: list[int] = []
    client = start(["one", gate, " two", lambda: passed.append(1), " three"])
    asked = client.ask()
    gate.wait_reached()
    asked.job.cancel()
    before = asked.so_far()
    gate.open()
    assert isinstance(client.ask().final(), Finished)
    assert asked.so_far() == before
    assert passed == []
    assert client.model.log.count("session") == 1


def test_a_request_cancelled_while_its_model_loads_is_not_run(start):
    gate = Gate()
    client = start()
    client.model.before_open = gate
    asked = client.ask()
    gate.wait_reached()
    asked.job.cancel()
    gate.open()
    assert isinstance(client.ask().final(), Finished)
    assert asked.so_far() == []
    assert len(client.model.calls) == 1
    assert [line for line in client.model.log if line.startswith("open")] == ["open one 1000"]


def test_cancelling_what_has_ended_does_not_touch_the_next_reply(start):
    gate = Gate()
    client = start(["Hello!"], ["one", gate, " two three"])
    first = client.ask()
    first.final()
    second = client.ask()
    gate.wait_reached()
    first.job.cancel()
    gate.open()
    *deltas, final = second.all()
    assert final.reason == "stop"
    assert "".join(delta.text for delta in deltas) == "one two three"


def test_embedding_can_be_cancelled(start):
    gate = Gate()
    client = start([gate])
    asked = client.ask(EmbedRequest(texts=("a", "b")))
    gate.wait_reached()
    asked.job.cancel()
    gate.open()
    assert isinstance(client.ask().final(), Finished)
    assert asked.so_far() == []


def test_whatever_is_cancelled_when_every_other_request_ends_once(start):
    chance = random.Random(5)
    client = start()
    client.model.replies = [["one two three four five"] for _ in range(60)]
    kept: list[Asked] = []
    for _ in range(60):
        asked = client.ask(directory=chance.choice([*[ONE] * 9, TWO]))
        if chance.random() < 0.5:
            time.sleep(chance.random() / 1000)
            asked.job.cancel()
        else:
            kept.append(asked)
    for asked in kept:
        assert [type(event) for event in asked.all() if isinstance(event, FINAL)] == [Finished]
    until(lambda: not client.worker.status().running)
    assert all(asked.so_far() == [] for asked in kept)


# Failures -----------------------------------------------------------------------------------------------------------


def test_an_error_in_a_reply_ends_it_alone_and_its_session(start, caplog):
    client = start(["one two", fail(ZeroDivisionError("bug"))])
    *deltas, final = client.ask().all()
    assert deltas
    assert isinstance(final, Failed)
    assert isinstance(final.error, ZeroDivisionError)
    assert "ZeroDivisionError: bug" in caplog.text
    assert isinstance(client.ask().final(), Finished)
    assert client.model.log == ["open one 1000", "session", "session"]


def test_a_request_is_let_go_once_it_is_over(start):
    """It may hold a hundred megabytes, and the next one may come tomorrow."""
    request = dataclasses.replace(HELLO)
    gone = weakref.ref(request)
    client = start(["Hi"])
    assert isinstance(client.ask(request).final(), Finished)
    del request
    until(lambda: gone() is None, seconds=IDLE_CHECK_S / 2)


def test_an_error_that_the_user_can_mend_is_not_logged(start, caplog):
    client = start([fail(CapacityError("too much"))])
    assert str(client.ask().error()) == "too much"
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_model_that_does_not_load_fails_its_request_alone(start):
    client = start()
    client.model.before_open = fail(SlotpyError("no memory"))
    assert str(client.ask().error()) == "no memory"
    assert client.worker.status().loaded is None
    client.model.before_open = lambda: None
    assert isinstance(client.ask().final(), Finished)


def test_a_handler_that_fails_does_not_end_the_worker(start, caplog):
    client = start()
    client.ask(deliver=fail_on_event)
    assert isinstance(client.ask().final(), Finished)
    assert "could not be delivered" in caplog.text


def fail_on_event(event: Event) -> None:
    raise RuntimeError("handler")


# Loading and unloading ----------------------------------------------------------------------------------------------


def test_another_model_takes_the_place_of_the_loaded_one(start):
    client = start()
    for directory in (ONE, TWO, TWO, ONE):
        client.ask(LoadRequest(), directory=directory).final()
    assert client.model.log == ["open one 1000", "close one", "open two 1000", "close two", "open one 1000"]


def test_swapping_waits_for_its_turn(start):
    gate = Gate()
    client = start(["a", gate, "b"])
    first, second, third = client.ask(), client.ask(directory=TWO), client.ask()
    gate.wait_reached()
    gate.open()
    assert all(isinstance(each.final(), Finished) for each in (first, second, third))
    assert [line for line in client.model.log if line != "session"] == [
        "open one 1000", "close one", "open two 1000", "close two", "open one 1000",
    ]  # fmt: skip


def test_another_name_of_the_same_directory_loads_nothing(start):
    client = start()
    client.ask(name="one:latest").final()
    client.ask(name="copy:latest").final()
    assert client.model.log == ["open one 1000", "session"]
    assert client.worker.status().loaded.name == "copy:latest"


def test_loading_says_how_long_it_took_and_nothing_when_it_was_not_needed(start):
    client = start()
    assert client.ask(LoadRequest()).final().load_ns > 0
    assert client.ask(LoadRequest()).final() == Loaded(0)
    assert client.ask().final().load_ns == 0


def test_unloading_what_is_not_loaded_succeeds_and_leaves_the_other(start):
    client = start()
    assert client.ask(UnloadRequest()).final() == Unloaded()
    client.ask().final()
    assert client.ask(UnloadRequest(), directory=TWO).final() == Unloaded()
    assert client.worker.status().loaded is not None
    assert client.ask(UnloadRequest()).final() == Unloaded()
    assert client.worker.status().loaded is None
    assert client.model.log[-1] == "close one"


def test_more_context_than_is_loaded_loads_anew_up_to_the_models_own_and_never_shrinks(start):
    client = start()
    for context in (500, 1500, 1200, None, 9000, 9999, 1000):
        client.ask(LoadRequest(context_tokens=context)).final()
    opened = [line for line in client.model.log if line.startswith("open")]
    assert opened == ["open one 1000", "open one 1500", "open one 9000"]
    assert client.worker.status().loaded.context_tokens == 2000


def test_loading_anew_for_context_keeps_the_keep_alive(start):
    client = start()
    client.ask(keep_alive_s=math.inf).final()
    client.ask(LoadRequest(context_tokens=1500)).final()
    assert client.worker.status().loaded.forever


def test_the_lock_is_held_while_a_model_is_loaded(start, tmp_path):
    client = start(lock=lambda name: ModelLock.acquire(tmp_path, name))
    client.ask().final()
    with pytest.raises(SlotpyError, match="one:latest"):
        ModelLock.acquire(tmp_path, "other")
    client.ask(UnloadRequest()).final()
    ModelLock.acquire(tmp_path, "other").release()


def test_a_lock_that_another_process_holds_fails_the_request_with_its_text(start, tmp_path):
    client = start(lock=lambda name: ModelLock.acquire(tmp_path, name))
    with ModelLock.acquire(tmp_path, "big"):
        assert "already loaded by process" in str(client.ask().error())
    assert client.model.log == []
    assert isinstance(client.ask().final(), Finished)


def test_a_model_that_does_not_load_gives_the_lock_back(start, tmp_path):
    client = start(lock=lambda name: ModelLock.acquire(tmp_path, name))
    client.model.before_open = fail(SlotpyError("no memory"))
    client.ask().error()
    ModelLock.acquire(tmp_path, "other").release()


# Keep-alive ---------------------------------------------------------------------------------------------------------


def test_zero_unloads_when_nothing_waits(start):
    gate = Gate()
    client = start([gate])
    first, second = client.ask(keep_alive_s=0), client.ask()
    gate.open()
    first.final()
    second.final()
    until(lambda: client.worker.status().loaded is None)
    assert client.model.log == ["open one 1000", "session", "close one"]


def test_time_runs_from_the_end_of_the_last_request(start):
    gate = Gate()
    client = start([gate])
    asked = client.ask(keep_alive_s=0.05)
    gate.wait_reached()
    time.sleep(0.08)
    assert client.worker.status().loaded.expires_at is None
    gate.open()
    asked.final()
    assert client.worker.status().loaded is not None
    until(lambda: client.worker.status().loaded is None)


def test_a_request_that_says_nothing_keeps_what_holds(start):
    client = start(keep_alive_s=100)
    client.ask().final()
    expires_at = client.worker.status().loaded.expires_at
    assert 95 < expires_at.timestamp() - time.time() <= 100
    client.ask(keep_alive_s=1e12).final()
    client.ask().final()
    loaded = client.worker.status().loaded
    assert loaded.forever
    assert loaded.expires_at is None
    client.ask(directory=TWO).final()
    assert not client.worker.status().loaded.forever


def test_an_idle_engine_is_looked_after(start, monkeypatch):
    monkeypatch.setattr(worker_module, "IDLE_CHECK_S", 0.005)
    client = start()
    looks: list[bool] = []
    client.model.check = looks.append
    client.ask().final()
    until(lambda: len(looks) >= 3)
    assert all(looks)


def test_a_resize_that_fails_unloads_the_model(start, monkeypatch, caplog):
    monkeypatch.setattr(worker_module, "IDLE_CHECK_S", 0.005)
    client = start()
    client.model.check = lambda between: fail(MemoryError())()
    client.ask().final()
    until(lambda: client.worker.status().loaded is None)
    assert "its size could not be changed" in caplog.text
    assert isinstance(client.ask().final(), Finished)


# Status and the end -------------------------------------------------------------------------------------------------


def test_status_never_waits_for_the_engine(start):
    opening, replying = Gate(), Gate()
    client = start([replying])
    client.model.before_open = opening
    asked = client.ask()
    opening.wait_reached()
    status = client.worker.status()
    assert (status.loaded, status.running, status.num_queued) == (None, True, 0)
    opening.open()
    replying.wait_reached()
    status = client.worker.status()
    assert status.running
    assert status.loaded.name == "one:latest"
    assert status.loaded.slots == {"num_slots": 4}
    assert status.loaded.expires_at is None
    replying.open()
    asked.final()
    assert not client.worker.status().running


def test_closing_lets_the_running_reply_finish_and_fails_the_others(start, tmp_path):
    gate = Gate()
    client = start(["a", gate, "b"], lock=lambda name: ModelLock.acquire(tmp_path, name))
    running, waiting = client.ask(), client.ask()
    gate.wait_reached()
    gate.open()
    client.worker.close(10)
    assert isinstance(running.final(), Finished)
    assert isinstance(waiting.error(), BusyError)
    with pytest.raises(BusyError, match="shutting down"):
        client.ask()
    assert client.worker.status().loaded is None
    assert client.model.log[-1] == "close one"
    ModelLock.acquire(tmp_path, "other").release()


def test_closing_ends_a_reply_that_takes_too_long(start):
    client = start(["a", *[lambda: time.sleep(0.002), " b"] * 900])
    asked = client.ask()
    until(asked.so_far)
    client.worker.close(0)
    assert isinstance(asked.error(), BusyError)
    client.worker.close(0)


def test_a_worker_that_never_started_can_be_closed():
    worker = Worker(FakeModel().open, EngineOptions())
    worker.close(1)


# The demo model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[Client]:
    client = Client(FakeModel())
    client.worker.close(0)
    client.worker = Worker(Engine.open, EngineOptions(slots=64))
    client.worker.start()
    yield client
    client.worker.close(0)


def test_the_demo_says_what_its_session_says(demo):
    *deltas, final = demo.ask(dataclasses.replace(HELLO, max_tokens=6), directory=DEMO).all()
    with Engine.open(DEMO, EngineOptions(slots=64)) as engine:
        params = SamplingParams(temperature=0)
        prompt = engine.tokenizer.encode(engine.chat.render(HELLO.messages))
        session = engine.new_session()
        expected = [sampled.token for sampled in session.generate(prompt, params, 6, engine.stop_ids)]
    assert final.token_ids == (*prompt, *expected)
    assert final.prompt_tokens == len(prompt)
    assert final.completion_tokens == session.stats.decode_tokens
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(expected)


def test_the_next_turn_prefills_only_what_is_new(demo):
    first = dataclasses.replace(HELLO, max_tokens=4)
    *deltas, final = demo.ask(first, directory=DEMO).all()
    reply = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
    longer = dataclasses.replace(first, messages=(*HELLO.messages, reply, {"role": "user", "content": "More"}))
    second = demo.ask(longer, directory=DEMO).final()
    assert second.stats.prefill_tokens == second.prompt_tokens - len(final.token_ids) + 1


def test_a_turn_that_drops_the_reasoning_before_it_reads_only_the_end_again(demo, monkeypatch):
    """As most templates of reasoning models do. In passes of 16 tokens, so that a short prompt has several."""
    monkeypatch.setattr(config, "PREFILL_CHUNK_TOKENS", 16)
    asked = {"role": "user", "content": "What is a lighthouse? " * 6}
    ask = dataclasses.replace(HELLO, messages=(asked,), think=True, max_tokens=40)
    *deltas, first = demo.ask(ask, directory=DEMO).all()
    said = "".join(delta.text for delta in deltas if not delta.reasoning)
    assert said and any(delta.reasoning for delta in deltas)
    messages = (asked, {"role": "assistant", "content": said}, {"role": "user", "content": "What is a river?"})
    ask = dataclasses.replace(ask, messages=messages)
    again = demo.ask(ask, directory=DEMO).final()
    assert again.stats.prefill_tokens == again.prompt_tokens - first.prompt_tokens // 16 * 16
    demo.ask(UnloadRequest(), directory=DEMO).final()
    anew = demo.ask(ask, directory=DEMO).final()
    assert (anew.stats.prefill_tokens, anew.token_ids) == (anew.prompt_tokens, again.token_ids)


def test_a_prefill_can_be_cancelled(demo, monkeypatch):
    demo.ask(LoadRequest(), directory=DEMO).final()
    monkeypatch.setattr("slotpy.engine.session.config.PREFILL_CHUNK_TOKENS", 4)
    session = demo.worker._model.shared_session()
    gate, step, steps = Gate(), session.step, []

    def step_at_gate(tokens, **upcoming):
        steps.append(len(tokens))
        gate()
        return step(tokens, **upcoming)

    monkeypatch.setattr(session, "step", step_at_gate)
    asked = demo.ask(GenerationRequest(prompt="word " * 40), directory=DEMO)
    gate.wait_reached()
    asked.job.cancel()
    gate.open()
    until(lambda: not demo.worker.status().running)
    assert steps == [4]
    monkeypatch.undo()
    assert isinstance(demo.ask(dataclasses.replace(HELLO, max_tokens=2), directory=DEMO).final(), Finished)
    assert asked.so_far() == []


def test_the_demo_embeds_and_then_chats_as_before(demo):
    request = dataclasses.replace(HELLO, max_tokens=4)
    before = demo.ask(request, directory=DEMO).final().token_ids
    embedded = demo.ask(EmbedRequest(texts=("a tower", "a tower")), directory=DEMO).final()
    assert isinstance(embedded, Embedded)
    assert np.array_equal(*embedded.vectors)
    assert demo.ask(request, directory=DEMO).final().token_ids == before


def test_the_demo_can_be_unloaded_and_loaded_again(demo):
    demo.ask(LoadRequest(), directory=DEMO).final()
    assert demo.worker.status().loaded.slots["num_slots"] == 64
    demo.ask(UnloadRequest(), directory=DEMO).final()
    assert any(
        isinstance(e, TextDelta) for e in demo.ask(dataclasses.replace(HELLO, max_tokens=3), directory=DEMO).all()
    )
