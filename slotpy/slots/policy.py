"""Which resident key will be needed last: the one eviction policy of the slot table.

Owns the clock, what is known about past uses (of evicted keys too) and the order of eviction. Knows no slots, states or
leases; `table.py` tells it what was used, what arrived and what may not go. Serves the slots layer.

The chance that a key is used at its layer's next turn is taken as sqrt(frequency) * 2^(-age / 6 tokens): frequency
alone and recency alone predict routing poorly, their product well. The wait until it is used again is then, in layers,
`distance to its layer's next turn + num_layers * (1 / chance - 1)`, and the key with the longest wait goes.
Numbers, and the policies that lost: docs/slots.md and bench/slot_replay.py.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Container, Iterable

_FREQUENCY_HALF_LIFE_TOKENS = 32.0
_CHANCE_HALF_LIFE_TOKENS = 6.0
_TOKENS_PER_DOUBLING = _CHANCE_HALF_LIFE_TOKENS / 2  # the square root: twice the frequency is worth 3 tokens of age
_FREQUENCY_GAIN = 1.0 - 2.0 ** (-1.0 / _FREQUENCY_HALF_LIFE_TOKENS)
# Bounds memory for n-gram rows; the experts of a model are fewer, and what is known of them is never lost.
_MAX_EVICTED_USES = 1 << 15
_MAX_EXPONENT = 1000.0  # 2^1024 overflows a float; a key this old goes first anyway
_NEVER_USED = (0, 0.0, -math.inf)


class NextUse:
    """Order the resident keys of `num_layers` layers by when each is expected to be used again.

    Between two uses of a key, its rank = (token of last use) + 3 * log2(frequency then) stands still, and its chance is
    2^((rank - now) / 6): keys of one layer never overtake each other. So one heap a layer, corrected only when its top
    is looked at, keeps the exact order. Deterministic; single thread.
    """

    def __init__(self, num_layers: int, keys_per_layer: int) -> None:
        self._num_layers = num_layers
        self._keys_per_layer = keys_per_layer
        self._token = 0
        self._layer = -1
        # key -> (token of last use, frequency then, rank); demanded or resident keys, and the latest evicted ones
        self._uses: dict[int, tuple[int, float, float]] = {}
        self._evicted_uses: OrderedDict[int, tuple[int, float, float]] = OrderedDict()
        # (rank when last looked at, key), one entry for each resident key; ranks only rise, so it is a lower bound
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(num_layers)]

    def occupancy(self) -> list[int]:
        """Count the resident keys of each layer."""
        return [len(heap) for heap in self._heaps]

    def use(self, layer: int, keys: Iterable[int]) -> None:
        """Record that `layer` asked for `keys`, resident or not.

        A layer before the last one asked starts the next token; the same layer again is another wave of the same token,
        except in a table of one layer, where every call is a token. A prefill chunk counts as one token.
        """
        if layer < self._layer or self._num_layers == 1:
            self._token += 1
        self._layer = layer
        token = self._token
        for key in keys:
            last_token, frequency, _ = self._uses.get(key) or self._evicted_uses.pop(key, _NEVER_USED)
            if last_token < token or not frequency:
                frequency *= 2.0 ** ((last_token - token) / _FREQUENCY_HALF_LIFE_TOKENS)
                frequency += _FREQUENCY_GAIN
            self._uses[key] = (token, frequency, token + _TOKENS_PER_DOUBLING * math.log2(frequency))

    def admit(self, key: int) -> None:
        """Make a key evictable: its bytes have arrived. One never used ranks below all others."""
        use = self._uses.get(key) or self._evicted_uses.pop(key, _NEVER_USED)
        self._uses[key] = use
        heapq.heappush(self._heaps[key // self._keys_per_layer], (use[2], key))

    def forget(self, key: int) -> None:
        """Note that a key is not resident after all; its uses are remembered for a while."""
        self._evicted_uses[key] = self._uses.pop(key)
        if len(self._evicted_uses) > _MAX_EVICTED_USES:
            self._evicted_uses.popitem(last=False)

    def evict(self, count: int, leased: Container[int]) -> list[int]:
        """Take out the `count` keys with the longest expected wait, longest first, passing over `leased` ones.

        The caller makes sure that so many exist. About 15 us with 48 layers, and 1 us a key.
        """
        # Each layer stands for its coldest key; a stale top shows too long a wait, and is corrected once it leads.
        leaders = [(-self._wait(layer, heap[0][0]), layer) for layer, heap in enumerate(self._heaps) if heap]
        heapq.heapify(leaders)
        evicted: list[int] = []
        passed_over: list[tuple[float, int]] = []
        while len(evicted) < count:
            layer = leaders[0][1]
            heap = self._heaps[layer]
            rank, key = heap[0]
            current = self._uses[key][2]
            if current != rank:
                heapq.heapreplace(heap, (current, key))
            else:
                heapq.heappop(heap)
                if key in leased:
                    passed_over.append((rank, key))
                else:
                    evicted.append(key)
                    self.forget(key)
            if heap:
                heapq.heapreplace(leaders, (-self._wait(layer, heap[0][0]), layer))
            else:
                heapq.heappop(leaders)
        for rank, key in passed_over:
            heapq.heappush(self._heaps[key // self._keys_per_layer], (rank, key))
        return evicted

    def _wait(self, layer: int, rank: float) -> float:
        """Give the expected number of layers until a key of this rank is used."""
        distance = layer - self._layer
        next_turn_token = self._token
        if distance <= 0:
            distance += self._num_layers
            next_turn_token += 1
        age_exponent = (next_turn_token - 1 - rank) / _CHANCE_HALF_LIFE_TOKENS
        return distance + self._num_layers * (2.0 ** min(age_exponent, _MAX_EXPONENT) - 1.0)
