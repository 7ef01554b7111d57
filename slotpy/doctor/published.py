"""Sizes of published models, so that a machine can be judged before anything is downloaded.

Owns constants alone. A test derives each from the published widths; the files' sizes are the publisher's.
"""

from dataclasses import dataclass

from slotpy import config
from slotpy.budget import Sizes


@dataclass(frozen=True)
class PublishedModel:
    """Describe a model that can be had. `download_bytes` is all its files together."""

    name: str
    title: str
    download_bytes: int
    sizes: Sizes


# The text model of the MLX 4-bit conversion. Vision weights (0.9 GB) and the draft head (1.5 GB) are downloaded with it
# and not loaded yet.
_FLASH_NEXT = PublishedModel(
    name="qwen3.8-flash-next",
    title="Qwen3.8-Flash-Next, MLX 4-bit",
    download_bytes=105_264_463_248,
    sizes=Sizes(
        resident_bytes=2_924_005_400,
        record_bytes=2_764_800,
        num_records=24_576,
        num_layers=48,
        experts_per_token=10,
        row_cache_bytes=config.ROW_CACHE_BYTES // 100 * 100,
        table_bytes=32_000_153_600,
        state_bytes=115_642_368,
        state_token_bytes=27_456,
        workspace_bytes=484_331_520,
        workspace_token_bytes=53_760,
        workspace_limit_bytes=1_365_135_360,
        loading_bytes=715_161_600,
        allocator_cache_bytes=config.ALLOCATOR_CACHE_BYTES,
        max_context_tokens=262_144,
        prefix_cache_bytes=config.SESSION_MARKS * 115_642_368,
    ),
)

PUBLISHED = {model.name: model for model in (_FLASH_NEXT,)}


def find(name: str) -> PublishedModel | None:
    """Find a published model by its short name, with or without its only variant, `:4bit`."""
    return PUBLISHED.get(name.removesuffix(":4bit"))
