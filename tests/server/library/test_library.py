"""What is offered under which name, what is said about it, and that nothing unfinished is."""

import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.demo import demo_directory
from slotpy.hub.manifest import FileEntry, Manifest, Source, Verified
from slotpy.server.errors import ApiError
from slotpy.server.library import library as library_module
from slotpy.server.library.facts import format_count, parameter_count, quantization_level
from slotpy.server.library.library import InvalidName, Library, UnknownModel
from slotpy.server.library.names import parse_served
from slotpy.server.library.records import Record
from tests import tiny


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "models", tmp_path / "home")


def put_demo(directory: Path, *, pulled_as: str = "", lacks: str = "") -> Path:
    """Lay the demo out as a model's directory; with a name, as one that was pulled, but for the file `lacks`."""
    shutil.copytree(demo_directory(), directory, copy_function=os.link)
    if pulled_as:
        files = tuple(
            FileEntry(path.name, path.stat().st_size, sha256="0" * 64, verified=Verified.of(path.stat()))
            for path in sorted(directory.iterdir())
        )
        Manifest(pulled_as, (Source("org/repo", "0" * 40),), files).save(directory)
    if lacks:
        (directory / lacks).unlink()
    return directory


def names(library: Library) -> set[str]:
    return {model.name for model in library.list()}


def save(library: Library, name: str, base: str = "demo:latest", **fields) -> None:
    library.save(Record(parse_served(name), base=base, **fields))


def test_the_longest_names_can_be_saved(library):
    for name in ("a" * 160, "host:1/a/b/" + "c" * 149 + ":" + "d" * 60):
        save(library, name)
        assert library.find(name).system == ""


def test_one_name_can_be_saved_by_several_at_once(library):
    systems = [str(number) for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda system: save(library, "copied", system=system), systems))
    assert library.find("copied").system in systems


def test_the_demo_is_always_there(library):
    [model] = library.list()
    assert model == library.find("DEMO") == library.find("registry.ollama.ai/library/demo:latest")
    assert (model.name, model.architecture, model.context_length) == ("demo:latest", "qwen4_exp", 4096)
    assert model.details["families"] == ["qwen4_exp"] and model.details["quantization_level"] == "4-bit"
    assert model.info["qwen4_exp.context_length"] == 4096 and model.info["qwen4_exp.embedding_length"] == 256
    assert model.info["qwen4_exp.expert_count"] == 32 and model.info["qwen4_exp.expert_used_count"] == 4
    assert model.capabilities == {"completion", "tools", "thinking"}
    assert "for tool in tools" in model.template and "WordNet" in model.license
    assert re.fullmatch("[0-9a-f]{64}", model.digest)
    assert model.modified_at.tzinfo is not None


def test_tools_in_a_grammar_that_nobody_reads_are_no_capability(library, tmp_path):
    directory = put_demo(tmp_path / "models" / "own")
    template = (directory / "chat_template.jinja").read_text().replace("tool_call>", "unheard_of>")
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text(template)
    assert library.find("own").capabilities == {"completion", "thinking"}


def test_the_size_is_that_of_the_models_files(library, tmp_path):
    directory = put_demo(tmp_path / "models" / "org" / "repo", pulled_as="org/repo")
    size = sum(path.stat().st_size for path in directory.iterdir() if path.name != "slotpy-model.json")
    assert library.find("org/repo").size == size


@pytest.mark.parametrize("layout", tiny.LAYOUTS)
def test_a_packed_weight_counts_the_values_it_stands_for(layout, tmp_path):
    checkpoint = open_checkpoint(tiny.write_tiny(tmp_path / layout, layout))
    values = tiny.tiny_values(tiny.tiny_config())
    text = sum(int(np.prod(value.shape)) for name, value in values.items() if not name.startswith(tiny.VISION))
    assert parameter_count(checkpoint) == text
    level = {"bf16": "BF16", "fp8": "FP8", "mlx": "4-bit", "nvfp4": "NVFP4"}[layout.split("-")[0]]
    assert quantization_level(checkpoint) == level


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (14_432, "14K"), (8_190_735_360, "8.2B"), (176_000_000_000, "176B"), (26_600_000, "27M")],
)
def test_counts_are_short(count, text):
    assert format_count(count) == text


def test_the_tokenizer_is_loaded_once_for_all_names_of_a_directory(library):
    save(library, "second", system="s")
    first, second = library.find("demo"), library.find("second")
    assert first.text.tokenizer is second.text.tokenizer
    assert first.text.chat is library.find("demo").text.chat


