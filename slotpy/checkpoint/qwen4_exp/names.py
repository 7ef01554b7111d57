"""Tensor and module names of `qwen4_exp` without the prefix that each publisher puts before them."""

# Longest first. `model.` alone is a text-only save; MLX files put lm_head under `language_model.`.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
VISION = ("visual.", "vision_tower.")


def canonical(name: str) -> str:
    """Strip the publisher's prefix: `model.language_model.layers.0.x` and `language_model.model.layers.0.x` agree."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name
