"""One request on a loaded engine: what it is sampled with, when it ends, and what its end says."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from slotpy.engine.answer import Work, answer, embed
from slotpy.engine.generation import EmbedRequest, Finished, GenerationRequest, TextDelta, ToolCall
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import SamplingParams
from slotpy.errors import CapacityError, UsageError
from tests.engine.fake_model import TOKENIZER, FakeEngine, FakeModel

MESSAGES = ({"role": "user", "content": "Hi"},)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


class Run:
    """The events and the end of one reply."""

    def __init__(self, *reply: str, loaded_tokens: int = 1000, engine_tools: bool = True, **request: object) -> None:
        model = FakeModel(list(reply) or ["Hello!"])
        engine = FakeEngine(model, Path("m"), EngineOptions(context_tokens=loaded_tokens))
        if not engine_tools:
            engine.tools = None
        engine.defaults = request.pop("config", {})
        self.events: list[object] = []
        work = Work(engine, engine.new_session(), self.events.append, lambda: False, 0, 7)
        if "prompt" not in request:
            request = {"messages": MESSAGES} | request
        self.end = answer(work, GenerationRequest(**request))
        self.call: SimpleNamespace = model.calls[0]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TextDelta) and not e.reasoning)


# The end ------------------------------------------------------------------------------------------------------------


def test_the_end_counts_every_sampled_token_and_lists_those_that_were_said():
    end = Run("Hello!").end
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_sequence) == ("stop", None)
    assert end.completion_tokens == len(TOKENIZER.encode("Hello!")) + 1  # the stop id was sampled too
    assert end.prompt_tokens + len(TOKENIZER.encode("Hello!")) == len(end.token_ids)
    assert TOKENIZER.decode(end.token_ids).endswith("Hello!")
    assert (end.load_ns, end.prefill_ns, end.decode_ns) == (7, 250_000_000, 500_000_000)
    assert end.total_ns > 0


def test_the_end_counts_the_tokens_of_the_reasoning_up_to_the_end_of_its_tag():
    assert Run("so be it</think>\n\nYes", think=True).end.reasoning_tokens == len(TOKENIZER.encode("so be it</think>"))
    assert Run("Yes").end.reasoning_tokens == 0


def test_a_reply_leaves_a_line_for_who_wants_more_of_the_log(caplog):
    with caplog.at_level(logging.DEBUG, logger="slotpy"):
        run = Run("Yes")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert line.startswith(f"prompt: {run.end.prompt_tokens} tokens, 0 of them computed in 0.25 s")
    assert f"reply: {run.end.completion_tokens} in 0.50 s" in line


def test_a_stop_string_ends_the_reply_and_is_named():
    run = Run("one STOP two", stops=("STOP", "other"))
    assert (run.text, run.end.reason, run.end.stop_sequence) == ("one ", "stop", "STOP")
    assert run.end.stats.finish_reason == "stop"
    assert run.end.completion_tokens < len(TOKENIZER.encode("one STOP two"))


def test_what_only_began_like_a_stop_string_is_said():
    run = Run("one ST", stops=("STOP",))
    assert (run.text, run.end.stop_sequence) == ("one ST", None)


def test_a_limit_ends_the_reply_as_too_long():
    run = Run("one two three four", max_tokens=2)
    assert (run.end.reason, run.end.completion_tokens) == ("length", 2)


def test_no_tokens_may_be_asked_for():
    run = Run(max_tokens=0)
    assert (run.text, run.end.reason, run.end.completion_tokens) == ("", "length", 0)


def test_the_context_ends_the_reply_as_too_long():
    run = Run("word " * 50, loaded_tokens=30)
    assert (run.end.reason, len(run.end.token_ids)) == ("length", 30)


def test_a_limit_beyond_the_context_is_the_context():
    run = Run(loaded_tokens=30, max_tokens=100)
    assert run.call.max_tokens == 30 - run.end.prompt_tokens


def test_less_context_than_is_loaded_bounds_the_request():
    run = Run("word " * 50, loaded_tokens=300, context_tokens=20)
    assert (run.end.reason, len(run.end.token_ids)) == ("length", 20)
    assert Run("word " * 50, loaded_tokens=300, context_tokens=400).end.reason == "stop"


def test_the_checkpoints_limit_holds_where_none_is_asked_for():
    config = {"max_new_tokens": 3}
    assert Run(config=config).call.max_tokens == 3
    assert Run(config=config, max_tokens=5).call.max_tokens == 5
    assert Run(config={"max_new_tokens": None}).call.max_tokens == 1000 - Run().end.prompt_tokens


def work_over_after(num_events: int, model: FakeModel) -> tuple[Work, list[object]]:
    engine, events = FakeEngine(model, Path("m"), EngineOptions()), []
    return Work(engine, engine.new_session(), events.append, lambda: len(events) >= num_events, 0, 0), events


def test_work_that_is_over_ends_within_a_token_and_has_no_end():
    work, events = work_over_after(2, FakeModel(["one two three four"]))
    assert answer(work, GenerationRequest(messages=MESSAGES)) is None
    assert len(events) == 2


def test_work_that_is_over_before_it_begins_is_not_begun():
    model = FakeModel(["one"])
    work, events = work_over_after(0, model)
    assert answer(work, GenerationRequest(messages=MESSAGES)) is None
    assert embed(work, EmbedRequest(("a",))) is None
    assert (events, model.replies) == ([], [["one"]])


# Sampling -----------------------------------------------------------------------------------------------------------


def sampling_params(request, generation_config):
    return SamplingParams.merge(generation_config, request.sampling, request.defaults)


def test_demands_win_over_the_checkpoint_and_that_over_defaults():
    request = GenerationRequest(
        sampling={"top_k": 1, "seed": None},
        defaults={"top_k": 2, "top_p": 0.2, "temperature": 0.2, "repeat_penalty": 1.2, "seed": 2, "min_p": 0.2},
    )
    config = {"top_k": 3, "top_p": 0.3, "repetition_penalty": 1.3, "min_p": None}
    assert sampling_params(request, config) == SamplingParams(
        top_k=1, top_p=0.3, temperature=0.2, repeat_penalty=1.3, seed=2, min_p=0.2
    )


def test_a_checkpoint_that_does_not_sample_is_greedy_whatever_the_defaults():
    request = GenerationRequest(defaults={"temperature": 0.8})
    assert sampling_params(request, {"do_sample": False}).temperature == 0
    assert sampling_params(request, {}).temperature == 0.8
    assert sampling_params(GenerationRequest(sampling={"temperature": 2}), {"do_sample": False}).temperature == 2


def test_log_probabilities_ride_on_the_text():
    run = Run("Hello!", top_logprobs=0)
    assert sum(len(delta.logprobs) for delta in run.events) == len(TOKENIZER.encode("Hello!"))


# Reasoning, formats and tools ---------------------------------------------------------------------------------------


def test_a_format_holds_from_the_first_token_of_the_answer():
    run = Run("let me think</think>", "{}", think=True, format="json")
    held = "".join(token for token, started in run.call.constraint.log if started)
    free = "".join(token for token, started in run.call.constraint.log if not started)
    assert (free, held) == ("let me think</think>", "{}")
    assert run.call.constraint.format == "json"


def test_without_reasoning_a_format_holds_from_the_first_token():
    run = Run("{}", think=False, format={"type": "object"})
    assert all(started for _, started in run.call.constraint.log)


def test_a_format_allows_a_tool_call_instead():
    run = Run(CALL, format="json", tools=(TOOL,))
    assert run.call.constraint.exempt_ids == frozenset({TOKENIZER.token_id("<tool_call>")} - {None})
    assert Run("{}", format="json").call.constraint.exempt_ids == frozenset()


def test_a_tool_call_is_found():
    run = Run(CALL, tools=(TOOL,))
    (call,) = (event for event in run.events if isinstance(event, ToolCall))
    assert (call.name, call.arguments) == ("look", {"at": "x"})
    assert (run.text, run.end.reason) == ("", "stop")


@pytest.mark.parametrize("choice", [{}, {"tools": (TOOL,), "tool_choice": "none"}])
def test_without_tools_a_call_is_text(choice):
    assert Run(CALL, **choice).text == CALL


def test_a_required_call_is_begun_for_the_model():
    other = {"type": "function", "function": {"name": "other"}}
    for tools, opening in (((TOOL, other), "<tool_call>"), ((TOOL,), '<tool_call>\n{"name": "look", "arguments":')):
        run = Run(CALL.removeprefix(opening), tools=tools, tool_choice="required", think=True)
        assert [event.name for event in run.events] == ["look"]
        assert run.call.tokens[-len(TOKENIZER.encode(opening)) :] == TOKENIZER.encode(opening)


def test_a_required_call_is_not_held_to_the_format_of_answers():
    run = Run(CALL.removeprefix("<tool_call>"), tools=(TOOL,), tool_choice="required", format="json")
    assert run.call.constraint is None


@pytest.mark.parametrize("without", [{"tools": ()}, {"tools": (TOOL,), "engine_tools": False}])
def test_a_call_that_is_required_of_nothing_is_refused(without):
    with pytest.raises(UsageError, match="required"):
        Run(tool_choice="required", **without)


# Embeddings ---------------------------------------------------------------------------------------------------------


def embedded(*texts: str, **request: object) -> object:
    engine = FakeEngine(FakeModel(), Path("m"), EngineOptions(context_tokens=10))
    work = Work(engine, engine.new_session(), lambda event: None, lambda: False, 0, 0)
    return embed(work, EmbedRequest(texts, **request))


def test_each_text_is_embedded_up_to_the_context():
    found = embedded("a tower", "word " * 50, "word " * 50)
    assert [int(vector[0]) for vector in found.vectors] == [len(TOKENIZER.encode("a tower")), 10, 10]
    assert found.prompt_tokens == len(TOKENIZER.encode("a tower")) + 20
    assert embedded("word " * 50, context_tokens=4).prompt_tokens == 4


def test_a_long_text_is_refused_where_it_may_not_be_cut():
    with pytest.raises(CapacityError, match=r"^the input length exceeds the context length"):
        embedded("word " * 50, truncate=False)


def test_a_text_without_tokens_is_refused_by_its_place():
    with pytest.raises(UsageError, match=r"^Text 1 of those to embed has no tokens"):
        embedded("a tower", "", "")


def test_nothing_to_embed_gives_nothing():
    assert embedded().vectors == ()