def test_models_are_named_after_their_place_or_as_they_were_pulled(library, tmp_path):
    models = tmp_path / "models"
    put_demo(models / "qwen3.8-flash-next-4bit", pulled_as="qwen3.8-flash-next:4bit")
    put_demo(models / "org" / "repo@v1", pulled_as="org/repo@v1")
    put_demo(models / "my own (copy)")
    (models / "empty" / "deeper").mkdir(parents=True)
    assert names(library) == {"demo:latest", "qwen3.8-flash-next:4bit", "org/repo:v1", "my-own-copy-:latest"}
    for name in ("hf.co/org/repo:v1", "ORG/repo@v1", "Org/Repo"):
        assert library.find(name).directory == models / "org" / "repo@v1"


def test_a_name_without_a_tag_means_the_only_variant(library, tmp_path):
    models = tmp_path / "models"
    put_demo(models / "org" / "repo@v1", pulled_as="org/repo@v1")
    assert library.find("org/repo").name == "org/repo:v1"
    put_demo(models / "org" / "repo@v2", pulled_as="org/repo@v2")
    with pytest.raises(UnknownModel):
        library.find("org/repo")
    put_demo(models / "org" / "repo", pulled_as="org/repo")
    assert library.find("org/repo").name == "org/repo:latest"


def test_a_made_model_is_not_found_under_another_tag(library):
    save(library, "mine:v1")
    with pytest.raises(UnknownModel):
        library.locate("mine")


def test_a_directory_given_to_serve_has_its_own_name(tmp_path):
    directory = put_demo(tmp_path / "elsewhere" / "mine")
    library = Library(tmp_path / "models", tmp_path / "home", [directory])
    assert library.find("mine").directory == directory


def test_a_model_that_is_not_completely_pulled_is_not_offered_and_says_how_to_go_on(library, tmp_path):
    put_demo(tmp_path / "models" / "org" / "repo", pulled_as="org/repo", lacks="tokenizer.json")
    assert names(library) == {"demo:latest"}
    with pytest.raises(UnknownModel, match=r"^model 'org/repo' not found: .*slotpy pull org/repo"):
        library.find("org/repo")
    assert library.locate("org/repo").directory == tmp_path / "models" / "org" / "repo"


def test_a_model_that_cannot_be_run_is_not_offered_and_says_why(library, tmp_path):
    directory = put_demo(tmp_path / "models" / "other")
    (directory / "config.json").unlink()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    assert names(library) == {"demo:latest"}
    with pytest.raises(ApiError, match="unsupported model_type") as caught:
        library.find("other")
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["", "a b"])
def test_what_is_no_name_is_another_error_than_an_unknown_one(library, name):
    with pytest.raises(InvalidName):
        library.find(name)


def test_hosted_models_are_refused_unless_one_of_that_name_is_here(library):
    with pytest.raises(ApiError, match="ollama cloud is disabled: remote model is unavailable") as caught:
        library.find("x:cloud")
    assert caught.value.status == 403
    save(library, "x:cloud")
    assert library.find("x:cloud").name == "x:cloud"


def test_every_name_and_every_change_has_its_own_digest(library, tmp_path):
    directory = put_demo(tmp_path / "models" / "one")
    save(library, "two", base="one:latest")
    save(library, "three", base="one:latest")
    before = {model.name: model.digest for model in library.list()}
    assert len(set(before.values())) == 4
    save(library, "three", base="one:latest", system="s")
    assert library.find("three").digest != before["three:latest"]
    (directory / "README.md").unlink()
    (directory / "README.md").write_text("changed")
    after = {model.name: model.digest for model in library.list()}
    assert {name for name in before if before[name] != after[name]} == {"one:latest", "two:latest", "three:latest"}


def test_the_newest_model_comes_first(library):
    save(library, "older")
    past = time.time() - 3600
    os.utime(library.home / "aliases" / "older%3Alatest.json", (past, past))
    save(library, "newer")
    found = [model.name for model in library.list()]
    assert found.index("newer:latest") < found.index("older:latest")


