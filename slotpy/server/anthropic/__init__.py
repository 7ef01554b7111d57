"""Anthropic's dialect: messages under /v1/messages."""
