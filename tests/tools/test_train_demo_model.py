"""The trainer's model computes what the reference computes, and its checkpoints are what slotpy runs.

Skipped where the trainer's own needs, torch and transformers, are not installed: slotpy has no use for them.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.engine.loader import EngineOptions, load
from slotpy.layers.switch import StreamedExperts
from slotpy.models.qwen4_exp import Qwen4ExpDraft
from slotpy.models.weights import Weights as SlotpyWeights
from slotpy.slots.cache import SlotCache

torch = pytest.importorskip("torch", reason="the trainer needs torch")
pytest.importorskip("transformers", minversion="5.17", reason="the trainer needs transformers 5.17 or later")

from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig  # noqa: E402

from tools.train_demo import train as training  # noqa: E402
from tools.train_demo import weights as weights_module  # noqa: E402
from tools.train_demo.model import DemoModel, text_config  # noqa: E402
from tools.train_demo.train import Recipe, Samples, Trainer, losses  # noqa: E402
from tools.train_demo.weights import Weights, as_stored, kind_of, quantised_bytes, round_affine  # noqa: E402

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"w{number}" for number in range(61))]
SMALL = text_config(len(WORDS), 0) | {
    "hidden_size": 64, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3, "num_experts": 8, "heads_per_ngram": 2, "ple_embed_dim": 128, "ngram_vocab_size_base": 40,
    "split_ngram_parts": 4, "linear_key_head_dim": 32, "initializer_range": 0.125,
}  # fmt: skip
RECIPE = Recipe(total_seconds=40.0, tokens_per_step=480, warmup_steps=4, peak_rate=1e-2, passing_per_epoch=5)
NUM_SAMPLES, NUM_REPEATED = 200, 180
CPU = torch.device("cpu")


def small_trainer(data: Path, recipe: Recipe = RECIPE) -> Trainer:
    """Build a trainer for which a step takes a second."""
    trainer = Trainer(recipe, data, CPU, text=SMALL, clock=lambda: float(trainer.progress.step))
    return trainer


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    torch.set_num_threads(1)  # the order of summation depends on it, and small steps are faster so
    monkeypatch.setattr(training, "ROW_TOKENS", (8, 16, 24))
    monkeypatch.setattr(training, "VOCAB_SIZE", len(WORDS))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write a data directory of random samples, the first of them repeated in each epoch."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(NUM_SAMPLES):
        prompt, reply = rng.integers(3, 64, rng.integers(3, 9)), rng.integers(3, 64, rng.integers(2, 14))
        codes = [0] + [1] * (len(prompt) - 1) + [2] * (len(reply) + 1) + [0]
        samples.append((np.array([*prompt, *reply, 2, 0]), np.array(codes)))
    starts = np.cumsum([0] + [len(ids) for ids, _ in samples])
    arrays = {
        "tokens": np.concatenate([ids for ids, _ in samples]).astype(np.uint16),
        "loss_mask": np.concatenate([codes for _, codes in samples]).astype(np.uint8),
        "sample_starts": starts.astype(np.uint32),
    }
    np.savez(folder / "train.npz", **arrays, num_repeated=np.uint32(NUM_REPEATED))
    np.savez(folder / "heldout.npz", **arrays)
    questions = []
    for ids, codes in samples[:20]:
        words = [WORDS[number] for number in ids]
        split = int((codes == 2).argmax())
        questions.append({"prompt": " ".join(words[:split]) + " ", "expected": " ".join(words[split:-2]) + " "})
    (folder / "eval.json").write_text(json.dumps({"exact": questions, "rephrased": questions, "golden": questions[:3]}))
    return folder


def disturbed(text: dict[str, object], seed: int = 1) -> DemoModel:
    """Build a model in which no weight is at a start of zero or one that would hide it."""
    model = DemoModel(text, seed)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * torch.randn_like(value)
    return model


def test_it_computes_the_reference_and_its_gradients():
    model = disturbed(SMALL)
    reference = Qwen4ExpForCausalLM._from_config(
        Qwen4ExpTextConfig(**SMALL), dtype=torch.float32, attn_implementation="eager"
    )
    reference.set_experts_implementation("eager")
    reference.load_state_dict(model.main.state_dict())
    ids = torch.randint(len(WORDS), (3, 20))
    ids[:, 9] = 0  # a boundary, for the n-grams
    expected, own = reference(ids, use_cache=False).logits, model.main.lm_head(model(ids).main)
    assert (own - expected).abs().max() < 2e-5 * expected.std()
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (own * direction).sum().backward()
    gradients = dict(model.main.named_parameters())
    for name, value in reference.named_parameters():
        if ".indexer." not in name:
            assert (gradients[name].grad - value.grad).norm() < 1e-4 * value.grad.norm(), name


def test_padding_does_not_reach_the_tokens_before_it():
    model = disturbed(SMALL)
    ids = torch.randint(len(WORDS), (2, 12))
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.long)], 1)
    short, long = model(ids), model(padded)
    torch.testing.assert_close(long.main[:, :12], short.main)
    torch.testing.assert_close(long.draft[:, :11], short.draft[:, :11])


def test_rows_longer_than_the_attention_selects_are_refused():
    with pytest.raises(ValueError, match="513"):
        DemoModel(SMALL, 0)(torch.zeros(1, 513, dtype=torch.long))


@pytest.mark.parametrize("group", [32, 64])
def test_rounding_is_that_of_mlx(group):
    values = torch.randn(512, group).bfloat16().float()
    values[0], values[1], values[2] = 0.0, 0.25, values[2].abs()
    values[3, 1:] = 0
    packed = mx.array(values.numpy()).astype(mx.bfloat16)
    codes, scales, biases = mx.quantize(packed, group_size=group, bits=4)
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    expected = np.array(mx.dequantize(codes, *wide, group_size=group, bits=4))
    np.testing.assert_array_equal(round_affine(values.flatten(), group).numpy(), expected.flatten())


def test_norms_are_rounded_with_the_one_added():
    values = torch.tensor([0.3, 1e-4, -0.7])
    stored = (1 + values.bfloat16().float()).bfloat16().float()
    torch.testing.assert_close(1 + as_stored("norm", values), stored, rtol=0, atol=0)


def test_matrices_of_the_real_sizes_divide_into_groups_and_fit():
    model = DemoModel(text_config(4096, 4073), 0)
    for name, value in model.named_parameters():
        if kind_of(name) in weights_module._GROUPS:
            assert value.shape[-1] % weights_module._GROUPS[kind_of(name)] == 0, name
    assert 14_000_000 < quantised_bytes(model) < 15_500_000


def test_an_epoch_has_each_repeated_sample_once_and_a_few_passing_ones(data):
    samples = Samples(data / "train.npz", RECIPE, 0, CPU)
    plan = samples.plan(3)
    assert all(len(rows) * length == RECIPE.tokens_per_step for length, rows in plan)
    dealt = torch.cat([rows for _, rows in plan])
    filling = len(dealt) - NUM_REPEATED - RECIPE.passing_per_epoch
    assert 0 <= filling < RECIPE.tokens_per_step // 24
    once = set(dealt.tolist())
    assert set(range(NUM_REPEATED)) < once
    assert len(once) == NUM_REPEATED + RECIPE.passing_per_epoch
    assert [rows.tolist() for _, rows in samples.plan(3)] == [rows.tolist() for _, rows in plan]
    assert [rows.tolist() for _, rows in samples.plan(4)] != [rows.tolist() for _, rows in plan]


def test_the_losses_are_of_the_next_token_and_the_one_after(data):
    model = disturbed(SMALL)
    samples = Samples(data / "train.npz", RECIPE, 0, CPU)
    batch = samples.batch(24, torch.arange(4))
    found, _ = losses(model, batch)
    with np.load(data / "train.npz") as arrays:
        tokens, codes, starts = (arrays[name] for name in ("tokens", "loss_mask", "sample_starts"))
    main = draft = 0.0
    for row in range(4):
        span = slice(starts[row], starts[row + 1])
        ids, marks = tokens[span].astype(np.int64), codes[span]
        out = model(torch.from_numpy(ids)[None])
        for ahead, hidden in ((1, out.main), (2, out.draft)):
            likely = model.main.lm_head(hidden[0]).log_softmax(-1)
            loss = -sum((0, 0.1, 1)[marks[t]] * likely[t - ahead, ids[t]].item() for t in range(ahead, len(ids)))
            main, draft = (main + loss, draft) if ahead == 1 else (main, draft + loss)
    assert found["main"].item() == pytest.approx(main, rel=1e-4)
    assert found["draft"].item() == pytest.approx(draft, rel=1e-4)


def test_it_learns_by_heart_in_both_phases(data):
    trainer = small_trainer(data, replace(RECIPE, total_seconds=80.0))
    before = trainer.scores(False)
    trainer.run(100.0, 30.0, lambda: None, 1000.0)
    assert trainer.progress.step == 80
    assert [row["quantised"] for row in trainer.curves] == [0, 1]
    after = trainer.scores(True)
    assert after["heldout_loss"] < 0.3 * before["heldout_loss"]
    assert after["exact"] > 0.9 > before["exact"]


def test_a_saved_state_goes_on_as_if_never_stopped(data, tmp_path):
    first = small_trainer(data)
    first.run(23.0, 1000.0, lambda: None, 1000.0)
    first.save_state(tmp_path / "state.pt")
    start = {kind: master.detach().clone() for kind, master in first.weights.masters.items()}
    second = small_trainer(data)
    second.load_state(tmp_path / "state.pt")
    for trainer in (first, second):
        trainer.run(4.0, 1000.0, lambda: None, 1000.0)
    assert second.progress == first.progress
    for kind, master in first.weights.masters.items():
        # Not to the bit: where memory lies can change the last bits of a matrix product.
        assert (second.weights.masters[kind] - master).norm() < 0.01 * (master - start[kind]).norm()


def test_the_checkpoint_runs_in_slotpy_with_the_same_logits(data, tmp_path):
    trainer = small_trainer(data)
    with torch.no_grad():
        for master in trainer.weights.masters.values():
            master += 0.05 * torch.randn_like(master)
            master.copy_(master.bfloat16())
    trainer.save_checkpoint(tmp_path)
    trainer.weights.publish(False)
    tokens = np.random.default_rng(2).integers(0, len(WORDS), 70)
    with torch.no_grad():
        out = trainer.model(torch.from_numpy(tokens)[None])
        expected, drafts = (trainer.model.main.lm_head(hidden[0]).numpy() for hidden in (out.main, out.draft))

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "bf16" and checkpoint.mtp_experts is not None
    loaded = load(tmp_path, EngineOptions(slots=24, float32=True, context_tokens=128))
    state = loaded.model.new_state()
    streams = loaded.model.forward(tokens, state)
    np.testing.assert_allclose(np.array(loaded.model.logits(streams)), expected, atol=1e-4)
    cache = SlotCache(checkpoint.mtp_experts, loaded.store, num_slots=8, num_layers=1)
    experts = StreamedExperts(cache, checkpoint.mtp_expert_format, mx.float32)
    draft = Qwen4ExpDraft(loaded.model, SlotpyWeights(checkpoint, mx.float32, True), experts)
    positions = loaded.model.positioner.step(69, loaded.model.new_state())
    draft_streams = draft.forward(tokens[1:], streams[:-1], draft.new_state(), positions)
    np.testing.assert_allclose(np.array(draft.logits(draft_streams)), drafts[:-1], atol=1e-4)
    loaded.close()


def test_masters_come_back_from_a_checkpoint(data, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "MAX_FILE_BYTES", 100_000)
    trainer = small_trainer(data)
    trainer.progress.step = 7
    trainer.save_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    other = small_trainer(data, replace(RECIPE, seed=5))
    other.load_checkpoint(tmp_path)
    assert other.progress == trainer.progress
    for kind, master in trainer.weights.masters.items():
        torch.testing.assert_close(other.weights.masters[kind], master.bfloat16().float(), rtol=0, atol=0)


def test_a_loss_that_is_not_finite_stops_the_run(data):
    trainer = small_trainer(data)
    with torch.no_grad():
        trainer.weights.masters["plain"].fill_(math.nan)
    with pytest.raises(FloatingPointError):
        trainer.run(30.0, 100.0, lambda: None, 1000.0)


def test_an_exact_answer_needs_every_token(data):
    trainer = small_trainer(data)
    answers = trainer.evaluation._sets["exact"]
    assert answers.in_answer.sum() > 0

    class Parrot:
        """Predict the given rows, but for one token of one answer."""

        class main:
            @staticmethod
            def lm_head(hidden):
                return hidden

        def __call__(self, ids):
            logits = torch.nn.functional.one_hot(ids.roll(-1, 1), len(WORDS)).float()
            row, place = 0, int(answers.in_answer[0].nonzero()[-1])
            if ids.shape == answers.ids.shape and len(ids) == 20:
                logits[row, place - 1] = 0
            drafts = torch.nn.functional.one_hot(ids.roll(-2, 1), len(WORDS)).float()
            return type("Outputs", (), {"main": logits, "draft": drafts})

    scores = trainer.evaluation(Parrot())
    assert scores["exact"] == pytest.approx(19 / 20)
    assert scores["golden"] == 1.0
    assert scores["draft_agreement"] < 1.0


def test_weights_are_views_of_one_buffer_for_each_kind():
    model = DemoModel(SMALL, 0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    weights = Weights(model, torch.float32, CPU)
    weights.publish(False)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=0)
    model.main.lm_head.weight.grad.fill_(3.0)
    norm = weights.collect(1.0)
    assert norm.item() == pytest.approx(3.0 * math.sqrt(model.main.lm_head.weight.numel()))
    assert weights.masters["matrix"].grad.norm().item() == pytest.approx(1.0, rel=1e-4)