def test_nothing_is_read_again_while_no_file_changes(library, monkeypatch):
    save(library, "second")
    library.list()

    def fail(*args):
        raise AssertionError("read again")

    monkeypatch.setattr(library_module, "read_facts", fail)
    monkeypatch.setattr("slotpy.server.library.records._parse", fail)
    began = time.perf_counter()
    for _ in range(10):
        library.list()
    assert time.perf_counter() - began < 0.5  # 0.2 ms each where nothing else runs


def test_a_record_adds_to_its_base(library):
    messages = ({"role": "user", "content": "hi"},)
    save(library, "mine", system="s", parameters={"temperature": 0.1}, messages=messages, license="MIT")
    model, base = library.find("mine"), library.find("demo")
    assert (model.system, model.parameters, model.license) == ("s", {"temperature": 0.1}, "MIT")
    assert model.messages == messages
    assert model.details["parent_model"] == "demo:latest"
    assert (model.directory, model.size, model.capabilities) == (base.directory, base.size, base.capabilities)
    assert base.system == "" and base.parameters == {}


def test_a_copy_of_a_made_model_is_built_on_the_same_base(library):
    save(library, "one", system="s")
    library.copy("one", "two")
    library.remove(library.locate("one"))
    assert library.find("two").system == "s"
    assert library.find("two").details["parent_model"] == "demo:latest"


def test_a_model_may_be_made_under_its_bases_own_name(library):
    save(library, "demo", system="s")
    assert [model.name for model in library.list()] == ["demo:latest"]
    assert library.find("demo").system == "s"
    library.remove(library.locate("demo"))
    assert library.find("demo").system == ""


def test_a_model_whose_base_is_gone_is_not_offered_but_can_be_removed_and_says_why(library, tmp_path):
    directory = put_demo(tmp_path / "models" / "one")
    save(library, "two", base="one:latest")
    shutil.rmtree(directory)
    assert names(library) == {"demo:latest"}
    with pytest.raises(UnknownModel, match="built on one:latest"):
        library.find("two")
    library.remove(library.locate("two"))
    with pytest.raises(UnknownModel, match=r"^model 'two' not found$"):
        library.find("two")


def test_a_model_that_others_build_on_stays(library, tmp_path):
    put_demo(tmp_path / "models" / "org" / "repo", pulled_as="org/repo")
    save(library, "two", base="org/repo:latest")
    with pytest.raises(ApiError, match=r"two:latest.*org/repo:latest") as caught:
        library.remove(library.locate("org/repo"))
    assert caught.value.status == 400
    library.remove(library.locate("two"))
    library.remove(library.locate("org/repo"))
    assert names(library) == {"demo:latest"}
    assert not (tmp_path / "models" / "org").exists()


def test_what_slotpy_did_not_write_stays(library, tmp_path):
    directory = put_demo(tmp_path / "models" / "mine")
    for name in ("demo", "mine"):
        with pytest.raises(ApiError) as caught:
            library.remove(library.locate(name))
        assert caught.value.status == 400
    assert (directory / "config.json").is_file() and (demo_directory() / "config.json").is_file()


def test_an_unfinished_model_can_be_removed(library, tmp_path):
    put_demo(tmp_path / "models" / "org" / "repo", pulled_as="org/repo", lacks="tokenizer.json")
    library.remove(library.locate("org/repo"))
    with pytest.raises(UnknownModel):
        library.locate("org/repo")


def test_records_survive_in_files_with_any_name(library):
    save(library, "org/Re.po:V1", system="s\n\u2028\U0001f600")
    again = Library(library.models_dir, library.home)
    assert again.find("org/re.po:v1").system == "s\n\u2028\U0001f600"
    assert again.find("org/re.po:v1").name == "org/Re.po:V1"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"name": "a b"}',
        '{"name": 5}',
        '{"name": "x"}',
        '{"name": "x", "base": "demo:latest", "parameters": 5}',
        '{"name": "x", "base": "demo:latest", "system": 5}',
        '{"name": "x", "base": "demo:latest", "messages": [5]}',
        '{"name": "x", "base": "demo:latest", "messages": "abc"}',
    ],
)
def test_a_record_that_cannot_be_read_is_left_out_and_logged_once(library, caplog, text):
    save(library, "mine")
    (library.home / "aliases" / "broken.json").write_text(text)
    for _ in range(3):
        assert "mine:latest" in names(library)
    [logged] = caplog.records
    assert "broken.json" in logged.getMessage()


def test_a_replaced_record_is_read_again_at_once(library):
    for number in range(20):
        save(library, "mine", system=str(number))
        assert library.find("mine").system == str(number)
