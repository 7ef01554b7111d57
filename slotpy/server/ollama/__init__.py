"""Ollama's own endpoints, under /api: the same bodies, answers and texts as Ollama 0.33, except where those break."""
