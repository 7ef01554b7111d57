"""Record which experts a model routes to, in the format of bench/traces, for bench/slot_replay.py.

    python bench/record_trace.py slotpy/data/demo bench/traces/demo.route.csv.gz --questions "What is a lighthouse?" ...
    python bench/record_trace.py tests/golden/qwen4_tiny bench/traces/random.route.csv.gz --random-tokens 200

Each question is a conversation of its own, answered greedily; the trace runs through all of them. With
`--random-tokens` the model, which may lack a tokenizer, reads random ids one by one.
"""

import argparse
import csv
import gzip
import io
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a clone, installed or not

from slotpy.engine.engine import Engine
from slotpy.engine.loader import EngineOptions, load
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.layers.switch import StreamedExperts


class Recorder:
    """Watch the keys that every layer asks for. Rows are (turn, phase, token, layer, rank, expert)."""

    def __init__(self, num_experts: int) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.turn = -1
        self._num_experts = num_experts
        self._token = 0
        self._last_layer = -1
        self._call = StreamedExperts.__call__

    def __enter__(self) -> "Recorder":
        recorder, call = self, self._call

        def watched(self: StreamedExperts, x: object, keys: np.ndarray) -> object:
            recorder._record(keys)
            return call(self, x, keys)

        StreamedExperts.__call__ = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        StreamedExperts.__call__ = self._call  # type: ignore[method-assign]

    def _record(self, keys: np.ndarray) -> None:
        layer = int(keys[0, 0]) // self._num_experts
        if layer < self._last_layer:
            self._token += self._pass_tokens
        self._last_layer, self._pass_tokens = layer, len(keys)
        phase = int(len(keys) == 1)
        for offset, experts in enumerate((keys % self._num_experts).tolist()):
            token = self._token + offset
            self.rows += [(self.turn, phase, token, layer, rank, expert) for rank, expert in enumerate(experts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--questions", nargs="+", default=[])
    parser.add_argument("--random-tokens", type=int, default=0)
    args = parser.parse_args()
    loaded = load(args.model, EngineOptions())
    config = loaded.model.config
    with Recorder(config.num_experts) as recorder:
        if args.random_tokens:
            recorder.turn = 0
            session = Session(loaded, num_valid_ids=config.vocab_size)
            for token in np.random.default_rng(5).integers(0, config.vocab_size, args.random_tokens).tolist():
                session.step([token])
        else:
            loaded.close()
            with Engine.open(args.model, EngineOptions()) as engine:
                for recorder.turn, question in enumerate(args.questions):
                    assert engine.chat is not None
                    prompt = engine.tokenizer.encode(engine.chat.render([{"role": "user", "content": question}]))
                    reply = engine.new_session().generate(prompt, SamplingParams(temperature=0), 80, engine.stop_ids)
                    print(question, "->", engine.tokenizer.decode(token for token, _ in reply))
    text = io.StringIO()
    text.write(f"# route_trace v1\n# model={args.model.name} n_layer={config.num_hidden_layers} ")
    text.write(f"n_expert={config.num_experts} n_expert_used={config.num_experts_per_tok}\n")
    text.write("turn,phase,step,layer,slot,expert\n")
    csv.writer(text, lineterminator="\n").writerows(recorder.rows)
    args.out.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    print(f"{args.out}: {recorder.rows[-1][2] + 1} tokens")


if __name__ == "__main__":
    main()
