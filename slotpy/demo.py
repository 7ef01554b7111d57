"""The demo model that ships with slotpy: a small trained `qwen4_exp` in the published 4-bit layout, a dictionary.

Owns where it lies. `slotpy/data/demo/README.md` is its model card; tools/train_demo made it.
"""

from pathlib import Path


def demo_directory() -> Path:
    """Give the demo's checkpoint directory, inside the installed package."""
    # Beside this file, because an editable install gives the package several folders.
    return Path(__file__).parent / "data" / "demo"
