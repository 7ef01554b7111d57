"""slotpy runs mixture-of-experts language models that are bigger than memory, streaming routed experts from SSD."""

__version__ = "0.1.0"
